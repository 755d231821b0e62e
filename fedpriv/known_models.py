"""Configurations of well-known language models, so that a plan needs neither their weights nor a network."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError


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
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
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
_BY_LAST_PART = {name.rpartition("/")[2].lower(): values for name, values in CONFIGURATIONS.items()}


def configuration(name: str) -> Any:
    """The transformers configuration of a model. No weights are read.

    Args:
        name: a local folder with a config.json, the path of a GGUF file, else one of `CONFIGURATIONS` (its last part
            will do), else a model on the Hub, from which only the configuration is fetched.

    Raises:
        InputError: there is no such model.
    """
    from transformers import AutoConfig

    from fedpriv.adapters.base_models import quiet_transformers

    folder = Path(name).expanduser()
    known = CONFIGURATIONS.get(name) or _BY_LAST_PART.get(name.lower())
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
