"""Many classifiers in shared passes answer as each does alone in plain peft, and none reaches another's rows."""

import math
import queue
from dataclasses import replace

import pytest
import torch

from fedpriv.learning import adapters
from fedpriv.models.serving import _classification
from fedpriv.models.serving._classification import together
from fedpriv.models.serving._engine import SharedBase
from fedpriv.models.serving.requests import BusyError, Classify, Failed, TooLongError, UnknownVariantError
from fedpriv.models.serving.sources import find, load
from tests.failing import failing
from tests.served import LABELS, Asked, ask_classes, eventually, hold, save_run, serving, to_classify
from tests.tiny import WORDS

NAMES = ("global", "client-2", "client-10", "client-1")
LENGTHS = (1, 3, 30, 7, 2, 31, 12, 5, 28, 9)


def text(length: int) -> str:
    return " ".join(WORDS[(length * 3 + place * place) % len(WORDS)] for place in range(length))


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory):
    values = {"model": str(tiny_bert), "layers": "all", "rank": 4}
    return save_run(tmp_path_factory.mktemp("served") / "run", values, NAMES)


@pytest.fixture(scope="module")
def scheduler(run):
    with serving(run) as found:
        yield found


@pytest.fixture(scope="module")
def base(run):
    source = find(run)
    return SharedBase(load(source).model), source


def weights_of(base, name, scaled=1.0):
    shared, source = base
    return shared.weights(name, {tensor: scaled * values for tensor, values in source.readers[name](2**30).items()})


def tokens(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(5, 15, (length,), generator=generator).tolist())


def test_mixed_requests_answer_as_each_variant_alone_in_plain_peft(run, tiny_bert):
    with serving(run) as scheduler:
        assert scheduler.names == ("global", "client-1", "client-2", "client-10", "base")
        assert scheduler.labels == LABELS
        asked = {
            (name, length): ask_classes(scheduler, name, (text(length), text(length + 1)))
            for length in LENGTHS
            for name in NAMES
        }
        answers = {key: found.last() for key, found in asked.items()}
        statistics = scheduler.statistics()
    tokenizer = adapters.load_tokenizer(str(tiny_bert))
    plain = {name: adapters.load(str(tiny_bert), run / "variants" / name) for name in NAMES}
    for (name, length), answer in answers.items():
        for own, each in zip(answer.probabilities, (text(length), text(length + 1)), strict=True):
            inputs = tokenizer(each, truncation=True, max_length=32, return_tensors="pt")
            with torch.no_grad():
                assert own == pytest.approx(plain[name](**inputs).logits[0].softmax(dim=0).tolist(), abs=1e-5)
    assert statistics.num_rows == 2 * len(asked)
    assert statistics.num_passes < statistics.num_rows / 4
    assert statistics.num_variants_of_passes > 2 * statistics.num_passes


def test_a_row_does_not_depend_on_what_shares_its_pass(base):
    names = [*NAMES[1:], "client-2", "client-10"]
    texts = [tokens(seed, 20) for seed in range(6)]
    alone = base[0].classify([weights_of(base, "global")], texts[:1])[0]
    for scale in (1.0, 1e3, math.nan, math.inf):
        others = [weights_of(base, name, scale) for name in names]
        mixed = base[0].classify([weights_of(base, "global"), *others[:5]], texts)
        assert torch.allclose(mixed[0], alone, atol=1e-5), scale
    assert not mixed[1].isfinite().all(), "the others' weights must have had an effect"


def test_variants_of_different_ranks_share_a_pass(base):
    shared, source = base
    given = dict(source.readers["client-1"](2**30))
    higher = {}
    for name, values in given.items():
        side = {".lora_A.weight": 0, ".lora_B.weight": 1}.get(name[name.rfind(".lora_") :])
        higher[name] = values if side is None else torch.cat([values, 0.5 * values], dim=side)
    ordinary = {n: 1.25 * v if n.endswith(".lora_B.weight") else v for n, v in given.items()}  # (1 + 1/4) B A
    texts = [tokens(1, 9), tokens(2, 12), tokens(1, 9)]
    rows = [shared.weights("high", higher), weights_of(base, "global"), shared.weights("same", ordinary)]
    logits = shared.classify(rows, texts)
    assert torch.allclose(logits[0], logits[2], atol=1e-5)
    assert torch.allclose(logits[1], shared.classify(rows[1:2], texts[1:2])[0], atol=1e-5)


