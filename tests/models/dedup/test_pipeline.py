"""Variants of one small network, trained on digits with noise: what is stored is what was accepted and may be spent."""

import re
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedpriv.errors import InputError
from fedpriv.models.dedup import _blocks, deduplicate, saliency
from fedpriv.models.dedup.planning import DedupSettings, plan, search_memory
from fedpriv.models.dedup.validation import PrivateQueries, PrivateRecords, loss_limit, proof_records
from fedpriv.models.variants import Described, Store, folders
from fedpriv.models.variants.composition import History
from fedpriv.privacy.accounting.accountants import epsilon_of as epsilon
from fedpriv.privacy.accounting.events import PureEpsilon, SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests import stores
from tests.failing import failing
from tests.marks import slow
from tests.stores import uploads

DIGITS = load_digits()
TEST = slice(1200, 1797)
COPIES = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class NetworkEvaluator:
    """The records of which a network says what is right."""

    utility = "accuracy"

    def __init__(self, model: nn.Module, inputs: torch.Tensor, private: PrivateRecords | None = None) -> None:
        self.model, self.inputs, self.private, self.num_records = model, inputs, private, len(inputs)
        self.labels = torch.zeros(len(inputs), dtype=torch.long)

    @torch.no_grad()
    def answers(self, tensors) -> torch.Tensor:
        self._load(tensors)
        return self.model(self.inputs).argmax(1)

    def _load(self, tensors) -> None:
        self.model.load_state_dict({name: torch.tensor(np.array(value)) for name, value in tensors.items()})

    def utilities(self, tensors, records):
        return (self.answers(tensors) == self.labels).numpy()[records].astype(float)

    def saliency(self, tensors, records):
        self._load(tensors)
        loss = nn.CrossEntropyLoss(reduction="none")
        batches = [{"x": self.inputs[records], "y": self.labels[records]}]
        return saliency.gradient(self.model, batches, lambda model, batch: loss(model(batch["x"]), batch["y"]))


class DigitsEvaluator(NetworkEvaluator):
    """Which of the last 597 digits are read rightly, each in eight copies that are a little blurred."""

    def __init__(self, private: PrivateRecords | None = None) -> None:
        images = torch.tensor(DIGITS.data[TEST] / 16, dtype=torch.float32).repeat(COPIES, 1)
        blurred = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        super().__init__(network(), blurred, private)
        self.labels = torch.tensor(DIGITS.target[TEST]).repeat(COPIES)


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


@pytest.fixture(scope="module")
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


SETTINGS = DedupSettings(block_size=64, options={"min_batch": 2}, fairness="outcome")


@pytest.fixture
def dedup(trained, tmp_path):
    """Deduplicates variants in a store of its own, all judged by one evaluator."""

    def outcomes_of(variants, evaluator=None, settings=SETTINGS, tensors=trained, **more):
        evaluators = dict.fromkeys(tensors, evaluator or DigitsEvaluator())
        with Store(tmp_path / "store") as store:
            return deduplicate(variants, tensors.__getitem__, evaluators, store, settings, **more)

    return outcomes_of


