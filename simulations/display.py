"""Shows a run in the terminal or a notebook: its present state, a line a round, the time left, closing tables."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any, Protocol, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedpriv.config import RunConfig
from fedpriv.holder.wire.kinds import Registration
from fedpriv.models.variants import stored_in
from fedpriv.privacy.accounting.recipe import LearningRate
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.runs import RoundRow, RunFolder
from fedpriv.runs.figures import counts_next_tokens, figures, format_bytes, format_seconds, limit_of
from fedpriv.runs.files import REPORT
from fedpriv.runs.show import TextTable as Content
from fedpriv.runs.show import accuracy_table, changes, client_table, joining_table, language_table, plain_table
from fedpriv.texts import of_whom, printable, what_is_counted
from server.observer import RunProgress, described, spent_so_far

_MOST_NAMES = 8
_BAR = "━"
_LONGEST_BAR, _SHORTEST_BAR = 24, 6


class TerminalObserver:
    """Shows a run on a rich console; where nothing can be rewritten it prints a line for each round, and in between.

    A context manager: whatever ends the run, the cursor is where it belongs.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._screen: _Screen | None = None
        self._config: RunConfig | None = None
        self._phases: list[str] = []
        self._comparison: list[str] = []
        self._seconds: dict[str, list[float]] = {}
        self._bytes, self._delta = 0, 0.0
        self._round, self._figures = 0, ""
        self._stage, self._now = "", RunProgress(what="preparing")
        self._began = self._round_began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Say which run begins."""
        self._say_what_begins(config, registrations, learning_rate)
        if not self._comparison:  # whose rounds take about as long as those before
            self._seconds = {}
        self._config, self._stage = config, ""
        self._phases = _phases_of(config)
        self._comparison = _phases_of(config.without_noise) if config.compares else []
        self._bytes, self._round, self._figures = 0, 0, ""
        self._delta = max(config.delta or default_delta(r.num_records) for r in registrations)
        self._began = self._round_began = time.monotonic()

    def _say_what_begins(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        private, show = config.noise_multiplier > 0, self._console.print
        self._console.rule(
            f"private run, {config.noise_in_words}" if private else "comparison run, z = 0, clipping kept"
        )
        if private:
            show(_who(registrations, config.unit), highlight=False, markup=False)
            model = "a model of your own" if config.is_own_model else f"{config.model}, LoRA rank {config.rank}"
            show(f"{model}, noise source: {config.noise_source}", markup=False)
            show(_rounds(config), highlight=False)
            if limit := limit_of(config.target_epsilon, config.budget_epsilon):
                show(
                    f"{limit[0]}: ε {limit[1]:.4g}{of_whom(config.unit)} on the {config.privacy_view} view, by pld; "
                    "until the end figures are upper bounds by rdp",
                    highlight=False,
                )
        if learning_rate is not None:
            show(described(learning_rate), highlight=False)
        if private and config.simulate:
            show("[bold red]simulate = true: noise and sampling are seeded, this run is NOT PRIVATE[/]")

    def notice(self, text: str) -> None:
        """Show a line that must not be missed."""
        self._console.print(f"[bold yellow]note[/] {escape(printable(text))}", highlight=False, soft_wrap=True)

    def progressed(self, progress: RunProgress) -> None:
        """Show what is going on."""
        if not progress.total:
            self._stage, self._began = progress.what, time.monotonic()
        elif progress.round is not None:
            self._stage = ""
            if progress.round != self._round:
                self._round, self._round_began = progress.round, time.monotonic()
        self._now = progress
        if self._screen is None:
            self._screen = _screen_of(self._console, self.lines)
        elif not self._screen.keeps_lines:
            self._screen.update()

    def round_done(self, row: RoundRow) -> None:
        """Show the round's figures."""
        if row.round:
            self._seconds.setdefault(self._phase(row.round), []).append(row.seconds)
        self._bytes += row.bytes_up + row.bytes_down
        self._figures = self._figures_of(row)
        self._now = RunProgress(what="")
        self._round_began = time.monotonic()
        is_last = self._config is not None and row.round == self._config.rounds
        keeps_lines = self._screen is None or self._screen.keeps_lines
        if keeps_lines or is_last:
            line = f"round {row.round}: {self._figures} | {format_seconds(row.seconds)}"
            # A pipe has no width.
            self._console.print(line, soft_wrap=keeps_lines, highlight=False, markup=False)
        if self._screen is not None:
            self._screen.update()
        if is_last:
            self._figures = ""

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Show the closing tables, what was spent and where everything is."""
        self._close()
        _closing(self._console, folder, summary)

    def _phase(self, round_: int) -> str:
        return self._phases[round_ - 1] if round_ <= len(self._phases) else ""

    def _figures_of(self, row: RoundRow) -> str:
        tested = [] if row.test_perplexity is None else [f"perplexity {row.test_perplexity:.2f}"]
        tested += [] if row.test_accuracy is None else [f"accuracy {row.test_accuracy:.3f}"]
        return " | ".join([*tested, *self._spent(row), format_bytes(self._bytes)])

    def _spent(self, row: RoundRow) -> list[str]:
        """The largest epsilons with their delta, the view that was asked for first; none before or without noise."""
        spent = spent_so_far(row, self._config, self._delta) if self._config else ""
        return [spent] if spent else []

    def lines(self) -> str:
        """The present lines: the state of the run, and the figures of its last round."""
        now, width = time.monotonic(), self._console.width
        in_rounds = self._config is not None and not self._stage
        what = ": ".join(filter(None, (self._stage, self._now.text if self._now.total else "")))
        place = f"round {self._round}/{self._config.rounds}" if in_rounds and self._config else ""
        left = self._left(now) if in_rounds else ""
        line = "  ".join(filter(None, (place, str(timedelta(seconds=int(now - self._began))), what, left)))
        if in_rounds and (bar := _bar((self._round - 1 + (self._share or 0.0)) / len(self._phases), width - len(line))):
            line = f"{line}  {bar}"
        return "\n".join(filter(None, (line, self._figures)))

    @property
    def _share(self) -> float | None:
        """The share of the current round's training that is done; None if that is not known."""
        return self._now.share if self._now.round is not None else None

    def _left(self, now: float) -> str:
        """The time left, the comparison run included."""
        ahead = [*self._phases[max(self._round, 1) - 1 :], *self._comparison]
        estimate = _time_left(self._seconds, ahead, now - self._round_began, self._share)
        if estimate is None:
            return ""
        return f"{'over' if estimate.is_least else 'about'} {format_seconds(round(estimate.seconds))} left"

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None


