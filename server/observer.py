"""Follows a run from outside: an observer is told of every step worth showing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fedpriv.accounting.recipe import LearningRate
from fedpriv.config import RunConfig
from fedpriv.protocol import Registration
from fedpriv.reports.language import changes
from fedpriv.reports.tables import format_accuracy, format_number
from fedpriv.runs.names import titled
from fedpriv.runs.rows import RoundRow

log = logging.getLogger("flwr")


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
        """Something that whoever started the run should know before it goes on."""

    def round_done(self, row: RoundRow) -> None:
        """A round is over."""

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Everything is written."""


def described(rate: LearningRate) -> str:
    """A derived learning rate with its terms, for whoever started the run."""
    return (
        f"learning rate {rate.learning_rate:.4g} = tau / T, "
        f"tau = min({rate.largest_learning_rate:g} T, 0.487 / (a nu)) = {rate.total_step:.4g}, "
        f"nu = {rate.noise_per_step_length:.3g}, a = {rate.delivered_noise:.2f}: "
        f"each weight of the head ends with noise of {rate.final_noise:.2g}"
    )


class LogObserver:
    """Writes to the log, for runs without a terminal of their own."""

    def started(
        self, config: RunConfig, registrations: Sequence[Registration], learning_rate: LearningRate | None
    ) -> None:
        """Log who takes part, and with which learning rate."""
        kind = f"z = {config.noise_multiplier}" if config.noise_multiplier else "comparison, z = 0"
        sizes = ", ".join(f"{titled(r.client, r.name)}: {r.num_records}" for r in registrations)
        log.info("run with %s; records: %s", kind, sizes)
        if learning_rate is not None:
            log.info("%s", described(learning_rate))

    def notice(self, text: str) -> None:
        """Log the text as a warning."""
        log.warning("%s", text)

    def round_done(self, row: RoundRow) -> None:
        """Log a round's figures."""
        tested = "" if row.test_accuracy is None else f"accuracy {row.test_accuracy:.4f}, "
        tested += "" if row.test_perplexity is None else f"perplexity {row.test_perplexity:.2f}, "
        log.info(
            "round %s: %sepsilon local <= %.3f, rho <= %.3f",
            *(row.round, tested, row.epsilon_local_max, row.epsilon_rho_max),
        )

    def finished(self, folder: Path, summary: dict[str, Any]) -> None:
        """Log where the results are, and what speaks against them."""
        for line in summary["warnings"]:
            log.warning("%s", line)
        if summary["perplexity"] is not None:
            log.info("perplexity %s; %s", format_number(summary["perplexity"]), "; ".join(changes(summary)))
        log.info("accuracy %s; results in %s", format_accuracy(summary), folder)
