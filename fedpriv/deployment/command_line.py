"""How the command lines of a deployment report errors and exit, and hand out systemd units."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.deployment.flower import FlowerError
from fedpriv.deployment.systemd import Unit, shown, write_units
from fedpriv.errors import LedgerError

UnitFolder = Annotated[Path | None, typer.Option("--out", help="Folder for the files; without it they are printed.")]


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


def give_units(units: Sequence[Unit], out: Path | None) -> None:
    """Print units, or write them and say how they are started.

    Raises:
        InputError: the folder does not exist, or holds a file of that name; nothing was written.
    """
    if out is None:
        typer.echo(shown(units), nl=False)
        return
    for path in write_units(units, out):
        typer.echo(f"wrote {path}")
    typer.echo(f"next: systemctl daemon-reload && systemctl enable --now {' '.join(unit.name for unit in units)}")
