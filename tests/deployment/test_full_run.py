"""A SuperLink and SuperNodes with TLS and authentication give the numbers that the in-process engine gives."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from fedpriv.config import parse
from server.observer import LogObserver
from simulations.engines import federation
from tests.deployment.conftest import NUM_NODES

pytestmark = pytest.mark.deployment

BYTES = ["bytes_up", "bytes_down"]


@pytest.mark.parametrize("model", ["tiny", pytest.param("all-MiniLM-L6-v2", marks=pytest.mark.nightly)])
def test_a_full_run_gives_the_numbers_of_the_in_process_engine(hospitals, corpus_run, tmp_path, model):
    values = {**corpus_run, "local_steps": 3}
    if model != "tiny":
        values |= {"model": model, "layers": "last-2", "rank": 8}
    hospitals.run({**values, "out": str(tmp_path / "deployed")})
    federation.run(parse({**values, "engine": "in-process", "out": str(tmp_path / "local")}), LogObserver())
    deployed, local = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("deployed", "local"))
    assert deployed["engine"] == "flower"
    for key in ("accuracy", "accuracy_initial", "epsilon_local_max", "epsilon_rho_max"):
        assert deployed[key] == pytest.approx(local[key], rel=1e-9), key
    for key in BYTES:  # each message of a round and its reply holds a receipt, which nodes without keys do not sign
        number = NUM_NODES * values["rounds"]
        assert number * 500 < deployed[key] - local[key] < number * 1500, key
    if model == "tiny":
        assert deployed["accuracy"] != deployed["accuracy_initial"]
    else:
        assert deployed["accuracy"] > deployed["accuracy_initial"]
    for name in ("rounds.csv", "clients.csv"):
        tables = [pd.read_csv(tmp_path / run / name).drop(columns=["seconds", *BYTES]) for run in ("deployed", "local")]
        pd.testing.assert_frame_equal(*tables, rtol=1e-5)
    for client in range(NUM_NODES):
        charged = hospitals.charges(client)[-2:]
        assert [entry.round for entry in charged] == [1, 2]
        assert {entry.noise_source for entry in charged} == {"seeded"}
