"""`fedpriv ...`: the library from a shell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fedpriv.apps import naming_extras
from fedpriv.cli import _audit, _config, _data, _dedup, _integral, _ledger, _programs, _serve, lmo
from fedpriv.cli._command import command
from fedpriv.cli._costs import account, calibrate, communication, repeat_and_select
from fedpriv.cli._plan import plan
from fedpriv.cli._programs import ProgramGroup
from fedpriv.cli._runs import card, export, predict, push, report, status, watch
from fedpriv.errors import FlowerError, LedgerError, StoreError
from fedpriv.texts import VERSION, printable

app = typer.Typer(cls=ProgramGroup, no_args_is_help=True, pretty_exceptions_enable=False)
for of_costs in (account, calibrate, repeat_and_select, plan, report, communication):
    command(app)(of_costs)
app.command()(status)
app.command()(watch)
for of_models in (predict, export, card, push, _programs.app):
    command(app)(of_models)
app.add_typer(_config.app, name="config")
app.add_typer(_data.app, name="data")
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
        typer.echo(VERSION)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script, which ends in SystemExit: 0 for success, 1 for a failure, 2 for a user's mistake.

    Args:
        arguments: of the command line, without the program's name; by default this process's own.
    """
    try:
        with naming_extras():
            app(arguments, prog_name="fedpriv")
    except ValueError as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(2)
    except (FlowerError, LedgerError, StoreError, OSError) as error:
        typer.echo(f"error: {printable(error)}", err=True)
        sys.exit(1)
