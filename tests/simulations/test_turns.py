"""Whole runs of the recipe whose rounds train some of the tensors: who moves when, exactly, and at what cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedpriv.config import parse
from fedpriv.learning.adapters._arithmetic import Adapter, factors_of
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.learning.aggregation._products import rebased
from fedpriv.learning.aggregation.rules import RULES
from server.observer import LogObserver
from server.strategy import RuleStrategy
from simulations.engines import federation

TURNS = {"dp-lora": ["all"] * 4, "rolora": ["lora-b", "lora-a"] * 2, "fedsvd": ["lora-b"] * 4}
PARTIAL = [rule for rule in TURNS if rule != "dp-lora"]
# Every day the server steps plainly; with momentum, which FedSVD turns with its basis, that rule's run is resumed.
OPTIMIZERS = ["sgd", pytest.param("momentum", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Seen:
    """What the server saw of a round."""

    before: GlobalModel
    uploads: Sequence[Adapter]
    weights: Sequence[float]
    after: GlobalModel


def values_of(small_run, rule: str, out: Path, **changes) -> dict[str, object]:
    kept = {
        key: value for key, value in small_run.items() if key not in ("local_steps", "batch_size", "noise_multiplier")
    }
    recipe = {"recipe": "fedpriv", "rounds": 6, "lora_rounds": 4, "target_epsilon": 8.0, "aggregation": rule}
    recipe |= {"lora_share": 0.5, "lora_learning_rate": 0.5}  # moves that float32 holds beside A
    return {**kept, **recipe, "out": str(out), **changes}


@pytest.fixture(scope="module")
def run_of(small_run, tmp_path_factory) -> Callable[[str, str], tuple[Path, list[Seen]]]:
    """Runs a rule with a server optimizer once: the folder, and what the server saw of each round."""
    plain = RuleStrategy._next_model

    @cache
    def run_of(rule: str, optimizer: str) -> tuple[Path, list[Seen]]:
        seen: list[Seen] = []

        def watched(self, adapters, weights, sizes):
            before, after = self.model, plain(self, adapters, weights, sizes)
            seen.append(Seen(before, list(adapters), list(weights), after))
            return after

        folder = tmp_path_factory.mktemp("runs") / f"{rule}-{optimizer}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RuleStrategy, "_next_model", watched)
            federation.run(parse(values_of(small_run, rule, folder, server_optimizer=optimizer)), LogObserver())
        return folder, seen

    return run_of


def kind(name: str) -> str:
    return "A" if ".lora_A." in name else "B" if ".lora_B." in name else "head"


def moves_in(trains: str) -> set[str]:
    return set({"all": "A B head", "head": "head", "lora-a": "A head", "lora-b": "B head"}[trains].split())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PARTIAL)
def test_every_trained_value_is_noised_and_every_other_one_comes_back_as_it_was_sent(run_of, rule, optimizer):
    _, seen = run_of(rule, optimizer)
    for each, trains in zip(seen, ["head", "head", *TURNS[rule]], strict=True):
        for upload in each.uploads:
            for name, sent in each.before.adapter.items():
                if kind(name) in moves_in(trains):
                    assert (upload[name] != sent).float().mean() > 0.99, f"{name}: float32 may round a move away"
                else:
                    assert torch.equal(upload[name], sent), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_rolora_a_factor_moves_in_its_own_rounds_alone(run_of, optimizer):
    _, seen = run_of("rolora", optimizer)
    for each, trains in zip(seen[1:], ["head", *TURNS["rolora"]], strict=True):  # the start leaves the bias at zero
        for name, before in each.before.adapter.items():
            assert torch.equal(before, each.after.adapter[name]) == (kind(name) not in moves_in(trains)), name


def products(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: b.double() @ a.double() for name, (b, a) in factors_of(adapter).items()}


def error(each: Seen) -> float:
    """How far the product of the averages is from the average of the products, relative to the latter's change."""
    total = {name: torch.zeros_like(p) for name, p in products(each.before.adapter).items()}
    for client, upload in enumerate(each.uploads):
        for name, product in products(upload).items():
            total[name] += each.weights[client] * product
    after = products(each.after.adapter)
    before = products(each.before.adapter)
    off = sum(float((after[name] - t).square().sum()) for name, t in total.items())
    moved = sum(float((before[name] - t).square().sum()) for name, t in total.items())
    return (off / moved) ** 0.5


@pytest.mark.parametrize("rule", PARTIAL)
def test_averaging_is_exact_in_every_round_and_that_of_dp_lora_is_not(run_of, rule):
    assert max(error(each) for each in run_of(rule, "sgd")[1][2:]) < 1e-5
    assert max(error(each) for each in run_of("dp-lora", "sgd")[1][2:]) > 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", PARTIAL)
