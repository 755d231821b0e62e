"""A coordinator's folder is made whole or not at all, and its command lines say in one line what is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedpriv.config import parse, to_toml
from fedpriv.deployment import certificates, keys
from fedpriv.deployment.flower import FlowerError
from fedpriv.errors import InputError
from server.deploy import doctor, folder, registration, runs, superlink
from server.deploy.__main__ import app
from server.deploy.folder import Coordinator
from simulations.processes import free_port, run_in_process

ROOT = Path(__file__).resolve().parents[3]


def deploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(app, "python -m server.deploy", *arguments)


@pytest.fixture
def coordinator(tmp_path):
    return folder.make(tmp_path / "co", addresses=["127.0.0.1", "fl.example.org"], port=free_port(), days=30)


@pytest.fixture
def public_key(tmp_path):
    keys.make_key_pair(tmp_path / "node.key")
    return tmp_path / "node.key.pub"


def test_init_makes_what_nodes_and_flower_need(tmp_path):
    addresses = ["--address", "fl.example.org", "--address", "10.0.0.5", "--port", "9443"]
    command = [sys.executable, "-m", "server.deploy", "init", tmp_path / "co", *addresses]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = Coordinator.read(tmp_path / "co")
    assert made.address == "fl.example.org:9443"
    assert {"fl.example.org", "10.0.0.5"} <= set(certificates.hosts_of(made.server_certificate))
    connection = tomllib.loads(made.connection_file.read_text())["superlink"]
    assert connection["default"] == "federation"
    assert connection["federation"] == {
        "address": "fl.example.org:9443",
        "root-certificates": str(tmp_path / "co" / "ca.crt"),
    }
    assert [made.ca_key.stat().st_mode & 0o777, made.folder.stat().st_mode & 0o777] == [0o600, 0o700]
    assert str(made.ca_certificate) in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "fl.example.org:9093"], "address = 'fl.example.org:9093'"),
        (["--address", "h.org", "--port", "0"], "port = 0"),
        (["--address", "h.org", "--days", "0"], "days = 0"),
    ],
)
def test_init_writes_nothing_when_something_is_wrong(tmp_path, options, message):
    done = deploy("init", tmp_path / "co", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "co").mkdir()
    (tmp_path / "co" / "mine").write_text("mine")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        folder.make(tmp_path / "co", addresses=["h.org"], port=9093, days=30)
    assert [file.name for file in (tmp_path / "co").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("address", "bind_host", "local_host"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("10.0.0.5", "0.0.0.0", "127.0.0.1"),
        ("fl.example.org", "0.0.0.0", "127.0.0.1"),
        ("2001:db8::1", "::", "::1"),
    ],
)
def test_superlink_of_one_machine_listens_on_loopback_alone(tmp_path, address, bind_host, local_host):
    made = Coordinator(folder=tmp_path, addresses=(address,))
    assert (made.bind_host, made.local_host) == (bind_host, local_host)


def test_renewed_certificate_is_of_the_same_authority(coordinator):
    authority = coordinator.ca_certificate.read_bytes()
    assert deploy("renew", coordinator.folder, "--days", 300).returncode == 0
    assert certificates.valid_until(coordinator.server_certificate) > datetime.now(UTC) + timedelta(days=290)
    assert coordinator.ca_certificate.read_bytes() == authority


def test_doctor_misses_nothing_in_a_new_folder_but_its_superlink(coordinator):
    (missing,) = [check for check in doctor.checks(coordinator) if not check.ok]
    assert (missing.name, missing.detail[:11]) == ("superlink", "not running")


def test_doctor_names_an_expired_certificate_and_an_open_key(coordinator):
    past = datetime.now(UTC) - timedelta(days=2)
    certificates.make_server_certificate(coordinator.folder, coordinator.addresses, 1, not_before=past)
    coordinator.ca_key.chmod(0o644)
    coordinator.connection_file.write_text("")
    done = deploy("doctor", coordinator.folder)
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["certificate", "key", "connection", "superlink"]


def test_doctor_names_an_address_that_the_certificate_lacks(coordinator):
    certificates.make_server_certificate(coordinator.folder, ["127.0.0.1"], 30)
    check, *_ = [check for check in doctor.checks(coordinator) if not check.ok]
    assert "not valid for fl.example.org" in check.detail


def test_certificate_near_its_end_is_warned_of(coordinator):
    assert not superlink.expiry_warning(coordinator)
    certificates.make_server_certificate(coordinator.folder, coordinator.addresses, 13)
    assert "run `renew`" in superlink.expiry_warning(coordinator)


def test_taken_port_is_said_before_anything_starts(coordinator):
    with socket.create_server(("127.0.0.1", coordinator.port)):
        done = deploy("start", coordinator.folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port = 127.0.0.1:{coordinator.port}: cannot listen there" in done.stderr


def test_superlink_is_not_started_with_an_expired_certificate(coordinator):
    past = datetime.now(UTC) - timedelta(days=2)
    certificates.make_server_certificate(coordinator.folder, coordinator.addresses, 1, not_before=past)
    with pytest.raises(InputError, match="has expired; run `renew`"):
        superlink.start(coordinator, print)


def test_node_is_not_kept_when_the_superlink_does_not_answer(coordinator, public_key):
    with pytest.raises(FlowerError, match="flwr supernode: Connection to the SuperLink is unavailable"):
        registration.register(coordinator, 0, public_key)
    assert not list(coordinator.nodes.iterdir())


def test_one_key_for_one_partition_id(coordinator, public_key, tmp_path):
    (coordinator.nodes / "0.pub").write_bytes(public_key.read_bytes())
    with pytest.raises(InputError, match="registered for partition id 0"):
        registration.register(coordinator, 1, public_key)
    keys.make_key_pair(tmp_path / "other.key")
    with pytest.raises(InputError, match="registered with another key"):
        registration.register(coordinator, 0, tmp_path / "other.key.pub")
    with pytest.raises(InputError, match="must be >= 0"):
        registration.register(coordinator, -1, public_key)
    assert [file.name for file in coordinator.nodes.iterdir()] == ["0.pub"]


def test_run_gets_a_folder_the_keys_of_the_nodes_and_checked_values(coordinator):
    values = runs.run_values(coordinator, ["rounds=3", "model=all-MiniLM-L6-v2", "client_sizes=[3, 4]"])
    assert values["node_keys"] == str(coordinator.nodes)
    assert Path(values["out"]).parent == coordinator.runs
    assert (values["rounds"], values["client_sizes"]) == (3, "3,4")
    assert values["engine"] == "flower"


def test_paths_of_a_run_become_absolute(coordinator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/anna")
    (tmp_path / "test.csv").write_text("text,label\n")
    values = runs.run_values(coordinator, ["out=~/runs/1", "ledger=own.sqlite", "test_data=test.csv"])
    assert [values[key] for key in ("out", "ledger", "test_data")] == [
        "/home/anna/runs/1",
        str(tmp_path / "own.sqlite"),
        str(tmp_path / "test.csv"),
    ]


def test_resumed_run_has_the_configuration_that_it_began_with(coordinator, tmp_path):
    began = runs.run_values(coordinator, [f"out={tmp_path / 'run'}", "rounds=7", "target_epsilon=2"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(parse(began)))
    for place in ("run", "run/checkpoint/round-0003"):
        values = runs.run_values(coordinator, [f"resume={tmp_path / place}"])
        assert values == began | {"resume": str(tmp_path / place)}


def test_wrong_run_configuration_starts_nothing(coordinator):
    done = deploy("run", coordinator.folder, "-c", "rouns=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: rouns: unknown configuration key; did you mean rounds?\n"


@pytest.mark.parametrize("command", ["start", "run", "renew", "doctor"])
def test_folder_that_was_never_made_is_said_in_one_line(tmp_path, command):
    done = deploy(command, tmp_path)
    assert done.returncode == 2
    assert "make the folder with `init` first" in done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_file_with_a_wrong_key_is_named(coordinator):
    (coordinator.folder / "coordinator.toml").write_text('addresses = ["h.org"]\nprot = 9093\n')
    with pytest.raises(InputError, match=r"coordinator\.toml: prot = 9093: "):
        Coordinator.read(coordinator.folder)
