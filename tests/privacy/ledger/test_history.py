"""The history of what a node's operator decides: who changed it, from what to what; chained, and never in the way."""

import errno
import fcntl
import json
import os
import pwd
from pathlib import Path

import pytest

from fedpriv.errors import LedgerError
from fedpriv.holder.vault import history
from fedpriv.privacy.ledger import head_file
from fedpriv.privacy.ledger.head_file import head_path

DIGEST = "9c" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node's folder, with one note of all that it holds."""
    (tmp_path / "vault.toml").write_text('data = "a.csv"\nbudget_epsilon = 4.0\n')
    (tmp_path / "policy.toml").write_text("max_rounds = 100\nmax_length = 64\n")
    (tmp_path / "approved-fabs").write_text("# bundles\n")
    history.note(tmp_path, "init")
    return tmp_path


def last(folder: Path) -> history.Noted:
    return history.read(folder)[-1]


def test_a_new_folder_is_noted_with_all_values(folder):
    fabs, policy, vault = history.read(folder)
    assert [each.file for each in (fabs, policy, vault)] == ["approved-fabs", "policy.toml", "vault.toml"]
    assert vault.values == {"budget_epsilon": (None, 4.0), "data": (None, "a.csv")}
    assert (policy.old, policy.command, policy.uid) == (None, "init", os.getuid())
    assert policy.user == pwd.getpwuid(os.getuid()).pw_name
    assert policy.time.endswith("+00:00")
    history.note(folder, "approve")
    assert last(folder) == vault, "nothing has changed"
    assert history.path_in(folder).stat().st_mode & 0o777 == 0o600


def test_a_change_by_hand_is_found_with_old_and_new_value(folder):
    before = history.read(folder)[1]
    (folder / "policy.toml").write_text("max_rounds = 9000\nmin_clip_norm = 1.0\n")
    history.watch(folder)()
    noted = last(folder)
    assert noted.values == {"max_rounds": (100, 9000), "max_length": (64, None), "min_clip_norm": (None, 1.0)}
    assert (noted.command, noted.old) == ("found by vault", before.new)
    assert any("policy.toml is changed, by hand" in line for line in noted.lines())


def test_a_change_by_hand_does_not_pass_as_the_next_commands(folder):
    (folder / "policy.toml").write_text("max_rounds = 9000\n")
    with history.noting(folder, "approve"):
        (folder / "approved-fabs").write_text(f"{DIGEST}\n")
    assert [(each.command, each.file) for each in history.read(folder)[3:]] == [
        ("found by approve", "policy.toml"),
        ("approve", "approved-fabs"),
    ]
    assert last(folder).values == {DIGEST: (None, True)}


def _fails_half_way(folder: Path) -> None:
    (folder / "peers" / "2.pub").write_text("vault-key two\n")
    (folder / "none" / "3.pub").write_text("vault-key three\n")


def test_a_command_that_fails_half_way_is_noted_and_a_killed_one_is_found(folder):
    (folder / "peers").mkdir()
    with pytest.raises(FileNotFoundError), history.noting(folder, "approve-peers"):
        _fails_half_way(folder)
    assert (last(folder).command, last(folder).file) == ("approve-peers", "peers/2.pub")
    (folder / "peers" / "3.pub").write_text("vault-key three\n")  # and killed before the note
    history.watch(folder)()
    assert (last(folder).command, last(folder).file) == ("found by vault", "peers/3.pub")


def test_the_vault_looks_again_whenever_it_is_asked(folder):
    look = history.watch(folder)
    look()
    (folder / "peers").mkdir()
    peer = folder / "peers" / "2.pub"
    peer.write_text("vault-key another\n")
    look()
    peer.unlink()
    look()
    assert [each.values for each in history.read(folder)[3:]] == [
        {"vault-key another": (None, True)},
        {"vault-key another": (True, None)},
    ]
    assert last(folder).new is None


def test_settings_that_cannot_be_read_are_noted_and_forget_no_value(folder):
    for text in ("max_rounds = ]\n", "\xff", "x = " + "[" * 5000):
        (folder / "policy.toml").write_bytes(text.encode("latin-1"))
        history.note(folder, "found by vault")
        assert last(folder).values == {}
    (folder / "policy.toml").write_text("max_rounds = 7\nmax_length = 64\n")
    history.note(folder, "found by vault")
    assert last(folder).values == {"max_rounds": (100, 7)}


