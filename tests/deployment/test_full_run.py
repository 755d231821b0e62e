"""A SuperLink and SuperNodes with TLS and authentication give the numbers that the in-process engine gives."""

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import parse
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sites import DeployedFederation
from tests.deployment.conftest import NUM_NODES

pytestmark = pytest.mark.deployment

BYTES = ["bytes_up", "bytes_down"]


def check_against_in_process(site: DeployedFederation, values: Mapping[str, object], out: Path) -> float:
    """What accuracy has gained, if the run in `out` has the numbers of the in-process engine, which are made here."""
    local_out = out.with_name("in-process")
    federation.run(parse({**values, "engine": "in-process", "out": str(local_out)}), LogObserver())
    deployed, local = (json.loads((folder / "summary.json").read_text()) for folder in (out, local_out))
    assert deployed["engine"] == "flower"
    for key in ("accuracy", "accuracy_initial", "epsilon_local_max", "epsilon_rho_max"):
        assert deployed[key] == pytest.approx(local[key], rel=1e-9), key
    for key, most in zip(BYTES, (1500, 2500), strict=True):  # a receipt each way, and down the record of the last sum
        number = NUM_NODES * local["num_rounds"]
        assert number * 500 < deployed[key] - local[key] < number * most, key
    for name in ("rounds.csv", "clients.csv"):
        tables = [pd.read_csv(folder / name).drop(columns=["seconds", *BYTES]) for folder in (out, local_out)]
        pd.testing.assert_frame_equal(*tables, rtol=1e-5)
    for client in range(NUM_NODES):
        charged = site.charges(client)[-local["num_rounds"] :]
        assert [entry.round for entry in charged] == [*range(1, local["num_rounds"] + 1)]
        assert {entry.noise_source for entry in charged} == {"seeded"}
    return float(deployed["accuracy"] - deployed["accuracy_initial"])


@pytest.mark.nightly  # test_who_gets_in.py compares a small model's run
def test_a_full_run_gives_the_numbers_of_the_in_process_engine(hospitals, corpus_run, tmp_path):
    values = {**corpus_run, "local_steps": 3, "model": "all-MiniLM-L6-v2", "layers": "last-2", "rank": 8}
    hospitals.run({**values, "out": str(tmp_path / "deployed")})
    assert check_against_in_process(hospitals, values, tmp_path / "deployed") > 0