def _bar(share: float, room: int) -> str:
    """A bar of at most so many characters; empty if that is too few."""
    length = min(_LONGEST_BAR, room - 2)
    if length < _SHORTEST_BAR:
        return ""
    num_done = round(length * min(max(share, 0.0), 1.0))
    return _BAR * num_done + "·" * (length - num_done)


def _who(registrations: Sequence[Registration], unit: str) -> str:
    """The clients with their numbers of records, or persons; or some of them."""
    shown = [f"{printable(r.name)} {r.num_records:,}" for r in registrations[:_MOST_NAMES]]
    more = [f"{len(registrations) - len(shown):,} more"] if len(registrations) > len(shown) else []
    return f"{len(registrations)} clients, by {what_is_counted(unit)}: {', '.join([*shown, *more])}"


def _rounds(config: RunConfig) -> str:
    """A line that says how many rounds train the head and how many train all, in order."""
    phases = {phase.name: phase for phase in config.phases}
    trained = "A and B" if config.task == "CAUSAL_LM" else "all" if config.is_own_model else "A, B and head"
    if config.rule.trains == "lora-b":
        trained = trained.replace("A and B", "B").replace("A, B", "B")
    parts = ["1 round for the head's start"] if "start" in phases else []
    if head := phases.get("head"):
        parts.append(f"{head.num_rounds} for the head, q = {head.sampling_probability}")
    if all_ := phases.get("all"):
        q, steps = all_.sampling_probability, f"local step{'s' * (config.local_steps > 1)}"
        batch = f"expected batch {config.batch_size}" if q is None else f"q = {q}"
        parts.append(f"{all_.num_rounds} for {trained}, {config.local_steps} {steps}, {batch}")
    return f"{config.rounds} rounds: {'; '.join(parts)}"


# A notebook keeps every version of its output until it is drawn.
_NOTEBOOK_SECONDS = 0.5
# A pipe is silent for no longer than this.
_PIPE_SECONDS = 8.0
_PER_SECOND = 4


class _Screen(Protocol):
    """Where the state of a run is shown.

    Attributes:
        keeps_lines: whether a line stays, as in a pipe or a file, instead of being rewritten.
    """

    keeps_lines: bool

    def update(self) -> None:
        """The lines changed, or where lines stay, one was printed."""

    def stop(self) -> None:
        """Take the lines away, and show no more."""


def _screen_of(console: Console, lines: Callable[[], str]) -> _Screen:
    """A screen that shows the lines from now on.

    Args:
        console: in whose place they are shown.
        lines: what they are just now.
    """
    if console.is_jupyter:
        return _Notebook(lines)
    # Colours may be forced upon a pipe; lines that are rewritten would litter it.
    return _Terminal(console, lines) if console.is_terminal and console.file.isatty() else _Pipe(console, lines)


