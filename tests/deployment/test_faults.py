"""A run outlives a killed node, a killed server and a federation without nodes."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import parse
from server.observer import LogObserver
from simulations.engines import federation
from simulations.sites import CLIENT, DeployedFederation, kit, read_ledger, wait_until
from tests.deployment.conftest import NUM_NODES, SLOW

pytestmark = pytest.mark.deployment

# Of a round beyond its deadline, in seconds: a last pull, and the test of the model.
DELAYS = 30.0

SENT = ["bytes_up", "bytes_down"]

LISTENS = "vault: vault listens on"

# Of a run whose server is killed within six seconds: a round takes more than one.
NUM_ROUNDS = 8


def num_rounds(out: Path) -> int:
    """How many rounds a run's table holds, round 0 left out."""
    table = out / "rounds.csv"
    return max(0, len(table.read_text().splitlines()) - 2) if table.is_file() else 0


def num_charges(site: DeployedFederation, client: int) -> int:
    """How many charges a node's log holds, which is quicker to read than its ledger."""
    file = site.node(client) / "events.jsonl"
    return file.read_text().count('"event": "charged"') if file.is_file() else 0


def start_again(site: DeployedFederation, client: int) -> None:
    """Start a node that was killed; its operator opens it if a reply was not due yet."""
    listened = site.services[f"node-{client}"].text().count(LISTENS)
    site.start_node(client)
    service = site.services[f"node-{client}"]
    wait_until(lambda: service.text().count(LISTENS) > listened, "the vault", 120)
    if (site.node(client) / "closed").is_file():
        kit(CLIENT, "reopen", site.node(client))


def told(out: Path, event: str) -> list[int]:
    """The rounds in which the run's log tells of such an event."""
    file = out / "events.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [each["round"] for each in map(json.loads, lines) if each["event"] == event]


@pytest.mark.nightly  # test_killed.py kills each of its processes and compares ledgers
@pytest.mark.parametrize("holders", [SLOW], indirect=True, ids=["slow"])
def test_a_node_killed_in_a_round_costs_its_own_updates_alone_until_it_is_back(holders, holders_run, tmp_path):
    # A killed node is let in again after a minute; the run is stopped once it is back.
    out = tmp_path / "out"
    values = {**holders_run, "rounds": 200, "round_seconds": 40, "out": str(out)}
    before = num_charges(holders, 1)
    run = holders.start_run("killed-node", values)
    wait_until(lambda: num_rounds(tmp_path / "out") >= 1, "round 1", 240)
    wait_until(lambda: num_charges(holders, 1) > before + 1, "a charge in round 2", 120, every=0.01)
    holders.services["node-1"].kill()
    wait_until(lambda: told(out, "skipped"), "two rounds without an answer", 300)
    start_again(holders, 1)
    wait_until(lambda: told(out, "returned"), "the node's return", 300)
    (skipped,), (returned,) = told(out, "skipped"), told(out, "returned")
    wait_until(lambda: num_rounds(out) >= returned, "a round with it", 120)
    run.stop()

    rows = pd.read_csv(out / "clients.csv")
    for round_ in (2, 3):
        each = rows.query(f"round == {round_}").set_index("client")
        assert each.status[0] == "ok"
        assert each.status[1] in ("no reply", "failed")
    assert pd.read_csv(out / "rounds.csv").seconds[2] < values["round_seconds"] + DELAYS
    assert list(rows.query(f"round == {returned}").status) == ["ok"] * NUM_NODES, "the node trains again"
    # One charge for each release that the node could have made, in its own ledger and in the server's; for the rounds
    # that were not waited for, none.
    assert skipped == 3
    ledger = [entry for entry in read_ledger(out / "ledger.sqlite") if entry.phase == "charged"]
    asked = [entry.round for entry in ledger if entry.client == "1"]
    assert asked == [1, 2, 3, *range(returned, max(entry.round for entry in ledger) + 1)]
    rounds = [entry.round for entry in holders.charges(1)[before:]]
    assert rounds == sorted(set(rounds))
    assert {1, 2, returned} <= set(rounds) <= set(asked)


