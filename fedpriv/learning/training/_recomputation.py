"""Layers whose insides are computed again in the backward pass, so that a pass keeps the input of each layer alone.

Unlike transformers' gradient checkpointing this needs no train mode, and gradients within a layer can be collected
while that layer alone is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

Run = Callable[[Tensor], Tensor]
"""A layer's hidden states after it, from those before it."""

Backward = Callable[[Run, Tensor, Tensor], Tensor | None]
"""Runs a layer with gradients enabled, on its input, and returns the gradient of this input from that of the output;
None if the input needs none."""


class _Recomputed(torch.autograd.Function):
    """A layer that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _anchor: Tensor, run: Run, backward: Backward) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.run_backward = run, backward
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            # Its own leaf: what is computed now belongs to this layer alone.
            again = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            return ctx.run_backward(ctx.run, again, gradients[0]), None, None, None


@contextmanager
def recomputing(blocks: Sequence[nn.Module], anchor: Tensor, backward: Backward) -> Iterator[None]:
    """Within this context the blocks run without gradients, and once more in the backward pass.

    Args:
        blocks: layers that take hidden states, [rows, tokens, width], as their first argument and return them alone or
            first in a tuple; each is called at most once.
        anchor: a tensor that requires a gradient; that of the losses with respect to it leads through all blocks.
        backward: called once for each block, the last one first.

    Raises:
        ValueError: a block is given something else that needs a gradient, which would get lost.
    """
    for block in blocks:
        vars(block)["forward"] = _forward_of(block, block.forward, anchor, backward)  # taken back below
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _forward_of(
    block: nn.Module, original: Callable[..., Any], anchor: Tensor, backward: Backward
) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
        # A cache of keys and values would get them twice.
        args, options = tree_map(_without_cache, (args, options), is_leaf=lambda x: isinstance(x, Cache))
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, options))):
            kind = type(block).__name__
            raise ValueError(f"activation_checkpointing = true: a {kind} takes trained inputs with its hidden states")
        others: list[tuple[Any, ...]] = []

        def run(x: Tensor) -> Tensor:
            output = original(x, *args, **options)
            if not isinstance(output, tuple):
                return output  # type: ignore[no-any-return]
            others[:] = [output[1:]]
            return output[0]  # type: ignore[no-any-return]

        first = _Recomputed.apply(hidden, anchor, run, backward)  # type: ignore[no-untyped-call]
        return (first, *others[0]) if others else first

    return forward


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value
