"""A frozen base in 4 bits: NF4 of QLoRA (Dettmers et al. 2023) with doubly quantised scales, by bitsandbytes.

Linear layers of the body are quantised, one at a time, on the device that trains. Embeddings, norms, the output
embedding, classification heads and layers whose number of inputs is no multiple of 64 stay as they are.

A product dequantises its weight, so nothing is chosen over a batch and records stay apart. LLM.int8() is left out on
purpose: a column counts as an outlier if any record of the batch makes it one, so one record would change how the
numbers of others are rounded.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from fedpriv.errors import InputError

# Values that share a scale. Where a row of a weight ends within a block, bitsandbytes reads wrong scales on a CPU, some
# from beyond their end.
_BLOCK = 64


def quantise(name: str, model: Any, device: torch.device) -> None:
    """Put NF4 layers in the place of a model's frozen linear layers, and make every other parameter float32.

    They are on the device from then on, and compute in bfloat16 on a GPU, in float32 on a CPU. The rest stays where it
    was.

    Args:
        name: of the model, for messages.
        model: of transformers, without an adapter; changed in place.
        device: that trains.

    Raises:
        InputError: bitsandbytes is missing or does not work on this device, or the model has no such layers.
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
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"base_dtype = nf4: bitsandbytes does not work on {device.type} here ({reason}); use bfloat16 or float32"
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
