"""The memory that a step of DP-LoRA needs, from a language model's configuration alone, before anything is loaded.

Parameters are counted on the model itself, with its adapter, on torch's meta device. Activations, logits and per-sample
gradients are counted in the library's own pass, run on tensors that have shapes but no values. The configurations of
well-known models stand here, so that a plan needs neither their weights nor a network.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, freeze, frozen_base, quiet_transformers
from fedpriv.learning.training import find_prefix, peak_of_pass
from fedpriv.learning.training.stacked import FLOATS_PER_VALUE

_FLOAT_BYTES = 4

# NF4 with double quantisation: 4 bits, 8 bits for the scale of each 64 values, 32 for that of each 256 such scales.
_NF4_BYTES = 4 / 8 + 1 / 64 + 4 / (64 * 256)

# The step keeps its values three times: the model's own, those that a run starts from, those that a client received.
_COPIES_OF_ADAPTER = 3

# Batches that are tried on the way to the largest one that fits.
_GUESSES = 3

# Torch, transformers and peft in a process, less than this; a CUDA context takes about as much on the GPU.
PROCESS_BYTES = 750 * 10**6

# Records of the largest pass that is counted where larger ones can be told from it.
_MOST_COUNTED = 32

# A vocabulary whose logits weigh nothing.
_FEW_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class MemorySetting:
    """The properties of a step that its memory depends on.

    Attributes:
        model: a local folder, a name of `fedpriv.runs.plan.memory`, or one on the Hub.
        bits: of the frozen base: 32 (float32), 16 (bfloat16) or 4 (NF4, double quantisation; embeddings, norms and
            output layer in bfloat16).
        rank: r >= 1.
        target_modules: names of linear layers; empty for peft's default.
        layers: `all`, `last-N` or indices.
        batch: records that pass at once, >= 1. A larger batch passes in several parts, to the same sum.
        max_length: tokens of each record, >= 2.
        device: `cpu` or `cuda`; on a CPU a base in bfloat16 computes attention product by product.

    Raises:
        InputError: a value is out of range.
    """

    model: str
    bits: int = 16
    rank: int = 8
    target_modules: tuple[str, ...] = ()
    layers: str = "all"
    batch: int = 8
    max_length: int = 512
    activation_checkpointing: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.bits not in (4, 16, 32):
            raise InputError(f"bits = {self.bits}: must be 4, 16 or 32")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device = {self.device!r}: must be cpu or cuda")
        for name, least in (("rank", 1), ("batch", 1), ("max_length", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name} = {getattr(self, name)}: must be >= {least}")
        if not re.fullmatch(r"all|last-[1-9]\d*|\d+(,\d+)*", self.layers):
            raise InputError(f"layers = {self.layers!r}: must be all, last-N, or indices such as 4,5")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that a setting needs, in bytes.

    Attributes:
        num_parameters: of the model, without the adapter; tied ones once.
        adapter: the trained values, their start, sums in float64, noise and optimizer state.
        gradients: the batch's per-sample gradients, and once more in rows.
        cache_per_1000_records: states below the first trained layer, of records of `max_length` tokens; zero if the
            first layer is trained. It stands in memory up to `memory_limit_mb`, beyond it in a file.
    """

    setting: MemorySetting
    num_parameters: int
    num_trained: int
    base: int
    adapter: int
    gradients: int
    cache_per_1000_records: int

    @cached_property
    def activations(self) -> int:
        """Bytes that a pass holds at once in addition to base and adapter, without logits."""
        return self.activations_of(self.setting.activation_checkpointing)

    @cached_property
    def logits(self) -> int:
        """Bytes that the vocabulary adds to a pass."""
        return max(0, _pass_bytes(self.setting) - self.activations)

    def activations_of(self, activation_checkpointing: bool) -> int:
        """`activations`, with or without layers that run again."""
        changed = replace(self.setting, activation_checkpointing=activation_checkpointing)
        return _pass_bytes(changed, vocabulary=_FEW_TOKENS)

    @property
    def total(self) -> int:
        """Bytes of a step at its peak, without the prefix cache and the process itself."""
        return self.base + self.adapter + max(self.activations + self.logits, self.gradients)


