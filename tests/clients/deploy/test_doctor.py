"""`doctor` passes no node that leaves to a coordinator what its operator must decide, and opens no record."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace

import pytest
import tomli_w

from clients.deploy import doctor, separate_users, supernode
from clients.deploy.admission import agreed_text, approve_model
from clients.deploy.folder import Node
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.files import Journal, User
from fedpriv.holder.vault._charging import NodePolicy, RefusedError, registered_data_set
from fedpriv.holder.vault.settings import terms_of
from fedpriv.operate import approvals
from fedpriv.privacy.ledger.head_file import head_path
from fedpriv.privacy.ledger.ledger import Ledger
from simulations.sites import free_port
from tests.cli.command_line import fedpriv
from tests.clients.deploy.conftest import charge, check, kit
from tests.deployment.tls_server import serving
from tests.marks import slow
from tests.vaults import write_records

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
OFFLINE = {"tls", "clock", "door", "admitted"}


@pytest.fixture
def node(make_node, own, tmp_path, tiny_bert) -> Node:
    """A node with records of its own, where all is well but for the coordinator, who is not there."""
    data = write_records(tmp_path / "own.csv", [("a", label) for label in own["labels"]])
    data.chmod(0o600)
    columns = {"text_column": "note", "label_column": "department"}
    node = make_node(**(own | columns | {"data": data}), superlink=f"127.0.0.1:{free_port()}")
    approve_model(node.vault, str(shutil.copytree(tiny_bert, tmp_path / "model")))
    approvals.approve(node.approved, "a" * 64)
    return node


def failed(node: Node) -> dict[str, str]:
    """The checks that fail, besides those that need a coordinator."""
    found = {check.name: check.detail for check in doctor.checks(Node.read(node.folder)) if not check.ok}
    return {name: detail for name, detail in found.items() if name not in OFFLINE}


def changed(node: Node, **values: object) -> None:
    """Write other values into the node's settings; None takes a key out of them."""
    file = node.folder / "vault.toml"
    merged = tomllib.loads(file.read_text()) | values
    file.write_text(tomli_w.dumps({key: value for key, value in merged.items() if value is not None}))


def test_settings_that_the_registered_data_set_does_not_have_or_allow_fail_until_the_advice_is_followed(node):
    with Ledger(node.vault.ledger) as ledger:
        known = ledger.data_set()
    changed(node, delta=1e-9)
    assert f"delta = 1e-09: {node.vault.ledger} has registered" in failed(node)["registered"]
    vault = Node.read(node.folder).vault
    with pytest.raises(RefusedError, match="delta: is not what this node has registered"):
        registered_data_set(NodePolicy(ledger=vault.ledger, delta=vault.delta), "1", None)
    changed(node, delta=known.delta, budget_epsilon=0.01)
    told = failed(node)
    assert told.keys() == {"enforced"}
    assert "budget_epsilon = 0.01: a Renyi filter of order" in told["enforced"]
    changed(node, budget_epsilon=float(told["enforced"].rpartition("set at least ")[2]))
    assert failed(node) == {}


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("budget", lambda node: changed(node, budget_epsilon=None), "budget_epsilon: required"),
        ("columns", lambda node: changed(node, prompt_column="note"), "response_column: required"),
        ("labels", lambda node: changed(node, labels=None), "labels: required"),
        ("models", lambda node: node.vault.models.write_text(""), "run `approve-model`"),
        ("models", lambda node: (node.folder.parent / "model" / "vocab.txt").write_text("more"), "its files changed"),
        pytest.param("decisions", lambda node: os.chown(node.approved, 1, 1), "run chown 0 /", marks=needs_root),
        ("registered", lambda node: [each.unlink() for each in node.folder.glob("ledger.sqlite*")], "no data set"),
        ("data", lambda node: node.vault.data.unlink(), "no such file"),
        ("files", lambda node: node.vault.data.chmod(0o604), "own.csv: mode 604 lets everybody in; chmod 600 /"),
        ("files", lambda node: node.vault.ledger.chmod(0o604), "ledger.sqlite: mode 604 lets everybody in; chmod 600"),
        ("node.key", lambda node: node.key.chmod(0o640), ""),
        ("vault.key", lambda node: node.vault.key.chmod(0o640), ""),
    ],
)
def test_what_the_operator_left_open_fails_by_name(node, name: str, spoil: Callable[[Node], object], said: str):
    spoil(node)
    assert said in failed(node)[name]


