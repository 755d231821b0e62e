"""A vault in a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path

from fedpriv.holder.vault.settings import VaultSettings

ROOT = Path(__file__).resolve().parents[3]


class Running:
    """A vault in a process of its own."""

    def __init__(self, settings: VaultSettings, *arguments: str, **options: object) -> None:
        self.settings = settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedpriv.holder.vault", *arguments, str(settings.folder)],
            stdout=subprocess.PIPE,
            stderr=(settings.folder.parent / "vault.log").open("a"),
            text=True,
            cwd=ROOT,
            **options,
        )
        assert self.process.stdout.readline().startswith("vault listens on")

    @property
    def child(self) -> int:
        """The process that works on records: the last child, after the one that multiprocessing keeps for itself."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return max(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
