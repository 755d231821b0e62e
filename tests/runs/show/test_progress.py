"""The page of a run or a sweep that goes on: it is what the folder holds, escaped, and does not look alive for ever."""

import base64
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.runs import files, marked_alive
from fedpriv.runs._writer import RunWriter, write_json
from fedpriv.runs.show import _progress_page as progress
from fedpriv.runs.show import _sweeps, watch
from fedpriv.runs.show._progress_page import PageWriter, RunPage, Share, Timing, kept_page, sweep_page
from tests.runs.written import SIZES, client_row, registrations, round_row

KEYS = ("rank-4-01234567", "rank-8-fedcba98")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e"
WRITTEN = 1_800_000_000
GOING = Timing(written=WRITTEN, due=WRITTEN + 60, every=5, silence=540)


def begin(folder: Path, **config: Any) -> RunWriter:
    """A run of three clients before its first round."""
    writer = RunWriter.created(folder, parse({"rounds": 10, "target_epsilon": None, "budget_epsilon": [2], **config}))
    writer.write_registrations({each.client: vars(each) for each in registrations()})
    writer.add(round_row(0, []), [])
    return writer


def register(writer: RunWriter, names: list[str]) -> None:
    """Give the clients these names."""
    registered = {str(c): {"client": c, "name": name, "num_records": 5} for c, name in enumerate(names)}
    (writer.path / files.REGISTRATIONS).write_text(json.dumps(registered))


def grow(writer: RunWriter, round_: int, **changes: Any) -> None:
    """One more round."""
    rows = [client_row(round_, client, **changes) for client in SIZES]
    writer.add(round_row(round_, rows), rows)


def end(folder: Path, **changes: Any) -> None:
    """The run is finished."""
    clients = [{"num_records": 9, "epsilon_local": 0.1, "epsilon_rho": 0.2, "delta": 1e-5, "client": c} for c in SIZES]
    values = {"epsilon_local_max": 0.1, "epsilon_rho_max": 0.2, "delta_max": 1e-5, "accuracy": 0.5, "seconds": 9.0}
    write_json(folder / files.SUMMARY, {**values, "clients": clients, "warnings": [], **changes})


def page_of(folder: Path, timing: Timing = GOING) -> str:
    return RunPage()(folder, timing)


def shown(folder: Path) -> tuple[str, dict[str, Any]]:
    """What `fedpriv watch` leaves on a terminal, and its values."""
    console = Console(width=100, record=True, highlight=False, file=(folder.parent / "terminal").open("w"))
    return (values := watch(folder, console)) and console.export_text(), values


