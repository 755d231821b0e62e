"""Killed with SIGKILL at random instants, a run loses no entry, leaves no release uncharged, and its chains verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# Kills of each kind: whole runs, and one node that is asked again.
@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_no_kill_loses_an_entry_or_leaves_a_release_uncharged(small_run, tmp_path, kills):
    changes = {"simulate": False, "public_data": True, "comparison": False, "rounds": 200, "local_steps": 1}
    script = str(Path(__file__).with_name("killed_run.py"))
    command = [sys.executable, script, str(tmp_path), json.dumps(small_run | changes), str(kills), "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for kind in ("whole_run", "one_node"):
        assert result[kind]["replies"] > kills, "the kills hit runs at work"
