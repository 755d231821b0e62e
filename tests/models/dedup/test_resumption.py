"""A deduplication that is killed goes on with what it stored, and ends as if it had never been interrupted."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import InputError, StoreError
from fedpriv.models.dedup.pipeline import check, deduplicate
from fedpriv.models.dedup.planning import DedupSettings, ValidationCharge, add_charges, read_charges
from fedpriv.models.dedup.validation import PrivateQueries, PrivateRecords
from fedpriv.models.dedup.work import Outcome, Progress, ProgressWatch
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting import PureEpsilon, epsilon_of
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.stores import content_of, described

TRUTH = np.random.default_rng(1).normal(size=1024).astype("f4")
INPUTS = np.random.default_rng(3).normal(size=(200, 1024)).astype("f4")
ROUNDS = (10, 12, 14, 16)
TENSORS = {
    f"round-{n}": {"weight": TRUTH + np.random.default_rng(n).normal(size=1024).astype("f4") / n} for n in ROUNDS
}
SETTINGS = DedupSettings(block_size=32, options={"min_batch": 2}, fairness="outcome")
# So large that its noise is a few hundredths of a record: every attempt gets the same answers.
VALIDATION = PureEpsilon(epsilon=400.0)


DESCRIBED = [described(f"round-{n}", n, utility=None if n == ROUNDS[-1] else 0.95) for n in ROUNDS]
GENEROUS = [replace(each, epsilon_bound=10 * VALIDATION.epsilon, utility=0.95) for each in DESCRIBED]


class Signs:
    """The records that have the sign that the true weights give them."""

    num_records, utility = len(INPUTS), "accuracy"

    def __init__(self, private: PrivateRecords | None = None) -> None:
        self.private = private

    def utilities(self, tensors, records):
        return ((INPUTS[records] @ tensors["weight"] > 0) == (INPUTS[records] @ TRUTH > 0)).astype(float)

    def saliency(self, tensors, records):
        return {"weight": np.abs(tensors["weight"])}


def in_one_go(store: Path, described=DESCRIBED, settings=SETTINGS, *, charged=None, **options) -> list[Outcome]:
    """Deduplicate; with `charged`, a file, on private records, whose charges are appended to it."""
    private = None
    if charged is not None:

        def charge(name, event):
            with charged.open("a") as file:
                file.write(json.dumps([name, event.epsilon]) + "\n")

        private = PrivateQueries(epsilon=VALIDATION.epsilon, charge=charge, source=SeededSource(0, "svt"))
    records = PrivateRecords(data_set="validation", delta=1e-5) if charged is not None else None
    with Store(store) as opened:
        evaluators = dict.fromkeys(TENSORS, Signs(records))
        return deduplicate(described, TENSORS.__getitem__, evaluators, opened, settings, private=private, **options)


def killed(store: Path, when: Callable[[Progress], bool], **options) -> None:
    """Deduplicate in a child process, which is killed when an observer says so."""

    def observer(progress: Progress) -> None:
        if when(progress):
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        in_one_go(store, observer=observer, **options)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def after(num_stored: int) -> Callable[[Progress], bool]:
    return lambda progress: progress.stored and progress.num_stored == num_stored


def under_way(name: str) -> Callable[[Progress], bool]:
    """Whether a variant was validated, but is not stored."""
    asked: list[int] = []

    def when(progress: Progress) -> bool:
        if progress.name == name:
            asked.append(progress.num_validations)
        return bool(asked) and progress.num_validations > asked[0]

    return when


@pytest.mark.parametrize("private", [False, True])
def test_killed_after_each_variant_and_amid_a_search_the_store_ends_as_in_one_go(tmp_path, private):
    described = GENEROUS if private else DESCRIBED
    whole, parts = (tmp_path / f"{name}.jsonl" if private else None for name in ("whole", "parts"))
    seen: list[Progress] = []
    expected = in_one_go(tmp_path / "whole", described, charged=whole, observer=seen.append)
    assert sum(outcome.num_replaced > 0 for outcome in expected) >= 2, "nothing is shared, the test would be blind"
    for when in (*map(after, range(1, len(ROUNDS))), *([] if private else [under_way(expected[-1].name)])):
        killed(tmp_path / "parts", when, described=described, charged=parts)
    assert in_one_go(tmp_path / "parts", described, charged=parts) == expected
    assert content_of(tmp_path / "parts") == content_of(tmp_path / "whole")
    if private:  # what was charged stays charged and is not charged again
        assert parts.read_text() == whole.read_text() != ""
    # The observer sees every validation and every variant.
    assert [(p.name, p.num_stored) for p in seen if p.stored] == [(o.name, n) for n, o in enumerate(expected, 1)]
    assert seen[-1].num_validations == sum(outcome.num_validations for outcome in expected)
    assert (seen[0].seconds_left, seen[-1].seconds_left) == (None, 0)


class Likelihoods(Signs):
    """Likelihoods that fall with the distance from the true weights, and the variants that it was asked about."""

    utility = "log likelihood"

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def utilities(self, tensors, records):
        self.asked |= {name for name, given in TENSORS.items() if np.array_equal(tensors["weight"], given["weight"])}
        return -np.square(INPUTS[records] @ (tensors["weight"] - TRUTH)).astype(float) / 1000


def test_a_model_whose_likelihoods_are_known_is_not_asked_again(tmp_path):
    found = []
    for expected in (set(TENSORS), set()):
        evaluator = Likelihoods()
        with Store(tmp_path / "store") as store:
            evaluators = dict.fromkeys(TENSORS, evaluator)
            found.append(deduplicate(DESCRIBED, TENSORS.__getitem__, evaluators, store, SETTINGS))
        assert evaluator.asked == expected
    assert found[0] == found[1]


def test_a_validation_that_was_under_way_is_paid_twice_and_the_variants_epsilon_says_so(tmp_path):
    charged = tmp_path / "charged.jsonl"
    killed(tmp_path / "store", under_way("round-16"), described=GENEROUS, charged=charged)
    outcomes = {outcome.name: outcome for outcome in in_one_go(tmp_path / "store", GENEROUS, charged=charged)}
    names = [json.loads(line)[0] for line in charged.read_text().splitlines()]
    targets = [name for name, outcome in outcomes.items() if outcome.bases]
    assert sorted(names) == sorted([*targets, "round-16"])
    once, twice = (epsilon_of([VALIDATION] * n, 1e-5).epsilon for n in (1, 2))
    assert outcomes["round-16"].epsilon_after == pytest.approx(twice)
    for name in set(targets) - {"round-16"}:
        assert outcomes[name].epsilon_after == pytest.approx(once)
    assert [charge.name for charge in read_charges(tmp_path / "store")] == names


@pytest.mark.parametrize(
    ("name", "bound"),
    [("round-16", VALIDATION.epsilon), ("round-12", 10 * VALIDATION.epsilon)],
    ids=["its own bound", "it would overtake others"],
)
def test_a_variant_without_room_for_a_second_attempt_stays_as_it_is(tmp_path, name, bound):
    charged, bounded = tmp_path / "charged.jsonl", [replace(variant, epsilon_bound=bound) for variant in GENEROUS]
    killed(tmp_path / "store", under_way(name), described=bounded, charged=charged)
    outcome = {each.name: each for each in in_one_go(tmp_path / "store", bounded, charged=charged)}[name]
    assert outcome.untouched == "repeated validation would exceed its bound"
    assert (outcome.bases, outcome.num_replaced, outcome.epsilon_after) == ((), 0, outcome.epsilon_before)
    assert charged.read_text().count(name) == 1
    with Store(tmp_path / "store", read_only=True) as store:
        assert np.array_equal(store.tensors(name)["weight"], TENSORS[name]["weight"])


def test_under_cross_a_base_that_an_earlier_call_charged_more_takes_nothing_and_dearer_targets_neither(tmp_path):
    bounded = [replace(variant, epsilon_bound=4 * VALIDATION.epsilon) for variant in GENEROUS]
    cross, charged = replace(SETTINGS, strategy="cross"), tmp_path / "charged.jsonl"
    planned = {each.name: each for each in in_one_go(tmp_path / "before", bounded, cross, charged=charged)}
    assert "round-12" in planned["round-14"].bases, "nothing depends on it, the test would be blind"
    dear = PureEpsilon(epsilon=20 * VALIDATION.epsilon)
    with Store(tmp_path / "store"):
        add_charges(
            tmp_path / "store", [ValidationCharge(name="round-12", data_set="validation", delta=1e-5, event=dear)]
        )
    for outcome in in_one_go(tmp_path / "store", bounded, cross, charged=charged):
        assert outcome.epsilon_after <= outcome.epsilon_before + 4 * VALIDATION.epsilon, outcome.name


def test_removed_and_made_again_a_variant_still_counts_its_first_validation(tmp_path):
    charged = tmp_path / "charged.jsonl"
    *_, target = in_one_go(tmp_path / "store", GENEROUS, charged=charged)
    assert target.bases
    with Store(tmp_path / "store") as store:
        store.remove(target.name)
    again = {o.name: o for o in in_one_go(tmp_path / "store", GENEROUS, charged=charged)}[target.name]
    assert again.epsilon_after > 1.9 * target.epsilon_after
    (tmp_path / "store" / "charges.json").write_text('{"version": 1, "charges": [{}]}')
    with pytest.raises(StoreError, match=r"charges\.json: not a list of charges"):
        read_charges(tmp_path / "store")


def test_what_was_stored_in_another_way_is_refused_in_one_line_and_nothing_changes(tmp_path, monkeypatch):
    killed(tmp_path / "store", after(2))
    before = content_of(tmp_path / "store")
    other_values = {"weight": TENSORS["round-16"]["weight"] + np.float32(1e-6)}
    for change in (
        {"settings": replace(SETTINGS, options={"min_batch": 3})},
        {"settings": replace(SETTINGS, metric="cosine")},
        {"described": [replace(DESCRIBED[0], utility_bound=0.06), *DESCRIBED[1:]]},
        {"described": DESCRIBED[:-1]},
        {"evaluation": "another seed"},
        {},
    ):
        if not change:
            monkeypatch.setitem(TENSORS, "round-16", other_values)
        with pytest.raises(InputError, match=r"holds 'round-1\d' from other settings, variants or valid") as caught:
            in_one_go(tmp_path / "store", **change)
        assert "\n" not in str(caught.value)
        assert content_of(tmp_path / "store") == before


def test_what_can_be_known_early_is_refused_before_anything_is_evaluated(tmp_path):
    store, read = tmp_path / "store", TENSORS.__getitem__
    check(DESCRIBED, read, store, SETTINGS)
    assert not store.exists()
    with pytest.raises(InputError, match=r"block_size = 2048: no float32 tensor of round-10 .* largest one has 1024"):
        check(DESCRIBED, read, store, replace(SETTINGS, block_size=2048))
    killed(store, after(1))
    check(DESCRIBED, read, store, SETTINGS)
    with pytest.raises(InputError, match="from other settings"):
        check(DESCRIBED, read, store, replace(SETTINGS, algorithm="dred"))
    with pytest.raises(InputError, match="has blocks of 32 float32"):
        check(DESCRIBED, read, store, replace(SETTINGS, block_size=64))
    with Store(store), pytest.raises(StoreError, match="another process is writing"):
        check(DESCRIBED, read, store, SETTINGS)


def test_the_time_left_is_what_the_variants_so_far_took_in_the_mean(monkeypatch):
    now, seen = iter([6.0, 6.0, 9.0]), []
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    watch = ProgressWatch(observer=seen.append, progress=Progress(num_variants=5, num_stored=2), _began=0.0)
    for name in ("a", "b"):
        watch.begin(name)
        watch.store()
    assert [(each.num_stored, each.seconds_left) for each in seen] == [(2, None), (3, 12.0), (3, 12.0), (4, 4.5)]