def test_weights_that_do_not_fit_are_named(base):
    shared, source = base
    tensors = dict(source.readers["global"](2**30))
    name = next(name for name in tensors if "lora_A" in name)
    for wrong, message in (
        ({**tensors, "x": tensors[name]}, "x is one too many"),
        ({n: t for n, t in tensors.items() if n != name}, "is missing"),
        ({**tensors, name: tensors[name][:, 1:]}, "lora_A.weight is torch.float32"),
        ({**tensors, name: tensors[name].double()}, "float64"),
        ({**tensors, name: tensors[name][1:]}, "lora_"),
    ):
        with pytest.raises(ValueError, match=message):
            shared.weights("v", wrong)


def test_a_row_that_breaks_its_pass_fails_alone(scheduler, monkeypatch):
    classify = SharedBase.classify

    def breaks(self, rows, texts):
        if any(row.variant == "client-1" for row in rows):
            raise RuntimeError("/secret/path: out of memory\nTraceback")
        return classify(self, rows, texts)

    monkeypatch.setattr(SharedBase, "classify", breaks)
    asked = [ask_classes(scheduler, name, ("a rash",)) for name in (*NAMES, *NAMES)]
    failed = [answer for answer in (found.last() for found in asked) if isinstance(answer, Failed)]
    assert [str(answer.error) for answer in failed] == ["variant 'client-1' failed on this request"] * 2


def test_an_answer_that_is_no_number_is_its_own_requests_failure(run, monkeypatch):
    with serving(run) as scheduler:
        read = SharedBase.weights

        def poisoned(self, variant, tensors):
            factor = math.nan if variant == "client-2" else 1.0
            return read(self, variant, {name: factor * tensor for name, tensor in tensors.items()})

        scheduler._memory._weights = poisoned.__get__(scheduler._counter.base)
        asked = [ask_classes(scheduler, name, ("a rash", "pain")) for name in NAMES]
        answers = dict(zip(NAMES, (found.last() for found in asked), strict=True))
    assert "no finite answer" in str(answers.pop("client-2").error)
    assert all(math.isclose(sum(p), 1) for answer in answers.values() for p in answer.probabilities)


def test_a_name_is_looked_up_and_never_a_path_and_too_many_tokens_are_refused_before_they_wait(scheduler):
    for name in ("nobody", "", "../global", "/etc/passwd", "global/../global", "global\x00", "a" * 10**6):
        with pytest.raises(UnknownVariantError) as caught:
            scheduler.submit(to_classify(scheduler, name, ("x",)), print)
        assert len(str(caught.value)) < 200
    assert scheduler.max_tokens == 32
    with pytest.raises(TooLongError, match="32 tokens"):
        scheduler.submit(Classify(variant="global", texts=((7,), (7,) * 33)), print)
    assert scheduler.statistics().num_waiting == 0


def test_a_full_queue_is_busy_and_a_cancelled_request_makes_room_at_once(run, monkeypatch):
    with serving(run, waiting=4) as scheduler:
        stopped, go = hold(monkeypatch)
        first = ask_classes(scheduler, "global", ("pain",))
        assert stopped.wait(30)
        waiting = [ask_classes(scheduler, "client-1", ("pain",)) for _ in range(2)]
        with pytest.raises(BusyError):
            scheduler.submit(to_classify(scheduler, "global", ("pain",)), print)
        waiting[0].ticket.cancel()
        third = ask_classes(scheduler, "global", ("pain",))
        go.set()
        assert [len(found.last().probabilities) for found in (first, waiting[1], third)] == [1, 1, 1]
        assert waiting[0].is_silent


