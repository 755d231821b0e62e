"""Long texts are refused or cut as a whole would be; draws and log-probabilities are those of plain peft."""

import random
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedpriv.learning import adapters
from fedpriv.learning.data.chat import ChatFormat
from fedpriv.models.serving._texts import Tokenizing, TokenTexts, next_token, penalized
from fedpriv.models.serving.requests import Finished, Generate, ServingError, TooLongError
from tests.chats import chat_tokenizer
from tests.marks import slow
from tests.served import Asked, serving

ROOM = 16
TEMPLATE = "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}"
PROMPT, NUM_NEW = (17, 42, 99, 7), 24


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


@pytest.fixture(scope="module")
def scheduler(chat_run):
    """An engine whose answers end by their length or their stop text alone."""
    with serving(chat_run) as found:
        found._desk._ends = frozenset()
        yield found


@pytest.fixture(scope="module")
def log_probabilities(chat_run, model):
    """Of every token, float32 [vocabulary], after a text, in plain peft."""
    plain = adapters.load(str(model), chat_run / "variants" / "global").eval()

    @torch.no_grad()
    def after(tokens):
        return plain(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(dim=0)

    return after


def ask(scheduler, **options):
    """All events of an answer by `global`."""
    asked = Asked(scheduler, Generate(variant="global", prompt=PROMPT, **{"max_new_tokens": NUM_NEW, **options}))
    finished = asked.last()
    assert isinstance(finished, Finished), finished
    return asked.pieces, finished


def chosen(pieces):
    """The tokens told, of a tokenizer whose tokens differ in text: their log-probabilities and alternatives."""
    return [token for piece in pieces for token in piece.tokens]


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (-0.5, 0.7), (2.0, 2.0), *slow((0.0, 0.0), (0.0, 0.7), (-0.5, 0.3))])
def test_greedy_tokens_with_penalties_are_those_of_the_formula(scheduler, log_probabilities, tapped, penalties):
    presence, frequency = penalties
    ask(scheduler, presence_penalty=presence, frequency_penalty=frequency)
    (found,) = tapped.values()
    expected: list[int] = []
    for _ in range(NUM_NEW):
        logits = log_probabilities([*PROMPT, *expected]).tolist()
        for token, count in Counter(expected).items():
            logits[token] -= frequency * count + presence
        expected.append(max(range(len(logits)), key=logits.__getitem__))
    assert found == expected
    if presence == 2.0:
        assert len(set(found)) > len(set(expected[:1])), "the penalties must have had an effect"


def test_penalties_leave_the_logits_and_the_prompt_alone():
    logits = torch.zeros(5)
    request = Generate(variant="v", prompt=(1, 1), max_new_tokens=1, presence_penalty=1.0, frequency_penalty=0.5)
    assert penalized(logits, (2, 2, 3), request).tolist() == [0, 0, -2.0, -1.5, 0]
    assert not logits.any()
    assert penalized(logits, (), request) is logits


def test_draws_follow_temperature_top_p_and_top_k():
    logits = torch.tensor([1.0, 3.0, 2.5, -40.0, 2.9])
    generator = torch.Generator().manual_seed(0)

    def shares(temperature=1.0, **options):
        request = Generate(variant="v", prompt=(1,), max_new_tokens=1, temperature=temperature, **options)
        drawn = [next_token(logits, request, generator) for _ in range(2000)]
        return [drawn.count(token) / 2000 for token in range(5)]

    def softmax(*values):
        # 2,000 draws: 5 standard errors are 0.056 at most.
        return pytest.approx(torch.tensor(values).softmax(dim=0).tolist(), abs=0.056)

    assert shares(temperature=0.0) == shares(temperature=1e-300) == [0, 1, 0, 0, 0]
    assert shares() == softmax(*logits)
    assert shares(top_k=5) == softmax(*logits)
    assert shares(temperature=2.0) == softmax(*(logits / 2))
    assert shares(top_p=0.6) == softmax(-torch.inf, 3.0, -torch.inf, -torch.inf, 2.9)
    assert shares(top_p=1e-9) == shares(top_k=1) == [0, 1, 0, 0, 0]
    assert shares(top_k=3) == softmax(-torch.inf, 3.0, 2.5, -torch.inf, 2.9)
    # Of two tokens with 0.525 and 0.475 between them: top_p is of these, not of all five.
    assert shares(top_k=2, top_p=0.5) == [0, 1, 0, 0, 0]
    assert shares(top_k=2, top_p=0.6)[4] == pytest.approx(0.475, abs=0.056)


@pytest.mark.parametrize("draw", [{"temperature": 0.0}, {"temperature": 1.7, "top_k": 30, "presence_penalty": 1.0}])
def test_log_probabilities_are_plain_peft_s_whatever_the_draw(scheduler, log_probabilities, draw):
    texts = TokenTexts(chat_tokenizer())
    pieces, finished = ask(scheduler, num_alternatives=4, seed=3, **draw)
    bare, _ = ask(scheduler, seed=3, **draw)
    tokens = chosen(pieces)
    assert len(tokens) == finished.num_new_tokens == NUM_NEW
    assert "".join(piece.text for piece in pieces) == "".join(piece.text for piece in bare)
    said = list(PROMPT)
    for told in tokens:
        plain = log_probabilities(said)
        values, likeliest = plain.topk(4)
        assert [text for text, _ in told.alternatives] == [texts[token] for token in likeliest.tolist()]
        assert [value for _, value in told.alternatives] == pytest.approx(values.tolist(), abs=1e-4)
        # The token itself: the one of this text and this probability.
        token = min(range(len(plain)), key=lambda t: (texts[t] != told.text, abs(plain[t] - told.log_probability)))
        assert told.log_probability == pytest.approx(float(plain[token]), abs=1e-4)
        said.append(token)
    if draw["temperature"] == 0:
        assert all(told.alternatives[0] == (told.text, told.log_probability) for told in tokens)


def test_offsets_say_where_a_token_stands_and_nothing_behind_a_stop_is_told(scheduler):
    pieces, _ = ask(scheduler, num_alternatives=0)
    text, tokens = "".join(piece.text for piece in pieces), chosen(pieces)
    # Bytes of no whole character may stand before a token's own text.
    three = zip(tokens, tokens[1:], tokens[2:], strict=False)
    whole = [(a, b) for before, a, b in three if "\ufffd" not in before.text + a.text and a.offset < b.offset]
    assert len(whole) > NUM_NEW // 8
    assert all(text[a.offset : b.offset] == a.text for a, b in whole)
    stop = text[len(text) // 2 :][:3]
    end = text.index(stop)
    pieces, finished = ask(scheduler, num_alternatives=0, stop=(stop,))
    assert (finished.reason, "".join(piece.text for piece in pieces)) == ("stop", text[:end])
    assert chosen(pieces) == [token for token in tokens if token.offset < end]


def test_what_cannot_be_drawn_is_refused_by_name(scheduler):
    for field, value in (
        *(("top_k", -1), ("presence_penalty", 2.1), ("frequency_penalty", float("nan"))),
        *(("num_alternatives", 21), ("num_alternatives", -1)),
    ):
        with pytest.raises(ServingError, match=field):
            scheduler.submit(Generate(variant="global", prompt=PROMPT, max_new_tokens=1, **{field: value}), print)
