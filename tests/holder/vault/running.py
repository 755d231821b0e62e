"""A vault in a process of its own, and another user's program beside it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fedpriv.holder.vault.settings import VaultSettings

ROOT = Path(__file__).resolve().parents[3]

NOBODY = 65534
AS_NOBODY = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


@cache
def other_python() -> str | None:
    """A Python that another user may run; None where this process cannot become another user."""
    if os.geteuid():
        return None
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([python, "-c", "import socket"], user=NOBODY, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@contextmanager
def passable_folder() -> Iterator[Path]:
    """A folder that every user may pass through, unlike those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="fedpriv-passable-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


class Running:
    """A vault in a process of its own."""

    def __init__(self, settings: VaultSettings, *arguments: str, **options: object) -> None:
        self.settings = settings
        command = [sys.executable, "-m", "fedpriv.holder.vault", *arguments, str(settings.folder)]
        streams = {"stdout": subprocess.PIPE, "stderr": (settings.folder.parent / "vault.log").open("a")}
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, **streams, **options)
        assert self.process.stdout.readline().startswith("vault listens on")

    @property
    def child(self) -> int:
        """The process that works on records: the last child, after the one that multiprocessing keeps for itself."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return max(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
