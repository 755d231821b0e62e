"""A coordinator's folder is made whole or not at all, its commands say in one line what is wrong, and its unit fits."""

import hashlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import tomllib
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fedpriv.config import parse, to_toml
from fedpriv.errors import FlowerError, InputError
from fedpriv.operate.checks import check_tls, listening
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from server.deploy import certificates, folder, membership, runs, superlink
from server.deploy.folder import Coordinator
from server.deploy.superlink import units
from tests.bundles import bundle
from tests.deployment.tls_server import serving
from tests.server.deploy.conftest import PASSPHRASE, deploy, make, refused


def certificate(coordinator: Coordinator, hosts: Sequence[str], days: int, **options: Any) -> None:
    certificates.make_server_certificate(coordinator.folder, hosts, days, passphrase=PASSPHRASE, **options)


def test_init_makes_what_nodes_and_flower_need(tmp_path):
    addresses = ["--address", "fl.example.org", "--address", "10.0.0.5", "--port", "9443"]
    done = deploy("init", tmp_path / "co", *addresses)
    assert done.returncode == 0, done.stderr
    made = Coordinator.read(tmp_path / "co")
    assert made.address == "fl.example.org:9443"
    assert {"fl.example.org", "10.0.0.5"} <= set(certificates.hosts_of(made.server_certificate))
    assert [made.ca_key.stat().st_mode & 0o777, made.folder.stat().st_mode & 0o777] == [0o600, 0o700]
    assert f"next: fedpriv coordinator invite {made.folder}" in done.stdout
    (told,) = [line for line in done.stdout.splitlines() if "shown this once" in line]
    key = made.ca_key.read_bytes()
    assert load_pem_private_key(key, told.split(": ")[1].encode()).key_size == 384
    with pytest.raises(TypeError, match="Password was not given"):
        load_pem_private_key(key, None)


def test_flwr_is_told_where_the_superlink_of_the_moment_is_and_other_connections_stay(coordinator):
    mine = {"superlink": {"default": "mine", "mine": {"address": "10.0.0.1:9"}}, "other": {"key": 1}}
    coordinator.connection_file.write_text(tomli_w.dumps(mine))
    for port in (1111, 2222):
        coordinator.connect(f"127.0.0.1:{port}")
        own = {"address": f"127.0.0.1:{port}", "root-certificates": str(coordinator.ca_certificate)}
        known = tomllib.loads(coordinator.connection_file.read_text())
        assert known["superlink"] == {**mine["superlink"], "default": "federation", "federation": own}
        assert known["other"] == {"key": 1}
    coordinator.connection_file.write_text("[superlink")
    with pytest.raises(InputError, match="is not valid TOML"):
        coordinator.connect("127.0.0.1:1")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("init", ["--address", "fl.example.org:9093"], "address = 'fl.example.org:9093'"),
        ("init", ["--address", "h.org", "--port", "0"], "port = 0"),
        ("init", ["--address", "h.org", "--days", "0"], "days = 0"),
        ("init", ["--address", "h.org", "-c", "rouns=3"], "rouns: unknown configuration key"),
        *((command, [], "make the folder with `init` first") for command in ("start", "run", "renew", "doctor")),
    ],
)
def test_a_command_writes_nothing_when_something_is_wrong(tmp_path, command, options, message):
    assert message in refused(command, tmp_path / "co", *options)
    assert not list(tmp_path.iterdir())


def test_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "co").mkdir()
    (tmp_path / "co" / "mine").write_text("mine")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        make(tmp_path / "co", "h.org")
    assert [file.name for file in (tmp_path / "co").iterdir()] == ["mine"]


@pytest.mark.parametrize("umask", [0o000, 0o027])
def test_whatever_the_umask_nobody_else_changes_what_the_coordinator_made(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = make(tmp_path / "co", "::1")
    finally:
        os.umask(before)
    assert made.folder.stat().st_mode & 0o777 == 0o700
    assert [path for path in made.folder.rglob("*") if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        *((address, ("127.0.0.1", "127.0.0.1")) for address in ("127.0.0.1", "localhost")),
        ("::1", ("::1", "::1")),
        *((address, ("::", "127.0.0.1")) for address in ("10.0.0.5", "fl.example.org", "2001:DB8::1")),
    ],
)
def test_superlink_of_one_machine_listens_on_loopback_alone_and_others_everywhere(tmp_path, address, hosts):
    made = Coordinator(folder=tmp_path, addresses=(address,))
    assert (made.bind_host, made.local_host) == hosts
    for client in ("127.0.0.1", "::1") if made.bind_host == "::" else ():
        with listening(made.bind_host, 0) as server:
            socket.create_connection((client, server.getsockname()[1]), timeout=5).close()


