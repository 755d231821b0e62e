"""Variants stored without loss: bit for bit, at their own epsilon, without any validation, and resumed."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.errors import InputError
from fedpriv.models.dedup import DedupSettings, deduplicate
from fedpriv.models.variants.store import Store
from fedpriv.models.variants.stored import kept_for_others
from tests.failing import failing
from tests.models.variants.test_blocks import same_bits
from tests.stores import content_of, described

SETTINGS = DedupSettings(block_size=64, algorithm="lossless")
NAMES = [f"round-{number}" for number in range(1, 9)]


class Signs:
    """A record for each weight, which is answered rightly where the weight is positive."""

    num_records, utility, private = 400, "accuracy", None

    def utilities(self, tensors, records):
        return (tensors["w"][records] > 0).astype(float)

    saliency = failing(AssertionError("no saliency is needed, so none may be measured or paid for"))


@pytest.fixture(scope="module")
def tensors():
    """Eight fine-tunes of a model, in bfloat16, and one of another architecture."""
    rng = np.random.default_rng(5)
    base = rng.standard_normal(3000)
    tuned = {name: {"w": (base + 1e-3 * rng.standard_normal(3000)).astype("bfloat16")} for name in NAMES}
    return {**tuned, "other": {"v": rng.standard_normal((7, 3)).astype("f4")}}


def variants():
    made = [described(name, number, epsilon_bound=0.3) for number, name in enumerate(NAMES, 1)]
    return [*made, described("other", 3, architecture="another", epsilon_bound=0.3)]


def stored(path, tensors, settings=SETTINGS, evaluators=None):
    with Store(path) as store:
        return deduplicate(variants(), tensors.__getitem__, evaluators or {}, store, settings)


@pytest.fixture(scope="module")
def whole(tensors, tmp_path_factory):
    """A store of all, and what was said of each."""
    path = tmp_path_factory.mktemp("lossless") / "whole"
    return path, stored(path, tensors)


def test_all_come_back_bit_for_bit_at_the_epsilon_that_they_had(tensors, whole):
    path, outcomes = whole
    assert {outcome.name for outcome in outcomes} == set(tensors)
    for outcome in outcomes:
        assert outcome.epsilon_after == outcome.epsilon_before > 0
        assert (outcome.bases, outcome.num_validations, outcome.num_replaced) == ((), 0, 0)
    with Store(path, read_only=True) as store:
        assert all(same_bits(store.tensors(name), tensors[name]) for name in tensors)
        assert store.sources("round-7") == ["round-7"], "it holds no other's values"
        assert store.compression_ratio < 0.7
        assert store.describe("round-7") == described("round-7", 7, epsilon_bound=0.3)


def test_whoever_removes_the_reference_is_told_whose_values_stay(whole, tmp_path):
    with Store(shutil.copytree(whole[0], tmp_path / "s")) as store:
        (chosen,) = {store.manifest(name).provenance["reference"] for name in NAMES}
        assert store.manifest("other").provenance["reference"] is None
        assert kept_for_others(store, [chosen, "other"]) == {chosen: sorted(set(NAMES) - {chosen})}
        store.remove(chosen)
        assert kept_for_others(store, [chosen]) == {chosen: sorted(set(NAMES) - {chosen})}
        store.remove(*(set(NAMES) - {chosen}))
        assert kept_for_others(store, [chosen]) == {}


def test_an_interrupted_one_goes_on_and_another_way_is_refused(tensors, whole, tmp_path):
    def until_five(progress):
        if progress.stored and progress.num_stored == 5:
            raise InterruptedError

    with Store(tmp_path / "s") as store, pytest.raises(InterruptedError):
        deduplicate(variants(), tensors.__getitem__, {}, store, SETTINGS, observer=until_five)
    stored(tmp_path / "s", tensors)
    assert content_of(tmp_path / "s") == content_of(whole[0])
    with pytest.raises(InputError, match="from other settings"):
        stored(tmp_path / "s", tensors, replace(SETTINGS, aggregation="l1"))
    with pytest.raises(InputError, match=r"option = 'bits': lossless has none"):
        stored(tmp_path / "new", tensors, replace(SETTINGS, options={"bits": 4}))


def test_evaluators_measure_what_is_not_known_and_nothing_else(tmp_path):
    rng = np.random.default_rng(6)
    models = {name: {"w": rng.standard_normal(400).astype("f4")} for name in ("a", "b")}
    known = [described("a", 1, utility=0.25), described("b", 2)]
    with Store(tmp_path / "s") as store:
        found = deduplicate(known, models.__getitem__, dict.fromkeys(models, Signs()), store, SETTINGS)
    assert found[1].utility_after == pytest.approx((models["b"]["w"] > 0).mean())
    assert all(outcome.loss_limit is None for outcome in found)
