"""Tells a tracker what a run or a sweep has released, behind a bounded queue and in a thread: whatever becomes of it,
the run goes on.

It reads the folder, so it knows nothing that is not released. At the end the tracker gets files too: copies without
the paths of the machine that made them. `Share` bounds the time that showing a run takes from it.
"""

import contextlib
import csv
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from queue import Full, Queue
from typing import Any

import tomli_w

from fedpriv.config import MachineSection, Track
from fedpriv.runs import ClientRow, RoundRow, RunFolder, column_types, files, is_alive
from fedpriv.runs.figures import figures
from fedpriv.runs.show import _tracker
from fedpriv.runs.show._tables import ReadStored, nothing_stored
from fedpriv.runs.show._tracker import Ending, Place, TrackedRun, Tracker
from fedpriv.runs.show._trackers import TRACKERS

SHARE = 0.02

# How long a tracker may take after the run, for what is still to be sent; and after one that failed.
END_SECONDS, SHORT_SECONDS = 60.0, 15.0

# Events that may wait; a tracker that is further behind is given up.
_MOST_WAITING = 1000

_LONGEST_REASON = 200
Tell = Callable[[Ending | None], None]

# A run that is followed is of this version, so a column that it lacks is damage.
_ROUND_COLUMNS, _CLIENT_COLUMNS = tuple(column_types(RoundRow)), tuple(column_types(ClientRow))

# The columns that a sweep's own run gets; all rows of sweep.csv hold the same.
_SWEEP_FIGURES = ("epsilon_sum", "delta_sum", "num_runs_in_sum")

# Of the global model's folder, which also holds the releases that the server deduplicates by.
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json", "fedpriv.json", "README.md")

GLOBAL = "global"