class _Pipe:
    """Prints the first line whenever nothing was printed for a while, so that a log shows that the run lives."""

    keeps_lines = True

    def __init__(self, console: Console, lines: Callable[[], str]) -> None:
        self._console, self._lines = console, lines
        self._printed, self._stopped = time.monotonic(), threading.Event()
        threading.Thread(target=self._print, daemon=True).start()

    def _print(self) -> None:
        while not self._stopped.wait(max(0.0, self._printed + _PIPE_SECONDS - time.monotonic())):
            if time.monotonic() - self._printed >= _PIPE_SECONDS:
                self.update()
                line, *_ = self._lines().split("\n")
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def update(self) -> None:
        self._printed = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()


class _Terminal:
    keeps_lines = False

    def __init__(self, console: Console, lines: Callable[[], str]) -> None:
        self._live = Live(
            get_renderable=lambda: Text(lines()), console=console, refresh_per_second=_PER_SECOND, transient=True
        )
        self._live.start()

    def update(self) -> None:
        """Nothing: the lines are drawn several times a second anyway."""

    def stop(self) -> None:
        self._live.stop()


class _Notebook:
    """rich's own needs ipywidgets in a notebook, and leaves nothing in one that is executed without a browser."""

    keeps_lines = False

    def __init__(self, lines: Callable[[], str]) -> None:
        display: Any = import_module("IPython.display").display  # a notebook has it
        self._lines = lines
        self._shown = time.monotonic()
        self._handle = display(_preformatted(lines()), raw=True, display_id=True)

    def update(self) -> None:
        if time.monotonic() - self._shown >= _NOTEBOOK_SECONDS:
            self._shown = time.monotonic()
            self._handle.update(_preformatted(self._lines()), raw=True)

    def stop(self) -> None:
        self._handle.update(_preformatted(""), raw=True)


def _preformatted(text: str) -> dict[str, str]:
    return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


# The first round of a phase reads records whose states later ones keep, so it says little once there are others.
_NUM_RECENT = 3
# A smaller share of a round says too little of the rest.
_SMALLEST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class _TimeLeft:
    """An estimate.

    Attributes:
        seconds: >= 0.
        is_least: whether rounds are ahead of a kind that has not been timed, so that it takes longer.
    """

    seconds: float
    is_least: bool


def _phases_of(config: RunConfig) -> list[str]:
    """The phase of each round: `start`, `head` or `all`; rounds of one phase take about as long."""
    return [phase.name for phase in config.phases for _ in range(phase.num_rounds)]


def _time_left(
    seconds: Mapping[str, Sequence[float]], ahead: Sequence[str], spent: float, share: float | None
) -> _TimeLeft | None:
    """How long the rest takes; None as long as nothing is known.

    Args:
        seconds: {phase: what its rounds have taken, in order}.
        ahead: the phases of the rounds that are not over, the current one first.
        spent: seconds that the current round has taken.
        share: of the current round that is done, in [0, 1]; None if that is not known.
    """
    if not ahead:
        return _TimeLeft(seconds=0.0, is_least=False)
    usual = {phase: mean(took[-_NUM_RECENT:]) for phase, took in seconds.items() if took}
    current, *later = ahead
    if share is not None and share >= _SMALLEST_SHARE:
        usual.setdefault(current, spent / share)
    if not usual:
        return None
    now = max(0.0, usual.get(current, spent) - spent)
    known = [usual[phase] for phase in later if phase in usual]
    return _TimeLeft(seconds=now + sum(known), is_least=current not in usual or len(known) < len(later))


_ALARM = "bold red"


def _closing(console: Console, folder: Path, summary: dict[str, Any]) -> None:
    """Print what a run reached and what it cost, which the run's folder has too."""
    view, unit = summary["privacy_view"], summary.get("unit")
    console.print(_clients(client_table(summary["clients"], summary["accountant"], view=view, unit=unit)))
    if (responses := language_table(summary)) is not None:
        console.print(plain_table(responses))
        for line in changes(summary):
            console.print(f"against untrained, paired: {line}", highlight=False)
    if not counts_next_tokens(summary):
        console.print(plain_table(accuracy_table(summary)))
    if (joining := joining_table(summary)) is not None:
        console.print(_clients(joining))
    if summary["accuracy"] is None and not summary.get("accuracy_interval"):
        console.print("accuracy is empty: nothing was evaluated on the holders' records, see test_data")
    look = RunFolder(folder)
    if (stored := stored_in(folder)) is not None:
        console.print(plain_table(stored.closing_table(summary.get("base_model_bytes"))))
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
    """The figures of the closing page: the result of an audit, if there was one, and what was spent."""
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


def from_here(path: Path) -> Path:
    """The path relative to the working directory if it lies in there, else as it is."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
