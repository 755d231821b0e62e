"""How far `fedpriv dedup run` is: one line that is rewritten on a terminal, otherwise a line for each variant."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fedpriv.dedup.work import Observer, Progress


@contextmanager
def shown(*, quiet: bool) -> Iterator[Observer]:
    """Show on stderr, within this context, what the observer is told; Ctrl-C ends it in one line and exit code 130.

    Args:
        quiet: show nothing but that line.
    """
    last: list[Progress] = []
    display = _nothing if quiet else _rewritten_line if sys.stderr.isatty() else _lines

    try:
        with display() as update:

            def observer(progress: Progress) -> None:
                last[:] = [progress]
                update(progress)

            yield observer
    except KeyboardInterrupt:
        stored = f"{last[0].num_stored} of {last[0].num_variants} variants are stored" if last else "nothing is stored"
        typer.echo(f"interrupted: {stored}; the same command goes on from there", err=True)
        raise typer.Exit(130) from None


def line(progress: Progress) -> str:
    """The state in one line."""
    left = progress.seconds_left
    parts = [
        f"{progress.num_stored} of {progress.num_variants} variants stored",
        progress.name,
        f"{progress.num_validations} validations",
        "estimating the time left" if left is None else f"{timedelta(seconds=round(left))} left",
    ]
    return " | ".join(parts)


@contextmanager
def _nothing() -> Iterator[Observer]:
    yield lambda progress: None


@contextmanager
def _lines() -> Iterator[Observer]:
    yield lambda progress: typer.echo(line(progress), err=True) if progress.stored else None


@contextmanager
def _rewritten_line() -> Iterator[Observer]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), TimeElapsedColumn(), BarColumn(bar_width=24)
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda progress: bar.update(
            task, description=line(progress), completed=progress.num_stored, total=progress.num_variants
        )
