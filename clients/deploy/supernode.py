"""A data holder's vault and its SuperNode: they run in the foreground and show their logs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from clients.deploy import separate_users, vault_process
from clients.deploy.folder import ROOT, Node
from clients.deploy.separate_users import Users
from fedpriv.deployment import polling
from fedpriv.deployment.checks import check_port_free
from fedpriv.deployment.flower import EXIT_CODES, environment, logged_exit_code, run_in_foreground, settings
from fedpriv.errors import InputError
from fedpriv.files import replace_file

# Where Flower's processes on this machine find each other.
_HOST = "127.0.0.1"

# What Flower logs if a node's key is not registered, or is in use: by another node, or by this node before it was
# killed, until two of its heartbeats are overdue.
_NOT_ADMITTED = "Failed to activate SuperNode"
_SHORTEST_RETRY_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 60.0


def program(node: Node) -> list[str]:
    """The program to start, without the arguments of Flower's SuperNode; it runs approved bundles only."""
    return [sys.executable, "-m", "clients.deploy.approved_supernode", str(node.approved)]


def command(node: Node, key: Path) -> list[str]:
    """The command that starts the SuperNode; a file holds its settings, since paths may contain spaces and quotes.

    Args:
        node: whose SuperNode to start.
        key: the file with node.key that the SuperNode reads.
    """
    return [
        *program(node),
        *("--superlink", node.superlink, "--root-certificates", str(node.ca_certificate)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", _HOST, "--port", str(node.port)),
        *("--node-config", str(node.node_config_file)),
    ]


def start(node: Node, say: Callable[[str], None]) -> int:
    """Run the vault and the SuperNode until a signal or an error ends the latter, and return its exit code.

    A node that is not admitted yet waits until it is.

    Args:
        node: whose vault and SuperNode to run.
        say: prints a line; other threads call it too.

    Raises:
        InputError: its port is taken, or see `prepare`.
        FlowerError: the vault does not start.
    """
    if not (free := check_port_free(_HOST, node.port)).ok:
        raise InputError(f"{free.name} = {free.detail}")
    environ = _environment(node)
    users = prepare(node)
    with _ended_by_signals(), vault_process.running(node, say, variables=environ, user=users.vault):
        say(f"SuperNode started for {node.superlink}, partition {node.vault.partition_id}; its log follows")
        started = time.monotonic()
        while (ending := _run(node, users, environ, say)).not_admitted:
            waited = time.monotonic() - started
            pause = polling.pause(waited, shortest=_SHORTEST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
            say(
                f"not admitted yet, after {waited:.0f} s: waiting until the coordinator registers its keys, "
                "or until the place of a node that was killed is free (up to a minute); "
                f"next try in {pause:.0f} s, Ctrl-C ends it"
            )
            time.sleep(pause)
    say(f"SuperNode ended with exit code {ending.code}{ending.meaning}")
    return ending.code


def prepare(node: Node) -> Users:
    """Make a node's folder ready for its SuperNode, and return whose processes it and the vault are.

    Raises:
        InputError: one of its keys cannot be used, or the SuperNode cannot run as the user that it should.
    """
    for check in separate_users.check_keys(node):
        if not check.ok:
            raise InputError(check.detail)
    users = separate_users.prepared(node, _environment(node))
    replace_file(node.node_config_file, tomli_w.dumps(node.node_config).encode())
    return users


@dataclass(frozen=True)
class _Ending:
    """How a SuperNode ended: its exit code, its meaning, and whether the SuperLink refused to admit the node."""

    code: int
    meaning: str
    not_admitted: bool


def _run(node: Node, users: Users, environ: Mapping[str, str], say: Callable[[str], None]) -> _Ending:
    reasons: list[int] = []
    refusals: list[str] = []

    def on_line(line: str) -> None:
        say(line)
        if (code := logged_exit_code(line)) is not None:
            reasons.append(code)
        if _NOT_ADMITTED in line:
            refusals.append(line)

    code = run_in_foreground(
        command(node, users.key),
        variables=users.client_variables(environ),
        folder=node.flower_home,
        on_line=on_line,
        user=users.client,
    )
    meaning = "".join(f": {EXIT_CODES[reason]}" for reason in reasons[-1:] if reason in EXIT_CODES)
    return _Ending(code, meaning, bool(refusals) and code != 0)


def variables(node: Node) -> dict[str, str]:
    """What the SuperNode is told by its environment, this checkout's modules among it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**settings(node.flower_home), "PYTHONPATH": os.pathsep.join(paths)}


def _environment(node: Node) -> dict[str, str]:
    """The SuperNode's whole environment."""
    return environment(node.flower_home, **variables(node))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """While no SuperNode runs, SIGTERM ends this process as SIGINT does, so that the vault is ended too."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
