"""The number format of a model's frozen base: float32 or bfloat16, with or without linear layers in 4 bits.

In bfloat16 a matrix product is several times as fast on processors that have instructions for it. Heads, LoRA's factors
and whatever else is trained stay float32: the LoRA layers of peft convert what passes between them and the base, and
hooks do so for heads and for layers that are trained as a whole.

The 4 bits are NF4 of QLoRA (Dettmers et al. 2023) with doubly quantised scales, by bitsandbytes. Linear layers of the
body are quantised, one at a time, on the device that trains. Embeddings, norms, the output embedding, classification
heads and layers whose number of inputs is no multiple of 64 stay as they are. A product dequantises its weight, so
nothing is chosen over a batch and records stay apart. LLM.int8() is left out on purpose: a column counts as an outlier
if any record of the batch makes it one, so one record would change how the numbers of others are rounded.

Processes of one user share converted weights: mapped from a file in `$FEDPRIV_CACHE` or `~/.cache/fedpriv`, their pages
are in memory once for all of them. The file is named by its contents and compared with them whenever it is mapped, so
nothing depends on whether it is there. Weights as they are in a checkpoint are mapped from it by safetensors.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.ln_tuning.layer import LNTuningLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedpriv.errors import InputError, first_line
from fedpriv.files import write_new
from fedpriv.learning.adapters._base_models import cache_folder, quiet_transformers

log = logging.getLogger(__name__)

# Parts of the names of an adapter's parameters, of which some rules train only a part.
_OF_ADAPTERS = (".lora_", ".modules_to_save.", ".ln_tuning_layers.")

# Values that share a scale. Where a row of a weight ends within a block, bitsandbytes reads wrong scales on a CPU, some
# from beyond their end.
_BLOCK = 64

# Of smaller models there is nothing to save.
_LEAST_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class _InFloat32:
    """A base before it was converted: {parameter's name: float32}, and transformers' name of its attention."""

    weights: Mapping[str, Tensor]
    attention: str


def base_dtype(model: Any) -> torch.dtype:
    """The format in which a peft model's frozen base computes, or its embeddings do if linear layers are quantised."""
    return next(p.dtype for p in frozen_base(model).values())


def frozen_base(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a peft model's base by name: all but the adapter's, a classifier's head and quantised ones."""
    of_heads = {id(p) for head in _classifier_head(model) for p in head.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if not p.requires_grad
        and p.is_floating_point()
        and id(p) not in of_heads
        and not any(part in name for part in _OF_ADAPTERS)
    }


def to_bfloat16(model: Any) -> _InFloat32:
    """Convert a peft model's frozen base, and return what it was.

    On a CPU it computes attention product by product from then on: there torch's fused attention is ten times slower
    in its bfloat16 backward pass.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    before = _InFloat32({n: p.data for n, p in frozen_base(model).items()}, model.config._attn_implementation)
    converted = {name: weight.to(torch.bfloat16) for name, weight in before.weights.items()}
    if on_cpu:
        # By the base's own names: whatever a run trains, one file serves, so no coordinator can fill a node's disk.
        mapped = _shared({_of_base(name): weight for name, weight in converted.items()})
        converted = {name: mapped[_of_base(name)] for name in converted}
    for name, p in frozen_base(model).items():
        p.data = converted[name]
    for module in model.modules():
        if isinstance(module, LNTuningLayer):
            module.register_forward_pre_hook(_in_float32)
            module.register_forward_hook(_in_bfloat16)
    for head in _classifier_head(model):
        head.register_forward_pre_hook(_in_float32)
    if on_cpu:
        _set_attention(model, "eager")
    return before


def restore_float32(model: Any, before: _InFloat32) -> None:
    """Undo `to_bfloat16`, given what it returned."""
    for name, p in frozen_base(model).items():
        p.data = before.weights[name]
    for module in [*_classifier_head(model), *(m for m in model.modules() if isinstance(m, LNTuningLayer))]:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_in_float32, _in_bfloat16)]:
                del hooks[key]
    _set_attention(model, before.attention)


def _set_attention(model: Any, implementation: str) -> None:
    """Some models know one implementation only, and keep it."""
    if model.config._attn_implementation != implementation:
        with quiet_transformers():
            model.get_base_model().set_attn_implementation(implementation)


def _classifier_head(model: Any) -> list[nn.Module]:
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


def quantise(name: str, model: Any, device: torch.device) -> None:
    """Put NF4 layers in the place of a model's frozen linear layers, and make every other parameter float32, in place.

    They are on the device from then on, and compute in bfloat16 on a GPU, in float32 on a CPU. The rest stays where it
    was. InputError if bitsandbytes is missing or does not work on this device, or the model has no such layers.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("base_dtype = nf4: needs bitsandbytes; run pip install 'fedpriv[quantized]', or use bfloat16")
    found = _linear_layers(model)
    if not found:
        raise InputError(
            f"base_dtype = nf4: model {name!r}, a {model.config.model_type}, has no linear layer whose number of "
            f"inputs is a multiple of {_BLOCK}; use bfloat16"
        )
    try:
        for path in found:
            model.set_submodule(path, _in_nf4(model.get_submodule(path), device))
    except Exception as error:  # bitsandbytes raises errors of many types; no record has been read
        raise InputError(
            f"base_dtype = nf4: bitsandbytes does not work on {device.type} here ({first_line(error)}); "
            "use bfloat16 or float32"
        ) from None
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    model.is_loaded_in_4bit = True  # as peft asks


def is_quantised(model: nn.Module) -> bool:
    """Whether a model's base is in 4 bits, of which a byte holds two values."""
    return any(parameter.dtype == torch.uint8 for parameter in model.parameters())


def _linear_layers(model: Any) -> list[str]:
    """Names of the body's linear layers: no head is among them, nor the output embedding."""
    body, output = model.base_model, model.get_output_embeddings()
    linear = (module for module in body.modules() if type(module) is nn.Linear and module is not output)
    inside = {id(module) for module in linear if module.in_features % _BLOCK == 0}
    return [name for name, module in model.named_modules() if id(module) in inside]


def _in_nf4(linear: Any, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer: Any = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = Params4bit(linear.weight.data, quant_type="nf4", blocksize=_BLOCK, module=layer).to(device)
    layer.bias = linear.bias
    # Where it could, bitsandbytes would repack the weight in the first pass without gradients, and compute such passes
    # in bfloat16 from then on: a result would depend on what was computed before.
    layer.support_avx512bf16_for_cpu = False
    quantised: nn.Module = layer.eval()
    return quantised


def _shared(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Equal tensors that are mapped from a file; the given ones if they are small, or if there can be no such file.

    Writing to a mapped tensor changes neither the file nor what other processes see. None may be a view of another.
    """
    own = {name: tensor.contiguous() for name, tensor in weights.items()}
    if sum(tensor.nbytes for tensor in own.values()) < _LEAST_BYTES:
        return own
    try:
        path = cache_folder() / f"{_digest(own)}.safetensors"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(InputError):  # it is there by now: another process may have mapped it
                write_new(path, save(own), mode=0o600)
        mapped = load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        log.info("the base's weights are this process's own: %s", error)
        return own
    if mapped.keys() != own.keys() or not all(torch.equal(mapped[name], tensor) for name, tensor in own.items()):
        log.warning("%s: does not hold the weights that it is named by; delete it", path)
        return own
    return mapped


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
