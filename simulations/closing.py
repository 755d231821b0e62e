"""What a finished run shows: tables of clients, accuracies and variants, and what it has spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedpriv.runs.figures import counts_next_tokens, figures
from fedpriv.runs.files import REPORT
from fedpriv.runs.folder import RunFolder
from fedpriv.runs.show.tables import TextTable as Content
from fedpriv.runs.show.tables import accuracy_table, changes, client_table, closing_table, language_table
from simulations.paths import from_here

_ALARM = "bold red"


def closing(console: Console, folder: Path, summary: dict[str, Any]) -> None:
    """Print what a run reached and what it cost, which the run's folder has too."""
    look = RunFolder(folder)
    console.print(_clients(client_table(summary["clients"], summary["accountant"], view=summary["privacy_view"])))
    if (responses := language_table(summary)) is not None:
        console.print(_shown(responses))
        for line in changes(summary):
            console.print(f"against untrained, paired: {line}", highlight=False)
    if not counts_next_tokens(summary):
        console.print(_shown(accuracy_table(summary)))
    if summary["accuracy"] is None and not summary.get("accuracy_interval"):
        console.print("accuracy is empty: nothing was evaluated on the holders' records, see test_data")
    if (stored := look.stored) is not None:
        console.print(_shown(closing_table(stored, summary.get("base_model_bytes"))))
    for line in summary["warnings"]:
        console.print(Panel(Text(line), title="WARNING", style=_ALARM))
    if not summary["private"]:
        console.print(Panel("This run is NOT PRIVATE: see report.html.", style=_ALARM))
    if not summary["adapters_moved"]:
        names = ", ".join(summary["unmoved_tensors"][:5])
        console.print(Panel(Text(f"TRAINING CHANGED NOTHING in: {names}"), style=_ALARM))
    console.print(_figures(look))
    # Whole, so that a path can be copied.
    console.print(f"results  {from_here(folder)}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"report   {from_here(folder / REPORT)}", soft_wrap=True, markup=False, highlight=False)


def _figures(folder: RunFolder) -> Table:
    """What an audit found, if there was one, what was spent, and all that is declared as a figure since."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=len("results"))
    grid.add_column(overflow="fold")
    for figure in figures(folder, "closing"):
        grid.add_row(figure.label, Text(figure.text, style=_ALARM if figure.is_alarming else ""))
    return grid


def _clients(content: Content) -> Table:
    """The clients' table: in a narrow terminal a name may take two lines, but no figure does."""
    table = Table(title=content.caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for position, header in enumerate(content.headers):
        width = max(len(header), *(len(row[position]) for row in content.rows))
        table.add_column(
            header,
            justify="right" if position else "left",
            no_wrap=bool(position),
            min_width=width if position else None,
        )
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


def _shown(content: Content) -> Table:
    table = Table(title=content.caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in content.headers:
        table.add_column(header, no_wrap=bool(header) or not table.columns)
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table
