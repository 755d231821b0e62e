"""What a page shows is what the folder holds by now, escaped; nothing in the folder ends it or leaves it otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from fedpriv.runs import _presence as presence
from fedpriv.runs import files
from fedpriv.runs._rows import RoundRow
from fedpriv.runs.show._live_page import LivePage, script
from tests.live.conftest import begin, end, grow, plan
from tests.runs.written import round_row

KEYS = ("0123456789abcdef", "fedcba9876543210")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e"


def text(page: LivePage) -> str:
    return "".join(page.read().values())


def test_a_run_that_begins_later_is_shown_once_it_does_and_then_round_by_round(tmp_path: Path) -> None:
    page = LivePage(tmp_path / "run")
    assert "No run has begun" in text(page)
    writer = begin(tmp_path / "run")
    with presence.marked_alive(writer.path):
        assert "0 of 10 rounds" in text(page)
        assert "Last sign of life" in text(page)
        for round_ in (1, 2):
            grow(writer, round_)
            assert f"{round_} of 10 rounds" in text(page)
        assert "its process lives" in text(page)
    assert "Interrupted" in text(page)
    end(writer.path)
    assert "The whole report" in text(page)
    assert "Interrupted" not in text(page)


def test_epsilons_stand_beside_the_budget_of_the_view_that_it_applies_to(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run", budget_epsilon=[2, 4, 8], privacy_view="rho")
    grow(writer, 1)
    clients = LivePage(writer.path).read()["clients"]
    assert "of its budget" in clients
    # epsilon_rho of round 1 is 0.2, 0.4 and 0.6.
    for epsilon, share, budget in (("0.200", "10.0", 2), ("0.400", "10.0", 4), ("0.601", "7.5", 8)):
        assert re.search(rf">{epsilon}<.*?width: {share}%.*? {budget}<", clients, re.DOTALL)


def test_a_client_is_called_and_judged_as_in_the_terminal(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    names = {0: "St. Anna", 1: "client 1", 2: ""}
    (writer.path / files.REGISTRATIONS).write_text(
        json.dumps({str(c): {"client": c, "name": name, "num_records": 5} for c, name in names.items()})
    )
    grow(writer, 1)
    checkpoint = writer.path / files.CHECKPOINTS / files.checkpoint_name(1)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"skipped": [2]}))
    clients = LivePage(writer.path).read()["clients"]
    assert re.findall(r'<th scope="row"><bdi>(.*?)</bdi>', clients) == ["St. Anna (0)", "1", "2"]
    assert "<bdi>skipped</bdi>" in clients
    assert "client <bdi>2</bdi>: <bdi>its node stopped answering" in clients


def test_a_row_that_is_half_written_is_not_shown(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    grow(writer, 1)
    page = LivePage(writer.path)
    before = page.read()
    for name in (files.ROUNDS, files.CLIENTS, files.EVENTS):
        with (writer.path / name).open("a") as file:
            file.write("2,0,1")
    assert page.read()["figures"] == before["figures"]
    assert "1 of 10 rounds" in text(page)


def test_names_reasons_and_events_are_text_whatever_they_hold(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    grow(writer, 1, status="failed", detail=HOSTILE)
    writer.journal.write(HOSTILE, reason=HOSTILE)
    (writer.path / files.REGISTRATIONS).write_text(
        json.dumps({str(c): {"client": c, "name": HOSTILE, "num_records": 5} for c in (0, 1, 2)})
    )
    end(writer.path, warnings=[HOSTILE], stopped_early=HOSTILE)
    pieces = LivePage(writer.path).read()
    assert "&lt;script&gt;" in pieces["clients"]
    assert "&lt;script&gt;" in pieces["notes"]
    assert "&lt;script&gt;" in pieces["events"]
    assert "<script" not in "".join(pieces.values())
    assert "<img" not in "".join(pieces.values())


def test_a_sweeps_settings_are_text_and_its_keys_name_folders_within(tmp_path: Path) -> None:
    runs = [{"key": KEYS[0], "varied": {HOSTILE: HOSTILE}}]
    (tmp_path / "sweep.json").write_text(json.dumps({"title": HOSTILE, "runs": runs}))
    shown = text(LivePage(tmp_path))
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    for key in ("../../etc", "/etc", "..", "0123"):
        (tmp_path / "sweep.json").write_text(json.dumps({"runs": [{"key": key, "varied": {}}]}))
        assert "must be 16 digits" in text(LivePage(tmp_path))
        assert not LivePage(tmp_path).has_run(key)


def test_a_sweep_shows_runs_that_wait_run_and_are_finished_and_what_they_spent_together(tmp_path: Path) -> None:
    plan(tmp_path, *KEYS)
    page = LivePage(tmp_path)
    assert "2 waiting" in text(page)
    first = begin(tmp_path / KEYS[0])
    grow(first, 1)
    with presence.marked_alive(first.path):
        assert "1 running, 1 waiting" in text(page)
        assert "All 1 runs together, local view, added up" in text(page)
    assert "1 waiting, 1 interrupted" in text(page)
    end(first.path)
    second = begin(tmp_path / KEYS[1])
    grow(second, 1)
    second.path.with_suffix(".txt").write_text("Traceback: a secret of the machine")
    with presence.marked_alive(second.path):
        pass
    assert "1 finished, 1 failed" in text(page)
    assert "a secret" not in text(page)
    # 0.1 of the finished run's summary, and 0.1 * 3 of the other's first round.
    assert "ε = 0.401 at δ = 2e-5" in text(page) or "ε = 0.400 at δ = 2e-5" in text(page)
    (tmp_path / "sweep.csv").write_text("epsilon_sum,delta_sum,num_runs_in_sum\n0.21,1e-5,2\n")
    assert "ε = 0.210 at δ = 1e-5" in text(page)
    assert "composed" in text(page)


def test_what_the_folder_does_not_mean_to_show_stays_in_it(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    grow(writer, 1)
    (writer.path / "notes.txt").write_text("a secret")
    (writer.path / files.ENVIRONMENT).write_text('{"fedpriv_file": "/home/someone/a secret"}')
    (writer.path / files.REPORT).write_text("<p>a secret</p>")
    shown = text(LivePage(writer.path))
    assert "a secret" not in shown
    assert str(tmp_path) not in shown.replace("--resume", "")


@pytest.mark.parametrize("name", ["config.toml", "rounds.csv", "clients.csv", "summary.json", "registrations.json"])
def test_no_file_ends_the_page_and_a_repaired_one_is_shown_again(tmp_path: Path, name: str) -> None:
    writer = begin(tmp_path / "run")
    page, path = LivePage(writer.path), writer.path / name
    before = path.read_bytes() if path.exists() else None
    for content in (b"", b"\xff\x00", b"[1, 2]", b'{"clients": 7, "rounds": "x"}', b"round,client\n1,x\n"):
        path.write_bytes(content)
        page.read()
    path.unlink() if before is None else path.write_bytes(before)
    assert "0 of 10 rounds" in text(page)


def test_a_folder_that_is_removed_does_not_end_the_page(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    page = LivePage(writer.path)
    page.read()
    shutil.rmtree(writer.path)
    assert "No run has begun" in text(page)
    begin(writer.path)
    assert "0 of 10 rounds" in text(page)


def test_looking_writes_nothing(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    grow(writer, 1)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in writer.path.rglob("*")}
    os.chmod(writer.path, 0o500)  # noqa: PTH101
    LivePage(writer.path).read()
    os.chmod(writer.path, 0o700)  # noqa: PTH101
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in writer.path.rglob("*")} == before


def test_an_unchanged_folder_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path / "run")
    page = LivePage(writer.path)
    first = page.read()
    monkeypatch.setattr("fedpriv.runs.show._live_page._run_pieces", None)
    assert page.read() is first


def test_a_run_without_any_limit_or_accuracy_has_a_page(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run", budget_epsilon=[])
    row: RoundRow = round_row(1, [], test_accuracy=None, test_loss=None)
    writer.add(row, [])
    assert "1 of 10 rounds" in text(LivePage(writer.path))


def test_the_script_puts_pieces_nowhere_but_into_their_places() -> None:
    assert "eval" not in script()
    assert script().count("innerHTML") == 1
    assert "</script" not in script()