def memory_plan(setting: MemorySetting) -> MemoryPlan:
    """The memory that the setting needs; InputError if its model is unknown, not causal, or lacks a layer."""
    model = _model_for(setting)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and setting.max_length > positions:
        raise InputError(f"max_length = {setting.max_length}: model {setting.model!r} takes at most {positions}")
    frozen = frozen_base(model)
    prefix = find_prefix(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    width = model.config.get_text_config().hidden_size
    value_bytes = 4 if setting.bits == 32 else 2  # in the format that the base computes in
    states = 1000 * setting.max_length * width * value_bytes if prefix else 0
    return MemoryPlan(
        setting=setting,
        num_parameters=sum(p.numel() for p in frozen.values()),
        num_trained=trained,
        base=_base_bytes(model, setting.bits),
        adapter=_FLOAT_BYTES * (_COPIES_OF_ADAPTER + FLOATS_PER_VALUE) * trained,
        gradients=2 * _FLOAT_BYTES * setting.batch * trained,
        cache_per_1000_records=states,
    )


def largest_batch(setting: MemorySetting, memory: float) -> int:
    """The most records that can pass at once; 0 if not even one can.

    Args:
        setting: its batch is where the search begins.
        memory: bytes, of which a process and its libraries need `PROCESS_BYTES`.
    """

    def counted(batch: int) -> int:
        return memory_plan(replace(setting, batch=batch)).total + PROCESS_BYTES

    def needed(batch: int) -> int:
        if batch <= _MOST_COUNTED:
            return counted(batch)
        # Every further row takes the same; each is counted by itself, which takes time.
        half = _MOST_COUNTED // 2
        return counted(half) + (counted(_MOST_COUNTED) - counted(half)) * (batch - half) // half

    return _largest(needed, memory, setting.batch)


def _largest(needed: Callable[[int], int], memory: float, start: int) -> int:
    """The largest number >= 1 that needs no more memory; 0 if there is none. Needs grow almost evenly.

    Each number costs a pass, so the next one is where the line through the last two meets the memory; after a few, the
    largest known to fit is returned.
    """
    points = [(start, needed(start)), (2 * start, needed(2 * start))]
    for _ in range(_GUESSES):
        fits = max((number for number, need in points if need <= memory), default=0)
        fails = min((number for number, need in points if need > memory), default=2**31)
        if fails == fits + 1:
            break
        (one, at_one), (other, at_other) = points[-2:]
        slope = max(1.0, (at_other - at_one) / (other - one))
        guess = min(max(int(other + (memory - at_other) / slope), fits + 1), fails - 1)
        points.append((guess, needed(guess)))
    return max((number for number, need in points if need <= memory), default=0)


@lru_cache(maxsize=256)
def _pass_bytes(setting: MemorySetting, vocabulary: int | None = None) -> int:
    """Bytes that a pass holds at once in addition to base and adapter."""
    model = _model_for(setting, vocabulary)
    peak = peak_of_pass(
        model, rows=setting.batch, tokens=setting.max_length, activation_checkpointing=setting.activation_checkpointing
    )
    # One layer's weights at a time are multiplied in bfloat16.
    return peak + (2 * max(p.numel() for p in _in_layers(model)) if setting.bits == 4 else 0)


def _base_bytes(model: Any, bits: int) -> int:
    total = sum(p.numel() for p in frozen_base(model).values())
    if bits != 4:
        return total * bits // 8
    quantised = sum(p.numel() for p in _in_layers(model))
    return round(quantised * _NF4_BYTES + 2 * (total - quantised))


def _in_layers(model: Any) -> list[Tensor]:
    """The matrices of the linear layers, without the output layer's."""
    head = model.get_output_embeddings()
    adapted = {id(p) for p in model.parameters() if p.requires_grad}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [m.weight for m in linear if id(m.weight) not in adapted]


def _model_for(setting: MemorySetting, vocabulary: int | None = None) -> Any:
    """The `_model` of the setting, which does not depend on the records that pass through it."""
    return _model(replace(setting, batch=1, max_length=2, activation_checkpointing=False), vocabulary)


@lru_cache(maxsize=8)
def _model(setting: MemorySetting, vocabulary: int | None) -> Any:
    """The peft model on torch's meta device, its base in the format that it computes in."""
    config = _configuration(setting.model)
    config.pad_token_id = 0
    if vocabulary is not None:
        config.vocab_size = vocabulary
    by_products = setting.device == "cpu" and setting.bits != 32
    try:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # transformers would import all classes to list them
            raise ValueError(f"its model_type is {config.model_type!r}")
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if by_products else None)
    except Exception as error:  # a foreign configuration may cause any error in transformers
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        raise InputError(
            f"model = {setting.model!r}: is no causal language model that can be built ({reason})"
        ) from None
    with torch.device("meta"):
        base = freeze(setting.model, model, None, task="CAUSAL_LM")
        lora = LoraSettings(
            rank=setting.rank, target_modules=setting.target_modules, layers=setting.layers, task="CAUSAL_LM"
        )
        adapted = attach(base, lora)
    for p in frozen_base(adapted).values():
        p.data = p.data.to(torch.float32 if setting.bits == 32 else torch.bfloat16)
    return adapted


