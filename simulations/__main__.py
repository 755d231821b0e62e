"""`python -m simulations`: run federations on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Set before flwr and transformers are imported: no telemetry, and no warning when a process with tokenizers forks.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from fedpriv.errors import InputError, LedgerError, TooFewClientsError
from fedpriv.runs.files import CONFIG, run_folder_of

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

RESULTS = Path(__file__).resolve().parent.parent / "results"


@app.callback()
def main() -> None:
    """Simulate DP-LoRA federations on this machine."""


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the embedded default.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Override one key; repeatable.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="How clients are run: stacked, in-process or ray.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one in results/.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume an interrupted run, from its folder or one of its checkpoints.")
    ] = None,
) -> None:
    """Run one federation and write its folder: tables, adapters, summary and report.

    Examples:

        python -m simulations run

        python -m simulations run -c rounds=5 -c noise_multiplier=3.0

        python -m simulations run simulations/configs/medquad.toml --out /tmp/medquad

        python -m simulations run --resume /tmp/medquad
    """
    with _failures_in_one_line("interrupted; --resume continues after the last finished round"):
        if resume is None:
            resolved = _resolve(config, override or [], engine, out)
        elif config or override or engine or out:
            raise InputError("--resume: a run keeps the configuration it began with; give no other option")
        else:
            resolved = _resumed(resume.expanduser().absolute())
        from simulations.display import TerminalObserver
        from simulations.engines import federation

        _quiet()
        federation.run(resolved, TerminalObserver(Console()))


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML file: run keys, and a [grid] or [[runs]] of what varies.")],
    override: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="A key of every run; may be repeated.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="How clients are run: stacked or in-process.")] = None,
    max_parallel: Annotated[
        int | None, typer.Option(help="Runs at a time; by default one per core. 1 needs no Ray.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; by default results/sweeps/NAME. Finished runs are kept.")
    ] = None,
) -> None:
    """Run many federations, one for each point of a grid, and write sweep.csv, a pivot and plots.

    Started again, it runs only what is unfinished.

    Examples:

        python -m simulations sweep simulations/configs/sweeps/epsilon.toml

        python -m simulations sweep my-sweep.toml -c data=letters.csv --max-parallel 1 --out /tmp/my-sweep
    """
    from simulations.sweeps import command

    console, finished = Console(), False
    with _failures_in_one_line("interrupted; finished runs are kept, start again to continue"):
        _quiet()
        folder = (out or RESULTS / "sweeps" / config.stem).expanduser().absolute()
        overrides = configuration.parse_overrides(override or []) | ({"engine": engine} if engine else {})
        finished = command.sweep(config, folder, overrides=overrides, max_parallel=max_parallel, console=console)
    if not finished:
        raise typer.Exit(1)


@contextlib.contextmanager
def _failures_in_one_line(interrupted: str) -> Iterator[None]:
    """Report a failure in one line on stderr, and end with its exit code."""
    console = Console(stderr=True)
    try:
        yield
    except InputError as error:
        console.print(f"[bold red]error[/] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except (LedgerError, TooFewClientsError) as error:
        console.print(f"[bold red]failed[/] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(interrupted)
        raise typer.Exit(130) from None


def _resumed(path: Path) -> RunConfig:
    """The configuration that a run began with, set to resume."""
    values = configuration.read(run_folder_of(path) / CONFIG)
    return configuration.parse(values | {"resume": str(path)})


def _resolve(path: Path | None, overrides: list[str], engine: str | None, out: Path | None) -> RunConfig:
    """The configuration: defaults, then the file, then `-c`, then the options."""
    values: dict[str, Any] = configuration.read(path) if path is not None else {}
    values |= configuration.parse_overrides(overrides)
    if engine is not None:
        values["engine"] = engine
    if out is not None:
        values["out"] = str(out)
    name = path.stem if path is not None else "embedded"
    if values.get("ledger"):
        values["ledger"] = str(Path(str(values["ledger"])).expanduser().absolute())
    folder = values.get("out") or RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    resolved = configuration.parse(values | {"out": str(Path(folder).expanduser().absolute())})
    if resolved.engine == "flower":
        raise InputError("engine = 'flower': is for `flwr run .`; here it must be stacked, in-process or ray")
    return resolved


def _quiet() -> None:
    """Leave the terminal to the progress display: Flower's own lines are not for users."""
    from simulations.engines.flower_private import colours_on_a_terminal_alone

    colours_on_a_terminal_alone()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = False


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        app()
