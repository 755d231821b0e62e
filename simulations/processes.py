"""Ports for processes on this machine, and command lines that need no process."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import sys
from subprocess import CompletedProcess
from unittest import mock

import typer

from fedpriv.deployment.command_line import run_command_line

# Below those that Linux hands out by itself and above those of Ray's workers; each of pytest's workers has its own.
FIRST_PORT, PORTS_OF_A_WORKER, MOST_WORKERS = 20_000, 3_000, 4


def free_port() -> int:
    """A port of loopback that nothing listens on and that no other worker of this test run is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    first = FIRST_PORT + worker * PORTS_OF_A_WORKER
    while True:
        port = random.SystemRandom().randrange(first, first + PORTS_OF_A_WORKER)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def run_in_process(app: typer.Typer, name: str, *arguments: object) -> CompletedProcess[str]:
    """What `python -m NAME ARGUMENTS` ends with, without the seconds that a new interpreter takes."""
    out, err, command = io.StringIO(), io.StringIO(), [name, *map(str, arguments)]
    code = 0
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_command_line(app, name)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())
