"""Flower's programs, as a coordinator or data holder starts them: environment, child process, answers, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONNECTION = "federation"

_ASK_SECONDS = 120.0

# Flower logs these codes; its processes exit with 1 whatever happened. See flwr/supercore/exit/exit_code.py, 1.41.
_EXIT_CODE = re.compile(r"Exit Code: (\d+)")
EXIT_CODES: Mapping[int, str] = {
    101: "the SuperLink's license is invalid",
    104: "Flower does not know these arguments",
    105: "state.db was written by another version of Flower; move it away and register the nodes again",
    302: "the node's key is no EC private key; make one with `init`",
    303: "the node's key was given, but no TLS",
    305: "no connection to the SuperLink, or it refused the node; is the node's public key registered there?",
    600: "the address is none; it must be HOST:PORT",
    604: "a file that was named does not exist",
    605: "the server's certificate or key cannot be used",
    606: "SuperLink and node have different versions of Flower",
}


class FlowerError(RuntimeError):
    """Flower failed or refused; one line with its reason. Command lines print it and exit with 1."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's programs: this virtual environment first, nothing installed or sent behind its back.

    Args:
        home: Flower's own folder.
        more: further variables.
    """
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(program_folder()), os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        **more,
    }


def program_folder() -> Path:
    """Where the programs of this virtual environment lie."""
    return Path(sys.executable).parent


def flwr(home: Path, arguments: Sequence[str], *, folder: Path) -> dict[str, Any]:
    """What `flwr ARGUMENTS --format json` answers.

    Args:
        home: Flower's own folder, with its connections.
        arguments: of flwr.
        folder: to run it in.

    Raises:
        FlowerError: it says that it failed, or answers nothing in time.
    """
    command = [str(program_folder() / "flwr"), *arguments, "--format", "json"]
    # Rich wraps at the terminal's width, which would break a long reason in two.
    variables = environment(home, COLUMNS="10000", NO_COLOR="1")
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise FlowerError(f"flwr {arguments[0]}: no answer within {_ASK_SECONDS:g} s") from None
    return _answer(done.stdout, done.stderr, arguments)


def _answer(stdout: str, stderr: str, arguments: Sequence[str]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(stdout[stdout.index("{") :])
    except ValueError:
        raise FlowerError(f"flwr {arguments[0]}: {_one_line(stderr or stdout) or 'answered nothing'}") from None
    if not answer.get("success"):
        raise FlowerError(f"flwr {arguments[0]}: {_one_line(str(answer.get('error-message', answer)))}")
    return answer


def num_online(home: Path, *, folder: Path) -> int:
    """How many nodes are online.

    Raises:
        FlowerError: the SuperLink does not say.
    """
    nodes = flwr(home, ["supernode", "list", CONNECTION], folder=folder)["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def run_in_foreground(
    command: Sequence[str], *, variables: Mapping[str, str], folder: Path, on_line: Callable[[str], None]
) -> int:
    """The exit code of a command once it has ended; 128 + n where signal n ended it.

    SIGINT and SIGTERM are passed on to it; that it ends by one of these is what was asked for, and counts as 0.

    Args:
        command: program and arguments.
        variables: its environment.
        folder: to run it in.
        on_line: gets each line of its output, in a thread of its own.
    """
    passing = _Passing()
    with _handled_by(passing):
        # In a process group of its own: else Ctrl-C would reach it twice, from the terminal and from here.
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        passing.to(child)
        relay = threading.Thread(target=_relay, args=(child, on_line), daemon=True)
        relay.start()
        code = child.wait()
    # A process that outlives the child may hold the pipe open.
    relay.join(timeout=2)
    if -code in passing.numbers:
        return 0
    return code if code >= 0 else 128 - code


def logged_exit_code(line: str) -> int | None:
    """Flower's own exit code, where a line of its log names it."""
    found = _EXIT_CODE.search(line)
    return int(found[1]) if found else None


def _relay(child: subprocess.Popen[str], on_line: Callable[[str], None]) -> None:
    for line in child.stdout or ():
        on_line(line.rstrip("\n"))


class _Passing:
    """A signal handler that passes signals on to a child; those that come before the child is there wait for it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, number: int, _: object) -> None:
        self.numbers.append(number)
        if self._child is not None:
            self._child.send_signal(number)

    def to(self, child: subprocess.Popen[str]) -> None:
        """Name the child."""
        self._child = child
        for number in self.numbers:
            child.send_signal(number)


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _one_line(text: str) -> str:
    """The reason without the lines by which flwr says what it is about to do."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Using SuperLink:") and line[-3:] != "...")