def test_a_certificate_is_renewed_by_its_authority_with_its_passphrase_alone(coordinator, passphrase_file, tmp_path):
    before, authority = coordinator.server_certificate.read_bytes(), coordinator.ca_certificate.read_bytes()
    assert "--ca-passphrase-file: is required without a terminal" in refused("renew", coordinator.folder)
    for passphrase, said in (("another passphrase", "with this passphrase"), ("short\n", "needs 12 characters")):
        passphrase_file.write_text(passphrase)
        assert said in refused("renew", coordinator.folder, "--ca-passphrase-file", passphrase_file)
    assert coordinator.server_certificate.read_bytes() == before
    passphrase_file.write_text(PASSPHRASE)
    offline = coordinator.ca_key.rename(tmp_path / "stick")
    assert "kept elsewhere" in deploy("doctor", coordinator.folder).stdout
    options = ["--days", 300, "--ca-key", offline, "--ca-passphrase-file", passphrase_file]
    assert deploy("renew", coordinator.folder, *options).returncode == 0
    assert certificates.valid_until(coordinator.server_certificate) > datetime.now(UTC) + timedelta(days=290)
    assert coordinator.ca_certificate.read_bytes() == authority


def failing(coordinator: Coordinator) -> dict[str, str]:
    """{what `doctor` finds wrong: how}."""
    return {check.name: check.detail for check in superlink.checks(coordinator) if not check.ok}


def test_an_authoritys_key_that_is_not_encrypted_stops_the_superlink(coordinator):
    plain = load_pem_private_key(coordinator.ca_key.read_bytes(), PASSPHRASE.encode())
    coordinator.ca_key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert "run `new-authority" in failing(coordinator)["ca.key"]
    with pytest.raises(InputError, match="the code of a run could read it"):
        superlink.start(coordinator, print)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("version = 3\n", r"is version 3; this is fedpriv \S+, which reads 1: "),
        ("version = 1\nprot = 9093\n", "prot = 9093: "),
    ],
)
def test_settings_of_another_version_or_with_a_wrong_key_are_refused_by_name(coordinator, change, said):
    path = coordinator.folder / "coordinator.toml"
    path.write_text(path.read_text().replace("version = 1\n", change))
    with pytest.raises(InputError, match=rf"coordinator\.toml: {said}"):
        Coordinator.read(coordinator.folder)


def test_doctor_misses_nothing_in_a_new_folder_but_its_superlink_and_warns_before_its_certificate_ends(coordinator):
    assert [(name, detail[:11]) for name, detail in failing(coordinator).items()] == [("superlink", "not running")]
    assert not superlink.expiry_warning(coordinator)
    certificate(coordinator, ["127.0.0.1"], 13)
    assert "run `renew`" in superlink.expiry_warning(coordinator)
    assert "not valid for fl.example.org" in failing(coordinator)["certificate"]


def test_an_expired_certificate_and_an_open_key_are_named_and_start_no_superlink(coordinator):
    certificate(coordinator, coordinator.addresses, 1, not_before=datetime.now(UTC) - timedelta(days=2))
    coordinator.server_key.chmod(0o644)
    done = deploy("doctor", coordinator.folder)
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["certificate", "key", "superlink"]
    with pytest.raises(InputError, match="has expired; run `renew`"):
        superlink.start(coordinator, print)


