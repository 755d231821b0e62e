"""A tiny random model of every architecture that may train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fedpriv.learning.adapters import BaseModel
from fedpriv.learning.adapters._base_models import freeze

_ENCODER = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3},
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": _ENCODER,
    "camembert": {**_ENCODER, "max_position_embeddings": 66},
    "deberta": _ENCODER,
    "deberta-v2": _ENCODER,
    "distilbert": {
        **{"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        **{"pad_token_id": 0, "num_labels": 3},
    },
    "electra": {**_ENCODER, "embedding_size": 32},
    # One layer, since all layers share their weights, and what is called twice in a pass is not trained.
    "albert": {**_ENCODER, "embedding_size": 32, "num_hidden_layers": 1},
    "ernie": _ENCODER,
    "nomic_bert": _ENCODER,
    "modernbert": {
        **_ENCODER,
        "global_attn_every_n_layers": 1,
        **{f"{name}_token_id": 1 for name in ("bos", "eos", "cls", "sep")},
    },
    "mpnet": _ENCODER,
    "roberta": {**_ENCODER, "max_position_embeddings": 66},
    "xlm-roberta": {**_ENCODER, "max_position_embeddings": 66},
    "convbert": {**_ENCODER, "embedding_size": 32},
    "fnet": {**_ENCODER, "tpu_short_seq_length": 64},
}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0},
    "gpt_neox": _DECODER,
    "gemma": _DECODER,
    "gemma2": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
    "olmo2": _DECODER,
    "opt": {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {**_DECODER, "num_key_value_heads": 4},
    "phi3": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "mixtral": {**_DECODER, "num_local_experts": 4},
}


# Encoders whose head of several layers is replaced where features are normalised.
REPLACED_HEADS = ("roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "modernbert", "deberta-v2")


def random_model(kind: str, **sizes: int) -> Any:
    """A random model of this type, tiny but for the given sizes: a classifier if it is an encoder, else causal."""
    encoder = kind in ENCODERS
    config = AutoConfig.for_model(kind, **{**(ENCODERS if encoder else DECODERS)[kind], **sizes})
    loader = AutoModelForSequenceClassification if encoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = loader.from_config(config)
        # Freshly initialised models are close to linear, which would hide what records do to each other.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name.lower():
                parameter.data.mul_(3)
    return model


def random_base(kind: str, *, normalize: bool = False, **sizes: int) -> BaseModel:
    """A frozen random base of this model type."""
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    return freeze(kind, random_model(kind, **sizes), tokenizer=None, task=task, normalize=normalize)


def save(model: Any, folder: Path, *, tokenizer_of: Path) -> Path:
    """The folder, with a model and the tokenizer of another model's folder."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_of / name).read_bytes())
    return folder


# Every day one of each way to be different; the others are slow tests.
EVERY_DAY = ("bert", "gpt2", "llama", "mixtral")
# Where peft has no default.
TARGETS = {"fnet": ("dense",), "olmo2": ("q_proj", "v_proj"), "phi3": ("qkv_proj",)}
