"""`fedpriv ...`: the library from a shell, and the programs above it, which are loaded when they are used."""

import difflib
import gc
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedpriv.apps import GARBAGE_THRESHOLDS, naming_extras
from fedpriv.cli import _audit, _dedup, _inputs, _integral, _ledger, _serve, lmo
from fedpriv.cli._command import Result, command
from fedpriv.cli._costs import account, calibrate, check, communication, repeat_and_select
from fedpriv.cli._plan import plan
from fedpriv.cli._runs import card, export, predict, push, report, status, watch
from fedpriv.errors import FlowerError, InputError, LedgerError, StoreError
from fedpriv.files import software
from fedpriv.texts import escape_what_a_terminal_lacks, printable

# {name: (module of the programs, its command or none for all of them, what --help lists)}
_PROGRAMS = {
    "run": ("simulations.__main__", "run", "Run one federation on this machine: tables, adapters, summary and report."),
    "sweep": ("simulations.__main__", "sweep", "Run many federations, one for each point of a grid."),
    "init": ("simulations.__main__", "init", "Write a commented configuration for a table of records."),
    "node": ("clients.deploy.__main__", "", "Take part in a federation as a data holder: init, doctor, start, ..."),
    "reproduce": (
        "simulations.studies.reproduce",
        "",
        "List the papers' figures next to ours, or compute one.",
    ),
    "coordinator": ("server.deploy.__main__", "", "Coordinate a federation: init, invite, admit, start, run, ..."),
}


# What --help lists together, in this order; what is in none is research.
_PANELS = {
    "Every day": "init data config run status watch report predict export card push serve docs",
    "Between institutions": "node coordinator app ledger evidence",
}
_RESEARCH = "Research, and what privacy costs"


class ProgramGroup(TyperGroup):
    """The commands of an app, and those of the programs, by what they are for; --help of the app loads no program."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        known = [*_PROGRAMS, *super().list_commands(ctx)]
        daily = [name for names in _PANELS.values() for name in names.split() if name in known]
        return [*daily, *(name for name in known if name not in daily)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _PROGRAMS:
            return click.Command(cmd_name, help=_PROGRAMS[cmd_name][2])
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Group.format_help(self, ctx, formatter)  # typer's boxes take longer to load than all else

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (*_PANELS, _RESEARCH)}
        for name in self.list_commands(ctx):
            panel = next((panel for panel, names in _PANELS.items() if name in names.split()), _RESEARCH)
            if command := self.get_command(ctx, name):
                panels[panel].append((name, command.get_short_help_str(limit=200)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

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


def flower_app(folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder.")]) -> Result:
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


def docs(
    page: Annotated[str, typer.Argument(metavar="[PAGE]", help="Such as privacy, or privacy#persons for a part.")] = "",
) -> Result:
    """Print a page of the documentation; without a name, the names of all. Messages name pages as docs/PAGE.md.

    Example: fedpriv docs privacy
    """
    from fedpriv.apps import PAGES

    pages = {path.relative_to(PAGES).with_suffix("").as_posix(): path for path in sorted(PAGES.rglob("*.md"))}
    name, _, anchor = page.partition("#")
    name = name.removeprefix("docs/").removesuffix(".md")
    if not name:
        titles = {
            name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in pages.items()
        }
        return Result({"pages": titles})
    if name not in pages:
        close = difflib.get_close_matches(name, pages, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; `fedpriv docs` lists all"
        raise InputError(f"PAGE = {page!r}: no such page{hint}")
    text = pages[name].read_text(encoding="utf-8")
    part = "".join(_part(text, anchor)) if anchor else text
    if not part:
        raise InputError(f"PAGE = {page!r}: {name} has no such part; `fedpriv docs {name}` prints the whole page")
    return Result({"page": name, "text": part}, [part.rstrip("\n")])


def _part(page: str, anchor: str) -> Iterator[str]:
    """The lines of a page from the heading with this anchor to the next one of its level or above."""
    level, is_code = 0, False
    for line in page.splitlines(keepends=True):
        is_code ^= line.startswith("```")
        heading = None if is_code else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            return
        if heading and not level and re.sub(r"[^\w -]", "", heading[2]).strip().lower().replace(" ", "-") == anchor:
            level = len(heading[1])
        if level:
            yield line


app = typer.Typer(cls=ProgramGroup, no_args_is_help=True, pretty_exceptions_enable=False)
for of_costs in (account, calibrate, check, repeat_and_select, plan, report, communication):
    command(app)(of_costs)
app.command()(status)
app.command()(watch)
for of_models in (predict, export, card, push):
    command(app)(of_models)
command(app, "app")(flower_app)
command(app)(docs)
app.add_typer(_inputs.config_app, name="config")
app.add_typer(_inputs.data_app, name="data")
app.add_typer(_ledger.app, name="ledger")
command(app)(_ledger.evidence)
app.add_typer(_dedup.app, name="dedup")
app.add_typer(lmo.app, name="lmo")
app.add_typer(_integral.app, name="integral")
app.add_typer(_audit.app, name="audit")
app.add_typer(_serve.app, name="serve")


@app.callback(invoke_without_command=True)
def fedpriv_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Federated LoRA fine-tuning under differential privacy, and what it costs every data holder."""
    if version:
        typer.echo(software())
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script, which ends in SystemExit: 0 for success, 1 for a failure, 2 for a user's mistake."""
    escape_what_a_terminal_lacks()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    # Nothing here is compiled, but peft imports bitsandbytes where it is, and that loads torch's compiler: 50 MB, 1 s.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        with naming_extras():
            app(arguments, prog_name="fedpriv")
    except ValueError as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(2)
    except (FlowerError, LedgerError, StoreError, OSError) as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(1)
