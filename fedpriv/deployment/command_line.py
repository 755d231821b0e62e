"""How the command lines of a deployment report errors and exit."""

from __future__ import annotations

import sys

import typer

from fedpriv.deployment.flower import FlowerError
from fedpriv.errors import LedgerError


def run_command_line(app: typer.Typer, name: str) -> None:
    """Run a command line: a user's mistake gives one line on stderr and exit code 2, any other failure exit code 1."""
    try:
        app(prog_name=name)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (FlowerError, LedgerError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
