"""What a person sees while a run goes on and at its end: at 80 columns, in a pipe, and in a notebook."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedpriv.config import RunConfig
from fedpriv.holder.wire.kinds import Registration
from fedpriv.runs._rows import RoundRow
from server.observer import RunProgress, answers
from simulations.display import TerminalObserver, _screen_of

NAMES = ("St. Anna", "Clinic of the North West and Lakes Region", "\x1b[31mred[bold]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(round_: int, epsilon: float = 1.9, **changes: Any) -> RoundRow:
    values: dict[str, Any] = {
        "num_selected": 3,
        "num_replies": 3,
        "num_silent": 0,
        "num_failures": 0,
        "num_late": 0,
        "num_retired": 0,
        "test_accuracy": 0.798,
        "test_loss": 1.0,
        "epsilon_local_max": epsilon,
        "epsilon_rho_max": 2 * epsilon,
        "epsilon_aggregate_max": None,
        "bytes_up": 1_000_000,
        "bytes_down": 1_000_000,
        "seconds": 4.0,
    }
    return RoundRow(round=round_, **(values | changes))


def observed(console: Console, **changes: Any) -> TerminalObserver:
    """An observer of a run of four rounds that has begun."""
    observer = TerminalObserver(console)
    registrations = [Registration(client=k, num_records=100, name=n, data_set=f"{k}") for k, n in enumerate(NAMES)]
    config = RunConfig(**({"rounds": 4, "lora_rounds": 2, "target_epsilon": 8.0, "comparison": False} | changes))
    observer.started(config, registrations, None)
    return observer


def pipe(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("what", ["training", "reading records", "a stage that takes very many words to name" * 2])
def test_a_narrow_terminal_shows_round_and_time_first_and_the_bar_alone_gives_way(width, what):
    observer = observed(pipe(width))
    observer.round_done(row(1))
    observer.progressed(RunProgress(what=what, done=3, total=6, round=2))
    first, figures = observer.lines().split("\n")
    assert first.startswith("round 2/4  0:00:00")
    assert figures == "accuracy 0.798 | ε ≤ 1.90 of 8 local, 3.80 rho by rdp, δ 1e-5 | 2 MB"
    if what == "training":
        assert "training 50%" in first
        assert " left" in first
        assert ("━" in first) == (width > 40)
        assert len(first) <= max(width, len("round 2/4  0:00:00  training 50%  over 10 s left"))


def test_the_view_that_was_asked_for_comes_first_with_its_limit_and_its_accountant():
    observer = observed(pipe(), privacy_view="rho")
    observer.round_done(row(1))
    assert "ε ≤ 3.80 of 8 rho, 1.90 local by rdp, δ 1e-5" in observer.lines()
    budgeted = observed(pipe(), target_epsilon=None, budget_epsilon=(4.0, 2.0, 3.0))
    budgeted.round_done(row(1))
    assert "ε ≤ 1.90 of 2 local" in budgeted.lines()


def test_a_shared_account_shows_what_this_run_spent_and_what_stood_there_before():
    observer = observed(pipe(), target_epsilon=1.0)
    observer.round_done(row(1, 9.4, epsilon_this_run_max=0.996, epsilon_before_max=9.0))
    spent = "ε ≤ 0.996 of target 1 in this run, 9.00 in the account before it: 9.40 local, 18.8 rho by rdp"
    assert spent in observer.lines()
    assert "of 1" not in observer.lines().replace("of target 1", "")


def test_a_pipe_is_never_silent_for_long_and_says_nothing_after_the_end(monkeypatch):
    monkeypatch.setattr("simulations.display._PIPE_SECONDS", 0.05)
    console = pipe()
    with TerminalObserver(console) as observer:
        observer.progressed(RunProgress(what="training the baselines"))
        assert until(lambda: console.file.getvalue().count("training the baselines") >= 3)  # type: ignore[attr-defined]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    time.sleep(0.2)
    assert console.file.getvalue() == said  # type: ignore[attr-defined]


def test_a_pipe_whose_rounds_are_short_gets_their_lines_alone(monkeypatch):
    monkeypatch.setattr("simulations.display._PIPE_SECONDS", 0.3)
    console = pipe()
    with observed(console) as observer:
        for round_ in range(1, 9):
            observer.progressed(RunProgress(what="training", done=1, total=2, round=round_))
            time.sleep(0.05)
            observer.round_done(row(round_))
    assert "training" not in console.file.getvalue()  # type: ignore[attr-defined]


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it holds within so many seconds."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_coordinator_shows_answers_and_a_stage_outside_the_rounds_has_no_round():
    observer = observed(pipe())
    observer.progressed(answers(3, 1, 3))
    assert observer.lines().startswith("round 3/4  0:00:00  answers 1/3")
    observer.progressed(RunProgress(what="deduplicating"))
    observer.progressed(RunProgress(what="testing", done=1, total=4))
    assert observer.lines() == "0:00:00  deduplicating: testing 25%"


def test_a_pipe_gets_a_line_for_each_round_and_no_escape_even_where_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for console in (pipe(), Console(file=io.StringIO(), width=80)):
        observer = observed(console)
        observer.progressed(answers(1, 0, 3))
        observer.round_done(row(1))
        observer.progressed(answers(2, 0, 3))
        observer.round_done(row(2))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.findall(r"^round \d: .*$", text, re.MULTILINE) == [
            f"round {k}: accuracy 0.798 | ε ≤ 1.90 of 8 local, 3.80 rho by rdp, δ 1e-5 | {2 * k} MB | 4 s"
            for k in (1, 2)
        ]
        assert "\x1b[?25l" not in text, "the cursor was hidden"
        assert "\x1b[31m" not in text, "a holder's name coloured the terminal"


def test_a_terminal_rewrites_its_lines_and_gets_its_cursor_back_however_the_run_ends():
    console = Console(file=Terminal(), width=80, force_terminal=True)

    def interrupted() -> None:
        with TerminalObserver(console) as observer:
            observer.progressed(RunProgress(what="loading model and data"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loading model and data" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_a_notebook_updates_one_output_and_needs_no_widgets(monkeypatch):
    shown: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))

    def display(data: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        shown.append(data)
        return handle

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("simulations.display._NOTEBOOK_SECONDS", 0.0)
    console = SimpleNamespace(is_jupyter=True)
    screen = _screen_of(console, lambda: "round 1/4 <b>")  # type: ignore[arg-type]
    assert screen is not None
    screen.update()
    screen.stop()
    assert [data["text/html"] for data in shown] == [*["<pre>round 1/4 &lt;b&gt;</pre>"] * 2, "<pre></pre>"]


def test_of_many_clients_some_are_named():
    console = pipe(200)
    registrations = [Registration(client=k, num_records=9, name=f"n{k}", data_set=f"{k}") for k in range(1000)]
    TerminalObserver(console).started(RunConfig(), registrations, None)
    assert "1000 clients, by records: n0 9, n1 9" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "992 more" in console.file.getvalue()  # type: ignore[attr-defined]
