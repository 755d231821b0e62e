"""A node's metrics: what Prometheus reads, what alerts make of it, and that nothing of it follows the records."""

import json
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest

from clients.deploy import metrics, separate_users
from clients.deploy.folder import Node
from clients.deploy.supernode import units
from fedpriv.holder.vault._disk import BEYOND
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.operate import checks
from fedpriv.operate.command_line import unit_name
from fedpriv.operate.metrics import Measured
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.receipts import Receipt
from simulations.sites import wait_until
from tests import monitoring
from tests.cli import inputs
from tests.clients.deploy.test_processes import Lines
from tests.deployment.tls_server import serving
from tests.monitoring import exported, firing, names, parsed, text_of, value


@pytest.fixture
def node(make_node, own) -> Node:
    return make_node(metrics=True, name="St. Anna", **own)


def samples(node: Node, *kinds: str) -> monitoring.Samples:
    return parsed(text_of(*(source for source in metrics.sources(node) if not kinds or source.name in kinds)))


def charge(node: Node, num_rounds: int, *, run: str = "r", noise_multiplier: float = 20.0) -> None:
    """Charge the ledger for the first rounds of a run, whatever the budget allows."""
    event = SubsampledGaussian(noise_multiplier=noise_multiplier, sampling_probability=0.5)
    paid = [Release(event=event, rho_bar=1.0)] * num_rounds
    with Ledger(node.vault.ledger) as ledger:
        data_set = ledger.data_set()
        inputs.charge(ledger, data_set.id, *paid, client=data_set.client, run=run)


def log(node: Node, *events: dict[str, object]) -> None:
    with node.vault.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_the_account_is_that_of_the_ledger_whose_budget_ends_and_which_may_be_a_restored_one(node):
    before = samples(node, "ledger")
    assert value(before, "fedpriv_releases_total") == 0
    charge(node, 3)
    found = samples(node, "ledger")
    assert value(found, "fedpriv_releases_total") == 3
    assert value(found, "fedpriv_last_round") == 3
    assert time.time() - value(found, "fedpriv_last_charge_timestamp_seconds") < 60
    spent, left = (value(found, f"fedpriv_epsilon_{name}", client="1", view="local") for name in ("spent", "left"))
    assert 0 < spent < 4
    assert spent + left == value(found, "fedpriv_epsilon_budget") == 4
    assert value(found, "fedpriv_rounds_left") > 1
    assert 0 < value(found, "fedpriv_budget_used_ratio") < 0.9
    assert value(found, "fedpriv_ledger_usable") == 1
    assert not firing(found)
    charge(node, 3, run="next", noise_multiplier=1.2)
    assert firing(samples(node, "ledger")) == {"BudgetNearlyUsed", "BudgetSpent"}
    # After a receipt of what it lacks a ledger is a restored one, and the vault refuses everything.
    lost = Receipt(data_set="d" * 32, counter=7, previous="e" * 64).signed(node.vault.key)
    ReceiptWatch.in_folder(node.vault).keep(lost)
    assert value(samples(node, "ledger"), "fedpriv_ledger_usable") == 0


def test_what_became_of_a_charge_changes_nothing(node):
    # The work on records has then ended, which nobody may learn before the reply's public time.
    charge(node, 1)
    text = text_of(*metrics.sources(node))
    secrets = ("Anna", str(node.folder), str(node.vault.data))
    assert not [secret for secret in secrets if secret in text], "nothing names the holder or its files"
    before = text_of(*metrics.sources(node)[1:3])
    with Ledger(node.vault.ledger) as ledger:
        ledger.store(Key(run="r", client="1", round=1, request="x"), b"reply")
    times = {"run": "r", "round": 1}
    after_the_charge = ("charged", "released", "withheld", "failed", "sent_again")
    log(node, *({"event": name, "reason": "refused: round: none", **times} for name in after_the_charge))
    log(node, {"event": "refused", "reason": "refused: this node's ledger cannot be used; its log says why"})
    assert text_of(*metrics.sources(node)[1:3]) == before