class Watched(DigitsEvaluator):
    """Remembers the records that saliencies are of, and how often it was asked for utilities."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.num_asked = 0

    def saliency(self, tensors, records):
        self.seen.append(records.tolist())
        return super().saliency(tensors, records)

    def utilities(self, tensors, records):
        self.num_asked += 1
        return super().utilities(tensors, records)


@pytest.mark.parametrize("algorithm", ["drd", "greedy", *slow("dred", "dedup", "mistique")])
def test_every_variant_is_within_its_bounds_by_an_independent_look_at_the_store(
    tmp_path, trained, described, dedup, algorithm
):
    options = {} if algorithm in ("greedy", "dedup", "mistique") else SETTINGS.options
    watched = Watched()
    outcomes = dedup(described, watched, replace(SETTINGS, algorithm=algorithm, options=options))
    evaluator = DigitsEvaluator()
    everyone = np.arange(evaluator.num_records)
    with Store(tmp_path / "store", read_only=True) as store:
        assert not store.verify()
        assert set(store.names) == set(trained)
        for variant, outcome in ((v, o) for v in described for o in outcomes if o.name == v.name):
            restored = store.tensors(variant.name)
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
            elif algorithm == "drd":
                # Both are functions of the same uploads: the later round's epsilon is the union's, not the sum.
                assert outcome.epsilon_after == pytest.approx(outcome.epsilons["provenance"])
                assert outcome.epsilons["basic"] > outcome.epsilon_before + 0.5
    assert any(outcome.num_replaced for outcome in outcomes)
    assert watched.seen
    searched = set(everyone.tolist()) - set(proof_records(len(everyone)).tolist())
    assert all(set(records) == searched for records in watched.seen), "they have not seen the records that prove them"


def test_searches_elsewhere_give_the_same_outcomes_and_blocks(tmp_path, trained, described, monkeypatch):
    evaluators, elsewhere = (dict.fromkeys(trained, DigitsEvaluator()) for _ in range(2))
    monkeypatch.setattr(_blocks, "_here", [trained.__getitem__, elsewhere])  # as in a process of its own
    found = []
    for place in (None, ThreadPoolExecutor(1)):
        with Store(tmp_path / str(len(found))) as store:
            outcomes = deduplicate(described, trained.__getitem__, evaluators, store, SETTINGS, apart=place)
            found.append((outcomes, store.blocks.tobytes(), [repr(store.manifest(name)) for name in store.names]))
    assert found[0] == found[1]
    assert any(outcome.num_replaced for outcome in found[0][0])


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


def privately(charged: list, epsilon: float = 0.25) -> PrivateQueries:
    """Queries whose charges are appended to a list."""
    source = SeededSource(0, "svt")
    return PrivateQueries(epsilon=epsilon, charge=lambda name, event: charged.append((name, event)), source=source)


@pytest.mark.parametrize("data_set", [*slow("validation"), "clinic"])
def test_private_validation_is_charged_before_it_asks_and_is_in_the_epsilons(described, dedup, data_set):
    charged: list = []
    evaluator = NoisedDigits(PrivateRecords(data_set=data_set, delta=1e-5, saliency=SALIENCY))
    outcomes = dedup(loosely(described[3:]), evaluator, private=privately(charged))
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


def test_a_ledger_that_refuses_leaves_private_records_unread(described, dedup, monkeypatch):
    monkeypatch.setattr(DigitsEvaluator, "utilities", failing(AssertionError("records are read")))
    evaluator = DigitsEvaluator(PrivateRecords(data_set="validation", delta=1e-5))
    with pytest.raises(ValueError, match="private: must be given"):
        dedup(described, evaluator)
    private = replace(privately([]), charge=failing(InputError("its budget is spent")))
    with pytest.raises(InputError, match="its budget is spent"):
        dedup(loosely(described[3:]), evaluator, private=private)


def test_private_records_that_are_too_few_or_that_the_bound_has_no_room_for_are_neither_asked_nor_charged(
    described, dedup, tmp_path
):
    charged: list = []
    evaluator = NoisedDigits(PrivateRecords(data_set="validation", delta=1e-5, saliency=SALIENCY))
    outcomes = dedup(described[3:], evaluator, private=privately(charged))
    assert not any(outcome.bases or outcome.num_replaced for outcome in outcomes)
    reasons = {outcome.untouched for outcome in outcomes} - {"serves as a base"}
    (reason,) = (each for each in reasons if "could" in each)
    assert re.fullmatch(rf"{597 * COPIES} validation records cannot tell a loss of 0\.02 from none, \d+ could", reason)
    shutil.rmtree(tmp_path / "store")
    evaluator = NoisedDigits(PrivateRecords(data_set="clinic", delta=1e-5, saliency=SALIENCY))
    outcomes = dedup(loosely(described[3:], epsilon_bound=0.1), evaluator, private=privately(charged))
    assert all(outcome.epsilon_after == outcome.epsilon_before for outcome in outcomes)
    assert not charged


def test_under_cross_a_bases_own_validation_is_its_targets_too(described, dedup):
    loose = loosely(described[2:], epsilon_bound=5.0)
    evaluator = NoisedDigits(PrivateRecords(data_set="clinic", delta=1e-5))
    found = dedup(loose, evaluator, replace(SETTINGS, strategy="cross"), private=privately([]))
    outcomes = {outcome.name: outcome for outcome in found}

    def originals(name: str) -> set[str]:
        return {name}.union(*(originals(base) for base in outcomes[name].bases))

    chained = [name for name in outcomes if any(outcomes[base].bases for base in outcomes[name].bases)]
    assert chained, "no base is a target, the test would be blind"
    for name in chained:
        runs = sum(bool(outcomes[each].bases) for each in originals(name))
        last = max(int(each.split("-")[1]) for each in originals(name))
        events = [*(upload.event for upload in uploads(last)), *[PureEpsilon(epsilon=0.25)] * runs]
        assert outcomes[name].epsilon_after == pytest.approx(epsilon(events, 1e-5).epsilon, rel=1e-6)


def test_options_that_the_search_does_not_take_are_no_settings():
    for changes, said in (
        ({"options": {"min_batch": 0}}, "min_batch = 0: must be a whole number >= 1"),
        ({"options": {"speed": 1}}, "option = 'speed': drd knows"),
        ({"algorithm": "magic"}, "algorithm = 'magic': known are drd, dred, greedy, mcts, dedup, mistique"),
    ):
        with pytest.raises(InputError, match=said):
            replace(SETTINGS, **changes)


def test_what_cannot_be_stored_is_refused_while_the_store_is_untouched(described, trained, tmp_path):
    evaluators = dict.fromkeys(trained, DigitsEvaluator())
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


def test_what_a_base_holds_already_is_shared_without_a_validation(described, trained, dedup):
    frozen = {name: {**tensors, "0.weight": trained["round-20"]["0.weight"]} for name, tensors in trained.items()}
    watched, settings = Watched(), replace(SETTINGS, algorithm="greedy", options={"batch": 1})
    outcomes = dedup(described, watched, settings, frozen)
    targets = [outcome for outcome in outcomes if outcome.bases]
    # 48 blocks of the first layer are equal; 8 of the second (10 x 48 values in blocks of 64) are searched, and what is
    # found of them is proven in as many steps or fewer.
    assert {outcome.num_blocks for outcome in targets} == {56}
    assert all(8 <= outcome.num_validations <= 16 for outcome in targets)
    assert all(outcome.num_replaced >= 48 for outcome in targets)
    assert watched.num_asked == len(outcomes) + sum(outcome.num_validations for outcome in targets)


def test_a_plan_looks_at_no_weights_and_of_several_bases_of_one_run_it_takes_the_first(described, dedup):
    (outcome,) = dedup([replace(described[0], epsilon_bound=0.0)])
    assert (outcome.bases, outcome.untouched) == ((), "no base meets its epsilon bound")
    selection = plan(described, SETTINGS)
    assert set(selection.assignments) | set(selection.untouched) == {variant.name for variant in described}
    selection = plan(described, replace(SETTINGS, strategy="multi"))
    assert {name: assignment.bases for name, assignment in selection.assignments.items()} == {
        f"round-{n}": ("round-20",) for n in (25, 30, 35, 40)
    }


class Agreeable:
    """Every form is as good as the one before, and magnitude is the saliency."""

    num_records, utility, private = 900, "accuracy", None

    def utilities(self, tensors, records):
        return np.ones(len(records))

    def saliency(self, tensors, records):
        return {name: np.abs(values) for name, values in tensors.items()}


@pytest.mark.parametrize(
    ("megabytes", "block_size", "strategy", "expected"),
    [
        (2, 512, "single", lambda own, bases: 2 * own + 48 * 1024**2),  # distances
        (2, 8192, "single", lambda own, bases: 3 * own),  # forms
        (2, 8192, "multi", lambda own, bases: own + 2 * bases),  # several bases
    ],
)
def test_a_search_holds_what_its_plan_says_within_15_percent(tmp_path, megabytes, block_size, strategy, expected):
    rng, size, where = np.random.default_rng(0), megabytes * 2**18, {}
    for name in ("round-1", "round-2", "round-3"):  # of a data set each, so that more bases cost less
        own = {"deltas": {name: 1e-5}, "history": History(name=name, ancestors=uploads(1, name))}
        where[name] = stores.described(name, utility=1.0, epsilon_bound=9.0, utility_bound=0.5, **own)
        folders.write(tmp_path / name, where[name], {"w": rng.normal(size=size).astype(np.float32)})
    settings = DedupSettings(
        block_size=block_size, algorithm="greedy", strategy=strategy, fairness="outcome", max_distance=2.0
    )
    targets = plan(list(where.values()), settings).assignments.values()
    most_bases = max(len(a.bases) for a in targets)
    assert (most_bases > 1) == (strategy == "multi")
    told = [search_memory(4 * size, 4 * size * len(a.bases), block_size)["memory_bytes"] for a in targets]
    assert max(told) == expected(4 * size, 4 * size * most_bases)
    with Store(tmp_path / "store") as store:
        tracemalloc.start()
        evaluators = dict.fromkeys(where, Agreeable())
        deduplicate(list(where.values()), lambda n: folders.read_tensors(tmp_path / n), evaluators, store, settings)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert max(told) / 1.15 <= peak <= max(told) * 1.15
