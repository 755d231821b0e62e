"""Answers of a causal model to prompts: the most likely next token, one after the other, until the turn ends.

The questions are those of the server's test set.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter, Merged, lora
from fedpriv.learning.data import turns_of
from fedpriv.learning.data.records import usable
from fedpriv.learning.training._passes import TOKENS_OF_A_PASS, batches
from fedpriv.learning.training.evaluation import Tokens, prompt_and_response, text_of
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import Workbench


class _CausalModel(Protocol):
    """A peft model that predicts tokens, and the device that it is on."""

    @property
    def peft_model(self) -> Any:
        """The model, in eval mode."""

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """The texts that a causal model has read so far, one in each row.

    Attributes:
        attention_mask: int64 [rows, tokens], padded on the left.
        states: the keys and values of every layer; `read_on` changes them in place.
        logits: float32 [rows, vocabulary], of the token that follows.
    """

    attention_mask: Tensor
    states: Any
    logits: Tensor


@contextmanager
def with_adapter(model: TrainingModel, adapter: Adapter, merged: Merged) -> Iterator[None]:
    """The model with another adapter and other additions to frozen weights, which it had before afterwards."""
    before = lora.read_parameters(model.parameters), model.merged
    try:
        model.merge(merged)
        lora.write_parameters(model.parameters, adapter)
        yield
    finally:
        model.merge(before[1])
        lora.write_parameters(model.parameters, before[0])


def read(model: _CausalModel, prompts: Sequence[Tokens]) -> Reading:
    """The model after reading prompts, each of at least one token.

    Padding on the left is not attended to, and positions count a prompt's own tokens, so that it is read as alone.
    """
    longest = max(map(len, prompts))
    padding = model.peft_model.config.pad_token_id or 0
    rows = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return _pass(model, torch.tensor(rows), mask.to(model.device), None)


def _pass(model: _CausalModel, tokens: Tensor, mask: Tensor, states: Any) -> Reading:
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    if (most := _most_positions(model)) is not None:
        positions = positions.clamp_max(most - 1)  # of rows that have ended and of answers that are too long
    output = model.peft_model(
        input_ids=tokens.to(model.device),
        attention_mask=mask,
        position_ids=positions[:, -tokens.shape[1] :],
        past_key_values=states,
        use_cache=True,
        logits_to_keep=1,
    )
    return Reading(attention_mask=mask, states=output.past_key_values, logits=output.logits[:, -1].float())


def _most_positions(model: _CausalModel) -> int | None:
    most: int | None = getattr(model.peft_model.config, "max_position_embeddings", None)
    return most


def ends_of_turn(model: _CausalModel, tokenizer: Any, responses: Sequence[Tokens]) -> frozenset[int]:
    """The tokens after which a model has said all.

    Its tokenizer and its generation settings name some; the special tokens with which responses end are others, since
    the turn of a chat template may end with another token than the sequence.
    """
    named = getattr(model.peft_model.generation_config, "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    special = {response[-1] for response in responses if response} & set(tokenizer.all_special_ids)
    return frozenset(token for token in (*several, tokenizer.eos_token_id, *special) if token is not None)


@torch.no_grad()
def greedy_answers(
    model: _CausalModel,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    ends: Iterable[int],
    on_answered: Callable[[int], None] = lambda num: None,
) -> list[Tokens]:
    """The model's most likely continuation of each prompt, token by token, without the one that ends it.

    Args:
        model: a causal one, with its adapter.
        prompts: each of at least one token.
        max_new_tokens: of an answer, >= 1; fewer where the model has no positions left.
        ends: tokens that end an answer.
        on_answered: is told after each pass how many prompts have been answered.
    """
    answers: dict[int, Tokens] = {}
    for positions in batches(list(map(len, prompts)), lambda tokens: TOKENS_OF_A_PASS // (tokens + max_new_tokens)):
        found = _greedy(model, [prompts[position] for position in positions], max_new_tokens, frozenset(ends))
        answers.update(zip(positions, found, strict=True))
        on_answered(len(answers))
    return [answers[position] for position in range(len(prompts))]


def _greedy(model: _CausalModel, prompts: list[Tokens], max_new_tokens: int, ends: frozenset[int]) -> list[Tokens]:
    most = _most_positions(model)
    room = [max_new_tokens if most is None else min(max_new_tokens, most - len(prompt)) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [tokens < 1 for tokens in room]
    reading = read(model, prompts)
    while not all(ended):
        chosen = reading.logits.argmax(dim=1)
        for row, token in enumerate(chosen.tolist()):
            ended[row] = ended[row] or token in ends
            if not ended[row]:
                answers[row].append(token)
                ended[row] = len(answers[row]) >= room[row]
        if not all(ended):
            mask = torch.cat([reading.attention_mask, torch.ones_like(chosen, device=model.device)[:, None]], dim=1)
            reading = _pass(model, chosen.unsqueeze(1), mask, reading.states)
    return [tuple(answer) for answer in answers]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """[questions] what is asked, in words and in tokens, and the test set's answers."""

    texts: list[str]
    prompts: list[Tokens]
    references: list[Tokens]


def first_questions(bench: Workbench, num: int, records: Sequence[int] | None = None) -> Questions:
    """The first distinct prompts with a response, at most `num`, in the order of the test set or of its records."""
    found: dict[Tokens, tuple[str, Tokens]] = {}
    for item in filter(usable, bench.test.items(records)):
        prompt, response = prompt_and_response(item)
        if prompt and response and len(found) < num:
            _, index = item
            text = bench.data.test.texts[index]
            if bench.config.messages_column:  # what was said before the response, a line for each turn
                text = "\n".join(f"{role}: {said}" for role, said in turns_of(text))
            found.setdefault(prompt, (text, response))
    return Questions(
        texts=[text for text, _ in found.values()],
        prompts=list(found),
        references=[response for _, response in found.values()],
    )


def answers_to(
    questions: Questions, bench: Workbench, on_answered: Callable[[int], None] = lambda num: None
) -> list[str]:
    """The answers of the bench's model with the adapter that it has, of at most `max_new_tokens`.

    `on_answered` is told how many have been answered.
    """
    answers = greedy_answers(
        bench.model,
        questions.prompts,
        max_new_tokens=bench.config.max_new_tokens,
        ends=ends_of_turn(bench.model, bench.base.tokenizer, questions.references),
        on_answered=on_answered,
    )
    return [text_of(bench.base.tokenizer, answer) for answer in answers]
