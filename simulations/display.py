"""What a run shows in the terminal or a notebook: where it is just now, a line for each round, closing tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from fedpriv.accounting.recipe import LearningRate
from fedpriv.accounting.views import default_delta
from fedpriv.config import RunConfig
from fedpriv.protocol import Registration
from fedpriv.reports.spending import limit_of, views_text
from fedpriv.reports.tables import format_bytes, format_delta, format_seconds
from fedpriv.runs.rows import RoundRow
from fedpriv.texts import printable
from fedpriv.training.schedule import num_lora_rounds
from server.observer import Progress, described
from simulations.closing import closing
from simulations.live_line import Screen, screen_of
from simulations.time_left import phases_of, time_left

_MOST_NAMES = 8
_BAR = "━"
_LONGEST_BAR, _SHORTEST_BAR = 24, 6


class TerminalObserver:
    """Shows a run on a rich console; where nothing can be rewritten it prints a line for each round.

    A context manager: whatever ends the run, the cursor is where it belongs.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._screen: Screen | None = None
        self._config: RunConfig | None = None
        self._phases: list[str] = []
        self._comparison: list[str] = []
        self._seconds: dict[str, list[float]] = {}
        self._bytes, self._delta = 0, 0.0
        self._round, self._figures = 0, ""
        self._stage, self._now = "", Progress(what="preparing")
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
        self._phases = phases_of(config)
        self._comparison = phases_of(config.without_noise) if config.compares else []
        self._bytes, self._round, self._figures = 0, 0, ""
        self._delta = max(config.delta or default_delta(r.num_records) for r in registrations)
        self._began = self._round_began = time.monotonic()

    def _say_what_begins(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        private, show = config.noise_multiplier > 0, self._console.print
        self._console.rule(
            f"private run, z = {config.noise_multiplier:.4g}" if private else "comparison run, z = 0, clipping kept"
        )
        if private:
            show(_who(registrations), highlight=False, markup=False)
            show(f"{config.model}, LoRA rank {config.rank}, noise source: {config.noise_source}", markup=False)
            show(_rounds(config), highlight=False)
            if limit := limit_of(config.target_epsilon, config.budget_epsilon):
                show(
                    f"{limit[0]}: ε {limit[1]:.4g} on the {config.privacy_view} view, by pld; until the end figures "
                    "are upper bounds by rdp",
                    highlight=False,
                )
        if learning_rate is not None:
            show(described(learning_rate), highlight=False)
        if private and config.simulate:
            show("[bold red]simulate = true: noise and sampling are seeded, this run is NOT PRIVATE[/]")

    def notice(self, text: str) -> None:
        """Show a line that must not be missed."""
        self._console.print(f"[bold yellow]note[/] {escape(printable(text))}", highlight=False, soft_wrap=True)

    def progressed(self, progress: Progress) -> None:
        """Show what is going on."""
        if not progress.total:
            self._stage, self._began = progress.what, time.monotonic()
        elif progress.round is not None:
            self._stage = ""
            if progress.round != self._round:
                self._round, self._round_began = progress.round, time.monotonic()
        self._now = progress
        if self._screen is None:
            self._screen = screen_of(self._console, self.lines)
        else:
            self._screen.update()

    def round_done(self, row: RoundRow) -> None:
        """Show the round's figures."""
        if row.round:
            self._seconds.setdefault(self._phase(row.round), []).append(row.seconds)
        self._bytes += row.bytes_up + row.bytes_down
        self._figures = self._figures_of(row)
        self._now = Progress(what="")
        self._round_began = time.monotonic()
        is_last = self._config is not None and row.round == self._config.rounds
        if self._screen is None or is_last:
            line = f"round {row.round}: {self._figures} | {format_seconds(row.seconds)}"
            # A pipe has no width.
            self._console.print(line, soft_wrap=self._screen is None, highlight=False, markup=False)
        if is_last:
            self._figures = ""

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Show the closing tables, what was spent and where everything is."""
        self._close()
        closing(self._console, folder, summary)

    def _phase(self, round_: int) -> str:
        return self._phases[round_ - 1] if round_ <= len(self._phases) else ""

    def _figures_of(self, row: RoundRow) -> str:
        tested = [] if row.test_perplexity is None else [f"perplexity {row.test_perplexity:.2f}"]
        tested += [] if row.test_accuracy is None else [f"accuracy {row.test_accuracy:.3f}"]
        return " | ".join([*tested, *self._spent(row), format_bytes(self._bytes)])

    def _spent(self, row: RoundRow) -> list[str]:
        """The largest epsilons with their delta, the view that was asked for first; none before or without noise."""
        if self._config is None or row.epsilon_local_max in (0.0, float("inf")):
            return []
        limit = limit_of(self._config.target_epsilon, self._config.budget_epsilon)
        epsilons = {"local": row.epsilon_local_max, "rho": row.epsilon_rho_max, "aggregate": row.epsilon_aggregate_max}
        views = views_text(epsilons, self._config.privacy_view, limit[1] if limit else None)
        return [f"ε ≤ {views} by rdp, δ {format_delta(self._delta)}"]

    def lines(self) -> str:
        """What is shown just now: where the run is, and the figures of its last round."""
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
        """Of the current round that is done, as far as training goes."""
        return self._now.share if self._now.round is not None else None

    def _left(self, now: float) -> str:
        """The time left, the comparison run included."""
        ahead = [*self._phases[max(self._round, 1) - 1 :], *self._comparison]
        estimate = time_left(self._seconds, ahead, now - self._round_began, self._share)
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


def _who(registrations: Sequence[Registration]) -> str:
    """The clients with their numbers of records, or some of them."""
    shown = [f"{printable(r.name)} {r.num_records:,}" for r in registrations[:_MOST_NAMES]]
    more = [f"{len(registrations) - len(shown):,} more"] if len(registrations) > len(shown) else []
    return f"{len(registrations)} clients, by records: {', '.join([*shown, *more])}"


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
        f"{num_all} for {trained}, {config.local_steps} local step{'s' * (config.local_steps > 1)}, {batch}"
        if num_all
        else "",
    ]
    return f"{config.rounds} rounds: {'; '.join(filter(None, parts))}"
