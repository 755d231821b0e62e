"""Who is invited and admitted, with keys that people have compared; and who leaves."""

import subprocess
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedpriv.errors import FlowerError, InputError
from fedpriv.learning.adapters import model_digest
from fedpriv.operate import approvals, joining
from fedpriv.privacy.ledger import keys
from server.deploy import folder as coordinator_folder
from server.deploy import membership, superlink
from server.deploy.folder import Coordinator
from tests.server.deploy.conftest import deploy, refused

ROOT = Path(__file__).resolve().parents[3]


def admit(coordinator: Coordinator, *files: Path, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`admit`, with the fingerprints that institutions read out."""
    lines = [tomllib.loads(file.read_text())["vault_key"] for file in files]
    told = [f"--fingerprint={keys.fingerprint(line)}" for line in lines]
    return deploy("admit", coordinator.folder, *files, *told, *options)


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

    def flwr(_home: Path, arguments: Sequence[str], *, folder: Path) -> dict[str, Any]:
        _, command, what = arguments[:3]
        if command == "list":
            return {"nodes": [{"node-id": id_, "status": status} for id_, (_, status) in nodes.items()]}
        if command == "unregister":
            if nodes.get(what, ("", "unregistered"))[1] == "unregistered":
                raise FlowerError(f"Node {what} not found for flwr_aid=.")
            nodes[what] = (nodes[what][0], "unregistered")
            asked.append([*arguments[:3]])
            return {}
        key = Path(what).read_text()
        if key in [known for known, _ in nodes.values()]:
            raise FlowerError("Public key already in use")
        nodes[str(len(nodes) + 1)] = (key, "registered")
        asked.append([*arguments[:2]])
        return {"node-id": str(len(nodes))}

    monkeypatch.setattr(coordinator_folder, "flwr", flwr)
    return asked


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


def test_what_a_crash_has_left_out_is_named_and_made_good(coordinator, superlink_of, make_keys):
    node, vault = make_keys("clinic")
    (coordinator.nodes / "0.pub").write_text(f"{node}\n")
    (failed,) = [check.detail for check in superlink.checks(coordinator) if check.name == "nodes"]
    assert "partitions 0: have no key of their vaults; `admit` them again" in failed
    assert membership.register(coordinator, 0, node, vault)
    new_node, _ = make_keys("new")
    (coordinator.nodes / "0.id").unlink()
    with pytest.raises(InputError, match=r"0\.id: is missing; write Flower's id of this node's old key"):
        membership.register(coordinator, 0, new_node, vault, replace_old=True)


@pytest.fixture
def apply(tmp_path, make_keys):
    """Makes an institution's answer to an invitation, and returns its file."""

    def apply(name: str, client: int, **changes: Any) -> Path:
        node, vault = make_keys(name)
        values = {"name": name, "partition_id": client, "node_key": node, "vault_key": vault}
        made = joining.Application(**values).signed(tmp_path / f"{name}-vault")
        path = tmp_path / f"{name}.toml"
        path.write_text(joining.text(replace(made, **changes), "an application"))
        return path

    return apply


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
    found = [(each.partition_id, each.fingerprint == first.fingerprint) for each in again.values()]
    assert found == [(2, False), (0, True)]


def test_nobody_is_invited_by_a_name_that_moves_a_cursor(coordinator):
    said = refused("invite", coordinator.folder, "St. Anna", "\x1b[2J")
    assert said == "error: name = '\\x1b[2J': must hold no control characters\n"
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
        # The attack: node.key of another, in an application that an institution signed.
        ("anna", 0, {"node_key": "stolen"}, "was changed since the node made it"),
    ],
)
def test_an_application_that_was_not_asked_for_or_was_changed_admits_nobody(
    coordinator, superlink_of, apply, make_keys, name, id_, changes, reason
):
    membership.invite(coordinator, ["anna", "bruno"])
    if "node_key" in changes:
        changes = {"node_key": make_keys("stolen")[0]}
    done = admit(coordinator, apply(name, id_, **changes))
    assert (done.returncode, reason in done.stderr) == (2, True)
    assert not superlink_of
    assert not [*coordinator.nodes.iterdir(), *coordinator.vaults.iterdir()]


def test_nobody_is_admitted_whose_fingerprint_was_not_compared(coordinator, superlink_of, apply):
    membership.invite(coordinator, ["anna", "bruno"])
    anna, bruno = apply("anna", 0), apply("bruno", 1)
    told = keys.fingerprint(joining.read(joining.Application, anna).vault_key)
    said = refused("admit", coordinator.folder, anna, bruno, "--fingerprint", told)
    assert "--fingerprint: let bruno read it to you" in said
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
    # Flower knows one of the keys alone.
    assert superlink_of[1:] == [["supernode", "register"], ["supernode", "unregister", "1"]] * (exchanged == "node")
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

    def full(write, *arguments, **options):
        if next(writes) == place:
            raise OSError(28, "No space left on device")
        return write(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(membership, "replace_file", partial(full, membership.replace_file))
        broken.setattr(membership.keys, "add_line", partial(full, membership.keys.add_line))
        with nullcontext() if place == 5 else pytest.raises(OSError, match="No space"):  # there are five writes
            membership.register(coordinator, 0, new_node, new_vault, replace_old=True)
    membership.register(coordinator, 0, new_node, new_vault, replace_old=True)
    assert (coordinator.nodes / "0.id").read_text() == "2\n"
    assert superlink_of.count(["supernode", "unregister", "1"]) == 1
    for folder, now, earlier in ((coordinator.vaults, new_vault, vault), (coordinator.nodes, new_node, node)):
        assert keys.read_lines(folder / "0.earlier") == (earlier,), "what the old one signed still tells"
        assert (folder / "0.pub").read_text() == f"{now}\n"


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
    assert "NAME = 'bruno': is none of anna, dora" in refused("unregister", coordinator.folder, "bruno")


def test_how_a_node_is_reached_is_what_it_was_admitted_with_last(coordinator, superlink_of, apply):
    membership.invite(coordinator, ["anna", "bruno"])
    files, marker = [apply("anna", 0), apply("bruno", 1)], coordinator.vaults / "1.by-file"
    admit(coordinator, files[0])
    assert "bruno is admitted, by file" in admit(coordinator, files[1], options=["--by-file"]).stdout
    assert marker.read_text() == (coordinator.nodes / "1.id").read_text() == "2\n"
    assert coordinator.registered(keys.VAULT).keys() == {0, 1}
    admit(coordinator, files[1])
    assert [file.name for file in coordinator.vaults.glob("*.by-file")] == []
    admit(coordinator, files[1], options=["--by-file"])
    deploy("unregister", coordinator.folder, "bruno")
    assert not marker.exists()


def test_a_node_that_flower_has_forgotten_can_leave(coordinator, superlink_of, apply, monkeypatch):
    """As after a crash between two of the steps, or a lost state.db."""
    membership.invite(coordinator, ["anna"])
    admit(coordinator, apply("anna", 0))
    forgotten = FlowerError("flwr supernode: Node 1 not found for flwr_aid=.")
    monkeypatch.setattr(coordinator_folder, "flwr", Mock(side_effect=forgotten))
    assert deploy("unregister", coordinator.folder, "anna").returncode == 0
    assert not coordinator.registered()
