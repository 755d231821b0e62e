"""Metadata of a GGUF file: the sizes of a model, its tokenizer, and the end of its answers.

Sizes are those of the model in memory. The tokenizer is copied from the GGUF file that the base came from, or else made
of the one in memory, if llama.cpp divides texts into words as it does. That is known for byte-level BPE with one of
four rules; tests compare the tokens.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, SpecialVocab, TokenType

from fedpriv.errors import InputError
from fedpriv.models.publishing._gguf_tensors import ELSEWHERE
from fedpriv.models.publishing.saved import LoadedVariant, prompt_tokens

_WORDS_OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_LLAMA_3 = _WORDS_OF_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def add_sizes(writer: GGUFWriter, config: Any) -> None:
    """Note the sizes of a model.

    Args:
        writer: of a file that is not begun.
        config: of a Llama-like transformers model.
    """
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


def add_tokenizer(writer: GGUFWriter, loaded: LoadedVariant, source: GGUFReader | None) -> None:
    """Note tokenizer, chat template, and what begins a prompt and ends an answer as the run had it.

    A chat begins as its template says, so nothing is put before it. Another prompt begins with the token for that if it
    did so in training.

    Args:
        writer: of a file that is not begun.
        loaded: the variant.
        source: the file that its base came from, if any.

    Raises:
        InputError: llama.cpp's tokens would be others.
    """
    reading, tokenizer = loaded.saved.reading, loaded.tokenizer
    end = reading.chat.end(tokenizer) if reading.instructs else tokenizer.eos_token_id
    decided = {Keys.Tokenizer.ADD_BOS, *([Keys.Tokenizer.EOT_ID] if end != tokenizer.eos_token_id else [])}
    if source is None:
        _add_own_tokenizer(writer, tokenizer, loaded.peft_model.config.vocab_size)
    else:
        _copy_tokenizer(writer, source, but=decided)
    writer.add_add_bos_token(not reading.instructs and prompt_tokens(loaded, "x", 1)[0] == tokenizer.bos_token_id)
    if Keys.Tokenizer.EOT_ID in decided:
        writer.add_eot_token_id(end)


def _copy_tokenizer(writer: GGUFWriter, source: GGUFReader, *, but: set[str]) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and name not in but:
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)


def _add_own_tokenizer(writer: GGUFWriter, tokenizer: Any, num_tokens: int) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"tokenizer = {type(tokenizer).__name__}: has no tokenizer.json, which --gguf reads")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    words = _words_of(content)
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(vocabulary) >= num_tokens:
        raise InputError(f"tokenizer: has token {max(vocabulary)}, but the model knows {num_tokens} tokens")
    added = tokenizer.added_tokens_decoder
    kinds = {index: TokenType.CONTROL if token.special else TokenType.USER_DEFINED for index, token in added.items()}
    rest = {index: TokenType.NORMAL if index in vocabulary else TokenType.UNUSED for index in range(num_tokens)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([vocabulary.get(index, f"[PAD{index}]") for index in range(num_tokens)])
    writer.add_token_types([kinds.get(index, rest[index]) for index in range(num_tokens)])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = SpecialVocab(folder, load_merges=True, n_vocab=num_tokens)
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
