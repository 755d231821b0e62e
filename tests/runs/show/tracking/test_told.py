"""A tracker is told of a folder once and in order, as far as it is final, and again of what did not arrive."""

import json
from pathlib import Path

import pytest

from fedpriv.errors import InputError
from fedpriv.runs import files, marked_alive
from fedpriv.runs.show import _tracking
from fedpriv.runs.show._tracker import Place
from fedpriv.runs.show._tracking import RunTeller, SweepTeller
from tests.runs.show.tracking.folders import NUM_ROUNDS, begun, round_row, summary


class Recorded:
    """A tracker that keeps what it is told, and may be down."""

    def __init__(self) -> None:
        self.points, self.calls, self.opened = [], [], []
        self.down = False

    id = "7"

    def open_run(self, place, known):
        self.opened.append((place.name, place.parent, known))
        return self

    def open_sweep(self, title, folder, keys, known):
        return self.open_run(Place(name=title, folder=folder), known)

    def log_parameters(self, values):
        self.calls.append("parameters")

    def log_points(self, points):
        if self.down:
            raise ConnectionError("down")
        self.points += [(p.metric, p.round, p.value) for p in points]

    def log_final(self, figures, facts, round_):
        self.calls.append(("final", round_, dict(figures)))

    def log_files(self, folder):
        self.calls.append(("files", sorted(path.name for path in folder.iterdir())))

    def end(self, ending):
        self.calls.append(ending)


@pytest.fixture
def tracker():
    return Recorded()


@pytest.fixture(autouse=True)
def _plain_files(monkeypatch):
    """No report is made of these folders, which lack what one needs."""
    monkeypatch.setattr(_tracking, "stage_run", lambda folder, into, stored_in: (into / "report.html").write_text("x"))


def followed(tracker, folder: Path) -> RunTeller:
    return RunTeller(tracker, "recorded", Place(name=folder.name, folder=folder))


def accuracies(tracker) -> list[tuple[int, float]]:
    return [(round_, value) for metric, round_, value in tracker.points if metric == "test/accuracy"]


def test_a_round_is_told_once_its_checkpoint_is_written_and_again_if_it_did_not_arrive(tmp_path, tracker):
    run = followed(tracker, tmp_path / "run")
    run("failed")
    assert not tracker.opened, "the folder is not begun"
    begun(tmp_path / "run", checkpoint=2, rounds=3)
    tracker.down = True
    with pytest.raises(ConnectionError):
        run(None)
    tracker.down = False
    run(None)
    run(None)
    assert accuracies(tracker) == [(k, round_row(k).test_accuracy) for k in range(3)]
    files.write_json(tmp_path / "run" / files.TRACKER, {"tracker": "mlflow", "run": "9", "round": 2})
    another = Recorded()
    followed(another, tmp_path / "run")(None)
    assert another.opened == [("run", None, None)], "another tracker is told from the start"
    assert len(accuracies(another)) == 3


def test_single_clients_are_told_of_unless_there_are_too_many(tmp_path, tracker, monkeypatch):
    begun(tmp_path / "run", checkpoint=1, rounds=1)
    for most, told in ((2, {"epsilon_local/client_00", "epsilon_local/client_01"}), (1, set())):
        monkeypatch.setattr(_tracking._tracker, "MOST_CLIENTS", most)
        (tmp_path / "run" / files.TRACKER).unlink(missing_ok=True)
        tracker.points.clear()
        followed(tracker, tmp_path / "run")(None)
        assert {metric for metric, _, _ in tracker.points if metric.startswith("epsilon_local/client")} == told


def test_a_finished_run_gets_figures_comparison_and_files_in_the_end(tmp_path, tracker):
    writer = begun(tmp_path / "run", checkpoint=NUM_ROUNDS, rounds=NUM_ROUNDS)
    inner = begun(writer.path / files.COMPARISON, checkpoint=0, rounds=1)
    early = Recorded()
    followed(early, writer.path)("failed")
    assert not any(metric.startswith("comparison") for metric, _, _ in early.points), "it would start over"
    assert early.calls[-1] == "failed"
    (writer.path / files.TRACKER).unlink()
    inner.finish({})
    writer.finish(summary())
    followed(tracker, writer.path)("finished")
    assert ("comparison/accuracy", 1, round_row(1).test_accuracy) in tracker.points
    calls = [call if isinstance(call, str) else call[0] for call in tracker.calls]
    assert calls == ["parameters", "final", "files", "finished"]


