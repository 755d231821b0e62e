"""Accuracy, loss, confusion matrix and perplexity on a set of records.

Classification may be put to a language model as a question: it is then tested on the records with each of the allowed
answers, and gives the likeliest one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.chat import RESPONSE_MASK
from fedpriv.data.records import Item, Records, num_tokens, usable
from fedpriv.errors import InputError
from fedpriv.training._decoding import Tokens, by_length, prompt_and_response
from fedpriv.training._losses import predictions
from fedpriv.training._metrics import Confusion, TokenLosses, accuracy_of, confusion_matrix
from fedpriv.training.model import TrainingModel
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
        """The perplexity over all targets; None for classifiers and without targets."""
        return self.tokens.perplexity if self.tokens else None


def passes_by_length(items: Sequence[Item]) -> Iterator[list[int]]:
    """The positions of the records in passes without much padding, of a bounded number of records and tokens."""
    return by_length([num_tokens(item) for item in items], most=_RECORDS_PER_PASS)


@torch.no_grad()
def evaluate(
    model: TrainingModel, records: Records, *, keep_features: bool = False, choices: Choices | None = None
) -> Evaluation:
    """The quality of the model, with its current adapter, on the records; the states of its prefix cache are used.

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

    It is the sum over the answer's tokens, its end of turn included, and not divided by their number: the
    probabilities of all texts add up to 1, so that they can be compared.

    Args:
        model: a causal one, with its adapter; the states of its prefix cache are used.
        choices: each answer of at least one token.
    """
    return -np.stack([_token_losses(model, records.items())[0].sums for records in choices.records], axis=1)


def _confusion_of(model: TrainingModel, choices: Choices) -> Confusion:
    """Records by their own answer (row) and the one that the model finds most likely (column)."""
    likeliest = _log_likelihoods(model, choices).argmax(axis=1)
    return confusion_matrix(choices.truth, likeliest, len(choices.records))


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """The test records whose response is one of the allowed answers.

    Attributes:
        records: a set for each allowed answer: the prompts, all with this response and its end of turn.
        truth: index of each record's own answer.
    """

    records: tuple[Records, ...]
    truth: tuple[int, ...]


def choices_of(records: Records, tokenizer: Any, answers: Sequence[str]) -> Choices:
    """The records as questions with the allowed answers; records with another response are left out, which is logged.

    Args:
        records: with a mask of their responses.
        tokenizer: of the records.
        answers: at least one.

    Raises:
        InputError: no record's response is an allowed answer.
    """
    pairs = [pair for item in records.items() if usable(item) and all(pair := prompt_and_response(item))]
    tokens = _answer_tokens(tokenizer, answers, [response for _, response in pairs])
    index = {answer.strip(): position for position, answer in enumerate(answers)}
    texts = [text_of(tokenizer, response) for _, response in pairs]
    known = [(prompt, index[text]) for (prompt, _), text in zip(pairs, texts, strict=True) if text in index]
    if not known:
        raise InputError(f"answers = {', '.join(answers)}: no test record has one of them as its response")
    if len(known) < len(records):
        log.warning(
            "%d of %d test records have no allowed answer and do not count", len(records) - len(known), len(records)
        )
    prompts, truth = zip(*known, strict=True)
    return Choices(records=tuple(_with_answer(prompts, answer, records.pad_token_id) for answer in tokens), truth=truth)


def _with_answer(prompts: Sequence[Tokens], answer: Tokens, pad_token_id: int) -> Records:
    """The prompts with this answer as their response."""
    features = {
        "input_ids": tuple(torch.tensor((*prompt, *answer)) for prompt in prompts),
        RESPONSE_MASK: tuple(torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt in prompts),
    }
    return Records(features, torch.tensor([], dtype=torch.int64), pad_token_id)


def _answer_tokens(tokenizer: Any, answers: Sequence[str], responses: Sequence[Tokens]) -> tuple[Tokens, ...]:
    """The tokens of each answer as a response: as a record has them, or else encoded alone and ended like the others.

    Args:
        tokenizer: of the responses.
        answers: texts.
        responses: tokens of the records' responses, with what ends them.
    """
    known: dict[str, Tokens] = {}
    for response in responses:
        known.setdefault(text_of(tokenizer, response), response)
    special = set(tokenizer.all_special_ids)
    end = next((response[_first_of_end(response, special) :] for response in responses), ())
    encoded = (tuple(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers)
    return tuple(known.get(answer.strip(), (*alone, *end)) for answer, alone in zip(answers, encoded, strict=True))


def _first_of_end(response: Tokens, special: set[int]) -> int:
    """Position of the first special token, from which on a response only ends."""
    return next((position for position, token in enumerate(response) if token in special), len(response))


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens without special ones and outer white space."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text.strip()
