"""A coordinator's metrics, what alerts make of them, and that they never keep the SuperLink from running."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fedpriv.config import parse
from fedpriv.operate.metrics import Measured
from fedpriv.runs import RunWriter, marked_alive
from server.deploy import certificates, metrics
from server.deploy.folder import Coordinator
from simulations.sites import free_port, wait_until
from tests.monitoring import Samples, exported, firing, names, parsed, text_of, value
from tests.runs.written import SIZES, client_row, registrations, round_row
from tests.server.deploy.conftest import PASSPHRASE, make


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return make(tmp_path / "co", "127.0.0.1", port=free_port(), metrics=True)


def superlink(coordinator: Coordinator, num_online: int | None = 0) -> Samples:
    return parsed(text_of(Measured("SuperLink", lambda: metrics._superlink(coordinator, num_online))))


def newest(coordinator: Coordinator) -> Samples:
    return parsed(text_of(Measured("run", lambda: metrics._newest_run(coordinator.runs))))


def write(coordinator: Coordinator, name: str, rounds: int, **config: object) -> Path:
    writer = RunWriter.created(coordinator.runs / name, parse({"rounds": 10, "round_seconds": 60.0, **config}))
    writer.write_registrations({each.client: vars(each) for each in registrations()})
    for round_ in range(rounds + 1):
        refused = ("refused", "noise_multiplier = 0.1: below") if round_ == rounds else ("ok", "")
        clients = [client_row(round_, c, *(refused if c == 1 else ("ok", ""))) for c in SIZES] if round_ else []
        writer.add(round_row(round_, clients), clients)
    return writer.path


def test_the_superlink_its_nodes_and_its_certificate_and_the_alerts_about_them(coordinator):
    assert firing(superlink(coordinator)) == {"SuperLinkDown"}
    with socket.create_server(("127.0.0.1", coordinator.port)):
        found = superlink(coordinator)
        assert value(found, "fedpriv_superlink_up") == 1
        assert value(found, "fedpriv_nodes_online") == value(found, "fedpriv_nodes_registered") == 0
        assert 29 < value(found, "fedpriv_certificate_days_left") < 30
        assert not firing(found)
        assert "fedpriv_nodes_online" not in names(superlink(coordinator, None))
        (coordinator.nodes / "0.pub").touch()
        assert firing(superlink(coordinator, 0)) == {"NodesMissing"}
        certificates.make_server_certificate(coordinator.folder, ["127.0.0.1"], 13, passphrase=PASSPHRASE)
        assert firing(superlink(coordinator, 1)) == {"CertificateExpires"}


def test_the_newest_run_on_the_view_of_its_limit(coordinator):
    assert newest(coordinator) == {}
    old = write(coordinator, "old", 1)
    os.utime(old / "config.toml", (1, 1))
    run = write(coordinator, "new", 3, privacy_view="rho", budget_epsilon=[2.0])
    with marked_alive(run):
        found = newest(coordinator)
    assert value(found, "fedpriv_last_round") == 3
    assert value(found, "fedpriv_rounds_planned") == 10
    spent = [value(found, "fedpriv_epsilon_spent", client=str(client), view="rho") for client in SIZES]
    assert spent == pytest.approx([0.6, 1.2, 1.8])
    left = [value(found, "fedpriv_epsilon_left", client=str(client)) for client in SIZES]
    assert left == pytest.approx([1.4, 0.8, 0.2])
    assert value(found, "fedpriv_replies_total", status="ok") == 8
    assert value(found, "fedpriv_replies_total", status="refused") == 1
    assert firing(found) == {"ClientsTroubled"}
    assert "St. Anna" not in str(found)


def test_a_run_that_died_or_is_silent_fires(coordinator):
    run = write(coordinator, "new", 1)
    with marked_alive(run):
        for path in (run, *run.rglob("*")):
            os.utime(path, (1, 1))
        assert firing(newest(coordinator)) == {"ClientsTroubled", "RunSilent"}
    assert firing(newest(coordinator)) == {"ClientsTroubled", "RunSilent", "RunDied"}


def test_they_are_written_if_the_settings_say_so_and_by_default_are_not(coordinator, tmp_path):
    said: list[str] = []
    path = coordinator.folder / "metrics" / "fedpriv.prom"
    metrics.write(coordinator, lambda: 3, said.append)
    wait_until(lambda: "fedpriv_superlink_up" in names(exported(coordinator.folder)), "figures", 10)
    blocked = replace(coordinator, folder=coordinator.server_key)
    metrics.write(blocked, lambda: 3, said.append)
    plain = make(tmp_path / "plain", "127.0.0.1")
    metrics.write(plain, lambda: 3, said.append)
    assert (said[0], len(said)) == (f"metrics: written to {path}", 2)
    assert said[1].startswith(f"metrics: not written: {blocked.folder}/metrics/fedpriv.prom: cannot be written (")
    assert (plain.metrics, (plain.folder / "metrics").exists()) == (False, False)
    assert "metrics" not in (plain.folder / "coordinator.toml").read_text()
