"""The vault of a node as a process beside its SuperNode: started first, ended last, and started again if it dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from clients.deploy.folder import Node
from fedpriv.deployment.flower import FlowerError
from fedpriv.deployment.users import User

# Its first line once it can be asked.
_READY = "vault listens on"
_READY_SECONDS = 120.0
_RESTART_SECONDS = 2.0
_END_SECONDS = 30.0


@contextmanager
def running(
    node: Node, say: Callable[[str], None], *, variables: Mapping[str, str], user: User | None
) -> Iterator[None]:
    """The node's vault, as long as the block runs; its output is shown behind `vault: `.

    Args:
        node: whose vault to run.
        say: prints a line, from other threads too.
        variables: environment of the vault.
        user: whose process it is; None stands for the user of this process.

    Raises:
        FlowerError: it ends before it can be asked, or takes too long.
    """
    vault = _Vault(node, say, variables=variables, user=user)
    vault.start()
    try:
        vault.wait_until_ready()
        yield
    finally:
        vault.end()


class _Vault:
    """Keeps one vault running until it is told to end it."""

    def __init__(
        self, node: Node, say: Callable[[str], None], *, variables: Mapping[str, str], user: User | None
    ) -> None:
        self._node, self._say = node, say
        self._variables, self._user = dict(variables), user
        self._ready, self._ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        self._keeper.start()

    def wait_until_ready(self) -> None:
        if not self._ready.wait(_READY_SECONDS):
            raise FlowerError(f"vault: does not listen within {_READY_SECONDS:g} s")
        if self._ending.is_set():
            raise FlowerError("vault: ended before it could be asked; the lines above say why")

    def end(self) -> None:
        """End the vault; it is not started again."""
        with self._lock:
            self._ending.set()
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._keeper.join(_END_SECONDS)

    def _keep(self) -> None:
        """Start the vault whenever there is none; one that never was ready is not started again."""
        while (process := self._started()) is not None:
            for line in process.stdout or ():
                self._say(f"vault: {line.rstrip()}")
                if line.startswith(_READY):
                    self._ready.set()
            code = process.wait()
            if not self._ready.is_set() or self._ending.is_set():
                break
            self._say(f"vault: ended with code {code}; it is started again in {_RESTART_SECONDS:g} s")
            self._ending.wait(_RESTART_SECONDS)
        self._ending.set()
        self._ready.set()

    def _started(self) -> subprocess.Popen[str] | None:
        """A new process; None once the vault is to end, or if the system does not let it start."""
        with self._lock:
            if self._ending.is_set():
                return None
            try:
                self._process = self._popen()
            except OSError as error:
                self._say(f"vault: cannot be started ({error.strerror})")
                return None
            return self._process

    def _popen(self) -> subprocess.Popen[str]:
        # In its own process group: otherwise Ctrl-C would end it before the SuperNode. What it writes is its own. If
        # this process is killed, the pipe to the vault's standard input closes: it ends too, and gives its place free.
        return subprocess.Popen(
            [sys.executable, "-m", "fedpriv.vault", "--with-parent", str(self._node.folder)],
            cwd=self._node.folder,
            env=self._variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            umask=0o077,
            **(self._user.popen_options if self._user else {}),
        )
