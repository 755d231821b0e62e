"""The SuperNode of a data holder: it runs in the foreground and shows its log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import tomli_w

from clients.deploy.approvals import ROOT
from clients.deploy.folder import Node
from fedpriv.deployment.checks import check_key, check_port_free
from fedpriv.deployment.files import replace
from fedpriv.deployment.flower import EXIT_CODES, environment, logged_exit_code, run_in_foreground
from fedpriv.errors import InputError

# Where Flower's processes on this machine find each other.
_HOST = "127.0.0.1"

# What Flower logs if a node's key is not registered, or is in use: by another node, or by this node before it was
# killed, until two of its heartbeats are overdue.
_NOT_ADMITTED = "Failed to activate SuperNode"
_RETRY_DELAY_SECONDS = 10.0
_MAX_RETRY_SECONDS = 120.0


def program(node: Node) -> list[str]:
    """The program to start, without the arguments of Flower's SuperNode; it runs approved bundles only."""
    return [sys.executable, "-m", "clients.deploy.approved_supernode", str(node.approved)]


def command(node: Node) -> list[str]:
    """The command that starts the SuperNode; a file holds its settings, since paths may contain spaces and quotes."""
    return [
        *program(node),
        *("--superlink", node.superlink, "--root-certificates", str(node.ca_certificate)),
        *("--auth-supernode-private-key", str(node.key)),
        *("--host", _HOST, "--port", str(node.port)),
        *("--node-config", str(node.node_config_file)),
    ]


def start(node: Node, say: Callable[[str], None]) -> int:
    """Run the SuperNode until a signal or an error ends it, and return its exit code.

    Args:
        node: whose SuperNode to run.
        say: prints a line.

    Raises:
        InputError: its port is taken, or its key cannot be used.
    """
    for check in (check_key(node.key), check_port_free(_HOST, node.port)):
        if not check.ok:
            raise InputError(f"{check.name} = {check.detail}")
    replace(node.node_config_file, tomli_w.dumps(node.node_config).encode())
    say(f"SuperNode started for {node.superlink}, partition {node.partition_id}; its log follows")
    started = time.monotonic()
    while True:
        ending = _run(node, say)
        if not ending.not_admitted or time.monotonic() - started > _MAX_RETRY_SECONDS:
            break
        say(
            "not admitted: its key is not registered, or in use (by a killed node for up to a minute); "
            f"retrying in {_RETRY_DELAY_SECONDS:g} s"
        )
        time.sleep(_RETRY_DELAY_SECONDS)
    say(f"SuperNode ended with exit code {ending.code}{ending.meaning}")
    return ending.code


@dataclass(frozen=True)
class _Ending:
    """How a SuperNode ended: its exit code, its meaning, and whether the SuperLink refused to admit the node."""

    code: int
    meaning: str
    not_admitted: bool


def _run(node: Node, say: Callable[[str], None]) -> _Ending:
    reasons: list[int] = []
    refusals: list[str] = []

    def on_line(line: str) -> None:
        say(line)
        if (code := logged_exit_code(line)) is not None:
            reasons.append(code)
        if _NOT_ADMITTED in line:
            refusals.append(line)

    code = run_in_foreground(command(node), variables=_variables(node), folder=node.folder, on_line=on_line)
    meaning = "".join(f": {EXIT_CODES[reason]}" for reason in reasons[-1:] if reason in EXIT_CODES)
    return _Ending(code, meaning, bool(refusals) and code != 0)


def _variables(node: Node) -> dict[str, str]:
    """Flower's environment, with this checkout's modules importable from any folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(node.flower_home, PYTHONPATH=os.pathsep.join(paths))
