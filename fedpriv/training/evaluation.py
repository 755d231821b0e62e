"""Accuracy and loss on a set of records."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpriv.data.records import Records, num_tokens, usable
from fedpriv.training.losses import losses_and_hits
from fedpriv.training.model import TrainingModel

_RECORDS_PER_PASS = 64


@dataclass(frozen=True)
class Evaluation:
    """Means over records.

    Attributes:
        accuracy: share of correct classes or next tokens, in [0, 1].
        loss: cross-entropy in nats.
    """

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: TrainingModel, records: Records) -> Evaluation:
    """The accuracy and loss of the model, with its current adapter, on the records.

    Raises:
        ValueError: there are no records that a model can read.
    """
    items = list(filter(usable, records.items()))
    if not items:
        raise ValueError("evaluation needs at least one record")
    hits = losses = 0.0
    order = sorted(items, key=num_tokens)
    for begin in range(0, len(order), _RECORDS_PER_PASS):
        indices = [index for _, index in order[begin : begin + _RECORDS_PER_PASS]]
        logits, batch = model.evaluation_logits(records, indices)
        loss, hit = losses_and_hits(logits, batch)
        losses += float(loss.double().sum())
        hits += float(hit.double().sum())
    return Evaluation(accuracy=hits / len(items), loss=losses / len(items))