def test_a_resumed_run_goes_on_in_the_same_tracker_run(tmp_path, tracker):
    begun(tmp_path / "run", checkpoint=2, rounds=2)
    followed(tracker, tmp_path / "run")("failed")
    (tmp_path / "run" / files.CHECKPOINTS / files.checkpoint_name(4)).mkdir()
    rest = begun(tmp_path / "rest", checkpoint=0, rounds=4)
    for name in (files.ROUNDS, files.CLIENTS):
        (rest.path / name).replace(tmp_path / "run" / name)
    followed(tracker, tmp_path / "run")("failed")
    assert tracker.opened == [("run", None, None), ("run", None, "7")]
    assert [k for k, _ in accuracies(tracker)] == [0, 1, 2, 3, 4]


def test_a_run_resumed_from_an_earlier_checkpoint_repeats_rounds_and_a_finished_one_is_left_alone(tmp_path, tracker):
    def kept(run: Path, **position) -> None:
        files.write_json(run / files.TRACKER, {"tracker": "recorded", "run": "7", **position})

    begun(tmp_path / "run", checkpoint=2, rounds=2)
    kept(tmp_path / "run", round=4)
    followed(tracker, tmp_path / "run")(None)
    assert json.loads((tmp_path / "run" / files.TRACKER).read_text())["round"] == 2
    tracker.opened.clear()
    kept(begun(tmp_path / "a1", checkpoint=1, rounds=1).path, round=1, finished=True)
    SweepTeller(tracker, "recorded", tmp_path, title="study", keys=[], names={"a1": "base"})("finished")
    assert tracker.opened == [("study", None, None)]
    assert _tracking.read_position(tmp_path, "recorded").run == "7"


def test_runs_of_a_sweep_have_a_parent_and_names_and_end_one_by_one(tmp_path, tracker):
    done = begun(tmp_path / "a1", checkpoint=NUM_ROUNDS, rounds=NUM_ROUNDS)
    begun(tmp_path / "b2", checkpoint=1, rounds=1)
    names = {"a1": "rank=2", "b2": "rank=4", "c3": "rank=8"}
    sweep = SweepTeller(tracker, "recorded", tmp_path, title="study", keys=["rank"], names=names)
    with marked_alive(done.path):
        done.finish(summary())
        sweep(None)
        assert tracker.opened == [("study", None, None)], "it has yet to write its report"
    sweep(None)
    assert tracker.opened == [("study", None, None), ("rank=2", "7", None)]
    assert tracker.calls.count("finished") == 1
    (tmp_path / "sweep.csv").write_text("rank,epsilon_sum,delta_sum,num_runs_in_sum\n2,1.5,1e-5,2\n")
    sweep("finished")
    figures = {"sweep/epsilon_sum": 1.5, "sweep/delta_sum": 1e-5, "sweep/num_runs_in_sum": 2.0}
    assert ("final", 0, figures) in tracker.calls
    assert tracker.calls.count("finished") == 2, "the run that is done is not told twice"
    assert tracker.calls.count("failed") == 1
    assert tracker.opened[2:] == [("rank=4", "7", None)]


def test_one_run_that_cannot_be_told_does_not_stop_the_others(tmp_path, tracker):
    for key in ("a1", "b2"):
        begun(tmp_path / key, checkpoint=1, rounds=1)
    (tmp_path / "a1" / files.ROUNDS).write_text("damaged\n1\n")
    names = {"a1": "rank=2", "b2": "rank=4"}
    sweep = SweepTeller(tracker, "recorded", tmp_path, title="study", keys=["rank"], names=names)
    with pytest.raises(InputError, match="a1"):
        sweep("finished")
    assert [k for k, _ in accuracies(tracker)] == [0, 1]
    assert tracker.calls[-1] == "finished"
