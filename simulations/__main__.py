"""`python -m simulations`: run federations on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedpriv import config as configuration
from fedpriv.errors import InputError, LedgerError, TooFewClientsError
from fedpriv.texts import printable
from simulations import api, completion
from simulations.initial import init

# A traceback with its variables would show records.
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False
)

_RECIPES = "Recipes, of which docs/recipes.md tells more:\n\n" + "\n\n".join(
    f"- **{name}**: {text}" for name, text in configuration.RECIPES.items()
)

Override = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        metavar="KEY=VALUE",
        help="Override one key; repeatable. docs/configuration.md lists them.",
        autocompletion=completion.overrides,
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", help="How clients are run: stacked, in-process or ray.", autocompletion=completion.engines
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Values for the keys that belong together and are not given; see below.",
        autocompletion=completion.recipes,
    ),
]


@app.callback()
def main(
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            is_eager=True,
            callback=completion.show,
            help='Print what completes these commands in bash: eval "$(python -m simulations --show-completion)"',
        ),
    ] = False,
) -> None:
    """Simulate DP-LoRA federations on this machine."""


app.command()(init)


@app.command(epilog=_RECIPES)
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the embedded default.")] = None,
    override: Override = None,
    recipe: RecipeOption = None,
    engine: EngineOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one in results/.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume an interrupted run, from its folder or one of its checkpoints.")
    ] = None,
) -> None:
    """Run one federation and write its folder: tables, adapters, summary and report.

    Examples:

        python -m simulations run

        python -m simulations run -c rounds=5 -c noise_multiplier=3.0

        python -m simulations run --recipe dp-lora-paper

        python -m simulations run simulations/configs/medquad.toml --out /tmp/medquad

        python -m simulations run --resume /tmp/medquad
    """
    with _failures_in_one_line("interrupted; --resume continues after the last finished round"):
        keys = _keys(override, engine=engine, recipe=recipe)
        api.federate(config, keys, out=out, resume=resume, console=Console())


@app.command(epilog=_RECIPES)
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML file: run keys, and a [grid] or [[runs]] of what varies.")],
    override: Override = None,
    recipe: RecipeOption = None,
    engine: EngineOption = None,
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
    finished = False
    with _failures_in_one_line("interrupted; finished runs are kept, start again to continue"):
        keys = _keys(override, engine=engine, recipe=recipe)
        finished = api.sweep_all(config, keys, out=out, max_parallel=max_parallel, console=Console()).is_finished
    if not finished:
        raise typer.Exit(1)


@contextlib.contextmanager
def _failures_in_one_line(interrupted: str) -> Iterator[None]:
    """Report a failure in one line on stderr, and end with its exit code."""
    console = Console(stderr=True)
    try:
        yield
    except InputError as error:
        console.print(f"[bold red]error[/] {escape(printable(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except (LedgerError, TooFewClientsError) as error:
        console.print(f"[bold red]failed[/] {escape(printable(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(interrupted)
        raise typer.Exit(130) from None


def _keys(pairs: list[str] | None, **options: str | None) -> dict[str, Any]:
    """The values after `-c`, then those of the options that are keys."""
    given = {key: value for key, value in options.items() if value is not None}
    return configuration.parse_overrides(pairs or []) | given


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        app(complete_var=completion.VARIABLE)
