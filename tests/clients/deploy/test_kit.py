"""A node's folder is made whole or not at all; its data, its code and its settings are what its operator said."""

import codecs
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
import tomli_w
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args

from clients.deploy import admission, doctor, supernode
from clients.deploy.folder import Node
from fedpriv.errors import FlowerError, InputError
from fedpriv.holder.vault import history
from fedpriv.holder.vault.settings import NodeLimits, agreed_runs, read_models
from fedpriv.learning.adapters import model_digest
from fedpriv.operate import approvals, joining
from fedpriv.privacy.ledger import keys, reader
from server.deploy import certificates
from tests.clients.deploy.conftest import charge, heard, kit
from tests.tiny import LABELS

ROOT = Path(__file__).resolve().parents[3]


def test_init_makes_keys_settings_and_policy(tmp_path, ca, invite):
    said = kit("init", tmp_path / "node", *heard(invite()), "--budget-epsilon", 4)
    node = Node.read(tmp_path / "node")
    vault = node.vault
    assert (vault.partition_id, vault.name, vault.budget_epsilon, vault.data) == (1, "clinic", 4.0, None)
    assert node.ca_certificate.read_bytes() == ca.read_bytes()
    assert NodeLimits.read(vault.policy) == NodeLimits()
    assert read_models(vault.models) == ()
    assert approvals.approved(node.approved) == frozenset()
    for key, kind in ((node.key, keys.NODE), (vault.key, keys.VAULT)):
        assert keys.kind_of(keys.public_line(key)) == kind
        assert key.stat().st_mode & 0o777 == 0o600
    assert keys.fingerprint(keys.public_line(vault.key)) in said
    applied = joining.read(joining.Application, node.application)
    applied.check(node.application)
    assert (applied.name, applied.partition_id, applied.vault_key) == ("clinic", 1, keys.public_line(vault.key))


@pytest.mark.skipif(not shutil.which("localedef"), reason="no other locale")
def test_on_a_machine_of_another_encoding_a_node_is_made_that_others_read(tmp_path, invite):
    name, locale = "Hôpital Saint-Étienne Ω", {"LOCPATH": str(tmp_path), "LC_ALL": "fr_FR", "PYTHONUTF8": "0"}
    subprocess.run(["localedef", "-i", "fr_FR", "-f", "ISO-8859-1", tmp_path / "fr_FR"], check=False, stderr=-3)
    options = ["--approve", *map(str, heard(invite(name=name)))]  # the bundle is built by a program that prints emoji
    command = [sys.executable, "-m", "clients.deploy", "init", tmp_path / "node", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env={**os.environ, **locale}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "invitation of Hôpital Saint-Étienne \\u03a9".encode("latin-1") in done.stdout
    node = Node.read(tmp_path / "node")
    assert (node.vault.name, joining.read(joining.Application, node.application).name) == (name, name)
    assert next(iter(history.read(node.folder))).values.get("name", (None, name))[1] == name


def test_a_byte_order_mark_in_what_an_operator_edits_changes_nothing(make_node):
    node = make_node()
    history.note(node.folder, "init")
    for file in (*node.folder.glob("*.toml"), node.approved):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert Node.read(node.folder) == node
    assert NodeLimits.read(node.vault.policy) == NodeLimits()
    assert (read_models(node.vault.models), approvals.approved(node.approved)) == ((), frozenset())
    joining.read(joining.Application, node.application).check(node.application)
    history.note(node.folder, "found")
    assert {change.file: change.values for change in history.read(node.folder)[6:]}["vault.toml"] == {}


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ({"superlink": "127.0.0.1"}, [], "superlink = '127.0.0.1': must be HOST:PORT"),
        ({"partition_id": -1}, [], "partition_id = -1"),
        ({"ca": "PEM"}, [], "ca: must be a certificate in PEM format"),
        ({"name": ""}, [], "name = ''"),
        ({"name": "\x1b[2J"}, [], r"name = '\x1b[2J': must hold no control characters"),
        ({"version": 2}, [], "is version 2"),
        ({"more": 1}, [], "more: unknown; is the file of a later version?"),
        ({"partition_id": 10**9}, [], "partition_id = 1000000000"),
        ({"run": {"rounds": date(2027, 1, 1)}}, [], "run.rounds"),
        ({"run": {"rounds": {"a": 1}}}, [], "run.rounds"),
        ({"run": {"rouns": 3}}, [], "rouns: unknown configuration key"),
        ({"run": {"system_prompt": "\x1b[2J"}}, [], "system_prompt = \N{REPLACEMENT CHARACTER}[2J: goes with prompt_"),
        ({"bundle": "a" * 64}, ["--approve"], f"bundle = {'a' * 16}...: this checkout's is"),
        ({"run": {"rounds": 3}, "model": "b" * 64}, ["--approve"], "the coordinator's files have digest bbbbbbbb"),
        ({}, ["--delta", 2], "delta = 2.0"),
    ],
)
def test_init_writes_nothing_when_something_is_wrong(tmp_path, invite, asked, options, message):
    assert message in kit("init", tmp_path / "node", *heard(invite(**asked)), *options, code=2)
    assert not list(tmp_path.iterdir())


