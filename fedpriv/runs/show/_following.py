"""The process that follows a run's folder and talks to its tracker, and the side of the run, which starts it.

`following` starts the process, passes its warning on, and waits for it at most a minute after the run. The process is
`python -m fedpriv.runs.show._following FOLDER`, with a `FollowedFolder` as JSON. Its standard input ends when the run
does; its standard output is at most one line, which says why something did not arrive.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpriv
from fedpriv.config import MachineSection, Track
from fedpriv.errors import InputError
from fedpriv.runs.show._tracker import Place, exists_here, plain_value, tracker_of, without_folders

if TYPE_CHECKING:
    from fedpriv.runs.show._follower import RunFollower, SweepFollower


# What is written to standard input at the end, if all files are there.
COMPLETE = b"complete"
# How long the process may go on after the run, for what is still to be sent.
END_SECONDS = 60.0

_POLL_SECONDS = 2.0
_RETRY_SECONDS = 15.0
_LONGEST_REASON = 200


@dataclass(frozen=True, kw_only=True)
class FollowedFolder:
    """A folder that is followed, and the tracker that is told.

    Attributes:
        tracker: which.
        folder: of the run or the sweep.
        title: of the sweep; None for a run of its own.
        keys: what varies in the sweep.
        names: {folder of a run in the sweep: what it is called}.
    """

    tracker: Track
    folder: str
    title: str | None = None
    keys: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The job as an argument of the process."""
        return json.dumps(asdict(self))


def _follower_of(job: FollowedFolder) -> RunFollower | SweepFollower:
    """The follower of the run's or the sweep's folder."""
    from fedpriv.runs.show._follower import RunFollower, SweepFollower

    folder, tracker = Path(job.folder), tracker_of(job.tracker)
    if job.title is None:
        return RunFollower(tracker, job.tracker, Place(name=folder.name, folder=folder))
    return SweepFollower(tracker, job.tracker, folder, title=job.title, keys=job.keys, names=job.names)


def follow(job: FollowedFolder, end: _EndOfRun, say: Callable[[str], None]) -> bool:
    """Follow the job's folder until its end, and return whether the last of it arrived.

    What fails is said once and tried again.
    """
    follower: RunFollower | SweepFollower | None = None
    told, pause = False, 0.0
    while True:
        ended = end.wait(pause)
        try:
            follower = follower or _follower_of(job)
            follower.update(complete=ended and end.complete, ended=ended)
            arrived, pause = True, _POLL_SECONDS
        except Exception as error:  # whatever a tracker raises, the run must not see it
            if not told:
                say(_reason(error))
            told, arrived, pause = True, False, _RETRY_SECONDS
        if ended:
            return arrived


class _EndOfRun:
    """Waits for the run's end in a thread; from then on the process has END_SECONDS left, whatever hangs."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.complete = False
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the run has ended, after that time at most."""
        return self._event.wait(seconds)

    def _watch(self) -> None:
        self.complete = sys.stdin.buffer.read() == COMPLETE
        self._event.set()
        time.sleep(END_SECONDS)
        os._exit(1)


def _reason(error: Exception) -> str:
    """An error in one line for a terminal: a server may have written it, and a URL may hold a password."""
    text = re.sub(r"//[^/@\s]+@", "//", f"{type(error).__name__}: {error}")
    printable = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(printable.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


def main() -> None:
    """Follow the job that the argument describes; libraries' own output goes nowhere."""
    job = FollowedFolder(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.nice(5)
    arrived = follow(job, _EndOfRun(), lambda line: print(line, file=answers))
    os._exit(0 if arrived else 1)  # libraries' exit handlers would wait for servers


# The wait for a tracker that has missed something, and after a run that failed.
_SHORT_SECONDS = 15.0


def following_run(
    folder: Path, config: MachineSection, notice: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """`following` of a run's folder, as its `track` says.

    Flower runs the coordinator in a folder of its own, so files of a tracker go next to the run there.
    """
    job = None if config.track == "none" else FollowedFolder(tracker=config.track, folder=str(folder))
    return following(job, notice, folder=folder.parent if config.engine == "flower" else None)


@contextlib.contextmanager
def following(
    job: FollowedFolder | None, notice: Callable[[str], None], *, folder: Path | None = None
) -> Iterator[None]:
    """Have the job's folder followed by a process of its own while the block runs; nothing happens without a job.

    What goes wrong there is told in one notice, from another thread; nothing is raised.

    Args:
        job: what is followed, and where to.
        notice: is told once if something did not arrive.
        folder: in which the process works, for trackers that write there; None for this one's.
    """
    if job is None:
        yield
        return
    try:
        process = _started(job, folder)
    except OSError as error:
        notice(f"track = {job.tracker}: its process does not start ({error}); the run goes on without")
        yield
        return
    told = threading.Event()
    reader = threading.Thread(target=_pass_on, args=(process, job, notice, told), daemon=True)
    reader.start()
    complete = False
    try:
        yield
        complete = True
    finally:
        _end(process, complete=complete, seconds=END_SECONDS if complete and not told.is_set() else _SHORT_SECONDS)
        reader.join(1.0)
        if process.returncode != 0 and not told.is_set():
            notice(f"track = {job.tracker}: not everything arrived; {job.folder} holds all of it")


def _started(job: FollowedFolder, folder: Path | None) -> subprocess.Popen[bytes]:
    # -P: a folder called `wandb` where the run was started is not the package.
    command = [sys.executable, "-P", "-m", "fedpriv.runs.show._following", job.to_json()]
    path = [str(Path(fedpriv.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,  # Ctrl-C is for the run; its end is told after it
    )


def _pass_on(
    process: subprocess.Popen[bytes], job: FollowedFolder, notice: Callable[[str], None], told: threading.Event
) -> None:
    """Tell the first line that the process says."""
    assert process.stdout is not None
    line = process.stdout.readline().decode(errors="replace").strip()
    if line:
        told.set()
        notice(f"track = {job.tracker}: {line}; the run is not affected, {job.folder} holds everything")


def _end(process: subprocess.Popen[bytes], *, complete: bool, seconds: float) -> None:
    """Say that the run has ended, wait, and end the process and what it started."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it is gone already
        if complete:
            process.stdin.write(COMPLETE)
        process.stdin.close()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:  # also at a second Ctrl-C
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_installed(track: Track) -> None:
    """Refuse a tracker whose package is missing, before anything is run.

    Raises:
        InputError: names the extra to install.
    """
    if track != "none" and find_spec(track) is None:
        raise InputError(f"track = {track}: needs {track}; pip install 'fedpriv[{track}]', or use none")


def run_name(varied: Mapping[str, Any], exists: Callable[[str], bool] = exists_here) -> str:
    """The name of a run in a sweep: the keys that vary, with their values."""
    values = {key: without_folders(value, exists) if isinstance(value, str) else value for key, value in varied.items()}
    named = [f"{key}={plain_value(value)}" for key, value in values.items() if value is not None]
    return ", ".join(named) or "base"


if __name__ == "__main__":
    main()
