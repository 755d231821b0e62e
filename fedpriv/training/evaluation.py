"""Accuracy, loss, confusion matrix and perplexity on a set of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.records import Item, Records, num_tokens, usable
from fedpriv.training.choices import Choices
from fedpriv.training.class_metrics import Confusion, accuracy_of, confusion_matrix
from fedpriv.training.decoding import by_length
from fedpriv.training.losses import predictions
from fedpriv.training.model import TrainingModel
from fedpriv.training.perplexity import TokenLosses
from fedpriv.training.progress import TESTING

_RECORDS_PER_PASS = 64


@dataclass(frozen=True)
class Evaluation:
    """Means over records.

    Attributes:
        accuracy: share of correct classes, answers or next tokens, in [0, 1].
        loss: cross-entropy in nats.
        confusion: records by true class (row) and predicted class (column), of a classifier or among allowed answers.
        tokens: of causal models, record by record; None for classifiers.
    """

    accuracy: float
    loss: float
    confusion: Confusion | None = field(default=None, repr=False)
    tokens: TokenLosses | None = field(default=None, repr=False)

    @property
    def perplexity(self) -> float | None:
        """Of all targets; None for classifiers and without targets."""
        return self.tokens.perplexity if self.tokens else None


def passes_by_length(items: Sequence[Item]) -> Iterator[list[int]]:
    """The positions of the records in passes without much padding, of a bounded number of records and tokens."""
    return by_length([num_tokens(item) for item in items], most=_RECORDS_PER_PASS)


@torch.no_grad()
def evaluate(
    model: TrainingModel, records: Records, *, keep_features: bool = False, choices: Choices | None = None
) -> Evaluation:
    """How well the model, with its current adapter, predicts the records; the states of its prefix cache are used.

    Args:
        model: with an adapter.
        records: public ones.
        keep_features: whether what the head reads is kept for evaluations with the same A and B: those of other ones
            are faster without, by a third on a CPU.
        choices: the same records with the allowed answers, one of which a causal model is to find; None counts its next
            tokens.

    Raises:
        ValueError: there are no records that a model can read.
    """
    items = list(filter(usable, records.items()))
    if not items:
        raise ValueError("evaluation needs at least one record")
    if not len(records.labels):
        return _of_causal_model(model, items, choices)
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
        num_classes = logits.shape[-1]
        labels += batch["labels"].tolist()
        predicted += logits.argmax(dim=-1).tolist()
        model.tell(TESTING, len(labels), len(items))
    return Evaluation(
        accuracy=hits / len(items),
        loss=losses / len(items),
        confusion=confusion_matrix(labels, predicted, num_classes),
    )


def _of_causal_model(model: TrainingModel, items: list[Item], choices: Choices | None) -> Evaluation:
    tokens, hits = _token_losses(model, items)
    confusion = confusion_of(model, choices) if choices else None
    return Evaluation(
        accuracy=accuracy_of(confusion) if confusion else float(hits.mean()),
        loss=float((tokens.sums / np.maximum(tokens.counts, 1)).mean()),
        confusion=confusion,
        tokens=tokens,
    )


def _token_losses(model: TrainingModel, items: Sequence[Item]) -> tuple[TokenLosses, npt.NDArray[np.float64]]:
    """The records' losses, and the share of their targets that are the most likely tokens, [records]."""
    sums, hits = np.zeros(len(items)), np.zeros(len(items))
    counts = np.zeros(len(items), dtype=np.int64)
    num_tested = 0
    for positions in passes_by_length(items):
        found = model.predictions([items[position] for position in positions], cached=True)
        counts[positions] = found.num_targets.cpu().numpy()
        sums[positions] = (found.losses.double() * found.num_targets).cpu().numpy()
        hits[positions] = found.hits.cpu().numpy()
        num_tested += len(positions)
        model.tell(TESTING, num_tested, len(items))
    return TokenLosses(sums=sums, counts=counts), hits


@torch.no_grad()
def log_likelihoods(model: TrainingModel, choices: Choices) -> npt.NDArray[np.float64]:
    """The logarithm of each answer's probability after each prompt, in nats, [records, answers].

    It is the sum over the answer's tokens, its end of turn included, and not divided by their number: the
    probabilities of all texts add up to 1, so that they can be compared.

    Args:
        model: a causal one, with its adapter; the states of its prefix cache are used.
        choices: each answer of at least one token.
    """
    return -np.stack([_token_losses(model, records.items())[0].sums for records in choices.records], axis=1)


def confusion_of(model: TrainingModel, choices: Choices) -> Confusion:
    """Records by their own answer (row) and the one that the model finds most likely (column)."""
    likeliest = log_likelihoods(model, choices).argmax(axis=1)
    return confusion_matrix(choices.truth, likeliest, len(choices.records))
