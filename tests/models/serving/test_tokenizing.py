"""A text with too many characters is refused, or cut as a whole would be, and most of it is never read."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedpriv.learning.data.chat import ChatFormat
from fedpriv.models.serving._texts import Tokenizing
from fedpriv.models.serving.requests import TooLongError

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


def test_a_text_with_too_many_characters_is_refused_before_it_is_tokenised():
    found = tokenizing()
    for ask in (
        lambda: found.encode("a b " * 250_000),
        lambda: found.encode("a" + " " * 10**5 + "b"),
        lambda: found.encode_chat((("user", "a"), ("assistant", "a"), ("user", "a b " * 250_000))),
    ):
        with pytest.raises(TooLongError, match="characters: at most 256"):
            ask()
    assert Counting.most == 0
    assert len(found.encode("ab" * 128)) == ROOM + 1
    assert found.encode("a" + " " * 200 + "b") == (1, 2)
    assert found.encode_chat((("user", "a" + " " * 100 + "b"),))[:2] == (1, 2)


@pytest.mark.parametrize("has_words", [True, False])
def test_what_is_cut_has_the_tokens_of_the_whole_text_or_is_refused(has_words):
    found, generator = tokenizing(has_words=has_words, cuts=True), random.Random(0)
    refused = 0
    for length in [*range(10, 1000, 7), 3000]:
        weights = [generator.random() for _ in range(3)]
        text = "".join(generator.choices(("a", "b", "     "), weights, k=length))
        expected = found._tokenizer([text], truncation=True, max_length=ROOM)["input_ids"][0]
        try:
            assert found.encode(text) == tuple(expected)
        except TooLongError:
            refused += 1
            assert len(text) > found.most_characters
    assert (refused > 20) != has_words
    Counting.most = 0
    assert not has_words or found.encode("a b " * 250_000) == (1, 2) * (ROOM // 2)
    assert Counting.most <= found.most_characters == 16 * ROOM


def test_where_a_text_s_end_is_kept_one_with_too_many_characters_is_refused():
    found = tokenizing(cuts=True)
    found._tokenizer.truncation_side = "left"
    assert found.encode("a b " * 20) == (1, 2) * (ROOM // 2)
    with pytest.raises(TooLongError):
        found.encode("a b " * 250)