def test_no_setting_stands_in_two_files_and_the_client_app_is_told_socket_partition_and_name(make_node, own):
    node = make_node("no de\"'=1", **own, delta=1e-6)
    connection, own = (tomllib.loads((node.folder / name).read_text()) for name in ("node.toml", "vault.toml"))
    assert set(connection) == {"version", "superlink", "port"}
    assert set(own) == {"version", "partition_id", "name", "data", "labels", "budget_epsilon", "delta"}
    node.node_config_file.write_text(tomli_w.dumps(node.node_config))
    read = parse_config_args([str(node.node_config_file)])
    assert read == node.node_config
    assert read == {"vault": str(node.folder / "vault.sock"), "partition-id": 1, "name": "clinic"}


def test_a_file_of_another_version_or_with_a_wrong_value_is_refused_by_name(make_node):
    node = make_node()
    for name, line, said in (("node.toml", 'data = "x.csv"', "'x.csv'"), ("vault.toml", "budget_epsilon = -1", "-1")):
        path, key = node.folder / name, line.partition(" =")[0]
        text = path.read_text()
        assert text.count("version = 1\n") == 1
        path.write_text(text.replace("version = 1\n", "version = 3\n"))
        with pytest.raises(InputError, match=rf"{name}: is version 3; this is fedpriv \S+, which reads 1: "):
            Node.read(node.folder)
        path.write_text(f"{text}{line}\n")
        with pytest.raises(InputError, match=f"{name}: {key} = {said}: "):
            Node.read(node.folder)
        path.write_text(text)


def test_an_invitation_that_was_compared_says_what_is_planned_and_its_labels_are_the_nodes(tmp_path, invite, table):
    run = {"rounds": 3, "target_epsilon": 2, "labels": list(LABELS), "secure_aggregation": True, "min_clients": 3}
    file = invite(run={**run, "out": "\x1b]0;title"})
    options = ["--data", table, "--text-column", "text", "--label-column", "label", "--budget-epsilon", 4]
    for told in ([], ["--fingerprint", "ABCD-EFGH-IJKL-MNOP-QRST"]):  # it was not compared
        assert "--fingerprint" in kit("init", tmp_path / "node", "--invite", file, *told, *options, code=2)
    assert not list(tmp_path.iterdir())
    said = kit("init", tmp_path / "node", *heard(file), *options)
    assert "planned: target_epsilon = 2\n" in said
    assert "\x1b" not in said
    assert joining.read(joining.Invitation, file).fingerprint in said
    assert "adds up under masks, but the budget counts uploads" in said
    assert Node.read(tmp_path / "node").vault.labels == LABELS
    assert approvals.approved(tmp_path / "node" / "approved-fabs") == frozenset()


def test_what_is_asked_is_approved_only_as_this_machine_has_it(tmp_path, invite, tiny_bert, monkeypatch):
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    asked = {"run": {"model": str(folder)}, "model": model_digest(folder), "bundle": approvals.bundle_digest(ROOT)}
    said = kit("init", tmp_path / "node", *heard(invite(**asked)), "--approve")
    node = Node.read(tmp_path / "node")
    assert approvals.approved(node.approved) == {asked["bundle"]}
    (model,) = read_models(node.vault.models)
    assert (model.name, model.digest) == (str(folder), asked["model"])
    assert "next: fedpriv node doctor" in said
    assert "next: fedpriv node approve" not in said
    # A model that changes after it was compared.
    compared = admission.check_asked
    changing = lambda asked: (compared(asked), (folder / "vocab.txt").write_text("other"))  # noqa: E731
    monkeypatch.setattr(admission, "check_asked", changing)
    said = kit("init", tmp_path / "other", *heard(invite(**asked)), "--approve", code=2)
    assert "has changed since it was compared" in said
    assert read_models(tmp_path / "other" / "approved-models.toml") == ()


def test_a_node_follows_the_coordinator_and_keeps_all_else(make_node, invite, own, tmp_path):
    node = make_node(**own)
    files = [node.folder / name for name in ("vault.toml", "vault.key", "node.key", "ledger.sqlite")]
    kept = [file.read_bytes() for file in files]
    certificates.make_ca(tmp_path, 30)
    new = (tmp_path / "ca.crt").read_text()
    kit("move", node.folder, *heard(invite(superlink="fl.example.org:443", ca=new)))
    moved = Node.read(node.folder)
    assert (moved.superlink, moved.port, moved.ca_certificate.read_text()) == ("fl.example.org:443", node.port, new)
    assert kept == [file.read_bytes() for file in files]
    for wrong, reason in (
        ({"partition_id": 2}, "is another's, this node is partition 1"),
        ({"superlink": "h"}, "HOST:PORT"),
    ):
        assert reason in kit("move", node.folder, *heard(invite(**wrong)), code=2)
    assert Node.read(node.folder) == moved


