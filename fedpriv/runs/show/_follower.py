"""Reads what a run or a sweep has released so far, and tells the tracker what it does not know yet.

At the end the tracker gets files too: copies without the paths of the machine that made them.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from fedpriv.runs import ClientRow, RoundRow, RunFolder, column_types, files
from fedpriv.runs.figures import figures
from fedpriv.runs.show import _tracker
from fedpriv.runs.show._tracker import Place, TrackedRun, Tracker

# A run that is followed is of this version, so a column that it lacks is damage.
_ROUND_COLUMNS, _CLIENT_COLUMNS = tuple(column_types(RoundRow)), tuple(column_types(ClientRow))

# The columns that a sweep's own run gets; all rows of sweep.csv hold the same.
_SWEEP_FIGURES = ("epsilon_sum", "delta_sum", "num_runs_in_sum")


@dataclass(frozen=True, kw_only=True)
class Position:
    """The last round that a tracker has been told, kept in tracker.json in the run's folder.

    Attributes:
        tracker: which.
        run: its id of the run; empty before there is one.
        round: the last one that it knows; -1 for none.
        finished: whether it knows the final figures and has the files.
    """

    tracker: str
    run: str = ""
    round: int = -1
    finished: bool = False


def read_position(folder: Path, tracker: str) -> Position:
    """The position of this tracker; the beginning, if another was told before, or none."""
    values = files.read_values(folder / files.TRACKER, optional=True)
    if values.get("tracker") != tracker:
        return Position(tracker=tracker)
    return Position(**values)


class RunFollower:
    """Follows one run's folder.

    Args:
        tracker: where to.
        name: of the tracker.
        place: of the run.
        once: whether a run that the tracker knows to be finished is left alone; a run that is resumed is not.
    """

    def __init__(self, tracker: Tracker, name: str, place: Place, *, once: bool = False) -> None:
        self._tracker, self._place, self._folder = tracker, place, place.folder
        self._position = read_position(place.folder, name)
        if not once:
            self._position = replace(self._position, finished=False)
        self._run: TrackedRun | None = None

    def update(self, *, complete: bool, ended: bool) -> None:
        """Tell what is new.

        Args:
            complete: whether the run's files are all written.
            ended: whether there will be no other call.

        Raises:
            Exception: the tracker's; the next call tells again what did not arrive.
        """
        if self._position.finished or not (self._folder / files.CONFIG).is_file():
            return
        look = RunFolder(self._folder)
        run = self._opened(look)
        try:
            self._tell_rounds(run, look, _last_round(look, complete=complete))
            if complete:
                self._finish(run, look)
        except Exception:
            if ended:
                with contextlib.suppress(Exception):  # the first reason is the one to tell
                    run.end("failed")
            raise
        if ended and not complete:
            run.end("failed")

    def _opened(self, look: RunFolder) -> TrackedRun:
        if self._run is None:
            run = self._tracker.open_run(self._place, self._position.run or None)
            if run.id != self._position.run:  # a new one, also where the old one is not there any more
                self._keep(replace(self._position, run=run.id, round=-1))
            if self._position.round < 0:
                run.log_parameters(_tracker.parameters(_tracker.configuration(look.config)))
            self._run = run
            # A run that is resumed from an earlier checkpoint repeats the rounds after it.
            self._keep(replace(self._position, round=min(self._position.round, _last_round(look, complete=False))))
        return self._run

    def _tell_rounds(self, run: TrackedRun, look: RunFolder, last: int) -> None:
        first = self._position.round
        if last <= first:
            return
        clients = _tracker.client_points(look.client_rows(_CLIENT_COLUMNS), len(look.registrations))
        points = _tracker.round_points(look.round_rows(_ROUND_COLUMNS)) + clients
        run.log_points(sorted((p for p in points if first < p.round <= last), key=lambda p: p.round))
        self._keep(replace(self._position, round=last))

    def _finish(self, run: TrackedRun, look: RunFolder) -> None:
        if look.comparison is not None and look.comparison.is_finished:
            run.log_points(
                _tracker.round_points(look.comparison.round_rows(_ROUND_COLUMNS), _tracker.COMPARISON_METRICS)
            )
        final = _tracker.final_figures(look.summary, figures(look, "tracker"))
        run.log_final(final, _tracker.facts(look.summary), self._position.round)
        _send(run, lambda into: stage_run(self._folder, into))
        run.end("finished")
        self._keep(replace(self._position, finished=True))

    def _keep(self, position: Position) -> None:
        if position != self._position:
            files.write_json(self._folder / files.TRACKER, asdict(position))
        self._position = position


class SweepFollower:
    """Follows a sweep's folder and those of its runs, which are never resumed.

    Args:
        tracker: where to.
        name: of the tracker.
        folder: the sweep's.
        title: of the sweep.
        keys: what varies.
        names: {folder of a run: what it is called}.
    """

    def __init__(
        self, tracker: Tracker, name: str, folder: Path, *, title: str, keys: Sequence[str], names: Mapping[str, str]
    ) -> None:
        self._tracker, self._name, self._folder = tracker, name, folder
        self._title, self._keys, self._names = title, keys, names
        self._run: TrackedRun | None = None
        self._is_open = False
        self._runs: dict[str, RunFollower] = {}

    def update(self, *, complete: bool, ended: bool) -> None:
        """Tell what is new of every run, as `RunFollower` does of one; one that fails does not stop the others."""
        self._open()
        errors = [error for key in self._names if (error := self._update_run(key, ended=ended))]
        if ended and self._run is not None:
            self._run.log_final(_sweep_figures(self._folder / "sweep.csv"), {}, 0)
            _send(self._run, lambda into: stage_sweep(self._folder, into))
            self._run.end("finished" if complete else "failed")
        if errors:
            raise errors[0]

    def _update_run(self, key: str, *, ended: bool) -> Exception | None:
        """Tell what is new of a run; returns the error of its follower, if there is one."""
        folder = self._folder / key
        if not (folder / files.CONFIG).is_file():
            return None
        written = files.is_finished(folder) and (folder / files.REPORT).is_file()
        try:
            self._follower(key).update(complete=written, ended=ended)
        except Exception as error:
            return error
        return None

    def _open(self) -> None:
        if self._is_open:
            return
        position = read_position(self._folder, self._name)
        self._run = self._tracker.open_sweep(self._title, self._folder, self._keys, position.run or None)
        if self._run is not None:
            files.write_json(self._folder / files.TRACKER, asdict(replace(position, run=self._run.id)))
        self._is_open = True

    def _follower(self, key: str) -> RunFollower:
        if key not in self._runs:
            place = Place(
                name=self._names[key],
                folder=self._folder / key,
                sweep=self._title,
                sweep_folder=self._folder,
                parent=self._run.id if self._run else None,
            )
            self._runs[key] = RunFollower(self._tracker, self._name, place, once=True)
        return self._runs[key]


def _last_round(look: RunFolder, *, complete: bool) -> int:
    """The last round that is final: a run that dies before its checkpoint repeats the round."""
    if complete:
        return max(int(row["round"]) for row in look.round_rows(("round",)))
    return -1 if (round_ := look.checkpoint[0]) is None else round_


def _send(run: TrackedRun, stage: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="fedpriv-tracking-") as folder:
        stage(Path(folder))
        run.log_files(Path(folder))


def _sweep_figures(table: Path) -> dict[str, float]:
    """The cost of all runs together; empty if the sweep ended before its table."""
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        row: dict[str, Any] = next(csv.DictReader(file), {})
    return {f"sweep/{name}": float(row[name]) for name in _SWEEP_FIGURES if row.get(name)}


# Of the global model's folder, which also holds the releases that the server deduplicates by.
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json", "fedpriv.json", "README.md")
GLOBAL = "global"


def stage_run(run_folder: Path, into: Path) -> None:
    """Write configuration, report and global adapter of a finished run into an empty folder.

    Raises:
        InputError: a file of the run is missing or damaged.
    """
    from fedpriv.runs.show._report_page import render  # deferred: matplotlib

    run = RunFolder(run_folder).checked()
    told = _tracker.configuration(run.config)
    (into / files.CONFIG).write_text(tomli_w.dumps(told), encoding="utf-8")
    report = render(run, config=told, environment=_tracker.versions(run.environment))
    (into / files.REPORT).write_text(report, encoding="utf-8")
    adapter = run_folder / files.VARIANTS / GLOBAL
    if not adapter.is_dir():
        return
    (into / "adapter").mkdir()
    named = _tracker.paths(run.config)
    for source in (adapter / name for name in ADAPTER_FILES):
        if source.is_file():
            _copy(source, into / "adapter" / source.name, named)


def stage_sweep(sweep_folder: Path, into: Path) -> None:
    """Copy a sweep's plots into an empty folder."""
    for plot in sorted(sweep_folder.glob("*.png")):
        shutil.copyfile(plot, into / plot.name)


def _copy(source: Path, target: Path, named: Mapping[str, str]) -> None:
    if source.suffix == ".safetensors":
        shutil.copyfile(source, target)
        return
    text = source.read_text(encoding="utf-8")
    for path, name in named.items():
        text = text.replace(path, name)
    target.write_text(text, encoding="utf-8")
