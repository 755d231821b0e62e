"""A model of which no record can be learned is refused when it is loaded, in one line that says what would be right."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.training.workbench import load_model
from tests.architectures import DECODERS, ENCODERS, TARGETS, random_model
from tests.chats import CHATML, chat_model, chat_tokenizer
from tests.marks import slow
from tests.tiny import LABELS, WORDS

WIDTH, NUM_EMBEDDINGS = 64, 60
ENCODER: Mapping[str, Any] = {"layers": "last-1", "labels": LABELS}
# {what is trained: (architecture, keys)}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "an encoder": ("bert", ENCODER),
    "a new head alone": ("bert", {**ENCODER, "train": "head"}),
    "a classifier's own head": ("bert", {**ENCODER, "recipe": "per-sample"}),
    "a causal language model": ("gpt2", {"task": "CAUSAL_LM", "layers": "last-1"}),
    "one without learned positions": ("llama", {"task": "CAUSAL_LM", "layers": "last-1"}),
}


def saved(folder: Path, kind: str, tokenizer: Any = None, change: Callable[[Any], None] = lambda _model: None) -> Path:
    """The folder of a random model that was changed, with a tokenizer or without."""
    model = random_model(kind)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def words(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words of the tests, in lines of text without a frame."""
    names = [*special.values(), "[UNK]", *WORDS, *LABELS]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=WIDTH, **special)


def loaded(folder: Path, keys: Mapping[str, Any], **changes: Any) -> None:
    config = parse({"model": str(folder), "max_length": 24, "memory_limit_mb": 8, "simulate": True, **keys, **changes})
    load_model(config, labels=() if config.task == "CAUSAL_LM" else tuple(LABELS))


def added_words(folder: Path, kind: str) -> None:
    tokenizer = words(pad_token="[PAD]")
    tokenizer.add_tokens([f"<name {number}>" for number in range(NUM_EMBEDDINGS)])
    saved(folder, kind, tokenizer)


def added_padding(folder: Path, kind: str) -> None:
    tokenizer = words()
    tokenizer.add_tokens([f"word{number}" for number in range(NUM_EMBEDDINGS - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    saved(folder, kind, tokenizer)


def added_frame(folder: Path, kind: str) -> None:
    """Every text ends with a token that has no embedding."""
    tokenizer = words(pad_token="[PAD]")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"[{number}]" for number in range(NUM_EMBEDDINGS)]})
    last = len(tokenizer) - 1
    end = tokenizer.convert_ids_to_tokens(last)
    frame = TemplateProcessing(single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, last)])
    tokenizer.backend_tokenizer.post_processor = frame
    saved(folder, kind, tokenizer)


def not_a_number(value: float, matrix: int) -> Callable[[Path, str], None]:
    def damage(model: Any) -> None:
        [p for p in model.parameters() if p.dim() > 1][matrix].view(-1)[-1] = value

    return lambda folder, kind: saved(folder, kind, words(pad_token="[PAD]"), damage)


WAYS: Mapping[str, tuple[Callable[[Path, str], None], str]] = {
    "no tokenizer": (saved, "its tokenizer knows no word.*tokenizer.json, into its folder|cannot be loaded for"),
    "added words": (added_words, r"'<name \d+>'\) of its tokenizer has no embedding, of which there are 60; resize"),
    "added padding": (added_padding, r"token 60 \('\[PAD\]'\) .* no embedding, .* are 60; resize them to 61"),
    "added frame": (added_frame, r"'\[59\]'\) of its tokenizer has no embedding"),
    "no padding": (lambda folder, kind: saved(folder, kind, words()), "neither a padding token nor .*name a pad_token"),
    "NaN in an embedding": (not_a_number(float("nan"), 0), "holds a value that is NaN or infinite; use an undamaged"),
    "infinity": (not_a_number(float("inf"), 1), "holds a value that is NaN or infinite; use an undamaged"),
}


