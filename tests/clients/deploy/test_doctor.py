"""`doctor` passes no node that leaves to a coordinator what its operator must decide, and opens no record."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w

from clients.deploy import doctor, models
from clients.deploy.__main__ import app
from clients.deploy.folder import Node
from fedpriv.deployment import approvals, keys
from fedpriv.errors import InputError
from simulations.processes import free_port, run_in_process
from tests.vaults import write_records

OFFLINE = {"tls", "clock"}


@pytest.fixture
def node(make_node, own, tmp_path, tiny_bert) -> Node:
    """A node with records of its own, where all is well but for the coordinator, who is not there."""
    data = write_records(tmp_path / "own.csv", [("a", label) for label in own["labels"]])
    data.chmod(0o600)
    columns = {"text_column": "note", "label_column": "department"}
    node = make_node(**(own | columns | {"data": data}), superlink=f"127.0.0.1:{free_port()}")
    models.approve(node.vault, str(tiny_bert))
    approvals.approve(node.approved, "a" * 64)
    return node


def failed(node: Node) -> dict[str, str]:
    """The checks that fail, besides those that need a coordinator."""
    found = {check.name: check.detail for check in doctor.checks(Node.read(node.folder)) if not check.ok}
    return {name: detail for name, detail in found.items() if name not in OFFLINE}


def without(node: Node, key: str) -> None:
    """Take a key out of the node's settings."""
    file = node.folder / "vault.toml"
    values = tomllib.loads(file.read_text())
    del values[key]
    file.write_text(tomli_w.dumps(values))


def test_a_node_that_decided_everything_passes(node):
    assert failed(node) == {}


def test_a_node_of_the_corpus_needs_code_alone(make_node):
    assert set(failed(make_node())) == {"approved"}


def test_no_budget(node):
    without(node, "budget_epsilon")
    assert "budget_epsilon: required" in failed(node)["budget"]


def test_prompts_without_a_column_of_responses(node):
    with (node.folder / "vault.toml").open("a") as file:
        file.write('prompt_column = "note"\n')
    assert "response_column: required" in failed(node)["columns"]


def test_labels_left_to_the_coordinator(node):
    without(node, "labels")
    assert "labels: required" in failed(node)["labels"]


def test_no_model(node):
    node.vault.models.write_text("")
    assert "run `approve-model`" in failed(node)["models"]


def test_a_model_that_changed(node, tiny_bert, tmp_path):
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tiny_bert.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    models.approve(node.vault, str(changed), name="ours")
    assert failed(node) == {}
    (changed / "vocab.txt").open("a").write("more\n")
    assert "ours: its files changed" in failed(node)["models"]


def test_no_registration(node):
    for file in node.folder.glob("ledger.sqlite*"):
        file.unlink()
    assert "holds no data set" in failed(node)["registered"]


@pytest.mark.parametrize("which", ["data", "ledger"])
def test_files_that_others_may_read(node, which):
    file = getattr(node.vault, which)
    file.chmod(0o604)
    assert failed(node)["files"] == f"{file}: mode 604 lets everybody in; chmod 600 {file}"


def test_data_that_are_gone(node):
    node.vault.data.unlink()
    assert "no such file" in failed(node)["data"]


def test_what_the_file_holds_is_not_looked_at(node):
    node.vault.data.write_bytes(b"\xff\0 no table at all")
    assert failed(node) == {}


def test_a_closed_node_stays_closed_until_it_is_opened(node):
    node.vault.closed.write_text("its child process was killed\n")
    assert "its child process was killed" in failed(node)["open"]
    done = run_in_process(app, "python -m clients.deploy", "reopen", node.folder)
    assert (done.returncode, "the node had closed: its child process was killed" in done.stdout) == (0, True)
    assert failed(node) == {}
    with pytest.raises(InputError, match="the node is open"):
        doctor.reopen(node.vault)


def test_a_key_that_others_may_read(node):
    assert keys.public_line(node.vault.key)
    node.vault.key.chmod(0o640)
    assert set(failed(node)) == {"key"}