def _decoder(kind: str, vocabulary: int, width: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> Any:
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


_LLAMA_2_7B = _decoder("llama", 32000, 4096, 11008, 32, 32, 32)
_LLAMA_2_13B = _decoder("llama", 32000, 5120, 13824, 40, 40, 40)
_LLAMA_3_8B = _decoder("llama", 128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192)
_MISTRAL_7B = _decoder("mistral", 32000, 4096, 14336, 32, 32, 8, max_position_embeddings=32768)
_QWEN_7B = _decoder("qwen2", 152064, 3584, 18944, 28, 28, 4, max_position_embeddings=32768)
_SMOLLM = {"max_position_embeddings": 8192, "tie_word_embeddings": True}

# {name on the Hub: configuration}. Instruction-tuned versions have the same shapes.
_CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _LLAMA_2_7B,
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA_2_7B,
    "meta-llama/Llama-2-13b-hf": _LLAMA_2_13B,
    "meta-llama/Llama-2-13b-chat-hf": _LLAMA_2_13B,
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_3_8B,
    "mistralai/Mistral-7B-v0.1": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.1": _MISTRAL_7B,
    "mistralai/Mistral-7B-v0.3": {**_MISTRAL_7B, "vocab_size": 32768},
    "mistralai/Mistral-7B-Instruct-v0.3": {**_MISTRAL_7B, "vocab_size": 32768},
    "Qwen/Qwen2.5-7B": _QWEN_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B,
    **{
        f"HuggingFaceTB/SmolLM2-{size}{suffix}": _decoder("llama", 49152, *shape, **_SMOLLM)
        for size, shape in (
            ("135M", (576, 1536, 30, 9, 3)),
            ("360M", (960, 2560, 32, 15, 5)),
            ("1.7B", (2048, 8192, 24, 32, 32)),
        )
        for suffix in ("", "-Instruct")
    },
}

# The last part of a name is enough, in any case.
_BY_LAST_PART = {name.rpartition("/")[2].lower(): values for name, values in _CONFIGURATIONS.items()}


def _configuration(name: str) -> Any:
    """The transformers configuration of a model. No weights are read.

    Args:
        name: a local folder with a config.json, the path of a GGUF file, else one of `_CONFIGURATIONS` (its last part
            will do), else a model on the Hub, from which only the configuration is fetched.
    """
    folder = Path(name).expanduser()
    known = _CONFIGURATIONS.get(name) or _BY_LAST_PART.get(name.lower())
    if known is not None and not folder.is_dir():
        return AutoConfig.for_model(**known)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"model = {name!r}: this folder has no config.json")
    file = {"gguf_file": folder.name} if folder.is_file() and name.endswith(".gguf") else {}
    place = str(folder.parent if file else folder) if file or folder.is_dir() else name
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(place, trust_remote_code=False, **file)
    except Exception as error:  # a foreign configuration may cause any error in transformers
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        known_names = ", ".join(last for last in _BY_LAST_PART if "instruct" not in last and "chat" not in last)
        raise InputError(f"model = {name!r}: {reason} (known without a network: {known_names})") from None