def test_taken_port_is_said_before_anything_starts(coordinator):
    with socket.create_server(("127.0.0.1", coordinator.port)):
        done = deploy("start", coordinator.folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port = 127.0.0.1:{coordinator.port}: cannot listen there" in done.stderr


@pytest.mark.parametrize("left", [10, -1])
@pytest.mark.parametrize("lasts", [True, False])
def test_the_advice_of_doctor_cures_a_certificate_whose_authority_ends(coordinator, passphrase_file, left, lasts):
    """`renew` makes none that outlasts its authority, so it says what does, and changes nothing where it would not."""
    for name in ("ca.crt", "ca.key"):
        (coordinator.folder / name).unlink()
    begin = datetime.now(UTC) - timedelta(days=3650 - left)
    certificates.make_ca(coordinator.folder, 3650, passphrase=PASSPHRASE, not_before=begin)
    certificate(coordinator, coordinator.addresses, 3650 if lasts else 3641 + min(left, 0), not_before=begin)
    given = ["--ca-passphrase-file", passphrase_file]

    def wrong() -> str:
        (line,) = [line for line in deploy("doctor", coordinator.folder).stdout.splitlines() if "certificate" in line]
        return line if line.startswith("FAIL") else ""

    assert "run `new-authority`" in wrong()
    if lasts or left < 0:
        assert "run `new-authority`" in refused("renew", coordinator.folder, *given)
    else:
        renewed = deploy("renew", coordinator.folder, *given)
        assert (renewed.returncode, "note: its authority ends on" in renewed.stdout) == (0, True)
    assert deploy("new-authority", coordinator.folder, *given).returncode == 0
    assert "run `renew`" in wrong()
    assert deploy("renew", coordinator.folder, *given).returncode == 0
    assert not wrong()


def test_an_address_in_another_form_is_the_one_in_the_certificate(tmp_path):
    made = make(tmp_path / "co", "2001:DB8::5", "0:0:0:0:0:0:0:1")
    assert made.addresses == ("2001:db8::5", "::1")
    assert superlink._certificate(made).startswith("for 2001:db8::5, ::1 until")
    with pytest.raises(InputError, match="address = 'fe80::1%eth0': must be a DNS name or an IP address"):
        make(tmp_path / "other", "fe80::1%eth0")


def test_nodes_trust_the_old_authority_and_the_new_until_the_old_is_taken_out(coordinator, passphrase_file):
    old = coordinator.ca_certificate.read_text()

    def trusts(ca: str) -> bool:
        file = coordinator.folder / "trusted.crt"
        file.write_text(ca)
        with serving(coordinator.folder) as port:
            return check_tls("127.0.0.1", port, file).ok

    done = deploy("new-authority", coordinator.folder, "--ca-passphrase-file", passphrase_file)
    assert done.returncode == 0, done.stderr
    both = coordinator.ca_certificate.read_text()
    new = both.removesuffix(old)
    assert [trusts(ca) for ca in (old, both, new)] == [True, True, False]
    (invitation,) = membership.invite(coordinator, ["anna"]).values()
    assert invitation.ca == both
    assert deploy("renew", coordinator.folder, "--ca-passphrase-file", passphrase_file).returncode == 0
    assert [trusts(ca) for ca in (old, both, new)] == [False, True, True]
    assert coordinator.ca_key.stat().st_mode & 0o777 == 0o600


def test_a_run_begins_as_planned_with_all_who_are_registered(planned, tmp_path):
    (planned.nodes / "2.pub").touch()
    values = runs.run_values(planned, ["rounds=3"])
    assert (values["rounds"], values["num_clients"], values["labels"]) == (3, 3, "a,b")
    assert values["test_data"] == "/own/t.csv"
    planned.plan.write_text(planned.plan.read_text() + "secure_aggregation = true\n")
    for client in (0, 3):
        (planned.nodes / f"{client}.pub").touch()
    values = runs.run_values(planned, [])
    assert (values["num_clients"], values["min_clients"]) == (4, 3)  # partition 1 has left
    for client in (4, 5):
        (planned.nodes / f"{client}.pub").touch()
    # One of five may be missing, unless all are needed.
    for number, more in ((4, []), (5, ["colluding_clients=3"]), (3, ["min_clients=3"])):
        assert runs.run_values(planned, more)["min_clients"] == number
    assert runs.run_values(planned, ["secure_aggregation=false"])["min_clients"] == 1
    planned.plan.write_text("")
    # The corpus has five holders, whoever is registered.
    numbers = [runs.run_values(planned, more)["num_clients"] for more in ([], ["partition=iid"], ["num_clients=7"])]
    assert numbers == [5, 6, 7]
    planned.plan.write_text("rouns = 3\n")
    with pytest.raises(InputError, match="rouns: unknown configuration key"):
        runs.run_values(planned, [])


def test_run_gets_a_folder_the_keys_of_the_nodes_checked_values_and_absolute_paths(coordinator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/anna")
    (tmp_path / "test.csv").write_text("text,label\n")
    given = ["rounds=3", "model=all-MiniLM-L6-v2", "client_sizes=[3, 4]"]
    values = runs.run_values(coordinator, given)
    assert values["node_keys"] == str(coordinator.vaults)
    assert Path(values["out"]).parent == coordinator.runs
    assert (values["rounds"], values["client_sizes"], values["engine"]) == (3, "3,4", "flower")
    values = runs.run_values(coordinator, ["out=~/runs/1", "ledger=own.sqlite", "test_data=test.csv"])
    own = ["/home/anna/runs/1", str(tmp_path / "own.sqlite"), str(tmp_path / "test.csv")]
    assert [values[key] for key in ("out", "ledger", "test_data")] == own


def test_resumed_run_has_the_configuration_that_it_began_with(coordinator, tmp_path):
    began = runs.run_values(coordinator, [f"out={tmp_path / 'run'}", "rounds=7", "target_epsilon=2"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(parse(began)))
    for place in ("run", "run/checkpoint/round-0003"):
        values = runs.run_values(coordinator, [f"resume={tmp_path / place}"])
        assert values == began | {"resume": str(tmp_path / place)}


def test_run_approves_its_checkout_and_names_what_is_not_committed(coordinator, monkeypatch):
    said = []
    monkeypatch.setattr(runs.approvals, "bundle_of", lambda _: bundle())
    monkeypatch.setattr(runs.approvals, "note_on", lambda _: "note: 1 bundled files differ")
    monkeypatch.setattr(folder, "flwr", Mock(side_effect=FlowerError("flwr run: is not there")))
    with pytest.raises(FlowerError):
        runs.run(coordinator, [], said.append)
    assert said == ["note: 1 bundled files differ"]
    assert coordinator.approved.read_text() == f"{hashlib.sha256(bundle()).hexdigest()}\n"
    coordinator.approved.unlink()
    with pytest.raises(InputError, match="no such file"):  # `start` makes it, as the user whose file it is to be
        runs.run(coordinator, [], said.append)
    assert not coordinator.approved.exists()


EARLY = "run 7 ended early: all clients have retired"
ABOVE = "run 7: epsilon 2.77 is above target_epsilon = 2 on the local view: rounds 3, 4 were charged again"
SPENT = {"stopped_early": None, "target_epsilon": 2.0, "privacy_view": "local", "epsilon_local_max": 2.77}
SPENT |= {"rounds_charged_again": [3, 4]}


@pytest.mark.parametrize(
    ("status", "summary", "code", "more"),
    [
        ("finished:completed", {"stopped_early": None}, 0, []),
        ("finished:completed", SPENT | {"epsilon_local_max": 2.0}, 0, []),
        ("finished:completed", SPENT, 3, [ABOVE]),
        ("finished:completed", SPENT | {"epsilon_this_run_max": 1.9}, 0, []),
        ("finished:completed", {"stopped_early": "all clients have retired"}, 1, [EARLY]),
        ("finished:failed", {"stopped_early": None}, 1, []),
        ("finished:failed", None, 1, []),
    ],
)
def test_a_run_completed_only_if_it_had_all_of_its_rounds_at_no_more_than_its_target(
    coordinator, tmp_path, monkeypatch, status, summary, code, more
):
    said, folder = [], tmp_path / "run"
    folder.mkdir()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(runs, "_submit", lambda *_: "7")
    monkeypatch.setattr(runs, "_follow", lambda *_: None)
    monkeypatch.setattr(runs, "_end", lambda *_: (status, ""))
    assert runs.run(coordinator, [f"out={folder}"], said.append) == code
    assert said == [f"run 7 writes {folder}", f"run 7: {status}", *more]


def test_a_log_stream_that_is_lost_is_said_and_taken_up_where_it_was(coordinator, monkeypatch, tmp_path):
    """The stream ends twice before the run does, and has grown meanwhile."""
    program = tmp_path / "flwr"
    program.write_text("#!/bin/sh\necho . >> n\nfor line in $(seq $(wc -l < n)); do echo line $line; done\n")
    program.chmod(0o755)
    states = iter(["running", "finished:completed"])
    monkeypatch.setattr(runs, "program_folder", lambda: tmp_path)
    monkeypatch.setattr(runs, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(folder, "flwr", lambda *_, **__: {"runs": [{"status": next(states)}]})
    said = []
    runs._follow(coordinator, "7", said.append)
    lost = f"the log's stream was lost after 1 lines; the run may go on, see {coordinator.log}; once more"
    assert said == ["line 1", lost, "line 2"]


def test_a_backup_of_a_coordinator_in_use_starts_in_its_place(coordinator, tmp_path):
    """Flower's state is copied as a database, whatever its log holds; what is planned to lie elsewhere is in it too."""
    ledger = tmp_path / "ledgers" / "own.sqlite"
    ledger.parent.mkdir()
    with Ledger(ledger) as kept, closing(sqlite3.connect(coordinator.database)) as state:
        kept.register("0", 7, 1e-5)
        state.execute("PRAGMA journal_mode = wal")
        state.execute("CREATE TABLE node (id)")
        state.execute("INSERT INTO node VALUES (1)")
        state.commit()
        coordinator.plan.write_text(f'ledger = "{ledger}"\n')
        (coordinator.runs / "first").mkdir()
        (coordinator.runs / "first" / "rounds.csv").write_text("round\n")
        assert deploy("backup", coordinator.folder, "--out", tmp_path / "copy").returncode == 0
    restored = Coordinator.read(tmp_path / "copy")
    restored.connect("127.0.0.1:9")
    with closing(sqlite3.connect(restored.database)) as state, reading(restored.folder / ledger.name) as db:
        assert state.execute("SELECT id FROM node").fetchall() == [(1,)]
        assert db.data_set(None).num_records == 7
    assert (restored.runs / "first" / "rounds.csv").read_text() == "round\n"
    assert restored.server_key.stat().st_mode & 0o777 == 0o600
    before, since = ({path.name for path in each.folder.iterdir()} for each in (coordinator, restored))
    assert before - since <= {"state.db-wal", "state.db-shm"}, "empty folders too, without which nothing starts"


@pytest.fixture
def odd(tmp_path: Path) -> Coordinator:
    """A coordinator whose folder has what systemd reads as something else in its name."""
    return make(tmp_path / "fed 100% $x", "fl.example.org")


def test_the_superlink_writes_its_own_folder_alone_and_not_its_authority(odd):
    lines = units(odd)[0].text().splitlines()
    folder = str(odd.folder).replace("%", "%%")
    assert [line for line in lines if line.startswith("ReadWritePaths")] == [f'ReadWritePaths="{folder}"']
    assert f'InaccessiblePaths="-{folder}/ca.key"' in lines
    assert {"ProtectSystem=strict", "NoNewPrivileges=yes", "PrivateTmp=yes", "Restart=on-failure"} <= set(lines)
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith(f'"server.deploy" "start" "{folder.replace("$", "$$")}"')


@pytest.mark.parametrize(("port", "capability"), [(443, "CAP_NET_BIND_SERVICE"), (9093, "")])
def test_a_port_of_roots_needs_a_capability_and_a_run_elsewhere_its_folder(tmp_path, port, capability):
    planned = {"data": "on-nodes", "labels": ["a", "b"], "out": str(tmp_path / "disk" / "run")}
    made = make(tmp_path / "fed", "::1", port=port, planned=planned)
    text = units(made)[0].text()
    assert f"\nCapabilityBoundingSet={capability}\nAmbientCapabilities={capability}\n" in text
    assert f'\nReadWritePaths="{tmp_path}"\n' in text
    (tmp_path / "unit.service").write_text(text)
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / "unit.service"], capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(odd, tmp_path):
    (unit,) = units(odd)
    file = tmp_path / f"{unit.name}.service"
    file.write_text(unit.text())
    verify, security = (
        subprocess.run(["systemd-analyze", *options, file], capture_output=True, text=True)
        for options in (["verify", "--man=no"], ["security", "--offline=yes", "--threshold=30"])
    )
    ours = [line for line in verify.stderr.splitlines() if "fedpriv" in line]
    assert (verify.returncode, ours) == (0, []), verify.stderr
    assert security.returncode == 0, security.stdout[-300:]  # an exposure below 3.0 of 10
