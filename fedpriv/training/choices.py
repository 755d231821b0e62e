"""Classification put as a question: the test records with each of the allowed answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedpriv.data.records import RESPONSE_MASK, Records, usable
from fedpriv.errors import InputError
from fedpriv.training.decoding import Tokens, prompt_and_response

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
    return Choices(records=tuple(with_answer(prompts, answer, records.pad_token_id) for answer in tokens), truth=truth)


def with_answer(prompts: Sequence[Tokens], answer: Tokens, pad_token_id: int) -> Records:
    """The prompts with this answer as their response."""
    features = {
        "input_ids": tuple(torch.tensor((*prompt, *answer)) for prompt in prompts),
        RESPONSE_MASK: tuple(torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt in prompts),
    }
    return Records(features, torch.tensor([], dtype=torch.int64), pad_token_id)


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
