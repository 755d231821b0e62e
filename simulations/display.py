"""What a run shows in the terminal: progress round by round, and a closing table of what every client spent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedpriv.accounting.recipe import LearningRate
from fedpriv.accounting.views import default_delta
from fedpriv.config import RunConfig
from fedpriv.protocol import Registration
from fedpriv.reports.accuracies import accuracy_table
from fedpriv.reports.language import changes, counts_next_tokens, language_table
from fedpriv.reports.tables import Table as Content
from fedpriv.reports.tables import client_table, format_bound, format_bytes, format_delta
from fedpriv.runs.files import REPORT
from fedpriv.runs.rows import RoundRow
from fedpriv.training.schedule import num_lora_rounds
from server.observer import described
from simulations.paths import from_here


class TerminalObserver:
    """Shows a run on a rich console; without a terminal it prints a line for each round."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID = TaskID(0)
        self._bytes = 0
        self._delta = 0.0

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Say which run begins, and open the progress display."""
        self._close()
        self._bytes = 0
        self._delta = max(config.delta or default_delta(r.num_records) for r in registrations)
        private = config.noise_multiplier > 0
        title = f"private run, z = {config.noise_multiplier}" if private else "comparison run, z = 0, clipping kept"
        self._console.rule(title)
        if private:
            sizes = ", ".join(f"{r.name} ({r.num_records})" for r in registrations)
            self._console.print(f"{len(registrations)} clients: {sizes}")
            self._console.print(f"{config.model}, LoRA rank {config.rank}, noise source: {config.noise_source}")
            self._console.print(_rounds(config), highlight=False)
        if learning_rate is not None:
            self._console.print(described(learning_rate), highlight=False)
        if private and config.simulate:
            self._console.print("[bold red]simulate = true: noise and sampling are seeded, this run is NOT PRIVATE[/]")
        self._progress = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            BarColumn(bar_width=24),  # last, since a narrow terminal cuts off the end
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("preparing", total=config.rounds)
        self._progress.start()

    def notice(self, text: str) -> None:
        """Show a line that must not be missed."""
        self._console.print(f"[bold yellow]note[/] {escape(text)}", highlight=False, soft_wrap=True)

    def round_done(self, row: RoundRow) -> None:
        """Show the round's figures."""
        self._bytes += row.bytes_up + row.bytes_down
        tested = "" if row.test_perplexity is None else f"perplexity {row.test_perplexity:.2f} | "
        tested += "" if row.test_accuracy is None else f"accuracy {row.test_accuracy:.3f} | "
        line = f"{tested}{self._spent(row)}{format_bytes(self._bytes)}"
        if self._progress is not None and not self._progress.disable:
            self._progress.update(self._task, completed=row.round, description=line)
        else:
            self._console.print(f"round {row.round}: {line} | {row.seconds:.1f} s", soft_wrap=True)

    def _spent(self, row: RoundRow) -> str:
        """The largest epsilons with their delta; empty for a run without noise."""
        if row.epsilon_local_max == float("inf"):
            return ""
        local, rho = format_bound(row.epsilon_local_max), format_bound(row.epsilon_rho_max)
        of_sum = "" if row.epsilon_aggregate_max is None else f"{format_bound(row.epsilon_aggregate_max)} aggregate, "
        return f"largest epsilon {of_sum}{local} local, {rho} rho at delta {format_delta(self._delta)} | "

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Show the closing table, the accuracies side by side and where everything is."""
        self._close()
        self._console.print(_clients_table(summary))
        if (responses := language_table(summary)) is not None:
            self._console.print(_shown(responses))
            for line in changes(summary):
                self._console.print(f"against untrained, paired: {line}", highlight=False)
        if not counts_next_tokens(summary):
            self._console.print(_shown(accuracy_table(summary)))
        if summary["accuracy"] is None and not summary["accuracy_interval"]:
            self._console.print("accuracy is empty: nothing was evaluated on the holders' records, see test_data")
        for line in summary["warnings"]:
            self._console.print(Panel(escape(line), title="WARNING", style="bold red"))
        if not summary["private"]:
            self._console.print(Panel("This run is NOT PRIVATE: see report.html.", style="bold red"))
        if not summary["adapters_moved"]:
            names = ", ".join(summary["unmoved_tensors"][:5])
            self._console.print(Panel(f"TRAINING CHANGED NOTHING in: {names}", style="bold red"))
        self._console.print(f"results  {from_here(folder)}", soft_wrap=True)
        self._console.print(f"report   {from_here(folder) / REPORT}", soft_wrap=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _rounds(config: RunConfig) -> str:
    """What the run's rounds do, in order."""
    num_all = num_lora_rounds(config)
    num_head = config.rounds - config.head_start - num_all
    q, of_all = config.sampling_probability, config.lora_sampling_probability
    batch = f"expected batch {config.batch_size}" if q is None else f"q = {q if config.lora_rounds is None else of_all}"
    trained = "A and B" if config.task == "CAUSAL_LM" else "A, B and head"
    if config.aggregation == "ffa-lora":
        trained = trained.replace("A and B", "B").replace("A, B", "B")
    parts = [
        "1 round for the head's start" if config.head_start else "",
        f"{num_head} for the head, q = {q}" if num_head else "",
        f"{num_all} for {trained}, {config.local_steps} local steps, {batch}" if num_all else "",
    ]
    return f"{config.rounds} rounds: {'; '.join(filter(None, parts))}"


def _clients_table(summary: dict[str, Any]) -> Table:
    content = client_table(summary["clients"], summary["accountant"])
    table = Table(title=content.caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for position, header in enumerate(content.headers):
        # A narrow terminal may cut a name, but never a figure.
        width = max(len(header), *(len(row[position]) for row in content.rows))
        justify: Literal["left", "right"] = "right" if position else "left"
        table.add_column(header, justify=justify, no_wrap=True, min_width=width if position else None)
    for row in content.rows:
        table.add_row(*row)
    return table


def _shown(content: Content) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=content.caption)
    for header in content.headers:
        table.add_column(header, no_wrap=bool(header) or not table.columns)
    for row in content.rows:
        table.add_row(*map(escape, row))
    return table
