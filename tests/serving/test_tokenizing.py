"""A text far too long is refused, or cut, by its beginning, and no text that fits ever is."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedpriv.data.chat import ChatFormat
from fedpriv.serving._texts import Tokenizing
from fedpriv.serving.requests import TooLongError

ROOM = 16
TEMPLATE = "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}"


class Counting(PreTrainedTokenizerFast):
    """Remembers the most characters that it was given at once."""

    most = 0

    def __call__(self, text, *args, **kwargs):
        type(self).most = max(self.most, *map(len, text))
        return super().__call__(text, *args, **kwargs)


def tokenizing(*, has_words: bool = True, cuts: bool = False) -> Tokenizing:
    Counting.most = 0
    pairs = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "abab": 4, "</s>": 5, " ": 6, "ba": 7}
    merges = [("a", "b"), ("ab", "ab"), ("b", "a")]
    inner = Tokenizer(models.BPE(vocab=pairs, merges=merges, unk_token="[UNK]"))
    if has_words:
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = Counting(tokenizer_object=inner, chat_template=TEMPLATE, model_max_length=10**6, **special)
    return Tokenizing(tokenizer, "tiny", ChatFormat(has_messages=True), ROOM, cuts=cuts)


def test_of_a_text_far_too_long_only_the_beginning_is_tokenised():
    found = tokenizing()
    with pytest.raises(TooLongError, match="16 tokens, by the beginning"):
        found.encode("a b " * 250_000)
    with pytest.raises(TooLongError):
        found.encode_chat((("user", "a"), ("assistant", "a"), ("user", "a b " * 250_000)))
    assert Counting.most <= found.quick_characters == 8 * ROOM


def test_a_text_of_few_tokens_is_read_however_long_it_is():
    found = tokenizing()
    assert found.encode("a" + " " * 10**5 + "b") == (1, 2)
    assert len(found.encode("ab" * 20_000)) == ROOM + 1  # one word: nothing tells where it may be cut
    chat = found.encode_chat((("user", "a" + " " * 10**4 + "b"),))
    assert chat[:2] == (1, 2)


@pytest.mark.parametrize("has_words", [True, False])
def test_what_is_refused_by_its_beginning_is_too_long_as_a_whole(has_words):
    found, generator = tokenizing(has_words=has_words), random.Random(0)
    refused = 0
    for _ in range(200):
        weights = [generator.random() for _ in range(3)]
        text = "".join(generator.choices(("a", "b", "     "), weights, k=generator.randrange(10, 400)))
        whole = found._short.tokenizer([text])["input_ids"][0]
        try:
            assert found.encode(text) == tuple(whole[: ROOM + 1])
        except TooLongError:
            refused += 1
            assert len(whole) > ROOM
    assert (refused > 20) == has_words


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_cut_has_the_tokens_of_the_whole_text(side):
    found, generator = tokenizing(cuts=True), random.Random(0)
    for each in (found._short, found._long):
        each.tokenizer.truncation_side = side
    whole = found._short.tokenizer
    for length in [*range(10, 100, 7), *range(1000, 3000, 500)]:
        text = "".join(generator.choices(("a", "b", "     "), k=length))
        expected = whole([text], truncation=True, max_length=ROOM)["input_ids"][0]
        assert len(expected) == ROOM or length < 100
        assert found.encode(text) == tuple(expected)
    Counting.most = 0
    assert found.encode("a b " * 250_000) == (1, 2) * (ROOM // 2)
    assert (Counting.most <= found.quick_characters) == (side == "right")
