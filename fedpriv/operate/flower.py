"""Flower's programs as a coordinator or data holder runs them: environment, process, answers, exit codes, and log."""

import ipaddress
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from fedpriv.files import User
from fedpriv.operate.checks import LOOPBACK
from fedpriv.operate.processes import UTF8, signals_handled_by, start_child

# Flower colours its log, even where no terminal shows it.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# Flower logs these codes; its processes themselves always exit with 1. See flwr/supercore/exit/exit_code.py, 1.42.
_EXIT_CODE = re.compile(r"Exit Code: (\d+)")
_EXIT_CODES: Mapping[int, str] = {
    101: "the SuperLink's license is invalid",
    104: "Flower does not know these arguments",
    105: "state.db was written by another version of Flower; move it away and register the nodes again",
    302: "the node's key is not an EC private key; make one with `init`",
    303: "the node's key was given, but TLS is not enabled",
    305: "no connection to the SuperLink, or it refused the node; is the node's public key registered there?",
    600: "the address is invalid; it must be HOST:PORT",
    604: "a given file does not exist",
    605: "the server's certificate or key cannot be used",
    606: "SuperLink and node have different versions of Flower",
}

_SHARE = 0.1
# Flower's own is 1 s, and each further one is twice as long.
_FIRST_RETRY_SECONDS = 0.05

_FILE_BYTES, _NUM_OLD_FILES = 10 * 2**20, 3

# Flower structures its log by lines that hold a level and nothing else.
_BLANK = re.compile(r"(?:[A-Z]+\s*:?)?\s*")


def environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment of Flower's programs: this virtual environment first; no installing, update checks or telemetry.

    Args:
        home: Flower's own folder.
        extra: further variables.
    """
    path = os.pathsep.join([str(program_folder()), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **UTF8, **settings(home), **extra}


def settings(home: Path) -> dict[str, str]:
    """The variables that Flower's programs take from their environment alone.

    They reach each other on this machine without a proxy, whatever the operator's is.
    """
    return {
        **proxies()[0],
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }


def proxies() -> tuple[dict[str, str], list[str]]:
    """The proxy variables as Flower's client, httpx, can read them, and a line for each entry that it cannot.

    A variable that is left out is empty: httpx would end the program.
    """
    entries = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    exempt = [host for entry in entries if (host := entry.strip().removeprefix("[").removesuffix("]"))]
    kept = [host for host in exempt if _is_read(f"all://{_bracketed(host)}")]
    direct = ",".join(dict.fromkeys([*kept, *LOOPBACK]))
    dropped = [host for host in exempt if host not in kept]
    lines = [f"NO_PROXY: {host!r} is left out, since Flower reads no such entry; name hosts" for host in dropped]
    values = {"NO_PROXY": direct, "no_proxy": direct}  # of both, programs read the one or the other
    for name in (f"{scheme}_PROXY" for scheme in ("HTTPS", "HTTP", "ALL")):
        for variable in (name, name.lower()):
            url = os.environ.get(variable, "")
            if url and not _is_proxy(url if "://" in url else f"http://{url}"):
                values[variable] = ""
                lines.append(f"{variable}: is left out, since Flower takes no such proxy; give http://HOST:PORT")
    return values, lines


def use_proxies(say: Callable[[str], None]) -> None:
    """Let this process read the proxy variables as Flower's programs do, and say which entries are left out."""
    values, lines = proxies()
    for line in lines:
        say(f"note: {line}")
    os.environ.update(values)


def _bracketed(host: str) -> str:
    """A host as httpx writes it in the pattern of its entry."""
    if "://" in host:
        return host.partition("://")[2]
    try:
        ipaddress.IPv6Address(host.partition("/")[0])
    except ValueError:
        return f"*{host}"
    return f"[{host}]"


def _is_read(pattern: str) -> bool:
    import httpx

    try:
        httpx.URL(pattern)
    except httpx.InvalidURL:
        return False
    return True


def _is_proxy(url: str) -> bool:
    import httpx

    try:
        httpx.HTTPTransport(verify=False, proxy=url).close()
    except (ImportError, ValueError, httpx.InvalidURL):  # SOCKS needs a package of its own
        return False
    return True


def python_path(checkout: Path | None) -> dict[str, str]:
    """The PYTHONPATH with which a program finds a checkout's modules first; none where there is no checkout."""
    if checkout is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])}


def program_folder() -> Path:
    """The folder with the programs of this virtual environment."""
    return Path(sys.executable).parent