@pytest.mark.slow
def test_bundle_has_one_digest_and_it_is_flowers_own(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "clients", checkout / "clients", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "server", checkout / "server", copy_function=shutil.copyfile)  # other times and modes
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    (checkout / "clients" / "linked.py").symlink_to(ROOT / "hatch_build.py")  # Flower leaves links out
    digest = approvals.bundle_digest(checkout)
    assert digest == hashlib.sha256(build_fab_from_disk(ROOT)).hexdigest()
    (checkout / "clients" / "more.py").write_text("")
    assert approvals.bundle_digest(checkout) != digest


def test_checkout_that_cannot_be_bundled_is_one_line(tmp_path):
    with pytest.raises(FlowerError, match="flwr build: ") as caught:
        approvals.bundle_digest(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_digest_is_approved_once_and_what_is_none_never(make_node):
    node, digest = make_node(), "a" * 64
    for wrong in ("", "a" * 63, "A" * 64, "g" * 64):
        with pytest.raises(InputError, match="64 lowercase hex digits"):
            approvals.approve(node.approved, wrong)
    for arguments in ([], [digest, "--this-checkout"]):
        assert "either FAB_HASH or --this-checkout" in kit("approve", node.folder, *arguments, code=2)
    assert approvals.approved(node.approved) == frozenset()
    assert approvals.approve(node.approved, digest)
    assert not approvals.approve(node.approved, digest)
    node.approved.write_text(node.approved.read_text().rstrip("\n"))
    assert approvals.approve(node.approved, "b" * 64)
    assert approvals.approved(node.approved) == {digest, "b" * 64}
    node.approved.write_text("# mine\nanything\n")
    with pytest.raises(InputError, match="line 2 = 'anything'"):
        approvals.approved(node.approved)


def test_nodes_get_ports_of_their_own_and_start_refuses_a_taken_one_and_an_open_key(make):
    nodes = [make(f"node {number}", port=None).node for number in range(3)]
    assert len({each.port for each in nodes}) == 3
    node = nodes[0]
    with socket.create_server(("127.0.0.1", node.port)), pytest.raises(InputError, match="cannot listen there"):
        supernode.start(node, print)
    node.vault.key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        supernode.start(node, print)


PLAN = {"data": "on-nodes", "labels": ",".join(LABELS), "rounds": 20, "purpose": "triage", "until": "2999-06-30"}


def test_what_is_planned_is_told_with_its_cost_kept_and_another_run_is_agreed_to_by_its_fingerprint(tmp_path, invite):
    invitation = invite(run=PLAN | {"target_epsilon": 2.0}, contact="Dr. Huber, +49 30 1234")
    told = kit("init", tmp_path / "node", *heard(invitation))
    for line in (
        "contact: Dr. Huber, +49 30 1234",
        "purpose: triage, until 2999-06-30",
        "cost: epsilon 2 at most on the local view, at delta 1 / (10 N_k), at most 1e-5; "
        "a round that is asked again costs again",
    ):
        assert line in told.splitlines(), told
    without = kit("init", tmp_path / "other", *heard(invite(run=PLAN | {"noise_multiplier": 8.0})))
    assert re.search(r"^cost: epsilon \d+\.\d\d on the local view, at delta 1e-05$", without, re.M), without
    assert "contact: nobody is named" in without
    vault = Node.read(tmp_path / "node").vault
    (agreed,) = agreed_runs(vault.agreed)
    assert (agreed["rounds"], agreed["target_epsilon"], agreed["purpose"]) == (20, 2.0, "triage")
    assert "no such file; no run waits" in kit("approve-run", tmp_path / "node", code=2)
    vault.waiting.write_text(json.dumps({**agreed, "rounds": 30}))
    differing, own = kit("approve-run", tmp_path / "node", code=2).splitlines()
    assert differing == "rounds = 30, agreed was 20"
    own = own.split()[-1]
    assert f"run {own} is approved" in kit("approve-run", tmp_path / "node", "--run", own)
    assert [run["rounds"] for run in agreed_runs(vault.agreed)] == [30, 20]
    assert not vault.waiting.exists()
    assert history.read(tmp_path / "node")[-1].file == "agreed-runs.toml"


def test_a_backup_of_a_node_in_use_is_a_node_whose_ledger_lacks_nothing(make_node, own, tmp_path, monkeypatch):
    """A charge that is made while the copy is made is in the ledger's copy, or in neither."""
    node = make_node(**own)
    node.vault.tokens.write_bytes(b"as telling as the records")
    whole = reader.write_copy

    def charged_meanwhile(db, path):
        charge(node, 2)
        return whole(db, path)

    charge(node, 1)
    monkeypatch.setattr(reader, "write_copy", charged_meanwhile)
    assert "keep it as closed as the node" in kit("backup", node.folder, "--out", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    node.folder.rename(tmp_path / "lost")
    (tmp_path / "copy").rename(node.folder)
    restored = {check.name: check for check in doctor.checks(Node.read(node.folder))}
    for name in ("decisions", "settings", "node.key", "vault.key", "ledger", "registered", "history"):
        assert restored[name].ok, restored[name]
    assert restored["newest"].detail.startswith("2 charges, none is known that the ledger lacks")
    assert not Node.read(node.folder).vault.tokens.exists()
    assert node.flower_home.is_dir()
    assert "lies in" in kit("backup", node.folder, "--out", node.folder / "copy", code=2)