class Share:
    """Says when something may be done again, such that it takes at most a fiftieth of all time.

    Args:
        expected: seconds that it takes at first.

    Attributes:
        expected: seconds that it took last.
    """

    def __init__(self, expected: float = 0.0, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._began = time.monotonic()
        self._spent, self.expected = 0.0, expected

    @property
    def is_due(self) -> bool:
        """Whether there is time for it."""
        return self._spent + self.expected <= SHARE * (time.monotonic() - self._began)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the block."""
        started = self._clock()
        try:
            yield
        finally:
            self.expected = self._clock() - started
            self._spent += self.expected


class Tracking:
    """Tells a tracker, in a thread of its own, whenever there is something new in a folder.

    A tracker that fails, or does not keep up, is told no more; that is one notice, and nothing is raised.

    Args:
        teller: makes what tells the tracker what is new, given how the run ended, or None before.
        notice: is told once why something did not arrive, from any thread.
    """

    def __init__(self, track: Track, teller: Callable[[], Tell], folder: Path, notice: Callable[[str], None]) -> None:
        self._track, self._teller, self._folder, self._notice = track, teller, folder, notice
        self._waiting = Queue[Ending | None](maxsize=_MOST_WAITING)
        self._dropped = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There is something new."""
        self._put(None)

    def end(self, ending: Ending) -> None:
        """There will be nothing more; waits for the tracker, but not for long."""
        self._put(ending)
        seconds = END_SECONDS if ending == "finished" else SHORT_SECONDS
        if not self._dropped.locked():
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._drop(f"not everything arrived within {seconds:g} s")

    def _put(self, event: Ending | None) -> None:
        if not self._dropped.locked():
            try:
                self._waiting.put_nowait(event)
            except Full:
                self._drop("it does not keep up")

    def _drop(self, reason: str) -> None:
        if self._dropped.acquire(blocking=False):
            self._notice(f"track = {self._track}: {reason}; the run is not affected, {self._folder} holds everything")

    def _work(self) -> None:
        ending, share = None, Share(clock=time.thread_time)
        try:
            tell = self._teller()
            while ending is None and not self._dropped.locked():
                ending = self._waiting.get()
                while ending is None and not self._waiting.empty():  # one look sees all that is new
                    ending = self._waiting.get()
                if ending or share.is_due:
                    with share.spending():
                        tell(ending)
        except Exception as error:  # whatever a tracker raises, the run must not see it
            self._drop(_reason(error))


@contextlib.contextmanager
def tracked(
    track: Track, folder: Path, teller: Callable[[], Tell], notice: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Have a tracker, if any, told of a folder; the block calls what it is given whenever something new is there."""
    if track == "none":
        yield lambda: None
        return
    tracking = Tracking(track, teller, folder, notice)
    try:
        yield tracking.look
    except BaseException:
        tracking.end("failed")
        raise
    tracking.end("finished")


def tracked_run(
    folder: Path, config: MachineSection, notice: Callable[[str], None], stored_in: ReadStored
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """`tracked` of a run's folder, as its `track` says.

    Flower runs the coordinator in a folder of its own, so files of a tracker go next to the run there.
    """
    place = Place(
        name=folder.name, folder=folder, home=folder.parent if config.engine == "flower" else None, stored_in=stored_in
    )
    return tracked(config.track, folder, lambda: RunTeller(TRACKERS[config.track], config.track, place), notice)


def _reason(error: Exception) -> str:
    """An error in one line for a terminal: a server may have written it, and a URL may hold a password."""
    text = re.sub(r"//[^/@\s]+@", "//", f"{type(error).__name__}: {error}")
    printable = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(printable.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


@dataclass(frozen=True, kw_only=True)
class Position:
    """The last round that a tracker has been told, -1 for none, and whether it has all, in the run's tracker.json."""

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


class RunTeller:
    """Tells a tracker what is new in a run's folder; `once` leaves alone a run that it knows to be finished."""

    def __init__(self, tracker: Tracker, name: str, place: Place, *, once: bool = False) -> None:
        self._tracker, self._place, self._folder = tracker, place, place.folder
        self._position = read_position(place.folder, name)
        if not once:
            self._position = replace(self._position, finished=False)
        self._run: TrackedRun | None = None

    def __call__(self, ending: Ending | None) -> None:
        """Tell what the tracker does not know yet, and how the run ended, if it has; raises what the tracker raises."""
        if self._position.finished or not (self._folder / files.CONFIG).is_file():
            return
        look = RunFolder(self._folder)
        run = self._opened(look)
        self._tell_rounds(run, look, _last_round(look, complete=ending == "finished"))
        if ending == "finished":
            self._finish(run, look)
        elif ending == "failed":
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
        points = _tracker.round_points(look.round_rows(_ROUND_COLUMNS))
        if len(look.registrations) <= _tracker.MOST_CLIENTS:
            points += _tracker.client_points(look.client_rows(_CLIENT_COLUMNS))
        run.log_points(sorted((p for p in points if first < p.round <= last), key=lambda p: p.round))
        self._keep(replace(self._position, round=last))

    def _finish(self, run: TrackedRun, look: RunFolder) -> None:
        if look.comparison is not None and look.comparison.is_finished:
            run.log_points(
                _tracker.round_points(look.comparison.round_rows(_ROUND_COLUMNS), _tracker.COMPARISON_METRICS)
            )
        final = _tracker.final_figures(look.summary, figures(look, "tracker"))
        run.log_final(final, _tracker.facts(look.summary), self._position.round)
        _send(run, lambda into: stage_run(self._folder, into, self._place.stored_in))
        run.end("finished")
        self._keep(replace(self._position, finished=True))

    def _keep(self, position: Position) -> None:
        if position != self._position:
            files.write_json(self._folder / files.TRACKER, asdict(position))
        self._position = position


@dataclass(frozen=True, eq=False)
class SweepTeller:
    """Tells a tracker of each run of a sweep, by `names`, once that has ended; runs of a sweep are never resumed."""

    tracker: Tracker
    name: str
    folder: Path
    _: KW_ONLY
    title: str
    keys: Sequence[str]
    names: Mapping[str, str]
    stored_in: ReadStored = nothing_stored

    def __call__(self, ending: Ending | None) -> None:
        """Tell what is new of every run, as `RunTeller` does of one; one that fails does not stop the others."""
        run = self._run
        errors = [error for key in self.names if (error := self._tell_run(key, ending))]
        if ending and run is not None:
            run.log_final(_sweep_figures(self.folder / files.SWEEP_TABLE), {}, 0)
            _send(run, lambda into: stage_sweep(self.folder, into))
            run.end(ending)
        if errors:
            raise errors[0]

    def _tell_run(self, key: str, ending: Ending | None) -> Exception | None:
        """Tell of a run that has ended; returns the tracker's error, if there is one."""
        folder = self.folder / key
        is_written = files.is_finished(folder)
        # A run writes more after its summary; where nobody can tell whether it still does, the sweep's end tells.
        if ending is None and not (is_written and is_alive(folder) is False):
            return None
        place = Place(
            name=self.names[key],
            folder=folder,
            sweep=self.title,
            sweep_folder=self.folder,
            parent=self._run.id if self._run else None,
            stored_in=self.stored_in,
        )
        try:
            RunTeller(self.tracker, self.name, place, once=True)("finished" if is_written else "failed")
        except Exception as error:
            return error
        return None

    @cached_property
    def _run(self) -> TrackedRun | None:
        """The sweep's own run, which the first look opens."""
        position = read_position(self.folder, self.name)
        run = self.tracker.open_sweep(self.title, self.folder, self.keys, position.run or None)
        if run is not None:
            files.write_json(self.folder / files.TRACKER, asdict(replace(position, run=run.id)))
        return run


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


def stage_run(run_folder: Path, into: Path, stored_in: ReadStored) -> None:
    """Write configuration, report and global adapter of a finished run, if all are sound, into an empty folder."""
    from fedpriv.runs.show._report_page import render  # deferred: matplotlib

    run = RunFolder(run_folder).checked()
    told = _tracker.configuration(run.config)
    (into / files.CONFIG).write_text(tomli_w.dumps(told), encoding="utf-8")
    report = render(run, stored_in(run_folder), config=told, environment=_tracker.versions(run.environment))
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
