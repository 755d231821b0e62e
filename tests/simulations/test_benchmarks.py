"""Every benchmark runs and ends with its claims, so that none breaks unseen between two measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "simulations" / "benchmarks"
SMALL = {
    "accounting_scale": ["--clients", "12"],
    "dedup_distance": ["--models", "2", "--values", "200000"],
    "dedup_loading": ["--variants", "3", "--queries", "4", "--repeats", "1"],
    "dp_step": ["--steps", "4"],
    "end_to_end": ["--setting", "tiny", "--rounds", "1"],
    "engine_cost": ["--clients", "2", "--rounds", "1"],
    "integral_training": ["--models", "80", "--epochs", "1", "--repeats", "1"],
    "prefix_cache": ["--repeats", "1"],
    "registered_clients": ["--registered", "20", "40", "--sampled", "5", "--rounds", "1"],
    "stacked_clients": ["--clients", "2", "--repeats", "1"],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[a-z]*.py")))
def test_benchmark_runs_to_its_claim(name):
    command = [sys.executable, "-m", f"simulations.benchmarks.{name}", *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["claim"]
