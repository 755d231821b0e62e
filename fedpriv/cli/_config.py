"""`fedpriv config ...`: check a configuration before it runs, and tell an editor what may be in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import Result, command
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Check a configuration before it runs, and help an editor to write one.")


@command(app)
def check(
    file: Annotated[Path, typer.Argument(help="TOML file of a run, or of a sweep.")],
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Also look for the data, the model and the folder that it names.")
    ] = True,
) -> Result:
    """Say everything that is wrong with a configuration, a line for each problem; exit with 2 if there is any.

    Paths are looked for from here, as a run from here would.

    Example: fedpriv config check simulations/configs/embedded.toml
    """
    from fedpriv.runs.plan.preflight import objections_to_run

    kind, configs, problems = _checked(file)
    problems += (objection for config in configs for objection in objections_to_run(config))
    if files and configs:
        from fedpriv.runs.plan import preflight  # deferred: it may load tables

        problems += preflight.problems(configs)
    problems = list(dict.fromkeys(problems))
    values = {"file": str(file), "kind": kind, "num_runs": len(configs), "problems": problems}
    runs = f"a sweep of {len(configs)} runs" if kind == "sweep" else "a run"
    return Result(values, problems or [f"{file}: {runs}, nothing wrong"], code=2 if problems else 0)


def _checked(file: Path) -> tuple[str, list[RunConfig], list[str]]:
    """Whether it is a run or a sweep, the configurations without problems, and what is wrong with the others."""
    from fedpriv import config as configuration

    kind, configs, problems = "run", [], []
    try:
        values = configuration.read(file)
        listed = [values]
        if configuration.is_sweep(values):
            kind = "sweep"
            listed = [
                dict(point.values) for point in configuration.sweep_points(values, source=str(file), title=file.stem)[2]
            ]
        for each in listed:
            config, found = configuration.checked(each)
            configs += [config] if config else []
            problems += found
    except InputError as error:
        problems.append(str(error))
    return kind, list(dict.fromkeys(configs)), list(dict.fromkeys(problems))


@command(app)
def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Of a sweep's file instead of a run's.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables of all keys, as in the documentation.")] = False,
) -> Result:
    """Print the JSON Schema (draft 2020-12) of a configuration, with which editors check and complete TOML files.

    Example: fedpriv config schema > fedpriv.schema.json
    """
    from fedpriv import config

    if markdown:
        tables = dict(config.schema_tables())
        parts = [f"## {group}\n\n{table}\n" for group, table in tables.items()]
        return Result({"tables": tables}, parts)
    found: dict[str, Any] = config.schema(sweep=sweep)
    return Result(found, [json.dumps(found, indent=2)])