def test_a_node_that_decided_everything_passes_and_one_of_the_corpus_needs_code_alone(node, make_node):
    assert set(failed(make_node("corpus"))) == {"approved"}
    assert failed(node) == {}
    node.vault.data.write_bytes(b"\xff\0 no table at all")
    assert failed(node) == {}, "what the file holds is not looked at"


def test_a_coordinator_whose_address_answers_strangers(make_node, server):
    with serving(server) as port:
        node = make_node(superlink=f"127.0.0.1:{port}")
        found = {check.name: check for check in doctor.checks(node)}
    assert found["tls"].ok
    assert (found["door"].ok, "OPEN TO STRANGERS: register, run, list" in found["door"].detail) == (False, True)


@pytest.mark.parametrize("counted", [False, True])
def test_a_restored_ledger_is_noticed_and_recovered(node, tmp_path, counted):
    """By what the folder keeps or, where all of it was restored, by the counter file."""
    counter = tmp_path / "counter"
    if counted:
        assert "counter_file: the settings name none" in kit("begin-counter", node.folder, code=2)
        changed(node, counter_file=str(counter))
        node = Node.read(node.folder)
        assert "is missing; put it back, or begin one, as `fedpriv node begin-counter` does" in failed(node)["newest"]
        kit("begin-counter", node.folder)
        again = kit("begin-counter", node.folder, code=2)
        assert f"counter_file = {counter}: exists; a new one would forget" in again
    charge(node, 1)
    backup = {path: path.read_bytes() for path in (node.vault.ledger, head_path(node.vault.ledger))}
    charge(node, 2)
    assert failed(node) == {}
    for path, content in backup.items():
        path.write_bytes(content)
    if counted:
        node.vault.receipts.unlink()
    said = failed(node)["newest"]
    assert "this node has signed charge 2" in said
    assert f"`fedpriv ledger recover {node.vault.ledger} --from" in said
    kept = counter if counted else node.vault.receipts
    fedpriv("ledger", "recover", node.vault.ledger, "--from", kept, "--reason", "a backup of 3 May")
    assert failed(node) == {}
    assert check(node, "newest").detail.startswith("2 charges, none is known that the ledger lacks; RECOVERED on")
    charge(node, 3)


def test_a_closed_node_stays_closed_until_it_is_opened(node):
    node.vault.closed.write_text("its child process was killed\n")
    assert "its child process was killed" in failed(node)["open"]
    assert "the node had closed: its child process was killed" in kit("reopen", node.folder)
    assert failed(node) == {}
    with pytest.raises(InputError, match="the node is open"):
        doctor.reopen(node.vault)


def test_a_node_that_runs_needs_no_free_port(node, monkeypatch):
    """Another program there, or the SuperNode of another node, is still in its way."""
    with socket.create_server(("127.0.0.1", node.port)):
        assert "stop the program that uses it" in failed(node)["port"]
        vault, found = doctor.health(node)
        assert (vault.ok, found.ok, "another program listens" in found.detail) == (False, False, True)
        other = replace(node, vault=replace(node.vault, folder=node.folder.parent))
        for runs, expected in ((other, {"port"}), (node, set())):
            command = ["sleep", *separate_users.program(runs)[1:]]  # as the SuperNode's, but for its program
            code = "import sys, time; print(flush=True); time.sleep(60)"
            with subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE) as process:
                process.stdout.readline()
                assert set(failed(node)) == expected
                process.kill()


def test_what_proc_hides_is_not_taken_for_another_program(node, monkeypatch, tmp_path):
    """With `hidepid`, the processes of the SuperNode's own user are not seen, and the vault says that the node runs."""
    monkeypatch.setattr(separate_users, "_PROC", tmp_path)
    monkeypatch.setattr(separate_users, "user_ids", lambda node: {os.geteuid(), 65534})
    with socket.create_server(("127.0.0.1", node.port)):
        assert "stop the program that uses it" in failed(node)["port"]
        with socket.socket(socket.AF_UNIX) as vault:
            vault.bind(str(node.vault.socket))
            vault.listen()
            assert failed(node) == {}
            assert [check.ok for check in doctor.health(node)] == [True, True]