def test_a_run_is_shown_round_by_round_until_the_block_fails_and_says_why(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    report = writer.path / files.REPORT

    def fail() -> None:
        with marked_alive(writer.path), kept_page(writer.path, 60.0) as look:
            assert "0 of 10 rounds" in report.read_text()
            for round_ in (1, 2):
                grow(writer, round_)
                look.__self__._share = Share()  # as if enough time had passed since the last page
                look()
                assert f"{round_} of 10 rounds" in report.read_text()
            assert '<span class="state running">' in report.read_text()
            assert "<script>" in report.read_text()
            raise InputError(f"too few {HOSTILE}")

    with pytest.raises(InputError):
        fail()
    last = report.read_text()
    assert '<span class="state interrupted">' in last
    assert "too few &lt;script&gt;" in last
    assert "as the last page" in last
    assert "<script" not in last, "it does not load itself again"


def test_a_page_says_when_the_next_is_due_and_runs_no_script_but_its_own(tmp_path: Path) -> None:
    page = page_of(begin(tmp_path / "run").path)
    assert "Written 2027-01-15 08:00:00 UTC" in page
    assert "due by 2027-01-15 08:01:00 UTC" in page
    assert f'data-written="{WRITTEN}" data-due="{WRITTEN + 60}" data-every="5" data-silence="540"' in page
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert "innerHTML" not in script


def test_names_reasons_and_events_are_text_whatever_they_hold(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    grow(writer, 1, status="failed", detail=HOSTILE)
    writer.journal.write(HOSTILE, reason=HOSTILE)
    register(writer, [HOSTILE] * 3)
    (writer.path / "notes.txt").write_text("a secret")
    (writer.path / files.ENVIRONMENT).write_text('{"version": 1, "fedpriv_file": "/home/someone/a secret"}')
    page = page_of(writer.path, Timing(written=WRITTEN))
    assert "a secret" not in page, "what the folder does not mean to show stays in it"
    assert page.count("&lt;script&gt;") >= 3 + 3 + 2
    assert not re.search("<script|<img|\u202e", page)
    runs = [{"key": KEYS[0], "varied": {HOSTILE: HOSTILE}}]
    (tmp_path / "sweep.json").write_text(json.dumps({"title": HOSTILE, "runs": runs}))
    page = sweep_page(tmp_path, Timing(written=WRITTEN))
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_a_client_is_called_and_judged_as_in_the_terminal(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run")
    register(writer, ["St. Anna", "client 1", ""])
    grow(writer, 1)
    checkpoint = writer.path / files.CHECKPOINTS / files.checkpoint_name(1)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"skipped": [2]}))
    page = page_of(writer.path)
    assert re.findall(r'<tr><th scope="row">(St\. Anna \(0\)|1|2)</th>', page) == ["St. Anna (0)", "1", "2"]
    assert "client 2: its node stopped answering" in page


def test_plots_stand_beside_the_budget_once_there_is_time_to_draw_them(tmp_path: Path, plots: None) -> None:
    writer = begin(tmp_path / "run", budget_epsilon=[2], privacy_view="rho")
    grow(writer, 1)
    render = RunPage()
    assert "<svg" not in render(writer.path, GOING)
    render._drawing = Share()
    page = render(writer.path, GOING)
    assert "ε so far, rho view" in page
    assert "budget" in page.partition("<svg")[2]
    assert "Test accuracy" in page
    assert render(writer.path, GOING) == page, "sooner than a page may draw again, its plots are those of before"
    bare = begin(tmp_path / "without limit or accuracy", budget_epsilon=[])
    bare.add(round_row(1, [], test_accuracy=None, test_loss=None), [])
    render._drawing = Share()
    assert "1 of 10 rounds" in render(bare.path, GOING)


def test_pages_take_a_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written: list[float] = []

    def slowly(folder: Path, timing: Timing) -> str:
        written.append(now[0])
        now[0] += 0.5
        assert timing.due - timing.written >= 50, "a page is due sooner than it may be written"
        return ""

    writer = PageWriter(tmp_path, slowly)
    for _ in range(10_000):
        writer.update()
        now[0] += 0.1
    assert 0.016 < 0.5 * len(written) / now[0] <= 0.02


def test_a_page_that_cannot_be_written_ends_nothing_and_is_told_once(tmp_path: Path, caplog) -> None:
    writer = PageWriter(tmp_path / "gone", lambda folder, timing: "")
    for _ in range(3):
        writer._share = Share()
        writer.update()
    writer.end()
    assert len(caplog.messages) == 1
    assert "report.html cannot be written; the run goes on" in caplog.messages[0]


def plan(folder: Path, *keys: str) -> None:
    """A sweep of runs that have not begun."""
    runs = [{"key": key, "varied": {"rank": number}} for number, key in enumerate(keys)]
    (folder / "sweep.json").write_text(json.dumps({"title": "ranks", "runs": runs}))


@pytest.mark.parametrize("key", ["../../etc", "/etc", "..", "0123"])
def test_a_sweeps_keys_name_folders_within_it(tmp_path: Path, key: str) -> None:
    plan(tmp_path, key)
    with pytest.raises(InputError, match="must be the name of a run"):
        sweep_page(tmp_path, GOING)


