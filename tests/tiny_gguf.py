"""A tiny language model in a GGUF file, with a tokenizer of single bytes and a chat template."""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = [*sorted(bytes_to_unicode().values()), "ab"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def tiny_llama() -> LlamaForCausalLM:
    """A random Llama of two layers, whose vocabulary is the tokenizer's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 96, "max_position_embeddings": 128, "tie_word_embeddings": True}
        config = LlamaConfig(vocab_size=len(SPECIAL) + len(TOKENS), **sizes)
        return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path, model: Any, *, tokenizer: bool = True, architecture: str = "llama", license: str = ""
) -> Path:
    """The path of a new GGUF file with this Llama, as llama.cpp would write it."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_license(license)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*SPECIAL, *TOKENS])
        writer.add_token_types([3] * len(SPECIAL) + [1] * len(TOKENS))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            turned = next((_as_llama_cpp(tensor, n) for part, n in heads.items() if part in name), tensor)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), turned.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_llama_cpp(weight: Tensor, heads: int) -> Tensor:
    """The rows of a query or key, whose halves of each head it interleaves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
