"""Variants of one small network, trained on digits with noise: what is stored is what was accepted and may be spent."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedpriv.errors import InputError
from fedpriv.models.dedup import _blocks, planning, saliency
from fedpriv.models.dedup.pipeline import deduplicate
from fedpriv.models.dedup.planning import DedupSettings
from fedpriv.models.dedup.validation import PrivateQueries, PrivateRecords, loss_limit, proof_records
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.accountants import epsilon_of as epsilon
from fedpriv.privacy.accounting.events import PureEpsilon, SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests import stores
from tests.marks import slow
from tests.stores import uploads

DIGITS = load_digits()
TEST = slice(1200, 1797)
COPIES = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class DigitsEvaluator:
    """Which of the last 597 digits are read rightly, each in eight copies that are a little blurred."""

    utility = "accuracy"

    def __init__(self, private: PrivateRecords | None = None) -> None:
        self.private = private
        images = torch.tensor(DIGITS.data[TEST] / 16, dtype=torch.float32).repeat(COPIES, 1)
        self.images = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        self.labels = torch.tensor(DIGITS.target[TEST]).repeat(COPIES)
        self.num_records = len(self.labels)
        self.model = network()

    def _load(self, tensors) -> None:
        self.model.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})

    @torch.no_grad()
    def utilities(self, tensors, records):
        self._load(tensors)
        return (self.model(self.images).argmax(1) == self.labels).numpy()[records].astype(float)

    def saliency(self, tensors, records):
        self._load(tensors)
        loss = nn.CrossEntropyLoss(reduction="none")
        batches = [{"images": self.images[records], "labels": self.labels[records]}]
        return saliency.gradient(
            self.model, batches, lambda model, batch: loss(model(batch["images"]), batch["labels"])
        )


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, np.ndarray]]:
    """A network after 20, 25, 30, 35 and 40 noisy steps of one training: later ones descend from earlier ones."""
    torch.manual_seed(0)
    model, found = network(), {}
    images = torch.tensor(DIGITS.data[:1200] / 16, dtype=torch.float32)
    labels = torch.tensor(DIGITS.target[:1200])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(1, 41):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        for parameter in model.parameters():
            parameter.grad += 0.002 * torch.randn_like(parameter)
        optimizer.step()
        if step >= 20 and step % 5 == 0:
            found[f"round-{step}"] = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return found


@pytest.fixture
def described(trained) -> list[Described]:
    evaluator = DigitsEvaluator()
    return [
        stores.described(
            name,
            int(name.split("-")[1]),
            architecture="mlp",
            utility=float(evaluator.utilities(tensors, np.arange(evaluator.num_records)).mean()),
            utility_bound=0.02,
        )
        for name, tensors in trained.items()
    ]


def each(evaluator: DigitsEvaluator) -> dict[str, DigitsEvaluator]:
    """It evaluates all variants."""
    return {f"round-{step}": evaluator for step in range(20, 41, 5)}


SETTINGS = DedupSettings(block_size=64, options={"min_batch": 2}, fairness="outcome")


@pytest.mark.parametrize("algorithm", ["drd", "greedy", *slow("dred", "dedup", "mistique")])
def test_every_variant_is_within_its_bounds_by_an_independent_look_at_the_store(
    tmp_path, trained, described, algorithm
):
    settings = replace(
        SETTINGS, algorithm=algorithm, options={} if algorithm in ("greedy", "dedup", "mistique") else SETTINGS.options
    )
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(described, trained.__getitem__, each(DigitsEvaluator()), store, settings)
    evaluator = DigitsEvaluator()
    with Store(tmp_path / "store", read_only=True) as store:
        assert not store.verify()
        assert set(store.names) == set(trained)
        for variant, outcome in ((v, o) for v in described for o in outcomes if o.name == v.name):
            restored = store.tensors(variant.name)
            everyone = np.arange(evaluator.num_records)
            proof = proof_records(len(everyone)) if outcome.num_replaced else everyone
            after = evaluator.utilities(restored, proof).mean()
            assert (outcome.utility_after, outcome.num_records) == (pytest.approx(after), len(proof))
            if outcome.num_replaced:
                losses = evaluator.utilities(trained[variant.name], proof) - evaluator.utilities(restored, proof)
                assert losses.mean() < loss_limit(losses) == pytest.approx(outcome.loss_limit)
                assert outcome.loss_limit <= outcome.bound <= variant.utility_bound + 1e-9
            assert outcome.epsilon_after <= outcome.epsilon_before + variant.epsilon_bound
            assert outcome.epsilons["provenance"] <= outcome.epsilons["basic"]
            if not outcome.bases:
                assert all(np.array_equal(restored[name], trained[variant.name][name]) for name in restored)
    assert any(outcome.num_replaced for outcome in outcomes)


def test_searches_elsewhere_give_the_same_outcomes_and_blocks(tmp_path, trained, described, monkeypatch):
    evaluators, found = each(DigitsEvaluator()), []
    monkeypatch.setattr(_blocks, "_here", [trained.__getitem__, each(DigitsEvaluator())])  # as in a process of its own
    for place in (None, ThreadPoolExecutor(1)):
        with Store(tmp_path / str(len(found))) as store:
            outcomes = deduplicate(described, trained.__getitem__, evaluators, store, SETTINGS, apart=place)
            found.append((outcomes, store.blocks.tobytes(), [repr(store.manifest(name)) for name in store.names]))
    assert found[0] == found[1]
    assert any(outcome.num_replaced for outcome in found[0][0])


def test_provenance_lets_rounds_of_one_run_share_blocks_where_a_sum_would_not(described, trained, tmp_path):
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(described, trained.__getitem__, each(DigitsEvaluator()), store, SETTINGS)
    used = [outcome for outcome in outcomes if outcome.bases]
    assert used
    for outcome in used:
        # Both are functions of the same uploads: the later round's epsilon is the union's.
        assert outcome.epsilon_after == pytest.approx(outcome.epsilons["provenance"])
        assert outcome.epsilons["basic"] > outcome.epsilon_before + 0.5


class NoisedDigits(DigitsEvaluator):
    """Its records are private: its saliency stands for one that is noised, and costs what it says."""

    z = 20.0

    def saliency(self, tensors, records):
        self._load(tensors)
        self.measured = getattr(self, "measured", 0) + (self.private.saliency is not None)
        return saliency.magnitude(self.model)


SALIENCY = SubsampledGaussian(noise_multiplier=NoisedDigits.z, sampling_probability=1.0)


def loosely(described: list[Described], **bounds: float) -> list[Described]:
    """With bounds that so few records can tell from nothing through the noise, and no order of utilities to keep."""
    return [replace(variant, utility=None, utility_bound=0.9, **bounds) for variant in described]


def privately(charged: list) -> PrivateQueries:
    return PrivateQueries(
        epsilon=0.25, charge=lambda name, event: charged.append((name, event)), source=SeededSource(0, "svt")
    )


@pytest.mark.parametrize("data_set", [pytest.param("validation", marks=pytest.mark.slow), "clinic"])
def test_private_validation_is_charged_before_it_asks_and_is_in_the_epsilons(described, trained, tmp_path, data_set):
    charged: list = []
    evaluator = NoisedDigits(PrivateRecords(data_set=data_set, delta=1e-5, saliency=SALIENCY))
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(
            loosely(described[3:]), trained.__getitem__, each(evaluator), store, SETTINGS, private=privately(charged)
        )
    targets = [outcome for outcome in outcomes if outcome.bases]
    assert evaluator.measured == len(targets) > 0
    spent = [PureEpsilon(epsilon=0.25), SALIENCY]
    assert charged == [(outcome.name, event) for outcome in targets for event in spent]
    assert {(outcome.utility_before, outcome.utility_after) for outcome in outcomes} == {(None, None)}
    for outcome in targets:
        ancestors = max(int(name.split("-")[1]) for name in (outcome.name, *outcome.bases))
        trained_on = [upload.event for upload in uploads(ancestors)]
        if data_set == "clinic":
            expected = epsilon([*trained_on, *spent], 1e-5).epsilon
        else:
            expected = max(epsilon(trained_on, 1e-5).epsilon, epsilon(spent, 1e-5).epsilon)
        assert outcome.epsilon_after == pytest.approx(expected, rel=1e-6)


def test_a_ledger_that_refuses_leaves_private_records_unread(described, trained, tmp_path):
    class Unread(DigitsEvaluator):
        def utilities(self, tensors, records):
            raise AssertionError("records are read")

    def refuse(name: str, event: object) -> None:
        raise InputError(f"{name}: its budget is spent")

    evaluator = Unread(PrivateRecords(data_set="validation", delta=1e-5))
    private = PrivateQueries(epsilon=0.25, charge=refuse, source=SeededSource(0, "svt"))
    with Store(tmp_path / "store") as store, pytest.raises(InputError, match="its budget is spent"):
        deduplicate(loosely(described), trained.__getitem__, each(evaluator), store, SETTINGS, private=private)


def test_private_records_that_are_too_few_are_neither_asked_nor_charged(described, trained, tmp_path):
    charged: list = []
    evaluator = NoisedDigits(PrivateRecords(data_set="validation", delta=1e-5, saliency=SALIENCY))
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(
            described, trained.__getitem__, each(evaluator), store, SETTINGS, private=privately(charged)
        )
    assert not charged
    assert not any(outcome.bases or outcome.num_replaced for outcome in outcomes)
    reasons = {outcome.untouched for outcome in outcomes} - {"serves as a base"}
    (reason,) = (each for each in reasons if "could" in each)
    assert re.fullmatch(rf"{597 * COPIES} validation records cannot tell a loss of 0\.02 from none, \d+ could", reason)


def test_private_validation_that_the_bound_has_no_room_for_is_never_asked(described, trained, tmp_path):
    charged: list = []
    tight = loosely(described, epsilon_bound=0.1)
    evaluator = NoisedDigits(PrivateRecords(data_set="clinic", delta=1e-5, saliency=SALIENCY))
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(tight, trained.__getitem__, each(evaluator), store, SETTINGS, private=privately(charged))
    assert not charged
    assert all(outcome.epsilon_after == outcome.epsilon_before for outcome in outcomes)


def test_under_cross_a_bases_own_validation_is_its_targets_too(described, trained, tmp_path):
    charged: list = []
    loose = loosely(described[2:], epsilon_bound=5.0)
    evaluator = NoisedDigits(PrivateRecords(data_set="clinic", delta=1e-5))
    settings = replace(SETTINGS, strategy="cross")
    with Store(tmp_path / "store") as store:
        outcomes = {
            outcome.name: outcome
            for outcome in deduplicate(
                loose, trained.__getitem__, each(evaluator), store, settings, private=privately(charged)
            )
        }

    def originals(name: str) -> set[str]:
        return {name}.union(*(originals(base) for base in outcomes[name].bases))

    chained = [name for name in outcomes if any(outcomes[base].bases for base in outcomes[name].bases)]
    assert chained, "no base is a target, the test would be blind"
    for name in chained:
        runs = sum(bool(outcomes[each].bases) for each in originals(name))
        last = max(int(each.split("-")[1]) for each in originals(name))
        events = [*(upload.event for upload in uploads(last)), *[PureEpsilon(epsilon=0.25)] * runs]
        assert outcomes[name].epsilon_after == pytest.approx(epsilon(events, 1e-5).epsilon, rel=1e-6)


def test_private_records_are_not_asked_without_saying_how(described, trained, tmp_path):
    evaluator = DigitsEvaluator(PrivateRecords(data_set="validation", delta=1e-5))
    with Store(tmp_path / "store") as store, pytest.raises(ValueError, match="private: must be given"):
        deduplicate(described, trained.__getitem__, each(evaluator), store, SETTINGS)


def test_bounds_that_nothing_can_meet_leave_everything_as_it_was(described, trained, tmp_path):
    apart = [
        replace(variant, epsilon_bound=0.0, history=replace(variant.history, ancestors=uploads(20 + place)))
        for place, variant in enumerate(described)
    ]
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(apart[:1], trained.__getitem__, each(DigitsEvaluator()), store, SETTINGS)
    assert [outcome.bases for outcome in outcomes] == [()]
    assert [outcome.untouched for outcome in outcomes] == ["no base meets its epsilon bound"]


def test_an_unknown_algorithm_leaves_the_store_untouched(described, trained, tmp_path):
    with Store(tmp_path / "store") as store:
        with pytest.raises(InputError, match="algorithm = 'magic': known are drd"):
            deduplicate(
                described, trained.__getitem__, each(DigitsEvaluator()), store, replace(SETTINGS, algorithm="magic")
            )
        assert not store.names


@pytest.mark.parametrize(
    ("options", "said"),
    [({"min_batch": 0}, "min_batch = 0: must be a whole number >= 1"), ({"speed": 1}, "option = 'speed': drd knows")],
)
def test_options_that_the_search_does_not_take_are_no_settings(options, said):
    with pytest.raises(InputError, match=said):
        replace(SETTINGS, options=options)


def test_what_cannot_be_stored_is_refused_while_the_store_is_untouched(described, trained, tmp_path):
    evaluators = each(DigitsEvaluator())
    with Store(tmp_path / "store") as store:
        with pytest.raises(InputError, match="block_size = 9999: no float32 tensor of round-20 has so many values"):
            deduplicate(described, trained.__getitem__, evaluators, store, replace(SETTINGS, block_size=9999))
        with pytest.raises(InputError, match="evaluators: none for variant 'round-40'"):
            deduplicate(described, trained.__getitem__, dict(list(evaluators.items())[:-1]), store, SETTINGS)
        assert not store.names
        deduplicate(described[:1], trained.__getitem__, evaluators, store, SETTINGS)
        with pytest.raises(InputError, match="holds 'round-20' from other settings, variants or validation"):
            deduplicate(described, trained.__getitem__, evaluators, store, SETTINGS)
        assert store.names == ["round-20"]


def test_what_a_base_holds_already_is_shared_without_a_validation(described, trained, tmp_path):
    frozen = {name: {**tensors, "0.weight": trained["round-20"]["0.weight"]} for name, tensors in trained.items()}
    counted = []

    class Counting(DigitsEvaluator):
        def utilities(self, tensors, records):
            counted.append(tensors)
            return super().utilities(tensors, records)

    settings = replace(SETTINGS, algorithm="greedy", options={"batch": 1})
    with Store(tmp_path / "store") as store:
        outcomes = deduplicate(described, frozen.__getitem__, dict.fromkeys(frozen, Counting()), store, settings)
    targets = [outcome for outcome in outcomes if outcome.bases]
    # 48 blocks of the first layer are equal; 8 of the second (10 x 48 values in blocks of 64) are searched, and what is
    # found of them is proven in as many steps or fewer.
    assert {outcome.num_blocks for outcome in targets} == {56}
    assert all(8 <= outcome.num_validations <= 16 for outcome in targets)
    assert all(outcome.num_replaced >= 48 for outcome in targets)
    assert len(counted) == len(outcomes) + sum(outcome.num_validations for outcome in targets)


def test_a_plan_looks_at_no_weights(described):
    selection = planning.plan(described, SETTINGS)
    assert set(selection.assignments) | set(selection.untouched) == {variant.name for variant in described}
    assert partial(planning.plan, described)(SETTINGS) == selection


def test_several_bases_of_one_run_leave_most_variants_to_share(described):
    selection = planning.plan(described, replace(SETTINGS, strategy="multi"))
    assert {name: assignment.bases for name, assignment in selection.assignments.items()} == {
        f"round-{n}": ("round-20",) for n in (25, 30, 35, 40)
    }


def test_what_orders_and_searches_blocks_has_not_seen_the_records_that_prove_them(described, trained, tmp_path):
    class Watched(DigitsEvaluator):
        def saliency(self, tensors, records):
            seen.append(records.tolist())
            return super().saliency(tensors, records)

    seen: list[list[int]] = []
    with Store(tmp_path / "store") as store:
        deduplicate(described, trained.__getitem__, each(Watched()), store, SETTINGS)
    everyone = set(range(DigitsEvaluator().num_records))
    assert seen
    assert all(set(records) == everyone - set(proof_records(len(everyone)).tolist()) for records in seen)
