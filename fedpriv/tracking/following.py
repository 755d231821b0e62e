"""Starts the process that follows a run, passes its warning on, and does not wait for it longer than a minute."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fedpriv
from fedpriv.config import RunConfig
from fedpriv.tracking.process import COMPLETE, END_SECONDS, FollowedFolder

# Once something did not arrive, and after a run that failed.
_SHORT_SECONDS = 15.0


def following_run(
    folder: Path, config: RunConfig, notice: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """`following` of a run's folder, as its `track` says.

    Flower runs the coordinator in a folder of its own, so there, files beside the tracker go beside the run.
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
        folder: in which the process works, for trackers that write beside it; None for this one's.
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
    command = [sys.executable, "-P", "-m", "fedpriv.tracking.process", job.to_json()]
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
