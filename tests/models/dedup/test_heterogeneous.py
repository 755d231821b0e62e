"""Variants of different architectures, each validated on its own records, share the blocks of one store."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.models.dedup import DedupSettings, deduplicate
from fedpriv.models.dedup.validation import PrivateRecords, proof_records
from fedpriv.models.variants import Described, Store
from fedpriv.models.variants.composition import History
from fedpriv.privacy.accounting import PureEpsilon, epsilon_of
from tests.marks import slow
from tests.models.dedup.test_pipeline import NetworkEvaluator, privately
from tests.stores import EVENT, described, uploads

SETTINGS = DedupSettings(block_size=32, options={"min_batch": 2}, max_distance=2.0)


def network(kind: str) -> nn.Sequential:
    """Two architectures without a tensor shape in common."""
    if kind == "wide":
        return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 2))
    return nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


class Teacher(NetworkEvaluator):
    """The records on which a network agrees with the one that it was derived from."""

    def __init__(self, kind: str, truth, num_records: int) -> None:
        width, generator = 16 if kind == "wide" else 20, torch.Generator().manual_seed(num_records)
        super().__init__(network(kind), torch.randn(num_records, width, generator=generator))
        self.labels = self.answers(truth)


def variants() -> tuple[dict, dict, list[Described]]:
    """{name: tensors}, {name: evaluator} and descriptions of two wide and two deep networks on disjoint data."""
    tensors, evaluators, made = {}, {}, []
    for kind, num_records in (("wide", 3000), ("deep", 4000)):
        torch.manual_seed(len(kind) + num_records)
        truth = {name: value.numpy().copy() for name, value in network(kind).state_dict().items()}
        for number in range(2):
            name, rng = f"{kind}-{number}", np.random.default_rng(number)
            tensors[name] = {
                key: (value + 0.02 * rng.normal(size=value.shape)).astype("f4") for key, value in truth.items()
            }
            evaluators[name] = Teacher(kind, truth, num_records)
            history = History(name=name, ancestors=uploads(5 if kind == "wide" else 10, name))
            bounds = {"epsilon_bound": 0.0, "utility_bound": 0.03, "deltas": {name: 1e-5}}
            made.append(described(name, architecture=kind, history=history, **bounds))
    return tensors, evaluators, made


def stored(path, evaluators, made, tensors, settings=SETTINGS, **more):
    with Store(path) as store:
        outcomes = deduplicate(made, tensors.__getitem__, evaluators, store, settings, **more)
        return {outcome.name: outcome for outcome in outcomes}, {name: store.tensors(name) for name in store.names}


def bases(outcomes) -> dict[str, tuple[str, ...]]:
    return {name: each.bases for name, each in outcomes.items() if each.bases}


def rows(tensors, size: int = 32, *, padded: bool = False) -> set[bytes]:
    """The blocks that hold no padding, of whose model all is; or the last ones with it, which others may take whole."""
    flat = [np.pad(values.ravel(), (0, size - values.size % size)) for values in tensors.values()]
    blocks = [values.reshape(-1, size) for values in flat]
    return {row.tobytes() for block in blocks for row in (block[-1:] if padded else block[:-1])}


@pytest.mark.parametrize("algorithm", ["drd", "greedy", *slow("dred", "mistique")])
def test_blocks_cross_architectures_within_every_variants_own_bounds(tmp_path, algorithm):
    tensors, evaluators, made = variants()
    options = {"min_batch": 2} if algorithm.startswith("d") else {"batch": 2}
    outcomes, restored = stored(
        tmp_path / "s", evaluators, made, tensors, replace(SETTINGS, algorithm=algorithm, options=options)
    )
    base = "wide-0"
    assert bases(outcomes) == dict.fromkeys(["wide-1", "deep-0", "deep-1"], (base,))
    for name, outcome in outcomes.items():
        everyone = np.arange(evaluators[name].num_records)
        proof = proof_records(len(everyone)) if outcome.num_replaced else everyone
        before, after = (evaluators[name].utilities(each[name], proof).mean() for each in (tensors, restored))
        assert (outcome.utility_before, outcome.utility_after) == pytest.approx((before, after))
        assert before - after <= outcome.loss_limit <= outcome.bound if outcome.num_replaced else after == before
        assert rows(restored[name]) <= rows(tensors[name]) | rows(tensors[base]) | rows(tensors[base], padded=True)
        assert outcome.epsilon_after == outcome.epsilon_before
        shapes = [{key: value.shape for key, value in each[name].items()} for each in (tensors, restored)]
        assert shapes[0] == shapes[1]
    if algorithm != "mistique":
        assert rows(restored["deep-0"]) & rows(tensors[base]), "nothing is shared, the test would be blind"


def test_without_one_cluster_each_architecture_has_its_own_base(tmp_path):
    tensors, evaluators, made = variants()
    outcomes, _ = stored(tmp_path / "s", evaluators, made, tensors, replace(SETTINGS, max_distance=1.0))
    assert bases(outcomes) == {"wide-1": ("wide-0",), "deep-1": ("deep-0",)}


def test_each_variant_pays_only_for_the_private_records_that_it_was_validated_on(tmp_path):
    tensors, evaluators, made = variants()
    for name, evaluator in evaluators.items():
        if name != "deep-1":  # whose records are public
            evaluator.private = PrivateRecords(data_set=f"records of {name}", delta=1e-5)
    roomy = [replace(each, epsilon_bound=3.0, utility_bound=0.9) for each in made]
    charged = []
    with pytest.raises(ValueError, match="private: must be given"):
        stored(tmp_path / "no", evaluators, roomy, tensors)
    outcomes, _ = stored(tmp_path / "s", evaluators, roomy, tensors, private=privately(charged, 2.0))
    assert sorted(charged, key=str) == [(name, PureEpsilon(epsilon=2.0)) for name in ("deep-0", "wide-1")]
    trained = {name: epsilon_of([EVENT] * n, 1e-5).epsilon for name, n in (("wide", 5), ("deep", 10))}
    answers = epsilon_of([PureEpsilon(epsilon=2.0)], 1e-5).epsilon
    assert outcomes["wide-1"].epsilon_after == pytest.approx(max(trained["wide"], answers), rel=1e-6)
    assert outcomes["deep-0"].epsilon_after == pytest.approx(max(trained["deep"], answers), rel=1e-6)
    assert outcomes["deep-1"].epsilon_after == pytest.approx(trained["deep"], rel=1e-6)
    assert outcomes["deep-1"].utility_before is not None
    assert {outcomes[name].utility_before for name in ("wide-0", "wide-1", "deep-0")} == {None}
    kept = json.loads((tmp_path / "s" / "charges.json").read_text())["charges"]
    assert {(charge["name"], charge["data_set"]) for charge in kept} == {
        (name, f"records of {name}") for name in ("deep-0", "wide-1")
    }