def test_turns_cost_what_rounds_that_train_everything_cost(run_of, rule, optimizer):
    tables = [pd.read_csv(run_of(each, optimizer)[0] / "rounds.csv") for each in (rule, "dp-lora")]
    for view in ("local", "rho"):
        assert tables[0][f"epsilon_{view}_max"].equals(tables[1][f"epsilon_{view}_max"])
    summary = json.loads((run_of(rule, optimizer)[0] / "summary.json").read_text())
    assert 7.9 < summary["epsilon_local_max"] <= 8.0
    assert not summary["unmoved_tensors"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fedsvd_sends_an_orthonormal_a_that_turns_in_its_row_space_once_b_has_moved(run_of, optimizer):
    _, seen = run_of("fedsvd", optimizer)
    a = {name: tensor for name, tensor in seen[0].before.initial.items() if kind(name) == "A"}
    assert a
    for each in seen[:2]:
        assert all(torch.equal(each.after.adapter[name], rows) for name, rows in a.items())
    for each in seen[2:]:
        for name, rows in a.items():
            new = each.after.adapter[name]
            assert not torch.allclose(new, each.before.adapter[name], atol=1e-3)
            torch.testing.assert_close(new @ new.T, torch.eye(len(new)), atol=1e-5, rtol=0)
            torch.testing.assert_close(new @ rows.T @ rows, new, atol=1e-5, rtol=0)


def without_moments(model: GlobalModel) -> GlobalModel:
    """The re-basing, with the server's momentum left in the old basis."""
    return replace(rebased(model), optimizer_state=model.optimizer_state)


def test_without_noise_fedsvd_is_training_b_with_a_frozen_orthonormal_a(small_run, tmp_path):
    """Each record is clipped, and the server's momentum must turn with the basis."""
    changes = {"target_epsilon": "", "noise_multiplier": 0.0, "clip_norm": 0.1, "rounds": 5, "lora_rounds": 4}
    changes |= {"rank": 3, "alpha": 60.0, "lora_learning_rate": 400.0, "lora_head_learning_rate": 1.0}
    losses = {}
    for name, finish in (("turning", rebased), ("frozen", None), ("stale", without_moments)):
        with pytest.MonkeyPatch.context() as patch:
            changed = replace(RULES["fedsvd"], finish=finish)
            patch.setitem(RULES._entries, "fedsvd", changed)  # in its place, so that the order of names stays
            federation.run(parse(values_of(small_run, "fedsvd", tmp_path / name, **changes)), LogObserver())
        losses[name] = pd.read_csv(tmp_path / name / "rounds.csv").test_loss.tolist()
    assert losses["turning"] == pytest.approx(losses["frozen"], rel=1e-5)
    assert losses["stale"] != pytest.approx(losses["frozen"], rel=1e-3), "the test could not see a wrong basis"


class Interrupted(LogObserver):
    """Ends the run in the middle of the turns, as Ctrl-C would."""

    def round_done(self, row):
        if row.round == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("rule", [pytest.param("rolora", marks=pytest.mark.slow), "fedsvd"])
def test_a_run_that_is_resumed_between_turns_ends_as_a_whole_one(run_of, small_run, tmp_path, rule):
    whole, _ = run_of(rule, "momentum")
    values = values_of(small_run, rule, tmp_path / "run", server_optimizer="momentum")
    with pytest.raises(KeyboardInterrupt):
        federation.run(parse(values), Interrupted())
    federation.run(parse(values | {"resume": str(tmp_path / "run")}), LogObserver())
    tables = [pd.read_csv(folder / "rounds.csv").drop(columns="seconds") for folder in (tmp_path / "run", whole)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    tensors = [load_file(f / "variants/global/adapter_model.safetensors") for f in (tmp_path / "run", whole)]
    assert all(torch.equal(tensors[0][name], tensor) for name, tensor in tensors[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("rule", PARTIAL)
def test_a_budget_stops_the_run_in_the_round_that_would_exceed_it(small_run, tmp_path, rule):
    """Both turns cost the same, so it is the round in which dp-lora would stop as well."""
    ends = {}
    for each in (rule, "dp-lora"):
        values = values_of(small_run, each, tmp_path / each, budget_epsilon=[7.0])
        federation.run(parse(values), LogObserver())
        ends[each] = json.loads((tmp_path / each / "summary.json").read_text())
    assert ends[rule]["epsilon_local_max"] == ends["dp-lora"]["epsilon_local_max"] <= 7.0
    assert 2 < ends[rule]["num_rounds"] == ends["dp-lora"]["num_rounds"] < 6
