"""Classification put as a question: which of the allowed answers a causal model finds most likely."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpriv.data.records import Records, usable
from fedpriv.errors import InputError
from fedpriv.training.class_metrics import Confusion, confusion_matrix
from fedpriv.training.decoding import Tokens, by_length, fork, prompt_and_response, read, read_on
from fedpriv.training.model import TrainingModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The test records whose response is one of the allowed answers.

    Attributes:
        answers: tokens of each allowed answer, its end of turn included.
        prompts: of each record.
        truth: index of each record's own answer.
    """

    answers: tuple[Tokens, ...]
    prompts: tuple[Tokens, ...]
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
    tokens = answer_tokens(tokenizer, answers, [response for _, response in pairs])
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
    return Choices(answers=tokens, prompts=prompts, truth=truth)


def answer_tokens(tokenizer: Any, answers: Sequence[str], responses: Sequence[Tokens]) -> tuple[Tokens, ...]:
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


@torch.no_grad()
def log_likelihoods(model: TrainingModel, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Tensor:
    """The logarithm of each answer's probability after each prompt, in nats, float64 [prompts, answers].

    It is the sum over the answer's tokens, its end of turn included, and not divided by their number: the
    probabilities of all texts add up to 1, so that they can be compared. Each prompt is read once.

    Args:
        model: a causal one, with its adapter.
        prompts, answers: each of at least one token.
    """
    found = torch.zeros(len(prompts), len(answers), dtype=torch.float64)
    longest = max(map(len, answers))
    for positions in by_length([len(prompt) for prompt in prompts], further=longest):
        reading = read(model, [prompts[position] for position in positions])
        for column, answer in enumerate(answers):
            tokens = torch.tensor([answer] * len(positions), device=model.device)
            logits = reading.logits.unsqueeze(1)
            if len(answer) > 1:
                logits = torch.cat([logits, read_on(model, fork(reading), tokens[:, :-1])[1]], dim=1)
            of_tokens = F.log_softmax(logits, dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
            found[positions, column] = of_tokens.double().sum(dim=1).cpu()
    return found


def confusion_of(model: TrainingModel, choices: Choices) -> Confusion:
    """Records by their own answer (row) and the one that the model finds most likely (column)."""
    likeliest = log_likelihoods(model, choices.prompts, choices.answers).argmax(dim=1)
    return confusion_matrix(choices.truth, likeliest.numpy(), len(choices.answers))