@pytest.mark.parametrize("closed", [".", "site", "site/node/ca.crt"])
def test_a_way_closed_to_the_supernodes_user_fails_until_the_advice_is_taken(node, tmp_path, monkeypatch, closed):
    """A home of mode 700, for instance, is passed by its owner alone."""
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o711)
    (tmp_path / "site").mkdir()
    moved = node.folder.rename(tmp_path / "site" / "node")
    node = Node.read(moved)
    changed(node, client_user="nobody")
    path = tmp_path / closed
    path.chmod(0o600 if path.is_file() else 0o700)
    said = failed(node)["client_user"]
    assert str(path.resolve()) in said
    subprocess.run(said.partition("; run ")[2].partition(", or ")[0], shell=True, check=True)
    assert "client_user" not in failed(node)


def test_the_device_the_runs_that_are_agreed_to_the_one_that_waits_and_the_time_of_replies_are_told(node):
    changed(node, device="cuda:0")
    assert check(node, "device").detail == "cuda:0, with a pass of its own for each record"
    assert check(node, "runs").detail == "any that policy.toml allows"
    assert check(node, "replies").detail == "leave when measurements say; no run has asked yet"
    run = terms_of(parse({"purpose": "triage", "rounds": 20}))
    node.vault.agreed.write_text(agreed_text([run]))
    node.vault.waiting.write_text(json.dumps(run | {"rounds": 30}))
    Journal(node.vault.events).write("asked", planned=20, affordable=20, reply_seconds=5793.0)
    waits = "one waits (rounds = 30, agreed was 20): run `approve-run`, or delete"
    assert check(node, "runs").detail == f"agreed to: triage, 20 rounds; others ask; {waits} {node.vault.waiting}"
    assert check(node, "replies").detail.endswith("at most 5,793.0 s after their charge")


@pytest.mark.parametrize("umask", [0o000, 0o077, *slow(0o002, 0o022, 0o027)])
def test_whatever_the_umask_others_neither_read_nor_change_what_decides(make_node, umask):
    before = os.umask(umask)
    try:
        node = make_node()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in node.deciding if path.exists()}
    assert len(modes) == 10, "the folder, six files of settings, the bundles, the certificate and the coordinator's key"
    assert modes.pop(node.folder) == 0o700
    public = {node.application, node.ca_certificate, node.vault.coordinator}
    assert modes == {path: 0o644 if path in public else 0o600 for path in modes}
    assert node.flower_home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("which", ["vault.toml", "peers", ".", *slow("policy.toml", "approved-fabs")])
def test_what_others_could_change_starts_no_supernode_of_another_user_until_the_advice_is_taken(node, which):
    node.vault.peers.mkdir()
    path = node.folder / which
    path.chmod(0o777 if path.is_dir() else 0o660)
    said = failed(node)["decisions"]
    assert said == f"{path}: others can change it; run chmod go-w {path}"
    with pytest.raises(InputError, match="others can change it"):
        supernode.prepare(replace(node, vault=replace(node.vault, client_user="nobody")))
    subprocess.run(said.partition("; run ")[2], shell=True, check=True)
    assert failed(node) == {}


def test_a_vaults_key_that_is_missing_or_that_the_supernodes_user_can_read(node, monkeypatch):
    nobody = User("nobody", node.folder.stat().st_uid, 1, ())  # as if the vault's key were its file
    monkeypatch.setattr(separate_users, "user_named", lambda name: nobody)
    named = replace(node, vault=replace(node.vault, client_user="nobody"))
    (said,) = [check.detail for check in separate_users.check_keys(named) if not check.ok]
    assert "vault.key: user nobody can read it" in said
    with pytest.raises(InputError, match="user nobody can read it"):
        supernode.prepare(named)
    node.vault.key.unlink()
    assert f"run `fedpriv node new-key {node.folder}`" in failed(node)["vault.key"]
    with pytest.raises(InputError, match="new-key"):
        supernode.prepare(node)
