"""Runs that are calibrated, and budgets that are kept, on what the sum of all clients shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedpriv.config import BY_RECIPE, parse
from fedpriv.runs import files
from server.observer import LogObserver
from simulations.engines import federation
from tests.chats import chat_model
from tests.tiny import write_table

TARGET = 3.0
TARGETED = {"target_epsilon": TARGET, "noise_multiplier": BY_RECIPE}


@pytest.fixture(scope="module")
def summed(small_run, tmp_path_factory) -> dict[str, object]:
    """Five equal clients of which only sums of five uploads are seen."""
    return small_run | {
        "recipe": "dp-lora-paper",
        "data": str(write_table(tmp_path_factory.mktemp("summed") / "records.csv", 200)),
        "partition": "iid",
        "client_column": "",
        "num_clients": 5,
        "sampling_probability": 0.5,
        "local_steps": 1,
        "rounds": 3,
        "secure_aggregation": True,
        "min_clients": 5,
    }


def run(values: dict[str, object], out: Path, **changes: object) -> tuple[float, dict]:
    """The run's noise multiplier and its summary."""
    federation.run(parse({**values, **changes, "out": str(out)}), LogObserver())
    return files.read_config(out).noise_multiplier, json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def targeted(summed, tmp_path_factory) -> dict[str, tuple[float, dict]]:
    """Of a run whose target is on each view: its noise multiplier and its summary."""
    folder = tmp_path_factory.mktemp("targeted")
    return {view: run(summed, folder / view, privacy_view=view, **TARGETED) for view in ("local", "aggregate")}


def test_five_equal_clients_need_root_four_times_less_noise_in_a_sum_that_one_of_them_reads(targeted):
    for view, (_, found) in targeted.items():
        assert 0.99 * TARGET < found[f"epsilon_{view}_max"] <= TARGET
        assert found["num_rounds"] == 3
    assert targeted["local"][0] / targeted["aggregate"][0] == pytest.approx(math.sqrt(4), rel=1e-3)
    assert found["epsilon_local_max"] > TARGET


def test_those_who_collude_and_a_lower_threshold_cost_noise(summed, targeted, tmp_path):
    changes = {"privacy_view": "aggregate", **TARGETED, "min_clients": 4, "colluding_clients": 1}
    local, _ = targeted["local"]
    noise, found = run(summed, tmp_path / "four", **changes)
    assert local / noise == pytest.approx(math.sqrt(3), rel=1e-3)
    assert 0.99 * TARGET < found["epsilon_aggregate_max"] <= TARGET, "whoever is in the sum, four less one count"


def test_a_budget_on_the_sum_counts_on_the_threshold_alone(summed, targeted, tmp_path):
    noise, _ = targeted["aggregate"]
    spend = {**summed, "privacy_view": "aggregate", "noise_multiplier": noise, "budget_epsilon": TARGET}
    _, found = run(spend, tmp_path / "kept")
    assert found["num_rounds"] == 3
    assert found["epsilon_aggregate_max"] <= TARGET
    assert not any(client["retired"] for client in found["clients"])
    _, found = run(spend, tmp_path / "fewer", min_clients=3)
    assert found["num_rounds"] < 3, "of three the noise is less, and the budget is spent earlier"


def test_a_model_that_answers_learns_from_the_sum_of_masked_updates(small_run, tmp_path):
    rows = [{"q": f"What is flu {'rash ' * (i % 7)}?", "a": f"A {'viral ' * (i % 5)}disease."} for i in range(60)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompt_column": "q", "response_column": "a", "client_column": "", "max_length": 60}
    changes |= {"model": str(chat_model(tmp_path / "chat")), "data": str(tmp_path / "records.jsonl")}
    changes |= {"num_clients": 3, "rounds": 1, "local_steps": 1, "aggregation": "ffa-lora", "generated_answers": 0}
    found = {
        masked: run(small_run | changes, tmp_path / str(masked), secure_aggregation=masked, min_clients=3)[1]
        for masked in (False, True)
    }
    assert found[True]["perplexity"] != found[True]["perplexity_initial"]
    assert found[True]["epsilon_aggregate_max"] < found[True]["epsilon_local_max"]
    assert found[True]["perplexity_initial"] == pytest.approx(found[False]["perplexity_initial"])
