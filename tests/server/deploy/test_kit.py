"""A coordinator's folder is made whole or not at all, and its command lines say in one line what is wrong."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fedpriv.adapters import model_digest
from fedpriv.config import parse, to_toml
from fedpriv.deployment import approvals, joining, keys
from fedpriv.deployment.checks import check_tls
from fedpriv.errors import FlowerError, InputError
from server.deploy import certificates, folder, membership, runs, superlink
from server.deploy.__main__ import app
from server.deploy.folder import Coordinator
from simulations.sites import free_port, run_in_process
from tests.deployment.tls_server import serving

ROOT = Path(__file__).resolve().parents[3]
PASSPHRASE = "correct horse battery"


def certificate(coordinator: Coordinator, hosts: Sequence[str], days: int, **options: Any) -> None:
    certificates.make_server_certificate(coordinator.folder, hosts, days, passphrase=PASSPHRASE, **options)


def admit(coordinator: Coordinator, *files: Path, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`admit`, with the fingerprints that institutions read out."""
    lines = [tomllib.loads(file.read_text())["vault_key"] for file in files]
    told = [f"--fingerprint={keys.fingerprint(line)}" for line in lines]
    return deploy("admit", coordinator.folder, *files, *told, *options)


def deploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(app, "fedpriv coordinator", *arguments)


@pytest.fixture
def coordinator(tmp_path):
    return folder.make(
        tmp_path / "co", addresses=["127.0.0.1", "fl.example.org"], port=free_port(), days=30, passphrase=PASSPHRASE
    )


@pytest.fixture
def make_keys(tmp_path):
    """Makes a node's two public lines; the private keys are NAME-node and NAME-vault."""

    def make_keys(name: str) -> tuple[str, str]:
        for kind in ("node", "vault"):
            keys.make_key_pair(tmp_path / f"{name}-{kind}", keys.NODE if kind == "node" else keys.VAULT)
        return keys.public_line(tmp_path / f"{name}-node"), keys.public_line(tmp_path / f"{name}-vault")

    return make_keys


@pytest.fixture
def superlink_of(monkeypatch):
    """What `flwr` is asked, of a SuperLink that gives ids from 1 on, and never takes a key again."""
    asked: list[list[str]] = []
    nodes: dict[str, tuple[str, str]] = {}  # {id: (key, status)}

    def flwr(_home: Path, arguments: list[str], *, folder: Path) -> dict[str, Any]:
        _, command, what = arguments[:3]
        if command == "list":
            return {"nodes": [{"node-id": id_, "status": status} for id_, (_, status) in nodes.items()]}
        if command == "unregister":
            if nodes.get(what, ("", "unregistered"))[1] == "unregistered":
                raise FlowerError(f"Node {what} not found for flwr_aid=.")
            nodes[what] = (nodes[what][0], "unregistered")
            asked.append(arguments[:3])
            return {}
        key = Path(what).read_text()
        if key in [known for known, _ in nodes.values()]:
            raise FlowerError("Public key already in use")
        nodes[str(len(nodes) + 1)] = (key, "registered")
        asked.append(arguments[:2])
        return {"node-id": str(len(nodes))}

    monkeypatch.setattr(membership, "flwr", flwr)
    return asked


