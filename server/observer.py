"""Follows a run from outside: an observer is told of every step worth showing."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedpriv.config import RunConfig
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.accounting.recipe import LearningRate
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.runs import RoundRow
from fedpriv.runs.figures import format_accuracy, format_delta, format_number, format_seconds, limit_of
from fedpriv.runs.show import changes, views_text
from fedpriv.texts import holder_label, what_is_counted

log = logging.getLogger("flwr")

# A log has at most one line in this time about what is going on, and with a heartbeat at least one.
_PAUSE_SECONDS = 10.0
_MOST_NAMES = 5
# Clients whose sizes a run's first line names.
_MOST_SIZES = 50


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The step that a run is at right now: to be shown, never to be stored or sent.

    A coordinator counts answers. In a simulation, where nothing is private from the one who runs it, it is also how far
    the clients' training is.

    Attributes:
        what: in a few words.
        done, total: in a unit of its own; a total of 0 says that there is nothing to count, so that it is something
            that happens outside the rounds.
        round: from 1; None if that has not changed.
        is_count: whether `done` and `total` count what `what` names, such as answers.
        clients: {client: what it does}, of those that were asked, as far as its coordinator knows: `training`, or
            `asked` something else, or `replied`.
    """

    what: str
    done: float = 0.0
    total: float = 0.0
    round: int | None = None
    is_count: bool = False
    clients: Mapping[int, str] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The share that is done, in [0, 1]; None if there is nothing to count."""
        return min(self.done / self.total, 1.0) if self.total else None

    @property
    def text(self) -> str:
        """Such as `training 62%`, or `answers 2/3`."""
        if self.share is None:
            return self.what
        return f"{self.what} {self.done:,.0f}/{self.total:,.0f}" if self.is_count else f"{self.what} {self.share:.0%}"


Follow = Callable[[RunProgress], None]


def answers(round_: int, num_answers: int, num_asked: int, clients: Mapping[int, str] | None = None) -> RunProgress:
    """The number of those asked in a round that have answered, and what each of them does."""
    return RunProgress(
        what="answers", done=num_answers, total=num_asked, round=round_, is_count=True, clients=clients or {}
    )


class Observer(Protocol):
    """Follows a run; the terminal display is one."""

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """A series of rounds begins: those of the private run, or of its comparison.

        Args:
            config: of these rounds.
            registrations: of the nodes that take part.
            learning_rate: what it was derived from; None if the configuration gives a number.
        """

    def notice(self, text: str) -> None:
        """Tell the user who started the run something before it goes on."""

    def progressed(self, progress: RunProgress) -> None:
        """Learn that something is going on, in a round or outside; this comes often, and may be ignored."""

    def round_done(self, row: RoundRow) -> None:
        """A round is over."""

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Everything is written."""


class FollowedObserver:
    """An observer beside which others look at the run's folder whenever something new is in it.

    Args:
        observer: is told everything.
        looks: called once a round and its checkpoint are written, and where a step outside the rounds begins.
    """

    def __init__(self, observer: Observer, *looks: Callable[[], None]) -> None:
        self.started, self.notice, self.finished = observer.started, observer.notice, observer.finished
        self._observer, self._looks = observer, looks

    def progressed(self, progress: RunProgress) -> None:
        """Pass it on."""
        self._observer.progressed(progress)
        if not progress.total:
            self._look()

    def round_done(self, row: RoundRow) -> None:
        """Pass it on."""
        self._observer.round_done(row)
        self._look()

    def _look(self) -> None:
        for look in self._looks:
            look()


def described(rate: LearningRate) -> str:
    """A derived learning rate with its terms, for the user who started the run."""
    return (
        f"learning rate {rate.learning_rate:.4g} = tau / T, "
        f"tau = min({rate.largest_learning_rate:g} T, 0.487 / (a nu)) = {rate.total_step:.4g}, "
        f"nu = {rate.noise_per_step_length:.3g}, a = {rate.delivered_noise:.2f}: "
        f"each weight of the head ends with noise of {rate.final_noise:.2g}"
    )


