"""`python -m simulations`: run federations on this machine, with tab completion of keys, values, engines and recipes.

Typer completes programs by name, and this one's is python's; so the shell's side is a function of our own, which asks
click's as soon as a line begins with `python -m simulations`, and otherwise leaves python to the shell's default.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv import config as configuration
from fedpriv.config import KEYS, RECIPES, schema
from fedpriv.errors import DiskFullError, InputError, LedgerError, TooFewClientsError
from fedpriv.operate.processes import signals_handled_by
from fedpriv.runs import RunFolder
from fedpriv.runs.figures import ABOVE_TARGET, above_target
from fedpriv.texts import printable
from simulations import api
from simulations.initial import init

# A traceback with its variables would show records.
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False
)

_RECIPES = "Recipes, of which `fedpriv docs recipes` tells more:\n\n" + "\n\n".join(
    f"- **{name}**: {text}" for name, text in configuration.RECIPES.items()
)

# By which environment variable the shell asks.
_COMPLETE_VARIABLE = "_SIMULATIONS_COMPLETE"

# The answers are lines of `type,value`. `=` ends a word in bash, so the line up to the cursor is split at blanks alone,
# and what is before a `=` is cut off the answers.
_SCRIPT = Path(__file__).with_name("completion.bash").read_text("utf-8").replace("VARIABLE", _COMPLETE_VARIABLE)


def _show_script(value: bool) -> None:
    """Print the shell's side of the completion, and end."""
    if value:
        typer.echo(_SCRIPT, nl=False)
        raise typer.Exit


def _override_names(incomplete: str) -> list[str]:
    """`key=` of the keys that begin so; or after a `=` the key with each of its values, where those have names."""
    key, sign, _ = incomplete.partition("=")
    if sign:
        found = [f"{name}={value}" for name in KEYS if name == key for value in _value_names(name)]
    else:
        found = [f"{name}=" for name in KEYS]
    return [name for name in found if name.startswith(incomplete)]


def _engine_names(incomplete: str) -> list[str]:
    """The engines that begin so, less Flower's own."""
    return [name for name in _value_names("engine") if name.startswith(incomplete) and name != "flower"]


def _recipe_names(incomplete: str) -> list[str]:
    """The recipes that begin so."""
    return [name for name in RECIPES if name.startswith(incomplete)]


def _value_names(key: str) -> list[str]:
    """The values of a key that are names, or true and false."""
    return list(_allowed(schema()["properties"][key]))


def _allowed(form: Mapping[str, Any]) -> Iterator[str]:
    if form.get("type") == "boolean":
        yield from ("true", "false")
    yield from (str(value) for value in (*form.get("enum", ()), form.get("const", "")) if value != "")
    for inner in form.get("anyOf", ()):
        yield from _allowed(inner)


_Override = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        metavar="KEY=VALUE",
        help="Override one key; repeatable. `fedpriv config keys` lists them.",
        autocompletion=_override_names,
    ),
]
_EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="How clients are run: stacked, in-process or ray.", autocompletion=_engine_names),
]
_RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Values for the keys that belong together and are not given; see below.",
        autocompletion=_recipe_names,
    ),
]


@app.callback()
def main(
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            is_eager=True,
            callback=_show_script,
            help='Print what completes these commands in bash: eval "$(python -m simulations --show-completion)"',
        ),
    ] = False,
) -> None:
    """Simulate DP-LoRA federations on this machine."""


app.command()(init)


@app.command(epilog=_RECIPES)
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one, the embedded default.")] = None,
    override: _Override = None,
    recipe: _RecipeOption = None,
    engine: _EngineOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one in results/.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume an interrupted run, from its folder or one of its checkpoints.")
    ] = None,
) -> None:
    """Run one federation and write its folder: tables, adapters, summary and report.

    Examples:

        fedpriv run

        fedpriv run -c rounds=5 -c noise_multiplier=3.0

        fedpriv run --recipe per-sample

        fedpriv run simulations/configs/medquad.toml --out /tmp/medquad

        fedpriv run --resume /tmp/medquad
    """
    excess = ""
    with _failures_in_one_line("interrupted before the run began; nothing was written"):
        keys = _keys(override, engine=engine, recipe=recipe)
        excess = above_target(RunFolder(api.federate(config, keys, out=out, resume=resume)).summary)
    if excess:  # the run has said so, as a warning
        raise typer.Exit(ABOVE_TARGET)


@app.command(epilog=_RECIPES)
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML file: run keys, and a [grid] or [[runs]] of what varies.")],
    override: _Override = None,
    recipe: _RecipeOption = None,
    engine: _EngineOption = None,
    max_parallel: Annotated[
        int | None, typer.Option(help="Runs at a time; by default one per core. 1 needs no Ray.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; by default results/sweeps/NAME. Finished runs are kept.")
    ] = None,
) -> None:
    """Run many federations, one for each point of a grid, and write sweep.csv, a pivot and plots.

    Started again, it runs only what is unfinished. `-c` of a key that varies picks the runs that have this value.

    Examples:

        fedpriv sweep simulations/configs/sweeps/epsilon.toml

        fedpriv sweep simulations/configs/sweeps/epsilon.toml -c target_epsilon=8 -c seed=0

        fedpriv sweep my-sweep.toml -c data=letters.csv --max-parallel 1 --out /tmp/my-sweep
    """
    finished = False
    with _failures_in_one_line("interrupted; finished runs are kept, start again to continue"):
        keys = _keys(override, engine=engine, recipe=recipe)
        finished = api.sweep_all(config, keys, out=out, max_parallel=max_parallel).is_finished
    if not finished:
        raise typer.Exit(1)


@contextlib.contextmanager
def _failures_in_one_line(interrupted: str) -> Iterator[None]:
    """Report a failure in one line on stderr, and end with its exit code.

    SIGTERM, with which batch systems end what runs too long, ends it as Ctrl-C does.
    """
    numbers = [signal.SIGINT]

    def terminate(number: int, _frame: object) -> None:
        numbers.append(signal.Signals(number))
        raise KeyboardInterrupt

    try:
        with signals_handled_by(terminate, [signal.SIGTERM]):
            yield
    except (InputError, DiskFullError, LedgerError, TooFewClientsError) as error:
        typer.echo(f"error: {printable(error)}", err=True)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt as error:
        typer.echo(printable(error) or interrupted, err=True)
        raise typer.Exit(128 + numbers[-1]) from None


def _keys(pairs: list[str] | None, **options: str | None) -> dict[str, Any]:
    """The values after `-c`, then those of the options that are keys."""
    given = {key: value for key, value in options.items() if value is not None}
    return configuration.parse_overrides(pairs or []) | given


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        app(complete_var=_COMPLETE_VARIABLE)
