"""Accuracy, loss and confusion matrix on a set of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fedpriv.data.records import Item, Records, num_tokens, usable
from fedpriv.training.class_metrics import Confusion, confusion_matrix
from fedpriv.training.losses import predictions
from fedpriv.training.model import TrainingModel

_RECORDS_PER_PASS = 64


@dataclass(frozen=True)
class Evaluation:
    """Means over records.

    Attributes:
        accuracy: share of correct classes or next tokens, in [0, 1].
        loss: cross-entropy in nats.
        confusion: records by true class (row) and predicted class (column); None for causal models.
    """

    accuracy: float
    loss: float
    confusion: Confusion | None = field(default=None, repr=False)


def passes_by_length(items: Sequence[Item]) -> Iterator[list[int]]:
    """The positions of the records in passes without much padding."""
    order = sorted(range(len(items)), key=lambda position: num_tokens(items[position]))
    for begin in range(0, len(order), _RECORDS_PER_PASS):
        yield order[begin : begin + _RECORDS_PER_PASS]


@torch.no_grad()
def evaluate(model: TrainingModel, records: Records, *, keep_features: bool = False) -> Evaluation:
    """How well the model, with its current adapter, predicts the records; the states of its prefix cache are used.

    Args:
        model: with an adapter.
        records: public ones.
        keep_features: whether what the head reads is kept for evaluations with the same A and B: those of other ones
            are faster without, by a third on a CPU.

    Raises:
        ValueError: there are no records that a model can read.
    """
    items = list(filter(usable, records.items()))
    if not items:
        raise ValueError("evaluation needs at least one record")
    hits = losses = 0.0
    labels: list[int] = []
    predicted: list[int] = []
    num_classes = 0
    for positions in passes_by_length(items):
        indices = [items[position][1] for position in positions]
        if keep_features:
            logits, batch = model.evaluation_logits(records, indices)
        else:
            logits, batch = model.logits(records.items(indices), cached=True)
        predicted_well = predictions(logits, batch)
        losses += float(predicted_well.losses.double().sum())
        hits += float(predicted_well.hits.double().sum())
        if "labels" in batch:
            num_classes = logits.shape[-1]
            labels += batch["labels"].tolist()
            predicted += logits.argmax(dim=-1).tolist()
    return Evaluation(
        accuracy=hits / len(items),
        loss=losses / len(items),
        confusion=confusion_matrix(labels, predicted, num_classes) if labels else None,
    )