def spent_so_far(row: RoundRow, config: RunConfig, delta: float) -> str:
    """The largest epsilons after a round with their delta, first that on the view of target or budget.

    Empty before anything is released, and without noise.
    """
    if row.epsilon_local_max in (0.0, math.inf):
        return ""
    epsilons = {"local": row.epsilon_local_max, "rho": row.epsilon_rho_max, "aggregate": row.epsilon_aggregate_max}
    this_run, before = row.epsilon_this_run_max, row.epsilon_before_max
    parts = None if this_run is None or before is None else (this_run, before)
    limit = limit_of(config.target_epsilon, config.budget_epsilon)
    return f"ε ≤ {views_text(epsilons, config.privacy_view, limit, parts)} by rdp, δ {format_delta(delta)}"


class LogObserver:
    """Writes to the log, for runs without a terminal of their own."""

    _config: RunConfig | None = None
    _delta = 0.0

    def __init__(self) -> None:
        self._last_line = self._began = time.monotonic()
        self._now = RunProgress(what="preparing")
        self._names: dict[int, str] = {}

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """While the block runs, at least every 10 s a line says what is going on."""
        ended = threading.Event()

        def speak() -> None:
            while not ended.wait(1.0):
                self._say_if_due()

        threading.Thread(target=speak, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Log who takes part, and with which learning rate."""
        self._last_line = self._began = time.monotonic()
        self._now = RunProgress(what="preparing the rounds")
        self._config, self._delta = config, max(config.delta or default_delta(r.num_records) for r in registrations)
        kind = config.noise_in_words if config.noise_multiplier else "comparison, z = 0"
        self._names = {r.client: r.name for r in registrations}
        listed = [f"{holder_label(r.client, r.name)}: {r.num_records}" for r in registrations[:_MOST_SIZES]]
        if (num_more := len(registrations) - len(listed)) > 0:
            listed.append(f"{num_more:,} more, {sum(r.num_records for r in registrations):,} in all")
        log.info("run with %s; %s: %s", kind, what_is_counted(config.unit), ", ".join(listed))
        if learning_rate is not None:
            log.info("%s", described(learning_rate))

    def notice(self, text: str) -> None:
        """Log the text as a warning."""
        log.warning("%s", text)

    def progressed(self, progress: RunProgress) -> None:
        """Log what is going on, now and then."""
        if (progress.what, progress.round) != (self._now.what, self._now.round):
            self._began = time.monotonic()
        self._now = progress
        self._say_if_due()

    def _say_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last_line < _PAUSE_SECONDS:
            return
        self._last_line = now
        place = "" if self._now.round is None else f"round {self._now.round}: "
        log.info("%s%s, %s", place, self._now.text, "; ".join([format_seconds(now - self._began), *self._awaited()]))

    def _awaited(self) -> Iterator[str]:
        """The clients that have not answered, by what they do."""
        for doing in sorted(set(self._now.clients.values()) - {"replied"}):
            who = [holder_label(c, self._names.get(c)) for c, does in self._now.clients.items() if does == doing]
            more = [f"{len(who) - _MOST_NAMES} more"] if len(who) > _MOST_NAMES else []
            yield f"{doing}: {', '.join([*who[:_MOST_NAMES], *more])}"

    def round_done(self, row: RoundRow) -> None:
        """Log a round's figures."""
        self._last_line = self._began = time.monotonic()
        self._now = RunProgress(what=f"after round {row.round}")
        figures = [
            *([] if row.test_accuracy is None else [f"accuracy {row.test_accuracy:.4f}"]),
            *([] if row.test_perplexity is None else [f"perplexity {row.test_perplexity:.2f}"]),
            spent_so_far(row, self._config, self._delta) if self._config else "",
        ]
        log.info("round %s: %s", row.round, ", ".join(filter(None, figures)) or "done")

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Log where the results are, and what speaks against them."""
        for line in summary["warnings"]:
            log.warning("%s", line)
        if summary["perplexity"] is not None:
            log.info("perplexity %s; %s", format_number(summary["perplexity"]), "; ".join(changes(summary)))
        log.info("accuracy %s; results in %s", format_accuracy(summary), folder)
