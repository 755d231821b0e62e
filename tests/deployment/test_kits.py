"""The kits with real processes: a node is let in once it is registered, and both sides stop when asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.deployment import keys
from simulations.sites import free_port

pytestmark = pytest.mark.deployment

ROOT = Path(__file__).resolve().parents[2]


class Started:
    """A command in the background, whose lines can be waited for."""

    def __init__(self, module: str, folder: Path) -> None:
        command = [sys.executable, "-m", module, "start", str(folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify_all()

    def wait_for(self, text: str, seconds: float = 60) -> str:
        def seen() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._more:
            found = self._more.wait_for(seen, timeout=seconds)
        assert found, f"{text!r} not among\n" + "\n".join(self.lines)
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def kit(side: str, *arguments: object) -> str:
    command = [sys.executable, "-m", f"{side}.deploy", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Path, int, Started]]:
    folder, port = tmp_path / "coordinator", free_port()
    kit("server", "init", folder, "--address", "127.0.0.1", "--port", port)
    superlink = Started("server.deploy", folder)
    yield folder, port, superlink
    superlink.stop()


def test_a_node_is_let_in_once_it_is_registered_and_both_stop_when_asked(coordinator, tmp_path):
    folder, port, superlink = coordinator
    superlink.wait_for(f"SuperLink answers at https://127.0.0.1:{port}, certificate valid until")
    heard = kit("server", "invite", folder, "St. Anna").split()[-1]
    invitation = ("--invite", folder / "invitations" / "0.toml", "--fingerprint", heard)
    kit("clients", "init", tmp_path / "node 0", *invitation, "--approve")
    node = Started("clients.deploy", tmp_path / "node 0")
    node.wait_for("vault: vault listens on")
    node.wait_for("s: waiting until the coordinator registers")

    application = tmp_path / "node 0" / "application.toml"
    told = keys.fingerprint(keys.public_line(tmp_path / "node 0" / "vault.key"))
    assert "St. Anna is admitted" in kit("server", "admit", folder, application, "--fingerprint", told)
    assert "St. Anna was admitted before" in kit("server", "admit", folder, application)
    try:
        superlink.wait_for("nodes online: 1 of 1 registered")
        assert "1 online of 1 registered" in kit("server", "doctor", folder)
    finally:
        assert node.stop() == 0
    assert superlink.stop() == 0
    assert " SuperLink ended with exit code 0" in superlink.lines[-1]
