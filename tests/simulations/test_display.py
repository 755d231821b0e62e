"""What a run tells while it goes on and at its end: at 80 columns, in a pipe, in a notebook; and who may be told."""

import io
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.training.independence import FEATURES, READING, TESTING, TRAINING, silent
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import forget, workbench
from fedpriv.runs._rows import RoundRow
from server import observer as observers
from server.exchange import Exchange
from server.observer import LogObserver, RunProgress, answers
from simulations.display import TerminalObserver, _phases_of, _screen_of, _time_left
from simulations.engines import federation
from simulations.engines.federation import _Followed
from tests.runs.written import round_row
from tests.tiny import with_persons

NAMES = ("St. Anna", "Clinic of the North West and Lakes Region", "\x1b[31mred[bold]")
FEDPRIV = Path(__file__).resolve().parents[2] / "fedpriv"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(round_: int, **changes: Any) -> RoundRow:
    values: dict[str, Any] = {"test_accuracy": 0.798, "epsilon_local_max": 1.9, "epsilon_rho_max": 3.8}
    return round_row(round_, [], **(values | {"bytes_up": 1_000_000, "bytes_down": 1_000_000} | changes))


def observed(console: Console, **changes: Any) -> TerminalObserver:
    """An observer of a run of four rounds that has begun."""
    observer = TerminalObserver(console)
    registrations = [Registration(client=k, num_records=100, name=n, data_set=f"{k}") for k, n in enumerate(NAMES)]
    config = RunConfig(**({"rounds": 4, "lora_rounds": 2, "target_epsilon": 8.0, "comparison": False} | changes))
    observer.started(config, registrations, None)
    return observer


