"""Every benchmark runs and ends with its claims, so that none breaks unseen between two measurements."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedpriv.learning.training.workbench import Workbench
from simulations.benchmarks import _parts
from tests.models.serving.running import needs_nginx

FOLDER = Path(__file__).resolve().parents[2] / "simulations" / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
SMALL = {
    "accounting_scale": ["--clients", "12"],
    "busy_machine": ["--loops", "0", "1", "--repeats", "1", "--setting", "rounds=2", 'train="head"'],
    "dedup_distance": ["--models", "2", "--values", "200000"],
    "dedup_resume": ["--variants", "2", "--kills", "1"],
    "dedup_loading": ["--variants", "3", "--queries", "4", "--repeats", "1"],
    "deployed_round": ["--nodes", "3", "--rounds", "2", "--setting", "lora_rounds=0", 'train="head"'],
    "discrete_gaussian": ["--repeats", "2"],
    "lossless_store": ["--models", "MiniLM-bfloat16", "--steps", "1"],
    "dp_step": ["--steps", "4"],
    "end_to_end": ["--setting", "tiny", "--rounds", "1"],
    "engine_cost": ["--clients", "2", "--rounds", "1"],
    "integral_training": ["--models", "80", "--epochs", "1", "--repeats", "1"],
    "language_model_memory": ["--repeats", "1", "--cases", "long"],
    "node_step": ["--tokens", "8", "--records", "4", "--filled", "0", "--repeats", "1"],
    "pfl_research": ["--clients", "4", "--rounds", "1"],
    "prefix_cache": ["--repeats", "1"],
    "registered_clients": ["--registered", "40", "--sampled", "5", "--rounds", "1"],
    "secure_aggregation": ["--clients", "5", "--dimension", "1000", "--repeats", "1"],
    "serving": ["--variants", "4", "--requests", "8", "--repeats", "1", "--tokens", "12"],
    "serving_hostile": ["--seconds", "1"],
    "serving_language": ["--requests", "2", "--variants", "2", "--tokens", "2", "--repeats", "1"],
    "serving_soak": ["--minutes", "0.05", "--variants", "6"],
    "stacked_clients": ["--clients", "2", "--repeats", "1"],
}
# What these do every day: whole where that takes seconds, or one of their arms.
SMALLEST = {
    "accounting_scale": ["--clients", "1"],
    "dedup_distance": SMALL["dedup_distance"],
    "discrete_gaussian": SMALL["discrete_gaussian"],
    "secure_aggregation": SMALL["secure_aggregation"],
}
ONE_ARM = {
    "dp_step": ["--memory-of", "dp", "--layers", "last-2"],
    "registered_clients": ["--one", "4", "--sampled", "2", "--rounds", "1"],
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a benchmark in this process and gives what it printed; undoes what it sets for a process of its own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    levels = {name: logging.getLogger(name).level for name in ("flwr", "ray")}

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(f"simulations.benchmarks.{name}").main()
        return capsys.readouterr().out

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_the_parts_of_a_run_are_where_they_are_looked_for_and_add_up():
    plain = Workbench.evaluate
    with _parts.measured() as clock:
        assert Workbench.evaluate is not plain
        started = time.perf_counter()
        with clock.part("steps"):
            time.sleep(0.02)
            with clock.part("cache filling"):
                time.sleep(0.04)
                clock.timed("evaluation", time.sleep)(0.08)
        taken = time.perf_counter() - started
    assert Workbench.evaluate is plain
    assert sum(clock.seconds.values()) == pytest.approx(taken, abs=0.01)
    assert [clock.seconds[part] >= least for part, least in [("steps", 0.02), ("cache filling", 0.04)]] == [True] * 2
    assert clock.seconds["evaluation"] >= 0.08 > clock.seconds["steps"]
    assert _parts.shown({"steps": 1.0, "ledger": 0.01, "start": 2.0}, 3.5) == "start 2.0, steps 1.0, other 0.5"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_nginx if n == "serving_hostile" else ()) for n in NAMES])
def test_benchmark_runs_to_its_claim(name):
    command = [sys.executable, "-m", f"simulations.benchmarks.{name}", *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], timeout=3600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["claim"]


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_takes_its_arguments(run, name):
    with pytest.raises(SystemExit, match="0"):
        run(name, *SMALL[name], "--help")


@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_at_its_smallest_runs_to_its_claim(run, name):
    assert json.loads(run(name, *SMALLEST[name]).splitlines()[-1])["claim"]


@pytest.mark.parametrize("name", [pytest.param("dp_step", marks=pytest.mark.slow), "registered_clients"])
def test_one_arm_of_a_benchmark_runs_to_its_figures(run, name):
    assert json.loads(run(name, *ONE_ARM[name]).splitlines()[-1])
