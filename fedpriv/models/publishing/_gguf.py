"""The content of a GGUF file: weights by llama.cpp's names and in its order of rows, and the metadata beside them.

transformers rotates the first half of a head's values against the second half, llama.cpp's Llama each value against its
neighbour. So the rows of its query and key weights take turns between the halves of a head, and so do those of a B that
is added to them; A reads the same inputs and stays as it is. llama.cpp's own converters do the same.

Sizes are those of the model in memory. The tokenizer is copied from the GGUF file that the base came from, or else made
of the one in memory, if llama.cpp divides texts into words as it does. That is known for byte-level BPE with one of
four rules; tests compare the tokens.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import gguf
import torch
from peft import PeftType
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.models.publishing.saved import LoadedVariant, prompt_tokens

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

ELSEWHERE = "`fedpriv export` without --gguf writes a folder that llama.cpp's convert_hf_to_gguf.py may read"

# Rotations that are one frequency for each pair of values, whatever the length of a text.
_FIXED_ROTATIONS = ("linear", "llama3")

_WORDS_OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_WORDS_OF_LLAMA_3 = _WORDS_OF_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def architecture_of(config: Any) -> gguf.MODEL_ARCH:
    """llama.cpp's architecture for a model; InputError if none is known here."""
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
    for what, is_used in (("use_dora", layer.use_dora), ("lora_bias", layer.lora_bias)):
        if is_used.get("default"):
            raise InputError(
                f"{what} = True: {name} has more than A and B, which are all of a LoRA file; give --only model"
            )


def model_tensors(model: Any) -> dict[str, Tensor]:
    """{llama.cpp's name: float32 values} of a whole model; an output layer that is the embedding is not repeated.

    InputError if llama.cpp has no such model, or computes it otherwise.
    """
    _refuse_other_functions(model.config)
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {**_rotations(model), **dict(as_llama_cpp(model.config, named))}


def as_llama_cpp(config: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(llama.cpp's name, values in its order of rows) of named tensors, [out] or [out, any], of a transformers model.

    InputError if llama.cpp has no such model, or no such tensor in it.
    """
    architecture = architecture_of(config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {gguf.MODEL_TENSOR.ATTN_Q: config.num_attention_heads, gguf.MODEL_TENSOR.ATTN_K: config.num_key_value_heads}
    for name, values in named:
        found = names.get_type_and_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise InputError(f"tensor = {name!r}: llama.cpp's {architecture.name} has none of that name; {ELSEWHERE}")
        kind, own = found
        turns = architecture is gguf.MODEL_ARCH.LLAMA and kind in heads
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
    if architecture_of(config) is not gguf.MODEL_ARCH.LLAMA or kind not in _FIXED_ROTATIONS:
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


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """Note the sizes of a model."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter, loaded: LoadedVariant, source: gguf.GGUFReader | None) -> None:
    """Note tokenizer, chat template, and what begins a prompt and ends an answer as the run had it.

    A chat begins as its template says, so nothing is put before it. Another prompt begins with the token for that if it
    did so in training.

    Args:
        source: the file that its base came from, if any.

    Raises:
        InputError: llama.cpp's tokens would be others.
    """
    reading, tokenizer = loaded.saved.reading, loaded.tokenizer
    end = reading.chat.end(tokenizer) if reading.instructs else tokenizer.eos_token_id
    decided = {gguf.Keys.Tokenizer.ADD_BOS, *([gguf.Keys.Tokenizer.EOT_ID] if end != tokenizer.eos_token_id else [])}
    if source is None:
        _add_own_tokenizer(writer, tokenizer, loaded.peft_model.config.vocab_size)
    else:
        _copy_tokenizer(writer, source, but=decided)
    writer.add_add_bos_token(not reading.instructs and prompt_tokens(loaded, "x", 1)[0] == tokenizer.bos_token_id)
    if gguf.Keys.Tokenizer.EOT_ID in decided:
        writer.add_eot_token_id(end)


def _copy_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, *, but: set[str]) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and name not in but:
            element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)


def _add_own_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, num_tokens: int) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"tokenizer = {type(tokenizer).__name__}: has no tokenizer.json, which --gguf reads")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    words = _words_of(content)
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(vocabulary) >= num_tokens:
        raise InputError(f"tokenizer: has token {max(vocabulary)}, but the model knows {num_tokens} tokens")
    added = tokenizer.added_tokens_decoder
    kinds = {
        index: gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
        for index, token in added.items()
    }
    rest = {
        index: gguf.TokenType.NORMAL if index in vocabulary else gguf.TokenType.UNUSED for index in range(num_tokens)
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([vocabulary.get(index, f"[PAD{index}]") for index in range(num_tokens)])
    writer.add_token_types([kinds.get(index, rest[index]) for index in range(num_tokens)])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=num_tokens)
    special.add_special_token = {}
    special.add_to_gguf(writer, quiet=True)


def _words_of(content: dict[str, Any]) -> str:
    """llama.cpp's name for the rule by which a tokenizer divides texts into words."""
    model, normalizer = content["model"], content["normalizer"]
    kind = f"{model['type']} with byte_fallback" if model.get("byte_fallback") else model["type"]
    rule = (_rule(content["pre_tokenizer"]), normalizer and normalizer["type"], bool(model.get("ignore_merges")))
    if kind != "BPE" or rule not in _RULES:
        raise InputError(
            f"tokenizer = {kind}: --gguf knows byte-level BPE that divides texts as {', '.join(_RULES.values())} do; "
            f"{ELSEWHERE}, and --only adapter needs no tokenizer"
        )
    return _RULES[rule]


def _rule(pre_tokenizer: dict[str, Any] | None) -> tuple[tuple[Any, ...], ...]:
    """The steps of a pre-tokenizer, without the settings that change no tokens."""
    if pre_tokenizer is None:
        return ()
    if pre_tokenizer["type"] == "Sequence":
        return tuple(step for each in pre_tokenizer["pretokenizers"] for step in _rule(each))
    settings = {key: value for key, value in pre_tokenizer.items() if key != "trim_offsets"}
    return (tuple(sorted((key, json.dumps(value)) for key, value in settings.items())),)


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split(words: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}


def _steps(*steps: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    return _rule({"type": "Sequence", "pretokenizers": list(steps)})


# {(steps, normalizer, whether a word that is a token is taken whole): llama.cpp's name}. It does not normalise texts,
# so one that is not in form C has other tokens there.
_RULES = {
    (_steps(_bytes(use_regex=True)), None, False): "gpt-2",
    (_steps({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)), None, False): "smollm",
    (_steps(_split(_WORDS_OF_LLAMA_3), _bytes(use_regex=False)), None, True): "llama-bpe",
    (_steps(_split(_WORDS_OF_QWEN), _bytes(use_regex=False)), "NFC", False): "qwen2",
}