def test_control_characters_reach_no_terminal(folder):
    text = '"\\u001b[2Jkey" = "\\u001b[31m\\u202e\\u0007"\ndate = 2026-11-26\nnumber = nan\n'
    (folder / "vault.toml").write_text(f"{text}[updates]\nclip_norm = 1.0\n")
    (folder / "peers").mkdir()
    (folder / "peers" / "\x1b[1m\n2.pub").write_text("vault-key \x1b[0m\n")
    history.note(folder, "found by vault")
    shown = [line for each in history.read(folder) for line in each.lines()]
    assert all(line.isprintable() for line in shown)
    assert "    updates.clip_norm: none -> 1.0" in shown
    assert history.path_in(folder).read_text().count("\n") == len(history.read(folder)) == 5
    history.note(folder, "found by vault")
    assert len(history.read(folder)) == 5, "nan is not another value than nan"


def by_somebody_else(line: str) -> str:
    return json.dumps(json.loads(line) | {"uid": 12, "user": "somebody else"}) + "\n"


EDITS = {
    "value": lambda lines: "".join(lines).replace("100", "101"),
    "user": lambda lines: lines[0] + by_somebody_else(lines[1]) + lines[2],
    "middle": lambda lines: lines[0] + lines[2],
    "tail": lambda lines: "".join(lines[:-1]),
    "half": lambda lines: "".join(lines)[:-20],
    "shape": lambda lines: '{"number": 1, "values": []}\n',
    "bytes": lambda lines: "\udcff\n",
}


@pytest.mark.parametrize("how", [*EDITS, "all", "head"])
def test_what_was_edited_or_cut_is_noticed_and_nothing_is_noted_on_top(folder, how, caplog):
    files = path, head = history.path_in(folder), head_path(history.path_in(folder))
    if how in EDITS:
        edited = EDITS[how](path.read_text().splitlines(keepends=True))
        path.write_text(edited, errors="surrogateescape")
    else:
        {"all": path, "head": head}[how].unlink()
    with pytest.raises(LedgerError, match=r"history\.jsonl") as caught:
        history.read(folder)
    assert "\n" not in str(caught.value)
    before = [path.exists() and path.read_bytes() for path in files]
    (folder / "policy.toml").write_text("max_rounds = 1\n")
    with history.noting(folder, "approve"):
        pass
    history.watch(folder)()
    if how != "head":  # a lost one is made empty, which is none either
        assert [path.exists() and path.read_bytes() for path in files] == before
    with pytest.raises(LedgerError):
        history.summary(folder)
    assert "is not noted" in caplog.text
    for path in files:  # the operator moves both away
        path.unlink(missing_ok=True)
    history.watch(folder)()
    assert [each.command for each in history.read(folder)] == ["found by vault"] * 3


@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_a_full_disk_stops_nothing_and_is_told_once(folder, call, caplog, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder / "policy.toml").write_text("max_rounds = 1\n")
    before = history.path_in(folder).read_bytes()
    look = history.watch(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "replace" else os, call, full)
        with history.noting(folder, "approve"):
            pass
        caplog.clear()
        look()
        look()
    told = [each.getMessage() for each in caplog.records if each.name == history.__name__]
    assert sum("No space left on device" in each for each in told) == 1
    assert history.path_in(folder).read_bytes() == before
    assert "the next start notes that there are changes of policy.toml" in history.summary(folder)
    history.watch(folder)()
    assert (last(folder).command, last(folder).file) == ("found by vault", "policy.toml")


def test_a_crash_between_line_and_head_leaves_the_head_behind_and_the_next_line_mends_it(folder):
    head = head_path(history.path_in(folder))
    behind = head.read_bytes()
    for rounds in (1, 2):
        (folder / "policy.toml").write_text(f"max_rounds = {rounds}\n")
        history.note(folder, "found by vault")
        head.write_bytes(behind)
    assert len(history.read(folder)) == 5
    assert f"5 changes, chain intact, head {last(folder).digest}" in history.summary(folder)


def test_who_holds_the_lock_delays_but_stops_nothing(folder, monkeypatch, caplog):
    monkeypatch.setattr(head_file, "_LOCK_SECONDS", 0.1)
    (folder / "policy.toml").write_text("max_rounds = 1\n")
    with head_path(history.path_in(folder)).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        history.note(folder, "approve")
    assert "another process is writing it" in caplog.text


def test_a_folder_that_is_no_nodes_gets_no_history(tmp_path):
    with history.noting(tmp_path / "none", "approve"):
        pass
    history.note(tmp_path, "approve")
    assert not list(tmp_path.iterdir())
