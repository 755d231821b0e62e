"""`fedpriv run`, `sweep`, `init`, `node`, `coordinator` and `app`: the programs above the library, loaded when used."""

from __future__ import annotations

import hashlib
import re
from importlib import import_module
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedpriv.cli._command import Result
from fedpriv.errors import InputError

# {name: (module of the programs, its command or none for all of them, what --help lists)}
_PROGRAMS = {
    "run": ("simulations.__main__", "run", "Run one federation on this machine: tables, adapters, summary and report."),
    "sweep": ("simulations.__main__", "sweep", "Run many federations, one for each point of a grid."),
    "init": ("simulations.__main__", "init", "Write a commented configuration for a table of records."),
    "node": (
        "clients.deploy.__main__",
        "",
        "Take part in a federation as a data holder: init, doctor, start, ...",
    ),
    "coordinator": ("server.deploy.__main__", "", "Coordinate a federation: init, invite, admit, start, run, ..."),
}


class ProgramGroup(TyperGroup):
    """The commands of an app, and those of the programs, which come first; --help of the app loads no program."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_PROGRAMS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _PROGRAMS:
            return super().get_command(ctx, cmd_name)
        return click.Command(cmd_name, help=_PROGRAMS[cmd_name][2])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _loaded(name) if name in _PROGRAMS else command, rest


def _loaded(name: str) -> click.Command:
    """The command of a program, or the group of all its commands."""
    from fedpriv.apps import program

    module, of_program, _ = _PROGRAMS[name]
    found = typer.main.get_command(program(module).app)
    return found.commands[of_program] if of_program and isinstance(found, click.Group) else found


def app(folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder.")]) -> Result:
    """Write the Flower app into a folder, for those who want to change it: `flwr run DIR` runs it.

    Nodes run what their operators approved, and this copy has the digest of the original until it is changed.

    Example: fedpriv app my-federation
    """
    from fedpriv.apps import FLOWER_APP
    from fedpriv.operate import approvals

    place = folder.absolute()
    if place.exists():
        raise InputError(f"DIR = {str(folder)!r}: exists; name a new folder")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9-]{0,31}", place.name):
        raise InputError(f"DIR = {str(folder)!r}: Flower takes names of letters, digits and hyphens alone, at most 32")
    import_module("flwr")  # whose absence is told here, before its program is looked for
    bundle = approvals.bundle_of(FLOWER_APP)
    approvals.install(bundle, place)
    digest = hashlib.sha256(bundle).hexdigest()
    return Result({"folder": str(folder), "bundle": digest}, [f"{folder}: the Flower app; its bundle is {digest}"])
