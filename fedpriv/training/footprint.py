"""What a record's pass through a model needs, and so how many records share a pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedpriv.training.shapes import MULTIPLE

_FLOAT_BYTES = 4

# Tokens of a pass on a CPU where its number of rows must be constant, times the root of the widest activation, in a
# step of 64 records. The last pass of each length is half dummies on average, which costs in proportion to the tokens;
# each pass has a fixed cost, in inverse proportion. The sum is least at a root of the step's tokens and of the fixed
# cost. Measured: results/benchmarks.md.
_TOKENS_TIMES_ROOT_OF_WIDTH = 10_240
RECORDS_OF_A_STEP = 64

# A larger activation no longer fits in a CPU's caches.
_MOST_ACTIVATION_FLOATS = 2**21

# Records of the shortest padded length in a pass on a CPU, at least.
_LENGTHS_AT_ONCE = 16

# Records of a pass through the head alone.
_FEATURES_AT_ONCE = 1024


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

    def tokens_at_once(self, num_expected: float) -> int:
        """Tokens of a pass on a CPU, in a step of so many records."""
        tokens = _TOKENS_TIMES_ROOT_OF_WIDTH * math.sqrt(num_expected / RECORDS_OF_A_STEP / self.widest_activation)
        return int(min(tokens, _MOST_ACTIVATION_FLOATS / self.widest_activation))

    @property
    def multiple(self) -> int:
        """Of record lengths: for a small model a further pass costs more than further padding."""
        if not self.on_cpu:
            return MULTIPLE
        return max(MULTIPLE, 1 << ((self.tokens_at_once(RECORDS_OF_A_STEP) // _LENGTHS_AT_ONCE).bit_length() - 1))

    def most_rows(self, tokens: int, num_values: int, memory_limit: int) -> int:
        """The most rows of a pass of records of this length that fit in memory and in a CPU's caches, >= 1."""
        needed = _FLOAT_BYTES * (2 * num_values + tokens * self.per_token + tokens**2 * self.per_token_pair)
        at_most = memory_limit // needed
        if self.on_cpu:
            at_most = min(at_most, _MOST_ACTIVATION_FLOATS // self.widest_activation // tokens)
        return max(1, at_most)


def features_at_once(num_values: int) -> int:
    """Records of a pass through the head alone, whose per-sample gradients have so many values each."""
    return max(1, min(_FEATURES_AT_ONCE, _MOST_ACTIVATION_FLOATS // num_values))
