"""Tiny tokenizers with chat templates, and a tiny model that goes with one, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny import llama_config

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Without special tokens around the turns, and with spaces that the first word of a text takes along.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)
TEXT = [
    "What is flu? A viral disease. Is this review positive or negative? the patient has pain in the chest today",
    "user system assistant You are kind. negative positive a rash and a cough [INST] [/INST] answer in one word",
]
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<unk>"]


def chat_tokenizer(template: str | None = CHATML, *, spaces: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, or one that takes spaces for the beginnings of words as Llama's first did."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if spaces:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") if spaces else text for text in TEXT] * 2, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = template
    return made


def chat_model(folder: Path) -> Path:
    """The folder of a random Llama with a tokenizer that has a chat template."""
    tokenizer: Any = chat_tokenizer()
    config = llama_config(len(tokenizer), num_hidden_layers=2, max_position_embeddings=128)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
