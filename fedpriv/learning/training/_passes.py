"""Which records share a pass of the model, how far each is padded, and how they reach the device that computes.

In a node each record has a pass of its own, in a length that it alone decides, so that no other record can touch it. A
simulation protects nobody: records of like length share passes as large as memory and a CPU's caches allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RECORDS_OF_A_STEP = 64
"""Records of a step of usual size."""

_FLOAT_BYTES = 4

# A larger activation no longer fits in a CPU's caches.
_MOST_ACTIVATION_FLOATS = 2**21

_MULTIPLE = 8


def padded(tokens: int, longest: int | None) -> int:
    """The length to which a record of so many tokens, >= 1, is padded where it has a pass of its own.

    It is a multiple of 8, and from 64 tokens on of the largest power of two that is at most an eighth of the record's.
    All records but the longest have some padding: without any, models leave out the mask and compute in another way.

    Args:
        tokens: of the record.
        longest: the most tokens that the model takes; None without a limit.
    """
    if longest is not None and tokens >= longest:
        return tokens
    multiple = max(_MULTIPLE, 1 << max(0, tokens.bit_length() - 4))
    length = (tokens // multiple + 1) * multiple
    return min(length, longest or length)


def lengths_up_to(most: int, longest: int | None) -> list[int]:
    """The largest number of tokens, at most `most`, of each way to be padded, ascending; `longest` as for `padded`."""
    largest = {(padded(tokens, longest), tokens == longest): tokens for tokens in range(1, most + 1)}
    return sorted(largest.values())


def batches(lengths: Sequence[int], most_rows: Callable[[int], int]) -> Iterator[list[int]]:
    """The positions of texts in passes without much padding, shortest first.

    Args:
        lengths: tokens of each text.
        most_rows: of a pass whose longest text has so many tokens; less than 1 counts as 1.
    """
    chosen: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
        if chosen and len(chosen) >= most_rows(lengths[position]):
            yield chosen
            chosen = []
        chosen.append(position)
    if chosen:
        yield chosen


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that one record needs in a forward and backward pass, in floats; generous estimates.

    Attributes:
        num_values: of the model's own adapter; per-sample gradients take twice as many.
        per_token: what the backward pass keeps of all layers, and a causal model's logits if it needs all at once.
        per_token_pair: for attention, per square of the number of tokens.
        widest_activation: per token.
        on_cpu: whether passes should fit in a CPU's caches.
    """

    num_values: int
    per_token: int
    per_token_pair: int
    widest_activation: int
    on_cpu: bool

    @staticmethod
    def of(
        peft_model: Any,
        parameters: Iterable[nn.Parameter],
        frozen_layers: int,
        *,
        whole_logits: bool,
        recomputes: bool = False,
    ) -> Footprint:
        config = peft_model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
        layers = config.num_hidden_layers - frozen_layers
        kept = min(layers, 1) if recomputes else layers
        vocabulary = config.vocab_size if whole_logits else 0
        return Footprint(
            num_values=sum(parameter.numel() for parameter in parameters),
            per_token=kept * (16 * hidden + 4 * intermediate) + (layers * hidden if recomputes else 0) + 3 * vocabulary,
            per_token_pair=3 * kept * heads,
            widest_activation=max(intermediate, vocabulary),
            on_cpu=next(peft_model.parameters()).device.type == "cpu",
        )

    def rows_in(self, memory_limit: int, tokens: int, num_values: int | None = None) -> int:
        """The most records of this length whose passes fit in memory at once, whatever their adapter; may be 0."""
        num_values = self.num_values if num_values is None else num_values
        needed = _FLOAT_BYTES * (2 * num_values + tokens * self.per_token + tokens**2 * self.per_token_pair)
        return memory_limit // needed

    def most_rows(self, tokens: int, num_values: int, memory_limit: int) -> int:
        """The most rows of a pass of records of this length that fit in memory and in a CPU's caches, >= 1."""
        at_most = self.rows_in(memory_limit, tokens, num_values)
        if self.on_cpu:
            at_most = min(at_most, _MOST_ACTIVATION_FLOATS // self.widest_activation // tokens)
        return max(1, at_most)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU copies it from pinned memory while both sides go on."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