def pipe(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("what", ["training", "reading records", "a stage that takes very many words to name" * 2])
def test_a_narrow_terminal_shows_round_and_time_first_and_the_bar_alone_gives_way(width, what):
    observer = observed(pipe(width))
    observer.round_done(row(1))
    observer.progressed(RunProgress(what=what, done=3, total=6, round=2))
    first, figures = observer.lines().split("\n")
    assert first.startswith("round 2/4  0:00:00")
    assert figures == "accuracy 0.798 | ε ≤ 1.90 of 8 local by rdp, δ 1e-5 | 2 MB"
    if what == "training":
        assert "training 50%" in first
        assert " left" in first
        assert ("━" in first) == (width > 40)
        assert len(first) <= max(width, len("round 2/4  0:00:00  training 50%  over 10 s left"))


def test_the_view_that_was_asked_for_comes_first_with_its_limit_and_its_accountant():
    def shown(changes: dict[str, Any], **figures: Any) -> str:
        observer = observed(pipe(), **changes)
        observer.round_done(row(1, **figures))
        return observer.lines()

    assert "ε ≤ 3.80 of 8 rho, 1.90 local by rdp, δ 1e-5" in shown({"privacy_view": "rho"})
    assert "ε ≤ 1.90 of 2 local" in shown({"target_epsilon": None, "budget_epsilon": (4.0, 2.0, 3.0)})
    # A shared account shows what this run spent and what stood there before.
    spent = "ε ≤ 0.996 of target 1 in this run, 9.00 in the account before it: 9.40 local by rdp"
    account = {"epsilon_local_max": 9.4, "epsilon_this_run_max": 0.996, "epsilon_before_max": 9.0}
    assert spent in shown({"target_epsilon": 1.0}, **account)


def test_a_pipe_is_never_silent_for_long_and_says_nothing_after_the_end(monkeypatch):
    monkeypatch.setattr("simulations.display._PIPE_SECONDS", 0.05)
    console = pipe()
    with TerminalObserver(console) as observer:
        observer.progressed(RunProgress(what="training the baselines"))
        assert until(lambda: text_of(console).count("training the baselines") >= 3)
    said = text_of(console)
    time.sleep(0.2)
    assert text_of(console) == said


def test_a_pipe_whose_rounds_are_short_gets_their_lines_alone(monkeypatch):
    monkeypatch.setattr("simulations.display._PIPE_SECONDS", 0.3)
    console = pipe()
    with observed(console) as observer:
        for round_ in range(1, 9):
            observer.progressed(RunProgress(what="training", done=1, total=2, round=round_))
            time.sleep(0.05)
            observer.round_done(row(round_))
    assert "training" not in text_of(console)


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
    console = pipe()
    observer = observed(console)
    for round_ in (1, 2):
        observer.progressed(answers(round_, 0, 3))
        observer.round_done(row(round_))
    assert re.findall(r"^round \d: .*$", text_of(console), re.MULTILINE) == [
        f"round {k}: accuracy 0.798 | ε ≤ 1.90 of 8 local by rdp, δ 1e-5 | {2 * k} MB | 4 s" for k in (1, 2)
    ]
    assert "\x1b[?25l" not in text_of(console), "the cursor was hidden"
    assert "\x1b[31m" not in text_of(console), "a holder's name coloured the terminal"


def test_a_terminal_rewrites_its_lines_and_gets_its_cursor_back_however_the_run_ends():
    console = Console(file=Terminal(), width=80, force_terminal=True)

    def interrupted() -> None:
        with TerminalObserver(console) as observer:
            observer.progressed(RunProgress(what="loading model and data"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "loading model and data" in text_of(console)
    assert text_of(console).count("\x1b[?25l") == text_of(console).count("\x1b[?25h") == 1


def test_a_notebook_updates_one_output_and_needs_no_widgets(monkeypatch):
    shown: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))

    def display(data: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        shown.append(data)
        return handle

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("simulations.display._NOTEBOOK_SECONDS", 0.0)
    console = SimpleNamespace(is_jupyter=True)
    screen = _screen_of(console, lambda: "round 1/4 <b>")
    assert screen is not None
    screen.update()
    screen.stop()
    assert [data["text/html"] for data in shown] == [*["<pre>round 1/4 &lt;b&gt;</pre>"] * 2, "<pre></pre>"]


def test_of_many_clients_some_are_named():
    console = pipe(200)
    registrations = [Registration(client=k, num_records=9, name=f"n{k}", data_set=f"{k}") for k in range(1000)]
    TerminalObserver(console).started(RunConfig(), registrations, None)
    assert "1000 clients, by records: n0 9, n1 9" in text_of(console)
    assert "992 more" in text_of(console)


def test_the_time_left_is_what_rounds_of_a_kind_took_or_a_lower_bound():
    def left(took, phases, spent, share=None):
        found = _time_left(took, phases, spent, share)
        return found and (found.seconds, found.is_least)

    took = {"start": [9.0], "head": [8.0, 1.0, 1.0, 1.0]}  # the last three of a kind count
    assert left(took, ["head"] * 5, 0.0) == (5.0, False)
    assert left(took, ["head"] * 5, 0.6) == (4.4, False)
    assert left(took, ["head", "head"], 7.0) == (1.0, False), "a round that takes longer than usual is about to end"
    assert left({}, [], 7.0, 1.0) == (0.0, False)
    assert left(took, ["head", "all"], 0.0) == (1.0, True)
    assert left(took, ["all", "all"], 3.0) == (0.0, True)
    # The first round is estimated from its share, once that says something.
    assert left({}, ["all"] * 3, 5.0) is left({}, ["all"] * 3, 5.0, 0.01) is None
    assert left({}, ["all"] * 3, 5.0, 0.5) == (25.0, False)


def test_every_round_of_a_run_has_a_phase():
    phases = _phases_of(RunConfig(rounds=10, lora_rounds=3))
    assert phases == ["start", *["head"] * 6, *["all"] * 3]
    assert _phases_of(RunConfig(rounds=4, lora_rounds=None, head_start=False, recipe="per-sample")) == ["all"] * 4


class Kept(LogObserver):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[RunProgress] = []

    def progressed(self, progress: RunProgress) -> None:
        self.seen.append(progress)


def shares(seen: list[RunProgress], round_: int, what: str) -> list[tuple[float, float]]:
    return [(each.done, each.total) for each in seen if (each.what, each.round) == (what, round_)]


class Failing(Kept):
    """A display that fails whenever a model tells it something."""

    def progressed(self, progress: RunProgress) -> None:
        super().progressed(progress)
        if progress.what in (READING, FEATURES, TRAINING, TESTING):
            raise OSError(f"PRIVATE {progress.done}")


def adapters(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}


@pytest.mark.parametrize("engine", ["in-process", "stacked"])
def test_an_engine_tells_of_each_step_of_each_client_until_all_are_done(small_run, tmp_path, engine, caplog):
    """A display that fails in it makes no record count as zero."""
    values = {**small_run, "engine": engine}
    forget()
    observer = Kept()
    federation.run(parse({**values, "out": str(tmp_path / "kept")}), observer)
    assert workbench(parse(values)).model.tell is silent
    for round_ in (1, 2):
        told = shares(observer.seen, round_, TRAINING)
        assert told == sorted(told)
        assert len(told) >= 2
        assert {total for _, total in told} == {told[-1][0]} == {6}, "three clients' steps, all done"
        answered = shares(observer.seen, round_, "answers")
        assert answered == sorted(answered)
        assert (answered[0], answered[-1]) == ((0, 3), (3, 3))
        doing = [each.clients for each in observer.seen if (each.what, each.round) == ("answers", round_)]
        assert (doing[0], doing[-1]) == (dict.fromkeys(range(3), "training"), dict.fromkeys(range(3), "replied"))
    stages = [each.what for each in observer.seen if not each.total]
    assert stages[0] == "loading model and data"
    assert stages[-1] == "writing the report"
    assert {READING, TESTING} <= {each.what for each in observer.seen}

    forget()
    federation.run(parse({**values, "out": str(tmp_path / "failing")}), Failing())
    assert adapters(tmp_path / "kept") == adapters(tmp_path / "failing") != {}
    said = [record.getMessage() for record in caplog.records]
    assert [line.splitlines()[0] for line in said if "progress" in line] == ["progress is shown no more: OSError at"]
    assert not [line for line in said if "counts as zero" in line or "PRIVATE 1" in line]


@pytest.mark.parametrize(
    ("engine", "of_persons"), [("in-process", True), pytest.param("stacked", False, marks=pytest.mark.slow)]
)
def test_records_are_read_once_over_all_clients_of_a_round(small_run, table, tmp_path, engine, of_persons):
    forget()
    of_the_paper = ("local_steps", "batch_size", "noise_multiplier")
    values = {key: value for key, value in small_run.items() if key not in of_the_paper} | {"engine": engine}
    values |= {"rounds": 3, "lora_rounds": 1, "target_epsilon": 3.0, "baselines": False}
    if of_persons:
        values |= {"person_column": "patient", "data": str(with_persons(table, tmp_path / "t.csv", 3))}
    observer = Kept()
    federation.run(parse({**values, "out": str(tmp_path / "run")}), observer)
    num_records = sum(len(records) for records in workbench(parse(values)).data.clients)
    for what in (READING, FEATURES):
        told = [each.done for each in observer.seen if each.what == what and each.total == num_records]
        assert told == sorted(told)
        assert told[-1] == num_records
        assert len(told) >= 3


def test_a_log_says_what_is_awaited_once_it_was_silent_for_10_seconds(caplog):
    quick, slow = LogObserver(), LogObserver()
    slow._names = {0: "St. Anna", 2: ""}
    doing = {0: "training", 1: "replied", 2: "training", 3: "asked"}
    for observer, silent_for in ((quick, 9), (slow, 11)):
        observer.progressed(answers(2, 0, 4, dict.fromkeys(doing, "asked")))
        observer._began = time.monotonic() - 83
        observer._last_line = time.monotonic() - silent_for
    with caplog.at_level(logging.INFO, logger="flwr"):
        for observer in (quick, slow):
            for _ in range(3):
                observer.progressed(answers(2, 1, 4, doing))
    assert [record.getMessage() for record in caplog.records] == [
        "round 2: answers 1/4, 1 min 23 s; asked: client 3; training: St. Anna (0), client 2"
    ]


def test_a_heartbeat_speaks_where_nothing_is_told(caplog, monkeypatch):
    monkeypatch.setattr(observers, "_PAUSE_SECONDS", 0.5)
    observer = LogObserver()
    observer.progressed(RunProgress(what="loading model and data"))
    with caplog.at_level(logging.INFO, logger="flwr"):
        with observer.heartbeat():
            assert until(lambda: caplog.records)
        num = len(caplog.records)
        time.sleep(1.2)
    assert len(caplog.records) == num
    assert caplog.records[0].getMessage().startswith("loading model and data, 1")


@pytest.mark.parametrize(
    ("calls", "together", "alone", "told"),
    [
        ([3], [3.0], [1.0, 2.0], [3, 1, 2, 3, 4, 5, 6]),  # a stack that fails is trained again, and never counts twice
        ([3, 1], [], [2.0], [2, 4, 6, 8]),  # tasks that come in several calls count together
    ],
    ids=["fails", "several calls"],
)
def test_steps_of_all_clients_of_a_round_count_together(calls, together, alone, told):
    seen: list[RunProgress] = []
    tasks = [SimpleNamespace(round=1, data=(), spec=SimpleNamespace(local_steps=2))] * 3

    def execute(given):
        for done in together:
            followed.tell(TRAINING, done, 6.0)
        for done in alone * len(given):
            followed.tell(TRAINING, done, 2.0)
        return []

    followed = _Followed(execute, seen.append)
    for _ in range(2):
        if len(calls) > 1:
            followed.begins(sum(calls))
        for num in calls:
            followed(tasks[:num])
    assert [each.done for each in seen] == 2 * told
    assert {each.total for each in seen} == {2 * sum(calls)}


def test_only_a_simulation_ever_sets_who_is_told():
    """What is told depends on who was drawn: a vault, its answers and the library's commands must not listen."""
    assert TrainingModel.tell is silent
    setting = [path for path in FEDPRIV.rglob("*.py") if ".tell = " in path.read_text()]
    assert setting == []


def test_a_node_that_answers_twice_is_one_answer():
    """A coordinator counts answers: a node must not be able to make it look as if others had answered."""

    def reply(message_id: str) -> SimpleNamespace:
        return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=message_id, src_node_id=7))

    ids = [SimpleNamespace(message_id=f"m{k}", message_type="train", dst_node_id=k) for k in range(3)]
    pulled = iter([[reply("m0"), reply("m0"), reply("unasked")], [reply("m0"), reply("m1")], []])
    grid = SimpleNamespace(push_messages=lambda messages: None, pull_messages=lambda ids: next(pulled, []))
    told: list[int] = []
    exchange = Exchange(lambda kind, asked, silent: told.append(len(asked) - len(silent)))
    assert len(list(exchange.replies(grid, [SimpleNamespace(metadata=each) for each in ids], 0.5))) == 2
    assert told[-1] == 2