def test_init_makes_what_nodes_and_flower_need(tmp_path):
    addresses = ["--address", "fl.example.org", "--address", "10.0.0.5", "--port", "9443"]
    command = [sys.executable, "-m", "server.deploy", "init", tmp_path / "co", *addresses]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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
    ("options", "message"),
    [
        (["--address", "fl.example.org:9093"], "address = 'fl.example.org:9093'"),
        (["--address", "h.org", "--port", "0"], "port = 0"),
        (["--address", "h.org", "--days", "0"], "days = 0"),
        (["--address", "h.org", "-c", "rouns=3"], "rouns: unknown configuration key"),
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
        folder.make(tmp_path / "co", addresses=["h.org"], port=9093, days=30, passphrase=PASSPHRASE)
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


@pytest.fixture
def passphrase_file(tmp_path):
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\n")
    return file


def test_renewed_certificate_is_of_the_same_authority(coordinator, passphrase_file, tmp_path):
    authority = coordinator.ca_certificate.read_bytes()
    offline = coordinator.ca_key.rename(tmp_path / "stick")
    assert "kept elsewhere" in deploy("doctor", coordinator.folder).stdout
    options = ["--days", 300, "--ca-key", offline, "--ca-passphrase-file", passphrase_file]
    assert deploy("renew", coordinator.folder, *options).returncode == 0
    assert certificates.valid_until(coordinator.server_certificate) > datetime.now(UTC) + timedelta(days=290)
    assert coordinator.ca_certificate.read_bytes() == authority


def test_authority_signs_nothing_without_its_passphrase(coordinator, passphrase_file):
    before = coordinator.server_certificate.read_bytes()
    done = deploy("renew", coordinator.folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--ca-passphrase-file: is required without a terminal" in done.stderr
    passphrase_file.write_text("another passphrase")
    done = deploy("renew", coordinator.folder, "--ca-passphrase-file", passphrase_file)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "with this passphrase" in done.stderr
    passphrase_file.write_text("short\n")
    assert "needs 12 characters" in deploy("renew", coordinator.folder, "--ca-passphrase-file", passphrase_file).stderr
    assert coordinator.server_certificate.read_bytes() == before


def test_key_of_an_earlier_version_is_encrypted_by_one_command(coordinator, passphrase_file):
    certificate = coordinator.ca_certificate.read_bytes()
    plain = load_pem_private_key(coordinator.ca_key.read_bytes(), PASSPHRASE.encode())
    coordinator.ca_key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    coordinator.approved.unlink()
    (failed, _) = [check for check in superlink.checks(coordinator) if not check.ok]
    assert (failed.name, "run `encrypt-key" in failed.detail) == ("ca.key", True)
    with pytest.raises(InputError, match="the code of a run could read it"):
        superlink.start(coordinator, print)
    before = coordinator.ca_key.read_bytes()
    with pytest.raises(BrokenPipeError):  # a passphrase that nobody was told would lock the key for ever
        certificates.encrypt_key(coordinator.folder, PASSPHRASE, Mock(side_effect=BrokenPipeError))
    assert coordinator.ca_key.read_bytes() == before
    assert deploy("encrypt-key", coordinator.folder, "--ca-passphrase-file", passphrase_file).returncode == 0
    assert b"ENCRYPTED" in coordinator.ca_key.read_bytes()
    assert coordinator.ca_key.stat().st_mode & 0o777 == 0o600
    assert certificate == coordinator.ca_certificate.read_bytes()
    assert deploy("renew", coordinator.folder, "--ca-passphrase-file", passphrase_file).returncode == 0
    again = deploy("encrypt-key", coordinator.folder)
    assert ("is encrypted already" in again.stderr, again.stdout) == (True, "")


def test_doctor_misses_nothing_in_a_new_folder_but_its_superlink(coordinator):
    (missing,) = [check for check in superlink.checks(coordinator) if not check.ok]
    assert (missing.name, missing.detail[:11]) == ("superlink", "not running")


def test_doctor_names_an_expired_certificate_and_an_open_key(coordinator):
    past = datetime.now(UTC) - timedelta(days=2)
    certificate(coordinator, coordinator.addresses, 1, not_before=past)
    coordinator.server_key.chmod(0o644)
    done = deploy("doctor", coordinator.folder)
    assert done.returncode == 1
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["certificate", "key", "superlink"]


def test_doctor_names_an_address_that_the_certificate_lacks(coordinator):
    certificate(coordinator, ["127.0.0.1"], 30)
    check, *_ = [check for check in superlink.checks(coordinator) if not check.ok]
    assert "not valid for fl.example.org" in check.detail


def test_certificate_near_its_end_is_warned_of(coordinator):
    assert not superlink.expiry_warning(coordinator)
    certificate(coordinator, coordinator.addresses, 13)
    assert "run `renew`" in superlink.expiry_warning(coordinator)


def test_taken_port_is_said_before_anything_starts(coordinator):
    with socket.create_server(("127.0.0.1", coordinator.port)):
        done = deploy("start", coordinator.folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port = 127.0.0.1:{coordinator.port}: cannot listen there" in done.stderr


def test_superlink_is_not_started_with_an_expired_certificate(coordinator):
    past = datetime.now(UTC) - timedelta(days=2)
    certificate(coordinator, coordinator.addresses, 1, not_before=past)
    with pytest.raises(InputError, match="has expired; run `renew`"):
        superlink.start(coordinator, print)


def test_node_is_not_kept_when_the_superlink_does_not_answer(coordinator, make_keys):
    with pytest.raises(FlowerError, match="flwr supernode: Connection to the SuperLink is unavailable"):
        membership.register(coordinator, 0, *make_keys("clinic"))
    assert not [*coordinator.nodes.iterdir(), *coordinator.vaults.iterdir()]


def test_one_pair_of_keys_for_one_partition_id(coordinator, superlink_of, make_keys):
    (node, vault), (new_node, new_vault) = make_keys("clinic"), make_keys("other")
    assert membership.register(coordinator, 0, node, vault)
    assert not membership.register(coordinator, 0, node, vault)
    for pair in ((node, new_vault), (new_node, vault)):
        with pytest.raises(InputError, match="registered for partition id 0"):
            membership.register(coordinator, 1, *pair)
        with pytest.raises(InputError, match="registered with another "):
            membership.register(coordinator, 0, *pair)
    assert sorted(file.name for file in coordinator.nodes.iterdir()) == ["0.id", "0.pub"]
    assert [file.name for file in coordinator.vaults.iterdir()] == ["0.pub"]


def test_an_exchanged_key_ends_and_what_the_vaults_old_one_signed_still_tells(coordinator, superlink_of, make_keys):
    (node, vault), (new_node, new_vault) = make_keys("clinic"), make_keys("new")
    membership.register(coordinator, 0, node, vault)
    assert membership.register(coordinator, 0, new_node, vault, replace_old=True)
    assert superlink_of[-1] == ["supernode", "unregister", "1"]
    assert membership.register(coordinator, 0, new_node, new_vault, replace_old=True)
    assert len(superlink_of) == 3
    assert (coordinator.nodes / "0.pub").read_text() == f"{new_node}\n"
    assert (coordinator.vaults / "0.pub").read_text() == f"{new_vault}\n"
    assert (coordinator.vaults / "0.earlier").read_text() == f"{vault}\n"


def test_a_node_that_was_admitted_by_one_key_gets_its_second(coordinator, superlink_of, make_keys):
    node, vault = make_keys("clinic")
    shutil.rmtree(coordinator.vaults)
    (coordinator.nodes / "0.pub").write_text(f"{node}\n")
    (failed,) = [check.detail for check in superlink.checks(coordinator) if check.name == "nodes"]
    assert "partitions 0: have no key of their vaults; `admit` them again" in failed
    assert membership.register(coordinator, 0, node, vault)
    assert (coordinator.vaults / "0.earlier").read_text() == f"{node}\n"
    new_node, _ = make_keys("new")
    (coordinator.nodes / "0.id").unlink()
    with pytest.raises(InputError, match=r"0\.id: is missing, since an earlier version registered this node"):
        membership.register(coordinator, 0, new_node, vault, replace_old=True)


@pytest.fixture
def apply(tmp_path, make_keys):
    """Makes an institution's answer to an invitation, and returns its file."""

    def apply(name: str, client: int, **changes: Any) -> Path:
        node, vault = make_keys(name)
        values = {"name": name, "partition_id": client, "node_key": node, "vault_key": vault}
        made = joining.made(joining.Application, **values).signed(tmp_path / f"{name}-vault")
        path = tmp_path / f"{name}.toml"
        path.write_text(joining.text(replace(made, **changes), "an application"))
        return path

    return apply


@pytest.fixture
def planned(tmp_path, tiny_bert):
    """A coordinator that plans a run with the tiny BERT."""
    values = {"model": str(tiny_bert), "data": "on-nodes", "labels": ["a", "b"], "rounds": 7, "test_data": "/own/t.csv"}
    return folder.make(
        tmp_path / "co", addresses=["h.org"], port=free_port(), days=30, passphrase=PASSPHRASE, planned=values
    )


def test_an_invitation_holds_what_an_institution_needs_and_nothing_of_the_coordinators_machine(planned, tiny_bert):
    done = deploy("invite", planned.folder, "St. Anna", "St. Bruno")
    assert done.returncode == 0, done.stderr
    first, second = membership.invited(planned).values()
    assert [(each.name, each.partition_id) for each in (first, second)] == [("St. Anna", 0), ("St. Bruno", 1)]
    assert (first.superlink, first.ca) == (planned.address, planned.ca_certificate.read_text())
    assert first.run == {"model": str(tiny_bert), "data": "on-nodes", "labels": ["a", "b"], "rounds": 7}
    assert (first.model, first.bundle) == (model_digest(tiny_bert), approvals.bundle_digest(ROOT))
    assert f"{planned.invitations / '0.toml'}, fingerprint {first.fingerprint}" in done.stdout
    again = membership.invite(planned, ["St. Clara", " St.  Anna", "St. Clara"])
    assert [(each.partition_id, each.fingerprint == first.fingerprint) for each in again.values()] == [
        (2, False),
        (0, True),
    ]


def test_nobody_is_invited_by_a_name_that_moves_a_cursor(coordinator):
    done = deploy("invite", coordinator.folder, "St. Anna", "\x1b[2J")
    assert (done.returncode, done.stderr) == (2, "error: name = '\\x1b[2J': must hold no control characters\n")
    assert not list(coordinator.invitations.iterdir())


def test_when_all_are_admitted_the_roster_has_their_keys(coordinator, superlink_of, apply):
    membership.invite(coordinator, ["anna", "bruno"])
    anna, bruno = apply("anna", 0), apply("bruno", 1)
    done = admit(coordinator, anna)
    own = joining.read(joining.Application, anna).vault_key
    assert f"anna is admitted: vault key {keys.fingerprint(own)}\nnot yet admitted: bruno" in done.stdout
    assert not coordinator.roster.exists()
    done = admit(coordinator, anna, bruno)
    assert "anna was admitted before" in done.stdout
    assert f"all 2 are admitted; for sums under masks, send to each: {coordinator.roster}" in done.stdout
    roster = joining.read(joining.Roster, coordinator.roster)
    assert [(each.partition_id, each.name) for each in roster.members] == [(0, "anna"), (1, "bruno")]
    assert roster.members[0].vault_key == own


@pytest.mark.parametrize(
    ("name", "id_", "changes", "reason"),
    [
        ("anna", 1, {}, "is of 'anna' for partition 1, which was invited as 'bruno'"),
        ("dora", 5, {}, "partition 5 was not invited"),
        ("anna", 0, {"partition_id": 1}, "was changed since the node made it"),
        ("anna", 0, {"signature": ""}, "was changed since the node made it"),
    ],
)
def test_an_application_that_was_not_asked_for_or_was_changed_admits_nobody(
    coordinator, superlink_of, apply, name, id_, changes, reason
):
    membership.invite(coordinator, ["anna", "bruno"])
    done = admit(coordinator, apply(name, id_, **changes))
    assert (done.returncode, reason in done.stderr) == (2, True)
    assert not superlink_of
    assert not [*coordinator.nodes.iterdir(), *coordinator.vaults.iterdir()]


def test_a_thief_of_the_supernodes_key_applies_in_vain(coordinator, superlink_of, apply, make_keys, tmp_path):
    """The attack: node.key of another, in an application that an institution signed."""
    membership.invite(coordinator, ["anna"])
    stolen, _ = make_keys("stolen")
    done = admit(coordinator, apply("anna", 0, node_key=stolen))
    assert "was changed since the node made it" in done.stderr
    assert not superlink_of


def test_nobody_is_admitted_whose_fingerprint_was_not_compared(coordinator, superlink_of, apply):
    membership.invite(coordinator, ["anna", "bruno"])
    anna, bruno = apply("anna", 0), apply("bruno", 1)
    told = keys.fingerprint(joining.read(joining.Application, anna).vault_key)
    done = deploy("admit", coordinator.folder, anna, bruno, "--fingerprint", told)
    assert (done.returncode, "--fingerprint: let bruno read it to you" in done.stderr) == (2, True)
    assert not superlink_of


@pytest.mark.parametrize("exchanged", ["node", "vault"])
def test_an_old_application_brings_no_key_back(coordinator, superlink_of, apply, tmp_path, make_keys, exchanged):
    """The attack: the application of before an exchange, whose vault's signature and fingerprint are right."""
    membership.invite(coordinator, ["anna"])
    old = apply("anna", 0)
    assert admit(coordinator, old).returncode == 0
    new_node, new_vault = make_keys("new")
    was = joining.read(joining.Application, old)
    key = tmp_path / ("anna-vault" if exchanged == "node" else "new-vault")
    changed = {"node_key": new_node} if exchanged == "node" else {"vault_key": new_vault}
    file = tmp_path / "new.toml"
    file.write_text(joining.text(replace(was, **changed).signed(key), "an application"))
    assert admit(coordinator, file, options=["--replace"]).returncode == 0
    before = {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()}
    done = admit(coordinator, old, options=["--replace"])
    assert (done.returncode, "was exchanged for a newer one" in done.stderr) == (2, True)
    assert before == {path: path.read_bytes() for path in coordinator.folder.rglob("*") if path.is_file()}
    assert "was admitted before" in admit(coordinator, file).stdout


@pytest.mark.parametrize("place", range(6))
def test_a_full_disk_at_any_write_of_an_exchange_is_made_good_by_repeating_it(
    coordinator, superlink_of, make_keys, monkeypatch, place
):
    (node, vault), (new_node, new_vault) = make_keys("clinic"), make_keys("new")
    membership.register(coordinator, 0, node, vault)
    writes = iter(range(100))

    def full(write):
        def wrapped(*arguments, **options):
            if next(writes) == place:
                raise OSError(28, "No space left on device")
            return write(*arguments, **options)

        return wrapped

    with monkeypatch.context() as broken:
        broken.setattr(membership, "replace_file", full(membership.replace_file))
        broken.setattr(membership.keys, "add_line", full(membership.keys.add_line))
        try:
            membership.register(coordinator, 0, new_node, new_vault, replace_old=True)
        except OSError:
            pass
        else:
            assert place == 5, "there are five writes"
    membership.register(coordinator, 0, new_node, new_vault, replace_old=True)
    assert (coordinator.nodes / "0.id").read_text() == "2\n"
    assert superlink_of.count(["supernode", "unregister", "1"]) == 1
    assert keys.read_lines(coordinator.vaults / "0.earlier") == (vault,)
    assert keys.read_lines(coordinator.nodes / "0.earlier") == (node,)


def test_who_leaves_is_out_for_good_and_what_it_signed_still_tells(coordinator, superlink_of, apply):
    membership.invite(coordinator, ["anna", "bruno"])
    files = [apply("anna", 0), apply("bruno", 1)]
    admit(coordinator, *files)
    done = deploy("unregister", coordinator.folder, "bruno")
    assert "bruno, partition 1, is out" in done.stdout
    assert superlink_of[-1] == ["supernode", "unregister", "2"]
    line = joining.read(joining.Application, files[1]).vault_key
    assert keys.read_lines(coordinator.vaults / "1.earlier") == (line,)
    assert [member.name for member in joining.read(joining.Roster, coordinator.roster).members] == ["anna"]
    assert coordinator.registered(keys.VAULT).keys() == coordinator.registered().keys() == {0}
    done = admit(coordinator, files[1])
    assert "partition 1 was not invited" in done.stderr
    (invitation,) = membership.invite(coordinator, ["dora"]).values()
    assert invitation.partition_id == 2
    done = deploy("unregister", coordinator.folder, "bruno")
    assert (done.returncode, "NAME = 'bruno': is none of anna, dora" in done.stderr) == (2, True)


def test_a_node_that_flower_has_forgotten_can_leave(coordinator, superlink_of, apply, monkeypatch):
    """As after a crash between two of the steps, or a lost state.db."""
    membership.invite(coordinator, ["anna"])
    admit(coordinator, apply("anna", 0))
    refuse = Mock(side_effect=FlowerError("flwr supernode: Node 1 not found for flwr_aid=."))
    monkeypatch.setattr(membership, "flwr", refuse)
    assert deploy("unregister", coordinator.folder, "anna").returncode == 0
    assert not coordinator.registered()


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
    planned.plan.write_text("rouns = 3\n")
    with pytest.raises(InputError, match="rouns: unknown configuration key"):
        runs.run_values(planned, [])


def test_run_gets_a_folder_the_keys_of_the_nodes_and_checked_values(coordinator):
    values = runs.run_values(coordinator, ["rounds=3", "model=all-MiniLM-L6-v2", "client_sizes=[3, 4]"])
    assert values["node_keys"] == str(coordinator.vaults)
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
    (tmp_path / "run" / "config.toml").write_text(to_toml(parse({**began, "node_keys": str(coordinator.nodes)})))
    assert runs.run_values(coordinator, [f"resume={tmp_path / 'run'}"])["node_keys"] == str(coordinator.vaults)


def test_wrong_run_configuration_starts_nothing(coordinator):
    done = deploy("run", coordinator.folder, "-c", "rouns=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: rouns: unknown configuration key; did you mean rounds?\n"


def test_run_approves_its_checkout_and_names_what_is_not_committed(coordinator, monkeypatch):
    said = []
    monkeypatch.setattr(runs.approvals, "bundle_digest", lambda _: "a" * 64)
    monkeypatch.setattr(runs.approvals, "note_on", lambda _: "note: 1 bundled files differ")
    monkeypatch.setattr(runs, "_flwr", Mock(side_effect=FlowerError("flwr run: is not there")))
    with pytest.raises(FlowerError):
        runs.run(coordinator, [], said.append)
    assert said == ["note: 1 bundled files differ"]
    assert coordinator.approved.read_text() == f"{'a' * 64}\n"
    coordinator.approved.unlink()
    with pytest.raises(InputError, match="no such file"):  # `start` makes it, as the user whose file it is to be
        runs.run(coordinator, [], said.append)
    assert not coordinator.approved.exists()


@pytest.mark.parametrize(
    ("status", "summary", "completed"),
    [
        ("finished:completed", {"stopped_early": None}, True),
        ("finished:completed", {"stopped_early": "all clients have retired"}, False),
        ("finished:failed", {"stopped_early": None}, False),
        ("finished:failed", None, False),
    ],
)
def test_a_run_completed_only_if_it_had_all_of_its_rounds(
    coordinator, tmp_path, monkeypatch, status, summary, completed
):
    said, folder = [], tmp_path / "run"
    folder.mkdir()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(runs, "_submit", lambda *_: "7")
    monkeypatch.setattr(runs, "_follow", lambda *_: None)
    monkeypatch.setattr(runs, "_end", lambda *_: (status, ""))
    assert runs.run(coordinator, [f"out={folder}"], said.append) == completed
    early = ["run 7 ended early: all clients have retired"] if summary and summary["stopped_early"] else []
    assert said == [f"run 7 writes {folder}", f"run 7: {status}", *early]


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
