"""What a causal model's logits become: tokens that are drawn, and text in whole characters that ends before a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedpriv.serving.requests import Generate, Tokens

# What a tokenizer writes for bytes that are no whole character, and the most tokens that may make one.
_INCOMPLETE = "\ufffd"
_MOST_PENDING = 16

# Tokens of the prompt before an answer's first: some tokenizers write no space before the first of a text.
_CONTEXT = 4


def generator_of(request: Generate) -> torch.Generator:
    """The source of a request's draws, which no other request has."""
    generator = torch.Generator()
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed % 2**63)
    return generator


def next_token(logits: Tensor, request: Generate, generator: torch.Generator) -> int:
    """The most likely token, or one drawn from the least set of likely tokens that has the probability `top_p`.

    Args:
        logits: float32 [vocabulary], on the CPU.
        request: says how to choose.
        generator: of the request; a greedy choice leaves it as it is.

    Source: Holtzman et al. 2020, section 3.1.
    """
    if request.temperature == 0:
        return int(logits.argmax())
    # The largest is subtracted first: a temperature near zero then makes zeros of the others and no infinity.
    probabilities = ((logits.double() - logits.max()) / request.temperature).softmax(dim=0)
    if request.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        ordered[ordered.cumsum(dim=0) - ordered >= request.top_p] = 0
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))


class Text:
    """An answer's text as its tokens come; gives only what no later token can change or take back.

    Args:
        tokenizer: of transformers.
        prompt: tokens before the answer.
        stop: texts before which the answer ends; empty ones never occur.

    Attributes:
        stopped: whether one of them came.
    """

    def __init__(self, tokenizer: Any, prompt: Tokens, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        # Tokens that the tokenizer is given at a time: those whose text was given already, and those whose was not.
        self._given, self._pending = list(prompt[-_CONTEXT:]), list[int]()
        self._held = ""  # characters that may begin a stop text
        self.stopped = False

    def add(self, token: int) -> str:
        """The further text with one more token; empty while a character or a stop text may be incomplete."""
        self._pending.append(token)
        before, whole = self._decoded(self._given), self._decoded([*self._given, *self._pending])
        if whole.endswith(_INCOMPLETE) and len(self._pending) < _MOST_PENDING:
            return ""
        self._given, self._pending = self._pending, []
        return self._before_stop(whole[len(before) :])

    def rest(self) -> str:
        """What was held back, without bytes that are no whole character; the answer has ended."""
        before, whole = self._decoded(self._given), self._decoded([*self._given, *self._pending])
        self._pending = []
        text = self._before_stop(whole[len(before) :].rstrip(_INCOMPLETE))
        held, self._held = self._held, ""
        return text + held

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _before_stop(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if places := [place for stop in self._stop if (place := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(places)]
        beginning = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - beginning :]
        return text[: len(text) - beginning]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that are the beginning of a stop text, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
