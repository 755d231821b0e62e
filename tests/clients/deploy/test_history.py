"""The kit's commands note what they change; the vault notes what somebody changed by hand; `history` shows both."""

import os

import pytest

from clients.deploy.folder import Node
from fedpriv.holder.vault import history
from fedpriv.holder.wire.frame import REGISTER, Request, ask
from tests.clients.deploy.conftest import check, heard, kit
from tests.holder.vault.running import Running

DIGEST = "9c" * 32


@pytest.fixture
def node(tmp_path, invite) -> Node:
    kit("init", tmp_path / "node", *heard(invite()))
    return Node.read(tmp_path / "node")


FILES = (
    *("agreed-runs.toml", "application.toml", "approved-fabs", "approved-models.toml"),
    *("coordinator.pub", "node.toml", "policy.toml", "vault.toml"),
)


def test_each_command_notes_what_it_changes_and_a_refused_one_nothing(node, invite, tiny_bert):
    assert [(each.command, each.file) for each in history.read(node.folder)] == [("init", file) for file in FILES]
    kit("approve", node.folder, DIGEST)
    kit("approve-model", node.folder, tiny_bert, "--name", "tiny")
    kit("move", node.folder, *heard(invite(superlink="127.0.0.1:9999")))
    kit("new-key", node.folder)
    kit("approve", node.folder, DIGEST)  # was approved before
    fabs, models, moved, key = history.read(node.folder)[len(FILES) :]
    assert (fabs.command, fabs.values) == ("approve", {DIGEST: (None, True)})
    assert (models.command, models.values["model"][1][0]["name"]) == ("approve-model", "tiny")
    assert (moved.command, moved.values) == ("move", {"superlink": ("127.0.0.1:9093", "127.0.0.1:9999")})
    assert (key.command, key.file) == ("new-key", "application.toml")
    assert "vault_key" in key.values
    for refused in (("approve", node.folder, "no digest"), ("approve", node.folder.parent, DIGEST)):
        kit(*refused, code=2)
    kit("history", node.folder / "none", code=2)
    assert not history.path_in(node.folder.parent).exists()
    assert f"{len(FILES) + 4} changes, chain intact, head {key.digest}" in check(node, "history").detail


@pytest.mark.slow
def test_a_colleague_edits_the_policy_and_restarts_and_then_approves_by_hand(node):
    text = node.vault.policy.read_text()
    node.vault.policy.write_text(text.replace("max_rounds = 1000", "max_rounds = 5000"))
    found = check(node, "history")
    assert found.ok
    assert "the next start notes that there are changes of policy.toml" in found.detail
    running = Running(node.vault)
    try:
        anything = Request.of(kind=REGISTER, run_config={})
        ask(node.vault.socket, anything)
        with node.approved.open("a") as file:
            file.write(f"{DIGEST}\n")
        ask(node.vault.socket, anything)
    finally:
        running.stop()
    change, approval = history.read(node.folder)[len(FILES) :]
    assert (approval.command, approval.values) == ("found by vault", {DIGEST: (None, True)})
    assert (change.command, change.file, change.uid) == ("found by vault", "policy.toml", os.getuid())
    assert change.values == {"max_rounds": (1000, 5000)}
    shown = kit("history", node.folder)
    assert "policy.toml is changed, by hand or by a command that was killed" in shown
    assert "    max_rounds: 1000 -> 5000\n" in shown
    assert kit("history", node.folder, "--head", change.digest.upper()) == shown


def test_a_history_that_was_cut_or_replaced_is_told_and_stops_no_command(node):
    head = history.read(node.folder)[-1].digest
    path = history.path_in(node.folder)
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]))
    found = check(node, "history")
    assert not found.ok
    assert f"ends at line {len(FILES) - 1}, but history.jsonl.head has seen line {len(FILES)}" in found.detail
    kit("history", node.folder, code=1)
    assert DIGEST in kit("approve", node.folder, DIGEST)
    # Somebody who may write the folder begins another one: only a digest that was kept elsewhere tells.
    for each in node.folder.glob("history.jsonl*"):
        each.unlink()
    kit("approve", node.folder, DIGEST)
    assert check(node, "history").ok
    assert "its chain is intact but has no line" in kit("history", node.folder, "--head", head, code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_command_of_root_leaves_the_history_to_the_owner_of_the_folder(node):
    for path in [node.folder, *node.folder.iterdir()]:
        os.chown(path, 1, 1)
    kit("approve", node.folder, DIGEST)
    assert [each.stat().st_uid for each in node.folder.glob("history.jsonl*")] == [1, 1]
    assert history.read(node.folder)[-1].uid == 0
