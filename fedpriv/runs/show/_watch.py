"""`fedpriv watch`: a run or a sweep in the terminal, read again and again from its folder until it has ended."""

from __future__ import annotations

import io
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedpriv.errors import InputError
from fedpriv.runs import RunFolder, files, is_alive, status_of
from fedpriv.runs.figures import format_epsilon
from fedpriv.runs.show._sweeps import is_sweep, read_sweep, sweep_table
from fedpriv.runs.show._terminal import page_line, plain_table, show_status

_PAUSE_SECONDS = 1.0


def watch(path: Path, console: Console) -> dict[str, Any]:
    """Show a run or a sweep until it has ended or Ctrl-C; the last look stays on the screen, and is returned.

    Args:
        path: of its folder, which may not be there yet.
        console: where to; one on which nothing can be rewritten gets the last look alone.

    Raises:
        InputError: the folder is neither there nor within one, or what has ended in it is damaged.
    """
    if not path.is_dir() and not path.absolute().parent.is_dir():
        raise InputError(f"folder = {str(path)!r}: must be the folder of a run or a sweep, or be in a folder")
    values: dict[str, Any] = {}
    text, has_ended = "", False
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not has_ended:
                text, values, has_ended = _look(path, console)
                live.update(Text.from_ansi(text), refresh=True)
                if not has_ended:
                    time.sleep(_PAUSE_SECONDS)
    except KeyboardInterrupt:
        pass
    console.print(Text.from_ansi(text), soft_wrap=True)
    return values


def _look(path: Path, console: Console) -> tuple[str, dict[str, Any], bool]:
    """The folder as the console would show it now, its values, and whether what is in it has ended."""
    paper = Console(
        file=io.StringIO(),
        force_terminal=console.is_terminal,
        color_system="standard" if console.is_terminal else None,
        width=console.width,
        highlight=False,
    )
    values, has_ended = dict[str, Any](), False
    try:
        if (path / files.CONFIG).is_file():
            folder = RunFolder(path)
            show_status(folder, paper)
            values = status_of(folder).as_dict()
            has_ended = values["state"] in ("finished", "interrupted")
        elif is_sweep(path):
            values, has_ended = _show_sweep(path, paper)
        else:
            paper.print(f"no run has begun in {path}", markup=False, soft_wrap=True)
    except (InputError, OSError) as error:
        if files.is_finished(path) or is_alive(path) is False:
            raise
        # A run may just be writing what this look found; the next one may see it whole.
        paper.print(f"cannot be read now: {error}", markup=False, soft_wrap=True)
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue().rstrip("\n"), values, has_ended


def _show_sweep(path: Path, console: Console) -> tuple[dict[str, Any], bool]:
    """Print a sweep; returns its values, and whether it has ended."""
    sweep, alive = read_sweep(path, now=time.time()), is_alive(path)
    spent = sweep.spending
    console.print(plain_table(sweep_table(sweep)))
    how = "composed" if spent.composed else "added up, never too small"
    console.print(
        f"\nall {spent.num_runs} runs together: {format_epsilon(spent.epsilon, spent.delta)}, local view, {how}",
        soft_wrap=True,
    )
    console.print(page_line(path), soft_wrap=True, markup=False)
    is_done = all(run.state in ("finished", "failed") for run in sweep.runs)
    return asdict(sweep), alive is False or (alive is None and is_done)
