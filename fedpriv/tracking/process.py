"""The process that follows a run and talks to its tracker: `python -m fedpriv.tracking.process JOB`.

Its standard input ends when the run does; its standard output is at most one line, why something did not arrive.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.config import Track

if TYPE_CHECKING:
    from fedpriv.tracking.follower import RunFollower, SweepFollower

# What is written to standard input at the end, if all files are there.
COMPLETE = b"complete"
# How long the process may go on after the run, for what is still to be sent.
END_SECONDS = 60.0

_POLL_SECONDS = 2.0
_RETRY_SECONDS = 15.0
_LONGEST_REASON = 200


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is followed.

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


def follower_of(job: Job) -> RunFollower | SweepFollower:
    """What follows the job's folder."""
    from fedpriv.tracking.follower import RunFollower, SweepFollower
    from fedpriv.tracking.protocol import Place, tracker_of

    folder, tracker = Path(job.folder), tracker_of(job.tracker)
    if job.title is None:
        return RunFollower(tracker, job.tracker, Place(name=folder.name, folder=folder))
    return SweepFollower(tracker, job.tracker, folder, title=job.title, keys=job.keys, names=job.names)


def follow(job: Job, end: End, say: Callable[[str], None]) -> bool:
    """Follow the job's folder until its end, and return whether the last of it arrived.

    What fails is said once and tried again.
    """
    follower: RunFollower | SweepFollower | None = None
    told, pause = False, 0.0
    while True:
        ended = end.wait(pause)
        try:
            follower = follower or follower_of(job)
            follower.update(complete=ended and end.complete, ended=ended)
            arrived, pause = True, _POLL_SECONDS
        except Exception as error:  # whatever a tracker raises, the run must not see it
            if not told:
                say(reason(error))
            told, arrived, pause = True, False, _RETRY_SECONDS
        if ended:
            return arrived


class End:
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


def reason(error: Exception) -> str:
    """An error in one line for a terminal: a server may have written it, and a URL may hold a password."""
    text = re.sub(r"//[^/@\s]+@", "//", f"{type(error).__name__}: {error}")
    printable = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(printable.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


def main() -> None:
    """Follow the job that the argument describes; libraries' own output goes nowhere."""
    job = Job(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.nice(5)
    arrived = follow(job, End(), lambda line: print(line, file=answers))
    os._exit(0 if arrived else 1)  # libraries' exit handlers would wait for servers


if __name__ == "__main__":
    main()
