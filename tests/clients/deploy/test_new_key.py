"""A key is exchanged by one command, and whatever the old one has signed of the node's charges still counts."""

import shutil
from pathlib import Path

import pytest

from clients.deploy.folder import Node
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.operate import joining
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.head_file import head_path
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import ReceiptLog, chains_of
from tests.cli.command_line import fedpriv
from tests.clients.deploy.conftest import charge, check, kit


def lost(node: Node) -> int | None:
    """The number of the charge that the node's folder says its ledger lacks."""
    with reading(node.vault.ledger) as db:
        found = ReceiptWatch.of(node.vault).lost(chains_of(db))
    return found.counter if found else None


def put_back(node: Node, tmp_path: Path) -> None:
    """Restore the node's ledger as it was after the first of its two charges."""
    for path in (node.vault.ledger, head_path(node.vault.ledger)):
        shutil.copy(tmp_path / path.name, path)


@pytest.fixture(params=["vault.key", "lost key", "counter file"])
def node(make_node, own, tmp_path, request) -> Node:
    """A node with two charges."""
    options = {"counter_file": tmp_path / "counter"} if request.param == "counter file" else {}
    node = make_node(**own, **options)
    charge(node, 1)
    for path in (node.vault.ledger, head_path(node.vault.ledger)):
        shutil.copy(path, tmp_path)
    charge(node, 2)
    if request.param == "lost key":
        node.vault.key.unlink()
    return node


def test_a_restored_ledger_is_noticed_by_what_the_old_key_signed(node, tmp_path):
    old = keys.read_public_line(keys.public_path(node.vault.key))
    assert f"send to the coordinator: {node.application}" in kit("new-key", node.folder)
    applied = joining.read(joining.Application, node.application)
    applied.check(node.application)
    files = [keys.public_path(key) for key in (node.key, node.vault.key)]
    assert [applied.node_key, applied.vault_key] == [file.read_text().strip() for file in files]
    assert node.vault.key.stat().st_mode & 0o777 == 0o600
    assert keys.kind_of(keys.public_line(node.vault.key)) == keys.VAULT
    assert keys.read_lines(node.vault.earlier_keys) == (old,)
    assert lost(node) is None
    charge(node, 3)
    newest = [each.signer for each in ReceiptLog(node.vault.receipts).read()]
    assert newest == [old, old, keys.public_line(node.vault.key)]
    put_back(node, tmp_path)
    assert lost(node) == 3
    if node.vault.counter_file is None:
        signed = node.vault.receipts.read_text().splitlines()[:2]
        node.vault.receipts.write_text("\n".join(signed) + "\n")
        assert lost(node) == 2, "by a receipt under the old key alone"
        fedpriv("ledger", "recover", node.vault.ledger, "--from", node.vault.receipts, "--reason", "a backup")
        assert lost(node) is None


def test_a_restored_ledger_gets_no_new_key(node, tmp_path):
    kept = tmp_path / "coordinator.receipts"
    shutil.copy(node.vault.receipts, kept)
    before = {path: path.read_bytes() for path in node.folder.glob("*.key*")}
    put_back(node, tmp_path)
    said = kit("new-key", node.folder, code=2)
    assert "lacks charges that the node has signed; first run `fedpriv ledger recover`" in said
    if node.vault.counter_file is None:
        node.vault.receipts.unlink()  # the whole folder was restored, and only others know
        assert "lacks charges" in kit("new-key", node.folder, "--from", kept, code=2)
    assert {path: path.read_bytes() for path in node.folder.glob("*.key*")} == before


def test_the_supernodes_key_is_exchanged_alone(node):
    if not node.vault.key.exists():
        assert "run `new-key` without --node first" in kit("new-key", node.folder, "--node", code=2)
        return
    old, vault = keys.public_line(node.key), keys.public_line(node.vault.key)
    kit("new-key", node.folder, "--node")
    line = keys.public_line(node.key)
    assert line != old
    assert (keys.kind_of(line), node.key.stat().st_mode & 0o777) == (keys.NODE, 0o600)
    assert keys.read_public_line(keys.public_path(node.key), keys.NODE) == line
    assert keys.public_line(node.vault.key) == vault
    assert not node.vault.earlier_keys.exists()
    assert lost(node) is None


def test_a_vault_that_still_runs_under_the_old_key_releases_nothing(node):
    if not node.vault.key.exists():
        pytest.skip("such a vault answers nothing at all")
    running = Holder.of(node.vault).policy.watch
    assert running.signer
    kit("new-key", node.folder)
    with reading(node.vault.ledger) as db, pytest.raises(Exception, match="was exchanged since the vault's start"):
        running.sign(chains_of(db)[0])
    newest = check(node, "newest")
    assert newest.ok, newest.detail
