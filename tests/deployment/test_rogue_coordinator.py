"""A coordinator that turns the noise down, repeats itself, or sends other code than was approved."""

import json
import shutil
from pathlib import Path

import pytest

from fedpriv.operate.approvals import bundle_digest
from tests.deployment.conftest import NUM_NODES, copied_checkout

pytestmark = pytest.mark.deployment


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_checkout(tmp_path / "checkout")


def test_a_bundle_that_nobody_approved_runs_nowhere(holders, holders_run, checkout, tmp_path):
    app = checkout / "clients" / "node.py"
    app.write_text(f"{app.read_text()}\n\n# Nobody has read this.\n")
    values = {**holders_run, "out": str(tmp_path / "out"), "registration_seconds": 20}
    output = holders.run(values, code=1, checkout=checkout)
    assert "none of which can take part" in output
    for client in range(NUM_NODES):
        told = f"Clinic {client} ({client}) has not approved this run's bundle; if it is right, run there: fedpriv node"
        assert told in output, output
    for client in range(NUM_NODES):
        assert "is not approved; review it, then add it to" in (holders.folder / f"node-{client}.log").read_text()
        assert not holders.charges(client)
        assert not list((holders.node(client) / "flower").rglob("node.py"))  # nothing was installed


def test_every_guard_refuses_a_coordinator_that_asks_for_too_much(holders, holders_run, checkout, tmp_path):
    shutil.copy(Path(__file__).with_name("rogue_server.py"), checkout / "server" / "app.py")
    digest = bundle_digest(checkout)
    for client in range(NUM_NODES):
        holders.approve(client, digest)
    holders.run({**holders_run, "out": str(tmp_path / "out")}, checkout=checkout, seconds=600)
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())

    assert set(answers["lies"]) == {"noise_multiplier", "local_steps", "clip_norm", "learning_rate"}
    for name, reasons in answers["lies"].items():
        assert len(reasons) == NUM_NODES
        for reason in reasons:
            assert reason.startswith(f"refused: {name}"), (name, reason)
    assert not holders.charges(1)

    # What came after the lies: an honest request, ten times.
    assert len(answers["replays"]) == 10
    assert len({answer["sha256"] for answer in answers["replays"]}) == 1
    phases = [entry.phase for entry in holders.entries(0) if entry.run == "rogue"]
    assert phases == ["charged", "released"]
    (released,) = (entry for entry in holders.entries(0) if entry.phase == "released")
    assert released.reply == answers["replays"][0]["sha256"]
    events = [json.loads(line)["event"] for line in (holders.node(0) / "events.jsonl").read_text().splitlines()]
    assert (events.count("refused"), events.count("released"), events.count("sent_again")) == (4, 1, 9)
