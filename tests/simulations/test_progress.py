"""Progress within a round: every engine tells it, it ends where it should, and outside a simulation nobody tells."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedpriv.config import parse
from fedpriv.learning.training.independence import FEATURES, READING, TESTING, TRAINING, silent
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import forget, workbench
from server import observer as observers
from server.exchange import Exchange
from server.observer import LogObserver, RunProgress, answers
from simulations.engines import federation
from simulations.engines.federation import _Followed
from tests.tiny import with_persons

FEDPRIV = Path(__file__).resolve().parents[2] / "fedpriv"


class Kept(LogObserver):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[RunProgress] = []

    def progressed(self, progress: RunProgress) -> None:
        self.seen.append(progress)


def shares(seen: list[RunProgress], round_: int, what: str) -> list[tuple[float, float]]:
    return [(each.done, each.total) for each in seen if (each.what, each.round) == (what, round_)]


@pytest.mark.parametrize("engine", ["in-process", "stacked"])
def test_an_engine_tells_of_each_step_of_each_client_until_all_are_done(small_run, tmp_path, engine):
    observer = Kept()
    federation.run(parse({**small_run, "engine": engine, "out": str(tmp_path / "run")}), observer)
    assert workbench(parse({**small_run, "engine": engine})).model.tell is silent
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


class Failing(Kept):
    """A display that fails whenever a model tells it something."""

    def progressed(self, progress: RunProgress) -> None:
        super().progressed(progress)
        if progress.what in (READING, FEATURES, TRAINING, TESTING):
            raise OSError(f"PRIVATE {progress.done}")


@pytest.mark.parametrize("engine", [pytest.param("in-process", marks=pytest.mark.slow), "stacked"])
def test_a_display_that_fails_makes_no_record_count_as_zero(small_run, tmp_path, engine, caplog):
    adapters = []
    for observer in (Kept(), Failing()):
        forget()
        out = tmp_path / type(observer).__name__
        federation.run(parse({**small_run, "engine": engine, "out": str(out)}), observer)
        adapters.append({path.name: path.read_bytes() for path in sorted(out.rglob("*.safetensors"))})
    assert adapters[0]
    assert adapters[0] == adapters[1]
    said = [record.getMessage() for record in caplog.records]
    assert [line.splitlines()[0] for line in said if "progress" in line] == ["progress is shown no more: OSError at"]
    assert not [line for line in said if "counts as zero" in line or "PRIVATE 1" in line]


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
            time.sleep(2.6)
        told = [record.getMessage() for record in caplog.records]
        time.sleep(1.5)
    assert len(caplog.records) == len(told) == 2
    assert told[0].startswith("loading model and data, 1")


def test_a_stack_that_fails_is_trained_again_and_never_counts_twice():
    seen: list[RunProgress] = []
    tasks = [SimpleNamespace(round=1, data=(), spec=SimpleNamespace(local_steps=2))] * 3

    def execute(given):
        followed.tell(TRAINING, 3.0, 6.0)  # and then one of the stack fails
        for _ in given:
            followed.tell(TRAINING, 1.0, 2.0)
            followed.tell(TRAINING, 2.0, 2.0)
        return []

    followed = _Followed(execute, seen.append)
    for _ in range(2):
        followed(tasks)  # type: ignore[arg-type]
    assert [each.done for each in seen] == 2 * [3, 1, 2, 3, 4, 5, 6]
    assert {each.total for each in seen} == {6}


def test_tasks_that_come_in_several_calls_count_together():
    seen: list[RunProgress] = []
    tasks = [SimpleNamespace(round=1, data=(), spec=SimpleNamespace(local_steps=2))] * 3

    def execute(given):
        for _ in given:
            followed.tell(TRAINING, 2.0, 2.0)
        return []

    followed = _Followed(execute, seen.append)
    for _ in range(2):
        followed.begins(4)
        followed(tasks)  # type: ignore[arg-type]
        followed(tasks[:1])  # type: ignore[arg-type]
    assert [each.done for each in seen] == 2 * [2, 4, 6, 8]
    assert {each.total for each in seen} == {8}


def test_only_a_simulation_ever_sets_who_is_told():
    """What is told depends on who was drawn: a vault, its answers and the library's commands must not listen."""
    assert TrainingModel.tell is silent
    setting = [path for path in FEDPRIV.rglob("*.py") if ".tell = " in path.read_text()]
    assert setting == []


def test_a_node_that_answers_twice_is_one_answer():
    """A coordinator counts answers: a node must not be able to make it look as if others had answered."""

    def reply(message_id: str) -> SimpleNamespace:
        return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=message_id, src_node_id=7))

    def message(k: int) -> SimpleNamespace:
        return SimpleNamespace(metadata=SimpleNamespace(message_id=f"m{k}", message_type="train", dst_node_id=k))

    asked = [message(k) for k in range(3)]
    told: list[int] = []
    pulled = iter([[reply("m0"), reply("m0"), reply("unasked")], [reply("m0"), reply("m1")], []])
    grid = SimpleNamespace(push_messages=lambda messages: None, pull_messages=lambda ids: next(pulled))
    exchange = Exchange(lambda kind, asked, silent: told.append(len(asked) - len(silent)))
    assert len(list(exchange.replies(grid, asked, 0.5))) == 2  # type: ignore[arg-type]
    assert told[-1] == 2
