"""Accuracy, loss, confusion matrix, perplexity and generated answers of a model on a set of records.

Classification may be put to a language model as a question: it is then tested on the records with each of the allowed
answers, or of a record's own choices, and gives the likeliest one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.errors import InputError
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Choices, Item, Records, num_tokens, usable
from fedpriv.learning.training._passes import TOKENS_OF_A_PASS, batches, predictions
from fedpriv.learning.training.independence import TESTING
from fedpriv.learning.training.model import TrainingModel

log = logging.getLogger(__name__)

Tokens = tuple[int, ...]
"""The ids of a text's tokens."""

Confusion = tuple[tuple[int, ...], ...]

_RECORDS_PER_PASS = 64


def confusion_matrix(labels: npt.ArrayLike, predicted: npt.ArrayLike, num_classes: int) -> Confusion:
    """The number of records by class: a row for each true class, a column for each predicted one.

    Args:
        labels: true classes in [0, num_classes), [records].
        predicted: classes in [0, num_classes), [records].
        num_classes: >= 1.
    """
    cells = num_classes * np.asarray(labels, dtype=np.int64) + np.asarray(predicted, dtype=np.int64)
    counts = np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
    return tuple(map(tuple, counts.tolist()))


def accuracy_of(confusion: Sequence[Sequence[int]]) -> float:
    """The share of records, of which there are some, whose predicted class is the true one, in [0, 1]."""
    counts = np.asarray(confusion)
    return float(counts.trace() / counts.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """The losses of a causal model on each record of a test set.

    Attributes:
        sums: float64 [records], minus the log-likelihood of a record's targets, in nats.
        counts: int64 [records], its targets: the tokens of the response, or all but the first of a bare text.
    """

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float | None:
        """exp(the mean over all targets, each counting the same), >= 1; None if no record has any."""
        total = int(self.counts.sum())
        if not total:
            return None
        mean = float(self.sums.sum()) / total
        return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf  # NaN, too, becomes inf


def require_rouge(num_answers: int) -> None:
    """Refuse to score answers where the package for it is missing.

    Raises:
        InputError: it is; says how to install it.
    """
    if find_spec("rouge_score") is None:
        raise InputError(
            f"generated_answers = {num_answers}: scoring answers needs rouge-score, which is not installed; "
            "pip install fedpriv[llm], or use 0"
        )


@dataclass(frozen=True)
class Evaluation:
    """Means over records.

    Attributes:
        accuracy: share of correct classes, answers or next tokens, in [0, 1].
        loss: cross-entropy in nats.
        confusion: records by true class (row) and predicted class (column), of a classifier or among allowed answers.
        right: bool [records], the records whose class a classifier finds; None for causal models.
        tokens: of causal models, record by record; None for classifiers.
    """

    accuracy: float
    loss: float
    confusion: Confusion | None = field(default=None, repr=False)
    right: npt.NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)
    tokens: TokenLosses | None = field(default=None, repr=False)

    @property
    def perplexity(self) -> float | None:
        """The perplexity over all targets; None for classifiers and without targets."""
        return self.tokens.perplexity if self.tokens else None


def passes_by_length(items: Sequence[Item]) -> Iterator[list[int]]:
    """The positions of the records in passes without much padding, of a bounded number of records and tokens."""
    lengths = [num_tokens(item) for item in items]
    return batches(lengths, lambda tokens: min(_RECORDS_PER_PASS, TOKENS_OF_A_PASS // tokens))


@torch.no_grad()
def evaluate(model: TrainingModel, records: Records, *, keep_features: bool = False) -> Evaluation:
    """The quality of the model, with its current adapter, on the records; the states of its prefix cache are used.

    Args:
        records: public ones; of a causal model, which is to find one of their choices, or predict their next tokens.
        keep_features: whether what the head reads is kept for evaluations with the same A and B: those of other ones
            are faster without, by a third on a CPU.

    Raises:
        ValueError: there are no records that a model can read.
    """
    items = list(filter(usable, records.items()))
    if not items:
        raise ValueError("evaluation needs at least one record")
    if not len(records.labels):
        return _of_causal_model(model, items, records.choices)
    losses, right = 0.0, np.zeros(len(records), dtype=np.bool_)
    labels, predicted = list[int](), list[int]()
    for positions in passes_by_length(items):
        indices = [items[position][1] for position in positions]
        if keep_features:
            logits, batch = model.evaluation_logits(records, indices)
        else:
            logits, batch = model.logits(records.items(indices), cached=True)
        predicted_well = predictions(logits, batch)
        losses += float(predicted_well.losses.double().sum())
        right[indices] = predicted_well.hits.cpu().numpy() > 0
        num_classes = logits.shape[-1]
        labels += batch["labels"].tolist()
        predicted += logits.argmax(dim=-1).tolist()
        model.tell(TESTING, len(labels), len(items))
    return Evaluation(
        accuracy=float(right.sum() / len(items)),
        loss=losses / len(items),
        confusion=confusion_matrix(labels, predicted, num_classes),
        right=right,
    )


def _of_causal_model(model: TrainingModel, items: list[Item], choices: Choices | None) -> Evaluation:
    tokens, hits = _token_losses(model, items)
    confusion = _confusion_of(model, choices) if choices else None
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
def _log_likelihoods(model: TrainingModel, choices: Choices) -> npt.NDArray[np.float64]:
    """The logarithm of each answer's probability after each prompt, in nats, [records, answers].

    It is the sum over the answer's tokens, its end of turn included. Allowed answers are compared by it, since the
    probabilities of all texts add up to 1; choices, which may be long, by the mean, the sum over their tokens' number.

    Source: Brown et al. 2020, section 2.4, for the mean.
    """
    found = np.full((len(choices.truth), len(choices.records)), -np.inf)
    for place, records in enumerate(choices.records):
        items = list(filter(usable, records.items()))
        losses, _ = _token_losses(model, items)
        found[[row for _, row in items], place] = -losses.sums / (losses.counts if records.are_choices else 1)
    return found


def _confusion_of(model: TrainingModel, choices: Choices) -> Confusion:
    """Records by their own answer (row) and the one that the model finds most likely (column)."""
    likelihoods, truth = _log_likelihoods(model, choices), np.array(choices.truth)
    rows = np.flatnonzero(truth >= 0)
    if choices.records[0].are_choices:  # whose cut texts may be equal: a tie is no hit
        likelihoods[rows, truth[rows]] = np.nextafter(likelihoods[rows, truth[rows]], -np.inf)
    return confusion_matrix(truth[rows], likelihoods[rows].argmax(axis=1), len(choices.records))


def prompt_and_response(item: Item) -> tuple[Tokens, Tokens]:
    """The prompt before a record's last response, and that response with its end of turn; both empty without one."""
    records, index = item
    tokens: list[int] = records.features["input_ids"][index].tolist()
    mask: list[int] = records.features[RESPONSE_MASK][index].tolist()
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    begin = end
    while begin and mask[begin - 1]:
        begin -= 1
    return (tuple(tokens[:begin]), tuple(tokens[begin:end])) if end else ((), ())


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens without special ones and outer white space."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text.strip()
