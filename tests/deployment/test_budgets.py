"""A run that budgets would end is refused before any charge; as many rounds as it names fit, as evidence confirms."""

import re

import pytest

from tests.deployment.conftest import deployed
from tests.deployment.test_evidence import confirmed

pytestmark = pytest.mark.deployment

NODES = range(2)


def test_no_run_is_begun_that_budgets_end_and_as_many_rounds_as_fit_are_done(tmp_path, table, tiny_bert, holders_run):
    with deployed(tmp_path, table, tiny_bert, "--budget-epsilon", "3", num_nodes=len(NODES)) as federation:
        values = {**holders_run, "num_clients": len(NODES), "min_clients": len(NODES), "noise_multiplier": 1.5}
        values |= {"local_steps": 1, "batch_size": 20}
        output = federation.run({**values, "rounds": 500, "out": str(tmp_path / "long")}, code=1)
        said = re.search(r"rounds = 500: nodes' budgets allow fewer .* no more than (\d+) of them fit", output)
        assert said, output
        assert [len(federation.charges(client)) for client in NODES] == [0] * len(NODES)
        fitting = int(said[1])
        assert 1 < fitting < 30, "the test would prove nothing, or take long"
        federation.run({**values, "rounds": fitting, "out": str(tmp_path / "short")})
        assert [len(federation.charges(client)) for client in NODES] == [fitting] * len(NODES)
        lines, _ = confirmed(tmp_path / "short", tmp_path / "run.zip")
        assert sum("its registration is signed by ssh-ed25519" in line for line in lines) == len(NODES)
        for client in NODES:
            lines, _ = confirmed(federation.node(client), tmp_path / f"node-{client}.zip")
            assert any(f"{fitting + 1} receipts of data set" in line for line in lines), lines
            assert any("its budget is kept" in line for line in lines), lines
        output = federation.run({**values, "rounds": 1, "out": str(tmp_path / "more")}, code=1)
        assert "not one fits" in output
