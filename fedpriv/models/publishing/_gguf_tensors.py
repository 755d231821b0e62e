"""Weights of a transformers model as llama.cpp keeps them: by its names, with its order of rows, as a LoRA or whole.

transformers rotates the first half of a head's values against the second half, llama.cpp's Llama each value against its
neighbour. So the rows of its query and key weights take turns between the halves of a head, and so do those of a B that
is added to them; A reads the same inputs and stays as it is. llama.cpp's own converters do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_TENSOR, get_tensor_name_map
from peft import PeftType
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from fedpriv.errors import InputError

_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}

ELSEWHERE = "`fedpriv export` without --gguf writes a folder that llama.cpp's convert_hf_to_gguf.py may read"

# Rotations that are one frequency for each pair of values, whatever the length of a text.
_FIXED_ROTATIONS = ("linear", "llama3")


def architecture_of(config: Any) -> MODEL_ARCH:
    """llama.cpp's architecture for a model.

    Args:
        config: of a transformers model.

    Raises:
        InputError: none is known here.
    """
    if config.model_type not in _ARCHITECTURES:
        raise InputError(f"model_type = {config.model_type!r}: --gguf knows {', '.join(_ARCHITECTURES)}; {ELSEWHERE}")
    return _ARCHITECTURES[config.model_type]


def adapter_tensors(peft_model: Any) -> tuple[float, dict[str, Tensor]]:
    """(alpha, {llama.cpp's name: values}) of a LoRA: A float32 [rank, in] and B float32 [out, rank] of each layer.

    llama.cpp scales a product by alpha over its own rank; whatever peft does otherwise (other ranks or alphas of some
    layers, the root of the rank) is in B.

    Raises:
        InputError: the adapter is no LoRA, has more than A and B, or adapts a layer that llama.cpp shares with another.
    """
    settings = peft_model.active_peft_config
    if settings.peft_type != PeftType.LORA:
        raise InputError("gguf: whole weights were trained, and no LoRA file holds them; give --only model")
    model = peft_model.get_base_model()
    alpha = float(settings.lora_alpha)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            raise InputError(f"modules_to_save = {name}: a LoRA file holds A and B alone; give --only model")
        if isinstance(module, LoraLayer):
            _refuse_more_than_factors(name, module)
            left, right = module.lora_B["default"].weight.detach(), module.lora_A["default"].weight.detach()
            left = left * (module.scaling["default"] * len(right) / alpha)
            ((own, turned),) = as_llama_cpp(model.config, [(f"{name}.weight", left)])
            tensors |= {f"{own}.lora_a": right, f"{own}.lora_b": turned}
    return alpha, tensors


def _refuse_more_than_factors(name: str, layer: Any) -> None:
    if "default" not in layer.lora_A or name.endswith("lm_head"):
        raise InputError(
            f"target_modules = {name}: llama.cpp may share this weight between input and output; give --only model"
        )
    if layer.use_dora.get("default") or layer.lora_bias.get("default"):
        what = "use_dora" if layer.use_dora.get("default") else "lora_bias"
        raise InputError(
            f"{what} = True: {name} has more than A and B, which are all of a LoRA file; give --only model"
        )


def model_tensors(model: Any) -> dict[str, Tensor]:
    """{llama.cpp's name: float32 values} of a whole model; an output layer that is the embedding is not repeated.

    Args:
        model: of transformers, with nothing of an adapter's left in it.

    Raises:
        InputError: llama.cpp has no such model, or computes it otherwise.
    """
    _refuse_other_functions(model.config)
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {**_rotations(model), **dict(as_llama_cpp(model.config, named))}


def as_llama_cpp(config: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(llama.cpp's name, values in its order of rows) of tensors of a transformers model.

    Args:
        config: of the model.
        named: (name, values [out] or [out, any]).

    Raises:
        InputError: llama.cpp has no such model, or no such tensor in it.
    """
    architecture = architecture_of(config)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {MODEL_TENSOR.ATTN_Q: config.num_attention_heads, MODEL_TENSOR.ATTN_K: config.num_key_value_heads}
    for name, values in named:
        found = names.get_type_and_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise InputError(f"tensor = {name!r}: llama.cpp's {architecture.name} has none of that name; {ELSEWHERE}")
        kind, own = found
        turns = architecture is MODEL_ARCH.LLAMA and kind in heads
        yield own, _taking_turns(values, heads[kind]) if turns else values


def _taking_turns(rows: Tensor, num_heads: int) -> Tensor:
    """The rows of a query or key projection, with those of each head taken from its two halves in turn."""
    halves: Tensor = rows.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _rotations(model: Any) -> dict[str, Tensor]:
    """The divisors of the rotations' frequencies, one for each pair of values; nothing where they are plain."""
    config = model.config
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return {}
    if architecture_of(config) is not MODEL_ARCH.LLAMA or kind not in _FIXED_ROTATIONS:
        raise InputError(
            f"rope_type = {kind!r}: --gguf knows default, and for Llama {', '.join(_FIXED_ROTATIONS)}; {ELSEWHERE}"
        )
    actual = model.model.rotary_emb.inv_freq.float()
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(actual)) / len(actual))
    return {"rope_freqs.weight": plain / actual}


def _refuse_other_functions(config: Any) -> None:
    """Refuse what llama.cpp would compute otherwise, though it has all the weights."""
    if config.hidden_act != "silu":
        raise InputError(f"hidden_act = {config.hidden_act!r}: llama.cpp computes silu in this model; {ELSEWHERE}")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        raise InputError(f"sliding_window = {window}: llama.cpp reads all tokens in this model; {ELSEWHERE}")
