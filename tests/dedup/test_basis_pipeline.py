"""Variants stored by a shared basis: priced with all of its members, stored as accepted, refused if it is damaged."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.events import PureEpsilon, SubsampledGaussian
from fedpriv.dedup._pipelines import INTERRUPTED, TOO_FEW_BYTES
from fedpriv.dedup.pipeline import deduplicate
from fedpriv.dedup.planning import DedupSettings, choose_members
from fedpriv.dedup.validation import PrivateQueries, PrivateRecords
from fedpriv.errors import InputError, StoreError
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.variants.blocks import layout_of
from fedpriv.variants.composition import History, Upload
from fedpriv.variants.folders import Described
from fedpriv.variants.store import Store
from fedpriv.variants.store import Variant as StoreVariant
from simulations.benchmarks._store_registry import StoreRegistry
from tests.stores import basis_sizes, content_of, damage_index

SIZE = 400
RNG = np.random.default_rng(3)
TRUTH = RNG.normal(size=SIZE)
RECORDS = RNG.normal(size=(6000, SIZE))
LABELS = RECORDS @ TRUTH > 0
EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.05)
SETTINGS = DedupSettings(block_size=64, algorithm="shared-basis", fairness="outcome", accountant="rdp")


class Linear:
    """The records that a vector classifies rightly; with `originals`, no restored form is any good."""

    num_records, utility = len(LABELS), "accuracy"

    def __init__(self, private=None, originals=()) -> None:
        self.private, self.originals = private, originals

    def utilities(self, tensors, records):
        if self.originals and not any(np.array_equal(tensors["w"], original["w"]) for original in self.originals):
            return np.zeros(len(records))
        return ((RECORDS[records] @ tensors["w"].reshape(-1) > 0) == LABELS[records]).astype(float)

    def saliency(self, tensors, records):
        raise AssertionError("no saliency is needed, so none may be measured or paid for")


def uploads(until: int, data_set: str = "clinic", first: int = 1) -> frozenset[Upload]:
    return frozenset(Upload(data_set=data_set, run="r", round=n, event=EVENT) for n in range(first, until + 1))


def described(name: str, ancestors: frozenset[Upload], bound: float = 0.3, **more) -> Described:
    return Described(
        name=name,
        architecture="linear",
        utility=None,
        epsilon_bound=bound,
        utility_bound=more.pop("utility_bound", 0.05),
        deltas={upload.data_set: 1e-5 for upload in ancestors} or {"clinic": 1e-5},
        history=History(name=name, ancestors=ancestors),
        **more,
    )


ROUNDS = (2, 20, 22, 24, 26, 28)


def rounds(bound: float = 0.3) -> list[Described]:
    return [described(f"round-{n}", uploads(n), bound) for n in ROUNDS]


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    return {
        f"round-{n}": {
            "w": (TRUTH + 4 / n * rng.normal(size=SIZE)).reshape(20, SIZE // 20).astype("f4"),
            "steps": np.array(n),
        }
        for n in ROUNDS
    }


def stored(path, variants, tensors, evaluator=None, settings=SETTINGS, private=None):
    with Store(path) as store:
        evaluators = {variant.name: evaluator or Linear() for variant in variants}
        outcomes = deduplicate(variants, tensors.__getitem__, evaluators, store, settings, private=private)
    return {outcome.name: outcome for outcome in outcomes}


def by_hand(names, extra=()) -> float:
    """The epsilon of the union of the uploads of rounds up to the last of these."""
    last = max(int(name.split("-")[1]) for name in names)
    return epsilon_of([*(EVENT for _ in range(last)), *extra], 1e-5, "rdp").epsilon


def test_every_variant_is_within_its_bounds_by_an_independent_look_at_the_store(tensors, tmp_path):
    outcomes = stored(tmp_path / "s", rounds(), tensors)
    with Store(tmp_path / "s", read_only=True) as store:
        assert (store.verify(), set(store.names)) == ([], set(tensors))
        assert len(basis_sizes(tmp_path / "s")) == 1
        for name, outcome in outcomes.items():
            restored, manifest = store.tensors(name), store.manifest(name)
            after = Linear().utilities(restored, np.arange(Linear.num_records)).mean()
            assert after == pytest.approx(outcome.utility_after)
            if outcome.num_replaced:
                assert outcome.utility_before - after <= outcome.loss_limit <= outcome.bound <= 0.05 + 1e-9
            assert restored["steps"] == tensors[name]["steps"]
            assert outcome.epsilon_after == pytest.approx(by_hand([name, *outcome.bases]), rel=1e-9)
            assert outcome.epsilon_after <= outcome.epsilon_before + 0.3
            assert manifest.privacy["epsilon"] == outcome.epsilon_after
            difference = restored["w"].astype(float) - tensors[name]["w"]
            if not outcome.bases:
                assert not difference.any()
                continue
            stated = manifest.provenance["basis"]["error"]
            assert stated["absolute"] == pytest.approx(np.abs(difference).max(), rel=1e-9)
            relative = np.linalg.norm(difference) / np.linalg.norm(tensors[name]["w"].astype(float))
            assert stated["relative"] == pytest.approx(relative, rel=1e-9)
            assert 0 < relative < 0.2


def test_a_variant_whose_bound_the_union_breaks_stays_plain_and_is_no_ancestor(tensors, tmp_path):
    outcomes = stored(tmp_path / "s", rounds(), tensors)
    assert outcomes["round-2"].untouched == "no shared basis meets its epsilon bound"
    assert outcomes["round-2"].epsilon_after == outcomes["round-2"].epsilon_before
    assert all("round-2" not in outcome.bases for outcome in outcomes.values())
    others = set(tensors) - {"round-2"}
    assert all({name, *outcomes[name].bases} == others for name in others)


def test_who_shares_is_decided_by_costs_whatever_the_values_are(tensors, tmp_path):
    zeros = {name: {"w": np.zeros((20, 20), "f4"), "steps": np.array(0)} for name in tensors}
    first, second = stored(tmp_path / "a", rounds(), tensors), stored(tmp_path / "b", rounds(), zeros)
    assert {name: outcome.bases for name, outcome in first.items()} == {n: o.bases for n, o in second.items()}


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.3, 5.0])
def test_the_first_group_is_the_largest_that_any_choice_of_members_allows(bound):
    variants = rounds(bound)
    groups = choose_members(variants, SETTINGS).groups
    limit = {v.name: by_hand([v.name]) + bound + 1e-12 for v in variants}
    allowed = [
        names
        for size in range(2, len(variants) + 1)
        for names in itertools.combinations(limit, size)
        if by_hand(names) <= min(limit[name] for name in names)
    ]
    assert len(groups[0]) == max(map(len, allowed)) if allowed else not groups
    assert all(group in allowed for group in groups)


def test_a_costly_variant_that_nobody_could_bear_does_not_keep_the_others_apart():
    costly = [described(f"other-{n}", uploads(200)) for n in range(3)]
    groups = choose_members([*costly, *rounds()[1:]], SETTINGS).groups
    assert [set(group) for group in groups] == [{f"round-{n}" for n in ROUNDS[1:]}, {v.name for v in costly}]


def test_under_fairness_no_epsilon_overtakes_a_formerly_higher_one():
    wide, between = described("wide", uploads(20), bound=5.0), described("between", uploads(24), bound=0.0)
    top = [described(f"top-{n}", uploads(40), bound=0.0) for n in range(2)]
    loose = choose_members([wide, between, *top], SETTINGS)
    assert loose.groups == (("top-0", "top-1"),)
    assert loose.left_out["wide"] == "would overtake another variant's epsilon"
    fair = choose_members([wide, between, *top], replace(SETTINGS, fairness="bounds"))
    assert set(fair.groups) == {("wide", "between"), ("top-0", "top-1")}
    assert choose_members([wide, *top], SETTINGS).groups == (("wide", "top-0", "top-1"),)


def test_other_architectures_have_bases_of_their_own():
    variants = rounds(5.0)
    mixed = [replace(v, architecture="a" if n < 3 else "b") for n, v in enumerate(variants)]
    groups = choose_members(mixed, SETTINGS).groups
    assert sorted(map(len, groups)) == [3, 3]
    assert {frozenset(int(name.split("-")[1]) for name in group) for group in groups} == {
        frozenset(ROUNDS[:3]),
        frozenset(ROUNDS[3:]),
    }


def test_a_variant_that_no_restored_form_serves_is_stored_plain_and_still_pays_for_its_basis(tensors, tmp_path):
    outcomes = stored(tmp_path / "s", rounds(), tensors, Linear(originals=list(tensors.values())))
    with Store(tmp_path / "s", read_only=True) as store:
        for name, original in tensors.items():
            assert np.array_equal(store.tensors(name)["w"], original["w"])
        assert not (tmp_path / "s" / "bases").exists()
    for name in set(tensors) - {"round-2"}:
        assert (outcomes[name].num_replaced, outcomes[name].num_validations) == (0, 1)
        assert outcomes[name].epsilon_after == pytest.approx(by_hand(["round-28"]), rel=1e-9)


def test_a_tight_utility_bound_takes_a_residual(tensors, tmp_path):
    coarse = replace(SETTINGS, options={"ratio": 0.1, "bits": 4})
    tight = [replace(v, utility_bound=0.002) for v in rounds()]
    outcomes = stored(tmp_path / "s", tight, tensors, settings=coarse)
    with Store(tmp_path / "s", read_only=True) as store:
        forms = [store.manifest(name).provenance.get("basis") for name in tensors]
    assert any(form and form["residual"] for form in forms)
    limits = [outcome.loss_limit for outcome in outcomes.values() if outcome.num_replaced]
    assert all(limit <= 0.002 for limit in limits)


@pytest.mark.parametrize("data_set", ["validation", "clinic"])
def test_private_validation_is_charged_before_it_asks_and_is_in_the_epsilons(tensors, tmp_path, data_set):
    charged: list = []

    class Watched(Linear):
        def utilities(self, tensors, records):
            known = any(np.array_equal(tensors["w"], original["w"]) for original in originals)
            assert known or charged[-1][0] == f"round-{tensors['steps']}"
            return super().utilities(tensors, records)

    originals = list(tensors.values())
    private = PrivateQueries(
        epsilon=0.2, charge=lambda name, event: charged.append((name, event)), source=SeededSource(0, "svt")
    )
    records = PrivateRecords(data_set=data_set, delta=1e-5, saliency=EVENT)
    known = [replace(v, utility=0.9, utility_bound=0.1) for v in rounds(0.6)]
    outcomes = stored(tmp_path / "s", known, tensors, Watched(records), private=private)
    members = [name for name, outcome in outcomes.items() if outcome.bases]
    assert charged == [(name, PureEpsilon(epsilon=0.2)) for name in members] != []
    assert {outcome.utility_before for outcome in outcomes.values()} == {None}
    for name in members:
        extra = [PureEpsilon(epsilon=0.2)]
        expected = by_hand([name, *outcomes[name].bases], extra if data_set == "clinic" else [])
        assert outcomes[name].epsilon_after == pytest.approx(expected, rel=1e-6)
        assert outcomes[name].epsilon_after <= outcomes[name].epsilon_before + 0.6


def test_private_validation_that_no_bound_has_room_for_is_never_asked(tensors, tmp_path):
    charged: list = []
    private = PrivateQueries(epsilon=1.0, charge=lambda *what: charged.append(what), source=SeededSource(0, "svt"))
    evaluator = Linear(PrivateRecords(data_set="clinic", delta=1e-5))
    outcomes = stored(tmp_path / "s", rounds(0.3), tensors, evaluator, private=private)
    assert not charged
    assert all(outcome.epsilon_after == outcome.epsilon_before for outcome in outcomes.values())


def test_a_damaged_basis_is_refused_by_name_and_plain_variants_are_served(tensors, tmp_path):
    stored(tmp_path / "s", rounds(), tensors)
    damage_index(tmp_path / "s", "bases", "content", -5)
    with Store(tmp_path / "s") as store:
        assert np.array_equal(store.tensors("round-2")["w"], tensors["round-2"]["w"])
        with pytest.raises(StoreError, match=r"model 'round-28': its basis .* is damaged"):
            store.tensors("round-28")
        assert len(store.verify()) == len(ROUNDS) - 1
        assert all("its basis" in line for line in store.verify())
    with closing(sqlite3.connect(tmp_path / "s" / "index.sqlite")) as db, db:
        db.execute("DELETE FROM bases")
    with Store(tmp_path / "s") as store, pytest.raises(StoreError, match="or missing"):
        store.tensors("round-28")


def test_damaged_coefficients_are_refused(tensors, tmp_path):
    stored(tmp_path / "s", rounds(), tensors)
    damage_index(tmp_path / "s", "models", "extras", name="round-28")
    with Store(tmp_path / "s", read_only=True) as store:
        assert len(store.verify()) == 1
        with pytest.raises(StoreError, match=r"'round-28': its extras in index\.sqlite: damaged"):
            store.tensors("round-28")


def test_a_basis_goes_with_the_last_variant_that_needs_it_and_strays_go_too(tensors, tmp_path):
    stored(tmp_path / "s", rounds(), tensors)
    with Store(tmp_path / "s") as store:
        *others, last = sorted(set(tensors) - {"round-2"})
        for name in others:
            store.remove(name)
        store.compact()
        assert len(basis_sizes(tmp_path / "s")) == 1
        store.tensors(last)
        store.remove(last)
        assert not basis_sizes(tmp_path / "s")
        assert store.names == ["round-2"]
    stray = tmp_path / "s" / "blocks.1.npy"  # of the next compaction
    stray.write_bytes(b"left by a killed writer")
    Store(tmp_path / "s").close()
    assert not stray.exists()


def test_what_needs_blocks_refuses_a_variant_without_any(tensors, tmp_path):
    stored(tmp_path / "s", rounds(), tensors)
    layout = layout_of(tensors["round-28"], 64)
    blocks, extras = layout.to_blocks(tensors["round-28"])
    with Store(tmp_path / "s") as store:
        with pytest.raises(InputError, match="restored from a basis"):
            StoreRegistry(store, 2**20).get("round-28")
        difference = StoreVariant(base="round-28", positions=np.array([0]), blocks=blocks[:1])
        with pytest.raises(InputError, match="base 'round-28': has no blocks"):
            store.add("new", layout, difference, extras)
        other = replace(SETTINGS, options={"bits": 8})
        with pytest.raises(InputError, match="holds 'round-2' from other settings"):
            deduplicate(rounds(), tensors.__getitem__, dict.fromkeys(tensors, Linear()), store, other)


def test_bytes_that_hold_no_basis_leave_all_plain_with_the_reason(tensors, tmp_path):
    outcomes = stored(tmp_path / "s", rounds(), tensors, settings=replace(SETTINGS, options={"max_bytes": 100}))
    assert {o.untouched for n, o in outcomes.items() if n != "round-2"} == {TOO_FEW_BYTES}


def test_nothing_is_stored_where_a_variant_cannot_be(tensors, tmp_path):
    broken = {**tensors, "round-28": {"w": np.full((20, 20), np.nan, "f4"), "steps": np.array(1)}}
    with pytest.raises(InputError, match="round-28: holds values that are not finite"):
        stored(tmp_path / "s", rounds(), broken)
    other = {**tensors, "round-28": {"w": np.ones((10, 40), "f4"), "steps": np.array(1)}}
    with pytest.raises(InputError, match="round-28: is of another architecture than round-20"):
        stored(tmp_path / "s", rounds(), other)
    with pytest.raises(InputError, match="max_error = 1e-09"):
        stored(tmp_path / "s", rounds(), tensors, settings=replace(SETTINGS, options={"max_error": 1e-9}))
    assert Store(tmp_path / "s", read_only=True).names == []


def interrupted(path, tensors, after, evaluator, variants=None, **more) -> None:
    """Stop at the step of progress with this number."""
    steps = itertools.count()

    def stop(progress) -> None:
        if next(steps) == after:
            raise KeyboardInterrupt

    evaluators = dict.fromkeys(tensors, evaluator)
    with Store(path) as store, pytest.raises(KeyboardInterrupt):
        deduplicate(variants or rounds(), tensors.__getitem__, evaluators, store, SETTINGS, observer=stop, **more)


@pytest.fixture(scope="module")
def whole(tensors, tmp_path_factory):
    """The outcomes and the content of a store that nothing interrupted."""
    path = tmp_path_factory.mktemp("basis") / "whole"
    return stored(path, rounds(), tensors), content_of(path)


@pytest.mark.parametrize(
    "after", [pytest.param(n, marks=[] if n in (1, 4, 9) else pytest.mark.slow) for n in range(12)]
)
def test_an_interrupted_call_goes_on_to_the_same_store(tensors, whole, tmp_path, after):
    interrupted(tmp_path / "s", tensors, after, evaluator=Linear())
    assert (stored(tmp_path / "s", rounds(), tensors), content_of(tmp_path / "s")) == whole


def test_a_private_validation_that_was_interrupted_is_not_asked_again(tensors, tmp_path):
    charged = []
    records = PrivateRecords(data_set="clinic", delta=1e-5)
    variants = [replace(variant, utility_bound=0.3) for variant in rounds()]

    def private() -> PrivateQueries:
        return PrivateQueries(
            epsilon=0.05, charge=lambda name, event: charged.append(name), source=SeededSource(0, "svt")
        )

    # After round-2, which is left out, and round-20's two steps: round-20 is charged, and never stored.
    interrupted(tmp_path / "s", tensors, 3, evaluator=Linear(records), variants=variants, private=private())
    (begun,) = charged
    outcomes = stored(tmp_path / "s", variants, tensors, Linear(records), private=private())
    assert (outcomes[begun].bases, outcomes[begun].untouched) == ((), INTERRUPTED)
    assert outcomes[begun].epsilon_after == outcomes[begun].epsilon_before
    assert charged.count(begun) == 1
    assert any(begun in outcome.bases for outcome in outcomes.values())
