"""A run of secure sums as its operators see it while it goes on: metrics, status, logs and ledgers agree."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.operate import metrics
from fedpriv.privacy.ledger import reader, statement
from fedpriv.runs import RunFolder, spent_on_view, status_of
from fedpriv.runs.show._terminal import state_of
from simulations.sites import DeployedFederation, wait_until
from tests.deployment.conftest import LITTLE_MEMORY, deployed
from tests.monitoring import Samples, exported, firing, names, value

pytestmark = pytest.mark.deployment

NODES = range(3)
# Long enough for a line of the log while the round goes on.
REPLY_SECONDS = 60
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "


@pytest.fixture(scope="module")
def site(tmp_path_factory, table, tiny_bert) -> Iterator[DeployedFederation]:
    made = {"settings": f"reply_seconds = {REPLY_SECONDS}\n{LITTLE_MEMORY}", "metrics": True}
    with deployed(
        tmp_path_factory.mktemp("seeing"), table, tiny_bert, "--budget-view", "aggregate", **made
    ) as federation:
        for client in NODES:
            federation.approve_peers(client)
        yield federation


def of_node(site: DeployedFederation, client: int) -> Samples:
    return exported(site.node(client))


def of_coordinator(site: DeployedFederation) -> Samples:
    return exported(site.coordinator)


def states(out: Path) -> set[str]:
    """What status says of the clients; nothing before there is a run."""
    if not (out / "registrations.json").is_file() or not (out / "clients.csv").is_file():
        return set()
    return {state_of(client) for client in status_of(RunFolder(out)).clients}


def blank(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.fullmatch(rf"({TIME})?(vault: )?([A-Z]+\s*:?)?\s*", line)]


def test_a_run_is_seen_while_it_goes_on_and_all_figures_agree(site, holders_run):
    out = site.coordinator / "runs" / "seen"
    sums = {"secure_aggregation": True, "privacy_view": "aggregate", "local_steps": 1, "optimizer": "sgd"}
    values = {**holders_run, **sums, "learning_rate": 0.1, "noise_multiplier": 4.0, "num_clients": 3, "min_clients": 3}
    run = site.start_run("seen", {**values, "out": str(out)})
    wait_until(lambda: "training" in states(out) or run.process.poll() is not None, "a client that trains", 200)
    assert states(out) == {"training"}, run.text()
    wait_until(lambda: value(of_node(site, 0), "fedpriv_releases_total") == 1, "the charge", 200)
    during, central = of_node(site, 0), of_coordinator(site)
    assert states(out) == {"training"}, "the charge is seen before the reply leaves"
    assert value(during, "fedpriv_last_round") == 1
    assert value(central, "fedpriv_nodes_online") == value(central, "fedpriv_nodes_registered") == 3
    assert firing(during) == firing(central) == set()

    assert run.process.wait(timeout=300) == 0, run.text()
    text = run.text()
    lines = [line for line in text.splitlines() if "round 1: answers" in line and "training: Clinic 0 (0)" in line]
    assert lines, text
    assert re.search(r"round 2: .*ε ≤ \S+ aggregate, \S+ local", text)
    assert not [line for line in text.splitlines() if not re.match(TIME, line)]
    assert not blank(text)

    status, spent = status_of(RunFolder(out)), spent_on_view(RunFolder(out))
    assert status.privacy_view == "aggregate"
    for client in NODES:
        ledger = site.node(client) / "ledger.sqlite"
        with reader.reading(ledger) as db:
            (row,) = statement.spending(db, view="aggregate")
        assert spent[client] == pytest.approx(row["epsilon_aggregate"], rel=1e-9)
        assert row["epsilon_aggregate"] < row["epsilon_local"]
        wait_until(lambda c=client: value(of_node(site, c), "fedpriv_releases_total") == 2, "both charges", 70)
        found = of_node(site, client)
        epsilon = value(found, "fedpriv_epsilon_spent", client=str(client), view="aggregate")
        assert epsilon == pytest.approx(row["epsilon_aggregate"], rel=1e-9)
        assert value(found, "fedpriv_clock_offset_seconds") == pytest.approx(0, abs=2)
        assert 300 < value(found, "fedpriv_certificate_days_left") < 366
        log = (site.node(client) / "node.log").read_text()
        assert "vault listens on" in log
        assert not blank(log)
        assert not [line for line in log.splitlines() if not re.match(TIME, line)]
    wait_until(lambda: value(of_coordinator(site), "fedpriv_run_finished") == 1, "the end of the run", 40)
    central = of_coordinator(site)
    assert value(central, "fedpriv_last_round") == 2
    assert value(central, "fedpriv_epsilon_spent", client="0") == pytest.approx(spent[0], rel=1e-9)
    assert value(central, "fedpriv_replies_total", status="ok") == 6
    superlink = (site.coordinator / "superlink.log").read_text()
    assert superlink
    assert not blank(superlink)


def test_a_refusal_a_closed_node_and_one_that_is_stopped_are_seen(site, holders_run):
    (site.node(2) / "closed").write_text("for a test\n")
    weak = {**holders_run, "num_clients": 3, "noise_multiplier": 0.1, "rounds": 1, "registration_seconds": 30}
    output = site.run({**weak, "out": str(site.coordinator / "runs" / "weak")}, code=1)
    assert "noise_multiplier: its effective value" in output or "closed" in output
    wait_until(lambda: "fedpriv_refusals_total" in names(of_node(site, 1)), "refusals", 40)
    refusals = json.dumps([dict(labels) for name, labels in of_node(site, 1) if name == "fedpriv_refusals_total"])
    assert "noise_multiplier" in refusals
    wait_until(lambda: firing(of_node(site, 2)) == {"NodeClosed"}, "the alert", 40)
    site.services["node-1"].stop()
    written = metrics.path_in(site.node(1)).stat().st_mtime
    wait_until(lambda: "NodesMissing" in firing(of_coordinator(site)), "the alert", 120)
    assert metrics.path_in(site.node(1)).stat().st_mtime == written, "which fires after five minutes"