def _run_in_foreground(
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    folder: Path,
    on_line: Callable[[str], None],
    user: User | None = None,
) -> int:
    """Run a command until it ends, and return its exit code; 128 + n if signal n ended it.

    SIGINT and SIGTERM are forwarded to it; if one of these ends it, as intended, the exit code is 0. If it ends by
    itself, which no service should, it is 1 at least. Its standard input is a pipe, which closes if this process is
    killed.

    Args:
        command: program and arguments.
        on_line: receives each line of its output without colours, in a separate thread.
        user: whose process it is; None stands for the user of this process.
    """
    forwarder = _SignalForwarder()
    with signals_handled_by(forwarder):
        child = start_child(command, folder=folder, variables=variables, user=user)
        forwarder.forward_to(child)
        relay = threading.Thread(target=_relay, args=(child, on_line), daemon=True)
        relay.start()
        code = child.wait()
    # A process that outlives the child may hold the pipe open.
    relay.join(timeout=2)
    if -code in forwarder.received:
        return 0
    return max(code, 0 if forwarder.received else 1) if code >= 0 else 128 - code


def run_and_explain(
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    folder: Path,
    on_line: Callable[[str], None],
    user: User | None = None,
) -> tuple[int, str]:
    """Run one of Flower's programs as `_run_in_foreground` does; its exit code, and `: MEANING` if its log says why."""
    reasons: list[int] = []

    def noted(line: str) -> None:
        on_line(line)
        if (code := _logged_exit_code(line)) is not None:
            reasons.append(code)

    code = _run_in_foreground(command, variables=variables, folder=folder, on_line=noted, user=user)
    return code, "".join(f": {_EXIT_CODES[reason]}" for reason in reasons[-1:] if reason in _EXIT_CODES)


def plain(line: str) -> str:
    """A line of Flower's log without colours."""
    return _COLOUR.sub("", line)


def _logged_exit_code(line: str) -> int | None:
    """Flower's own exit code, if a line of its log states it."""
    match = _EXIT_CODE.search(line)
    return int(match[1]) if match else None


def _relay(child: subprocess.Popen[str], on_line: Callable[[str], None]) -> None:
    for line in child.stdout or ():
        on_line(plain(line.rstrip("\n")))


class _SignalForwarder:
    """A signal handler that forwards signals to a child process, including those that arrive before it has started."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, number: int, _: object) -> None:
        self.received.append(number)
        if self._child is not None:
            self._child.send_signal(number)

    def forward_to(self, child: subprocess.Popen[str]) -> None:
        """Forward to this child the signals received so far and from now on."""
        self._child = child
        for number in self.received:
            child.send_signal(number)


def seconds_to_pause(waited: float, *, shortest: float, longest: float) -> float:
    """Seconds until the next question: a tenth of the time already waited, within bounds.

    What comes after a wait of t is therefore seen at 1.1 t or at t + `shortest`, unless `longest` cuts that short.

    Args:
        waited: seconds since the wait began, >= 0.
        shortest: that a pause lasts, in seconds.
        longest: the same; where the two conflict, it counts.
    """
    return min(longest, max(shortest, _SHARE * waited))


def ask_again_soon(pull_objects: Any) -> None:
    """Make `pull_objects` ask again soon for an array that a message announces and that has not arrived yet."""
    pull_objects.__kwdefaults__["initial_backoff"] = _FIRST_RETRY_SECONDS


class Log:
    """A program's log: takes lines, from any thread, shows them, and keeps them in a file that does not grow for ever.

    Args:
        show: prints a line; None shows none.
        path: of the file that keeps the last 40 MB without colours; None keeps none. Where it cannot be written, lines
            are only shown.
    """

    def __init__(self, show: Callable[[str], None] | None, path: Path | None = None) -> None:
        self._show = show
        self._file = None if path is None else _File(path, maxBytes=_FILE_BYTES, backupCount=_NUM_OLD_FILES, delay=True)

    def __call__(self, line: str) -> None:
        """Take a line: it gets the time in UTC in front; a blank one is left out."""
        if _BLANK.fullmatch(plain(line)):
            return
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}"
        if self._show is not None:
            self._show(line)
        if self._file is not None:
            self._file.handle(logging.makeLogRecord({"msg": plain(line)}))


class _File(RotatingFileHandler):
    """A file for its owner alone: what a vault tells its operator, such as when it failed, is for nobody else."""

    def _open(self) -> TextIOWrapper:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return os.fdopen(file, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing: a full disk must end no program."""