# test_killed.py ends nodes one by one; tests/server/test_absence.py and test_strategy.py end runs that have too few.
@pytest.mark.nightly
@pytest.mark.parametrize("holders", [SLOW], indirect=True, ids=["slow"])
def test_without_nodes_a_run_stops_in_time_and_goes_on_when_they_return(holders, holders_run, tmp_path):
    # Killed before they answer, since Flower waits three minutes for the rest of an upload; a round that fails is one
    # of the six all the same.
    values = {**holders_run, "rounds": 6, "round_seconds": 25, "min_clients": NUM_NODES}
    values |= {"out": str(tmp_path / "out")}
    before = [num_charges(holders, client) for client in range(NUM_NODES)]
    run = holders.start_run("no-nodes", values)
    wait_until(lambda: num_rounds(tmp_path / "out") >= 1, "round 1", 240)
    charged = lambda: [num_charges(holders, client) - was for client, was in enumerate(before)]  # noqa: E731
    wait_until(lambda: max(charged()) > 1, "a charge in round 2", 120, every=0.01)
    # At once: one that is killed after the others may have begun to upload.
    with ThreadPoolExecutor(NUM_NODES) as pool:
        list(pool.map(lambda client: holders.services[f"node-{client}"].kill(), range(NUM_NODES)))
    assert run.process.wait(timeout=600) == 1
    # By the run's own clock, since how long processes take to start and end is the machine's affair.
    assert pd.read_csv(tmp_path / "out" / "rounds.csv").seconds.iloc[-1] < values["round_seconds"] + DELAYS
    assert "resume the run once more clients answer" in run.text()
    stopped = num_rounds(tmp_path / "out")
    for client in range(NUM_NODES):
        start_again(holders, client)
    holders.wait_for_nodes(NUM_NODES)
    holders.run({"resume": str(tmp_path / "out")})
    assert num_rounds(tmp_path / "out") == 6
    rows = pd.read_csv(tmp_path / "out" / "clients.csv")
    assert list(rows.query("round == 6").status) == ["ok"] * NUM_NODES
    assert (rows["round"] <= stopped).any()
    read_ledger(tmp_path / "out" / "ledger.sqlite")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {client["rounds"] for client in summary["clients"]} == {6}


@pytest.mark.nightly  # test_killed_coordinator.py ends each of its processes and resumes its run
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_a_server_killed_at_any_instant_is_resumed_to_the_same_numbers(hospitals, corpus_run, tmp_path, seed):
    values = {**corpus_run, "rounds": NUM_ROUNDS, "seed": seed, "out": str(tmp_path / "deployed")}
    run = hospitals.start_run(f"killed-server-{seed}", values)
    wait_until(lambda: (tmp_path / "deployed" / "checkpoint").is_dir(), "a checkpoint", 240)
    wait_until(lambda: num_rounds(tmp_path / "deployed") >= seed % 2, "round 1", 120)
    time.sleep(random.Random(seed).uniform(0, 6))
    hospitals.services["superlink"].kill()
    run.kill()
    hospitals.start_superlink()
    hospitals.wait_for_nodes(NUM_NODES, 180)
    if (tmp_path / "deployed" / "summary.json").is_file():
        pytest.fail("the run was over before the server was killed; kill it earlier")
    hospitals.run({"resume": str(tmp_path / "deployed")})

    federation.run(parse({**values, "out": str(tmp_path / "whole"), "engine": "in-process"}), LogObserver())
    tables = [pd.read_csv(tmp_path / name / "rounds.csv").drop(columns="seconds") for name in ("deployed", "whole")]
    # Nodes of their own sign a receipt of each charge, which replies and the next requests carry.
    more = tables[0][SENT] - tables[1][SENT]
    assert (more["bytes_up"][1:] > 0).all()
    assert (more["bytes_down"] >= 0).all()
    pd.testing.assert_frame_equal(*(table.drop(columns=SENT) for table in tables), rtol=1e-5)
    server = read_ledger(tmp_path / "deployed" / "ledger.sqlite")
    for client in range(NUM_NODES):
        run_id = next(entry.run for entry in server if entry.run)
        own = [entry.round for entry in hospitals.charges(client) if entry.run == run_id]
        assert own == [*range(1, NUM_ROUNDS + 1)], "the node releases each round once, and pays for it once"
        charged = [e.round for e in server if e.phase == "charged" and e.client == str(client)]
        assert charged == own