def test_refusals_are_counted_by_what_was_wrong(node):
    log(
        node,
        {"event": "refused", "reason": "refused: noise_multiplier = 0: this node releases nothing without noise"},
        {"event": "refused", "reason": "refused: noise_multiplier: its effective value 0.1 is below"},
        {"event": "refused", "reason": "refused: round 3: already answered"},
        {"event": "retired", "reason": "retired: budget_epsilon: another round would exceed this node's budget"},
        *({"event": BEYOND, "number": number} for number in (1, 1, 2, 4)),
    )
    node.vault.events.open("a").write('{"event": "refused", "reason": "refused: clip_norm = 9:')  # still being written
    refusals = metrics.Refusals(node.vault.events)
    kinds = Measured("journal", refusals.read)
    found = parsed(text_of(kinds))
    expected = {"noise_multiplier": 2, "round": 1, "budget_epsilon": 1, "beyond_quota": 8}
    assert {reason: value(found, "fedpriv_refusals_total", reason=reason) for reason in expected} == expected
    assert len([name for name, _ in found if name == "fedpriv_refusals_total"]) == len(expected)
    log(node, {"event": "x"})
    assert parsed(text_of(kinds)) == found


def test_a_coordinator_cannot_make_reasons_without_end(node):
    for letter in "abcdefghij":
        log(node, *({"event": "refused", "reason": f"refused: {letter * n}: no"} for n in range(1, 12)))
    log(node, {"event": "refused", "reason": 'refused: x" 1\nfedpriv_closed 1 #: no'})
    found = samples(node, "journal")
    assert len(found) == 51
    assert value(found, "fedpriv_refusals_total", reason="other") == 60


@pytest.mark.parametrize("alert", ["NodeClosed", "LedgerUnusable", "VaultDown", "SuperNodeDown", "CoordinatorSilent"])
def test_alerts_of_a_node_fire(node, alert, monkeypatch):
    monkeypatch.setattr(separate_users, "is_running", lambda node: True)  # the socket below stands for its process
    charge(node, 1)
    with socket.socket(socket.AF_UNIX) as vault, socket.socket() as supernode:
        if alert != "SuperNodeDown":
            supernode.bind(("127.0.0.1", node.port))
            supernode.listen()
        if alert != "VaultDown":
            vault.bind(str(node.vault.socket))
            vault.listen()
        if alert == "NodeClosed":
            node.vault.closed.write_text("killed\n")
        if alert == "LedgerUnusable":
            node.vault.ledger.with_name("ledger.sqlite.head").write_text("?")
        kinds = () if alert == "CoordinatorSilent" else ("processes", "ledger")
        assert firing(samples(node, *kinds)) == {alert}


def test_a_clock_that_is_apart_from_the_coordinators_fires_and_a_slow_answer_does_not(node, server, monkeypatch):
    for seconds, takes in ((0, 0), (60, 0), (-60, 0), (0, 30), (60, 30)):
        moments = iter([0, takes])  # before and after the answer
        monkeypatch.setattr(checks, "time", SimpleNamespace(time=lambda later=moments: time.time() + next(later)))
        with serving(server, clock_offset=timedelta(seconds=seconds)) as port:
            found = samples(replace(node, superlink=f"127.0.0.1:{port}"), "coordinator")
        assert firing(found) == ({"ClockApart"} if seconds else set())


def test_a_node_writes_them_from_a_process_that_ends_with_it(node, make_node):
    silent, say = make_node("silent"), Lines()
    with metrics.running(silent, say, variables=os.environ, user=None):
        assert say.lines == [], "without the setting there is no process and no file"
    assert not (silent.folder / "metrics").exists()

    def writers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if "metrics" in child.cmdline()]

    with metrics.running(node, say, variables=os.environ, user=None):
        say.wait_for(f"metrics: written to {node.folder}/metrics/fedpriv.prom")
        assert len(writers()) == 1
        wait_until(lambda: "fedpriv_releases_total" in names(exported(node.folder)), "figures", 30)
        wait_until(lambda: "fedpriv_closed" in names(exported(node.folder)), "figures", 30)
    assert not writers()


def test_a_place_that_cannot_be_written_is_one_line_and_stops_nothing(node):
    say = Lines()
    (node.folder / "metrics").touch()
    with metrics.running(node, say, variables=os.environ, user=None):
        say.wait_for("the node goes on without them")
    assert say.count("metrics/fedpriv.prom: cannot be written (") == 1
    assert say.count("Traceback") == 0


def test_the_unit_has_the_network_and_sees_neither_records_nor_keys(make_node, own, tmp_path):
    node = make_node(metrics=True, client_user="daemon", **own)
    unit = units(node)[-1]
    lines = unit.text().splitlines()
    assert unit.name == unit_name("metrics", node.folder)
    assert f'ReadWritePaths="{node.folder}"' in lines
    for secret in (node.vault.data, node.vault.key, node.key, node.vault.tokens):
        assert f'InaccessiblePaths="-{secret}"' in lines
    assert len(units(make_node("other", client_user="daemon", **own))) == 2