def test_a_sweep_shows_runs_that_wait_run_and_are_finished_and_what_they_spent_together(tmp_path: Path) -> None:
    plan(tmp_path, *KEYS)
    assert "2 waiting" in sweep_page(tmp_path, GOING)
    first = begin(tmp_path / KEYS[0])
    grow(first, 1)
    with marked_alive(first.path):
        page = sweep_page(tmp_path, GOING)
        assert "1 running, 1 waiting" in page
        assert "All 1 runs together, local view, added up" in page
        assert "href=" not in page
        (first.path / files.REPORT).write_text("")
        assert f'<a href="{KEYS[0]}/report.html">rank=0</a>' in sweep_page(tmp_path, GOING)
    assert "1 waiting, 1 interrupted" in sweep_page(tmp_path, GOING)
    end(first.path)
    second = begin(tmp_path / KEYS[1])
    grow(second, 1)
    second.path.with_suffix(".txt").write_text("Traceback: a secret of the machine")
    with marked_alive(second.path):
        pass
    page = sweep_page(tmp_path, GOING)
    assert "1 finished, 1 failed" in page
    assert "a secret" not in page
    # 0.1 of the finished run's summary, and 0.1 * 3 of the other's first round.
    assert "ε = 0.401 at δ = 2e-5" in page or "ε = 0.400 at δ = 2e-5" in page
    (tmp_path / "sweep.csv").write_text("epsilon_sum,delta_sum,num_runs_in_sum\n0.21,1e-5,2\n")
    page = sweep_page(tmp_path, GOING)
    assert "ε = 0.210 at δ = 1e-5" in page
    assert "composed" in page
    text, values = shown(tmp_path)
    assert "ε = 0.210 at δ = 1e-5, local view, composed" in text
    assert [run["state"] for run in values["runs"]] == ["finished", "failed"]


def test_watching_waits_for_the_run_and_ends_with_it_and_writes_nothing(tmp_path: Path, monkeypatch) -> None:
    looks: list[dict[str, Any]] = []

    def after_a_look(seconds: float) -> None:
        before = _sweeps._look(tmp_path / "run", Console(width=100))
        looks.append(before[1])
        if len(looks) == 1:
            assert "no run has begun" in before[0]
            grow(begin(tmp_path / "run"), 1)
        elif len(looks) == 2:
            (tmp_path / "run" / files.ROUNDS).rename(tmp_path / "rounds")
        elif len(looks) == 3:
            assert "cannot be read now" in before[0]
            (tmp_path / "rounds").rename(tmp_path / "run" / files.ROUNDS)
        else:
            end(tmp_path / "run", warnings=["a warning"])
            written.update(times(tmp_path / "run"))

    written: dict[str, int] = {}
    monkeypatch.setattr(_sweeps, "time", SimpleNamespace(sleep=after_a_look))
    text, values = shown(tmp_path / "run")
    assert [look.get("state") for look in looks] == [None, "running", None, "running"]
    assert values["state"] == "finished"
    assert "warning: a warning" in text
    assert times(tmp_path / "run") == written
    with pytest.raises(InputError, match=r"folder = .*: must be the folder of a run or a sweep, or be in a folder"):
        watch(tmp_path / "none" / "run", Console())
    (tmp_path / "run" / files.SUMMARY).unlink()
    (tmp_path / "run" / files.CHECKPOINTS / files.checkpoint_name(1)).mkdir(parents=True)
    with marked_alive(tmp_path / "run"):
        (tmp_path / "run" / files.REPORT).write_text("")
    text, values = shown(tmp_path / "run")
    assert values["state"] == "interrupted"
    assert f"fedpriv run --resume {tmp_path / 'run'}" in text
    assert (tmp_path / "run" / files.REPORT).as_uri() in text.replace("\n", "").replace(" ", "")


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