EVERY_DAY = ("an encoder", "a causal language model")


@pytest.mark.parametrize("kind", [*EVERY_DAY, *slow(*(kind for kind in KINDS if kind not in EVERY_DAY))])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_says_nothing_of_any_record_is_refused_by_name(way, kind, tmp_path):
    make, message = WAYS[way]
    architecture, keys = KINDS[kind]
    make(tmp_path / "model", architecture)
    with pytest.raises(InputError, match=f"^model = '{tmp_path}/model': .*({message})") as refused:
        loaded(tmp_path / "model", keys)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_with_a_sound_tokenizer_and_weights_loads(kind, tmp_path):
    architecture, keys = KINDS[kind]
    loaded(saved(tmp_path / "model", architecture, words(pad_token="[PAD]")), keys)


def test_special_tokens_without_an_embedding_that_no_text_holds_do_no_harm(tmp_path):
    """Such as one for images, in the tokenizer of a model that reads texts alone."""
    tokenizer = words(pad_token="[PAD]")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {n}>" for n in range(NUM_EMBEDDINGS)]})
    loaded(saved(tmp_path / "model", "llama", tokenizer), KINDS["one without learned positions"][1])


# {architecture: tokens that it holds fewer than it has positions}: the first positions are those of padding.
OFFSETS = {"roberta": 1, "xlm-roberta": 1, "camembert": 1, "mpnet": 2}
POSITIONS = ("bert", "gpt2", "roberta")


@pytest.mark.parametrize("kind", [*POSITIONS, *slow(*sorted({*ENCODERS, *DECODERS} - {*POSITIONS}))])
def test_a_length_that_positions_do_not_hold_is_refused_with_the_longest_that_they_do(kind, tmp_path):
    tokenizer = words(pad_token="[PAD]")
    tokenizer.model_max_length = 10**30
    folder = saved(tmp_path / "model", kind, tokenizer)
    stated = AutoConfig.from_pretrained(folder).max_position_embeddings
    keys = {"recipe": "per-sample", "target_modules": TARGETS.get(kind, ()), "rank": 2, "layers": "all"}
    keys |= {"labels": LABELS} if kind in ENCODERS else {"task": "CAUSAL_LM"}
    at_most = stated - OFFSETS.get(kind, 0)
    with pytest.raises(InputError, match=rf"^max_length = {at_most + 1}: .*( takes|; use) at most {at_most}$"):
        loaded(folder, keys, max_length=at_most + 1)
    loaded(folder, keys, max_length=at_most)
    if kind == "gpt2":
        nothing = r"^max_length = 1: a gpt2 model learns nothing of texts of so many tokens"
        with pytest.raises(InputError, match=nothing):
            loaded(folder, keys, max_length=1)
        loaded(folder, keys, max_length=2)


def test_a_chat_whose_turns_have_no_embedding_is_refused(tmp_path):
    """The tokens of a template are in every record, whatever is said."""
    folder, keys = chat_model(tmp_path / "chat"), {"prompt_column": "q", "response_column": "a", "max_length": 60}
    loaded(folder, keys)
    tokenizer = chat_tokenizer(CHATML.replace("<|im_start|>", "<|turn|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(folder)
    with pytest.raises(InputError, match=rf"^model = '{folder}': token \d+ \('<\|turn\|>'\) .* has no embedding"):
        loaded(folder, keys)


def test_gradients_that_overflow_are_refused(tmp_path):
    """All weights are finite, and what they make of a text is not."""
    tokenizer, folder = words(pad_token="[PAD]"), tmp_path / "model"
    saved(folder, "llama", tokenizer, lambda model: model.model.layers[-1].mlp.down_proj.weight.fill_(3e38))
    with pytest.raises(InputError, match=r"gradients of a llama model are NaN or infinite on a text of 24 tokens"):
        loaded(folder, KINDS["one without learned positions"][1])
