"""The number format of a model's frozen base: float32 or bfloat16, with or without linear layers in 4 bits.

In bfloat16 a matrix product is several times as fast on processors that have instructions for it. Heads, LoRA's factors
and whatever else is trained stay float32: the LoRA layers of peft convert what passes between them and the base, and
hooks do so for heads and for layers that are trained as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.ln_tuning.layer import LNTuningLayer
from torch import Tensor, nn

from fedpriv.adapters.base_models import quiet_transformers
from fedpriv.adapters.shared_pages import shared

# Parts of the names of an adapter's parameters, of which some rules train only a part.
_OF_ADAPTERS = (".lora_", ".modules_to_save.", ".ln_tuning_layers.")


@dataclass(frozen=True, eq=False)
class InFloat32:
    """What a base was before it was converted.

    Attributes:
        weights: {parameter's name: float32}.
        attention: transformers' name of the implementation.
    """

    weights: Mapping[str, Tensor]
    attention: str


def base_dtype(model: Any) -> torch.dtype:
    """The format in which a peft model's frozen base computes, or its embeddings do if linear layers are quantised."""
    return next(p.dtype for p in frozen_base(model).values())


def frozen_base(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a peft model's base by name: all but the adapter's, a classifier's head and quantised ones."""
    of_heads = {id(p) for head in classifier_head(model) for p in head.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if not p.requires_grad
        and p.is_floating_point()
        and id(p) not in of_heads
        and not any(part in name for part in _OF_ADAPTERS)
    }


def to_bfloat16(model: Any) -> InFloat32:
    """Convert a peft model's frozen base, and return what it was.

    On a CPU it computes attention product by product from then on: there torch's fused attention is ten times slower
    in its bfloat16 backward pass (results/benchmarks.md).
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    before = InFloat32({n: p.data for n, p in frozen_base(model).items()}, model.config._attn_implementation)
    converted = {name: weight.to(torch.bfloat16) for name, weight in before.weights.items()}
    if on_cpu:
        # By the base's own names: whatever a run trains, one file serves, so no coordinator can fill a node's disk.
        mapped = shared({_of_base(name): weight for name, weight in converted.items()})
        converted = {name: mapped[_of_base(name)] for name in converted}
    for name, p in frozen_base(model).items():
        p.data = converted[name]
    for module in model.modules():
        if isinstance(module, LNTuningLayer):
            module.register_forward_pre_hook(_in_float32)
            module.register_forward_hook(_in_bfloat16)
    for head in classifier_head(model):
        head.register_forward_pre_hook(_in_float32)
    if on_cpu:
        _set_attention(model, "eager")
    return before


def restore(model: Any, before: InFloat32) -> None:
    """Undo `to_bfloat16`, given what it returned."""
    for name, p in frozen_base(model).items():
        p.data = before.weights[name]
    for module in [*classifier_head(model), *(m for m in model.modules() if isinstance(m, LNTuningLayer))]:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_in_float32, _in_bfloat16)]:
                del hooks[key]
    _set_attention(model, before.attention)


def _set_attention(model: Any, implementation: str) -> None:
    """Some models know one implementation only, and keep it."""
    if model.config._attn_implementation != implementation:
        with quiet_transformers():
            model.get_base_model().set_attn_implementation(implementation)


def classifier_head(model: Any) -> list[nn.Module]:
    """A classifier's modules behind its encoder or decoder; none of a causal model, whose head is part of the base."""
    if model.active_peft_config.task_type != "SEQ_CLS":
        return []
    whole = model.get_base_model()
    return [child for child in whole.children() if child is not whole.base_model]


def _of_base(name: str) -> str:
    """A parameter's name in the model before peft wrapped its layers."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _in_float32(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def _in_bfloat16(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)
