"""In passes of which sizes a record's result has the same bits, whatever the size: found out on this machine.

What the rows of a pass share are its matrix products, in most architectures those of linear layers and attention. A
library may choose another kernel, which rounds otherwise, for another number of rows; which it chooses depends on
shapes and processor, not on values. So each product of the model is tried on random states, in the sizes in question,
forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fedpriv.adapters.base_dtype import base_dtype, classifier_head

# Ranks of LoRA for which each record's own products are tried, beside the model's.
_RANKS = (1, 2, 4, 8, 16, 32)

Product = Callable[[Tensor], Tensor]
"""From [rows, tokens, inputs] to [rows, ...], each row by itself."""


def powers_of_two(largest: int) -> tuple[int, ...]:
    """2, 4 and so on, up to `largest`; a product of a single row often has a kernel of its own, so 1 stays alone."""
    return tuple(1 << power for power in range(1, largest.bit_length())) or (1,)


# Architectures in which rows share nothing else before the head, as tests/training/test_independence.py shows: others
# have products of one vector a record too, whose bits depend on the number of rows.
LINEAR_AND_ATTENTION = frozenset(
    {
        "bert",
        "camembert",
        "distilbert",
        "electra",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mpnet",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "roberta",
        "xlm-roberta",
    }
)


def give_the_same_bits(model: Any, sizes: Sequence[int], tokens: int, *, apart: nn.Module | None = None) -> bool:
    """Whether a peft model gives each row the same bits in passes of all these sizes, in any place, on this machine.

    False also for architectures of which it is not known what rows share, and for a frozen head: a trained one has a
    product for each record.

    Args:
        model: on a CPU, as it trains.
        sizes: as from `powers_of_two`.
        tokens: of each row.
        apart: a layer that has a product for each row anyway.
    """
    if model.config.model_type not in LINEAR_AND_ATTENTION or _has_frozen_head(model):
        return False
    return all(_same(product, width, dtype, sizes, tokens) for product, width, dtype in _products(model, apart))


def _has_frozen_head(model: Any) -> bool:
    modules = [module for head in classifier_head(model) for module in head.modules()]
    trained = any(isinstance(module, ModulesToSaveWrapper) for module in modules)
    return not trained and any(isinstance(module, nn.Linear) for module in modules)


def _same(product: Product, width: int, dtype: torch.dtype, sizes: Sequence[int], tokens: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(sizes[-1], tokens, width, generator=generator).to(dtype)

    def there_and_back(begin: int, end: int) -> tuple[Tensor, Tensor]:
        inputs = states[begin:end].clone().requires_grad_()
        with torch.enable_grad():
            outputs = product(inputs)
        return outputs.detach(), torch.autograd.grad(outputs, inputs, outputs.detach())[0]

    first = there_and_back(0, sizes[0])
    for half, size in pairwise(sizes):
        whole, second = there_and_back(0, size), there_and_back(half, size)
        if not all(map(torch.equal, whole, map(torch.cat, zip(first, second, strict=True)))):
            return False
        first = whole
    return True


def _products(model: Any, apart: nn.Module | None) -> Iterator[tuple[Product, int, torch.dtype]]:
    """One of each shape, with its number of inputs and their format."""
    seen, dtype = set(), base_dtype(model)
    for name, module in model.named_modules():
        # A head has a product for each record.
        if not isinstance(module, (nn.Linear, Conv1D)) or ".modules_to_save." in name or module is apart:
            continue
        inputs, outputs = _inputs_and_outputs(module)
        # What is quantised, in bytes, computes in the format of what it is given.
        of_module = module.weight.dtype if module.weight.is_floating_point() else dtype
        kind = type(module), inputs, outputs, of_module
        if kind not in seen:
            seen.add(kind)
            # Of its class: its own may be recording gradients just now.
            yield partial(type(module).forward, module), inputs, of_module
    width, heads = model.config.hidden_size, model.config.num_attention_heads
    if width % heads == 0:
        yield lambda x: _attention(x, heads, by_products=model.config._attn_implementation == "eager"), width, dtype
    for rank in sorted({*_RANKS, getattr(model.active_peft_config, "r", 1)}):
        factor = torch.randn(rank, width, generator=torch.Generator().manual_seed(rank))
        yield partial(_common_factor, factor), width, torch.float32
        yield partial(_own_factors, factor), width, torch.float32


def _inputs_and_outputs(module: nn.Linear | Conv1D) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return module.in_features, module.out_features


def _attention(states: Tensor, heads: int, *, by_products: bool) -> Tensor:
    """Of each row to itself, as the model computes it."""
    split = states.unflatten(-1, (heads, -1)).transpose(1, 2)
    if by_products:
        attended: Tensor = torch.softmax(split @ split.transpose(2, 3), dim=-1) @ split
        return attended
    mask = states.new_zeros(len(states), 1, states.shape[1], states.shape[1])
    return F.scaled_dot_product_attention(split, split, split, mask)


def _common_factor(factor: Tensor, states: Tensor) -> Tensor:
    """A^T A x, where one client is alone."""
    inner = F.linear(states, factor)
    return F.linear(inner, factor.T.contiguous())


def _own_factors(factor: Tensor, states: Tensor) -> Tensor:
    """A x for each row's own A, and the per-sample gradient that such a product has."""
    inner = states @ factor.T.expand(len(states), -1, -1)
    return torch.bmm(inner.transpose(1, 2), states)