def test_one_request_of_many_texts_holds_up_no_other(run):
    with serving(run, rows=4) as scheduler:
        order: list[str] = []
        many = to_classify(scheduler, "global", ("a patient has pain",) * 300)
        few = [to_classify(scheduler, name, ("the rash",)) for name in ("global", "client-1")]
        tickets = [scheduler.submit(many, lambda _: order.append("many"))]
        tickets += [scheduler.submit(request, lambda _: order.append("few")) for request in few]
        assert eventually(lambda: len(order) == 3)
    assert order == ["few", "few", "many"]


def test_closing_gives_up_and_frees_the_memory(run, monkeypatch):
    with serving(run, rows=1) as scheduler:
        stopped, go = hold(monkeypatch)
        asked = [ask_classes(scheduler, name, ("pain",)) for name in NAMES]
        assert stopped.wait(30)
        scheduler._is_closing.set()
        go.set()
        scheduler.close()
        assert {type(found.last()) for found in asked} >= {Failed}
        with pytest.raises(BusyError):
            scheduler.submit(to_classify(scheduler, "global", ("pain",)), print)
        assert scheduler.statistics().bytes_in_memory == 0


def alone(lengths: list[int], rows: int, most: int) -> list[int]:
    """The next pass of a server with one client."""
    return together(lengths, [""] * len(lengths), rows, most, 1)


def test_no_client_fills_a_pass_or_makes_another_s_longer():
    greedy, modest = ["greedy"] * 40, ["modest"] * 3
    assert len(together([100] * 40, greedy, 32, 2048, 512)) == 5
    assert together([500] * 40, greedy, 32, 2048, 512) == [0]
    assert together([100, *[500] * 40], ["modest", *greedy], 32, 2048, 512) == [0]
    mixed = together([100] * 43, [*modest, *greedy], 32, 2048, 512)
    assert sorted(mixed) == [*range(8)], "three of one, five of the other"


def test_a_client_s_first_text_has_one_pass_of_each_other_client_before_it(run, monkeypatch):
    with serving(run, client_tokens=32) as scheduler:
        stopped, go = hold(monkeypatch)
        many = to_classify(scheduler, "global", (text(28),) * 16)
        greedy = [Asked(scheduler, replace(many, client="greedy")) for _ in range(10)]
        assert stopped.wait(30)
        few, passes = replace(to_classify(scheduler, "client-1", ("pain",)), client="modest"), queue.Queue()
        scheduler.submit(few, lambda _: passes.put(scheduler.statistics().num_passes))
        go.set()
        assert passes.get(timeout=30) == 2
        for each in greedy:
            each.ticket.cancel()


def test_a_pass_has_the_oldest_text_and_others_of_its_length():
    lengths = [30, 200, 31, 10, 29, 500, 28]
    assert alone(lengths, 8, 2048)[:4] == [0, 2, 4, 6]
    assert alone([500, 8, 8], 8, 400) == [0]
    assert set(alone([32] * 100, 16, 10**6)) <= set(range(16))
    many = alone([32] * 30 + [100] * 30, 64, 10**6)
    assert sorted(many) == list(range(30)), "enough of one length: no other is padded to it"
    for most in (64, 300, 1000):
        chosen = alone([8 + 7 * n % 90 for n in range(60)], 32, most)
        assert chosen[0] == 0
        assert len(chosen) * max(8 + 7 * n % 90 for n in chosen) <= max(most, 8)


def test_after_a_step_that_fails_as_a_whole_or_a_reader_that_raises_the_next_requests_are_answered(
    scheduler, monkeypatch
):
    breaks = failing(MemoryError("none left"))
    with monkeypatch.context() as patched:
        patched.setattr(_classification, "together", breaks)
        failed = ask_classes(scheduler, "global", ("pain",)).last()
        assert str(failed.error) == "the server failed"
    assert ask_classes(scheduler, "global", ("pain",)).last().num_tokens == 3
    scheduler.submit(to_classify(scheduler, "global", ("pain",)), breaks)
    assert ask_classes(scheduler, "global", ("pain",)).last().num_tokens == 3
