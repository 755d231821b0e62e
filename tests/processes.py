"""Processes of a test, and command lines that need none."""

from __future__ import annotations

import contextlib
import io
import sys
from subprocess import CompletedProcess
from unittest import mock

import typer

from fedpriv.deployment.command_line import run_command_line


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
