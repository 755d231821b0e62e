"""The lines of the study, and what they say of a method: means, standard errors and differences over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from simulations.studies.dedup.cells import lines
from simulations.studies.utility.cells import Cell


@dataclass(frozen=True)
class Estimate:
    """The mean over runs, and its standard error; None for a single run."""

    mean: float
    standard_error: float | None
    num_runs: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate | None:
        """The mean and its error of one value for each run; None if there are none."""
        if not values:
            return None
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else None
        return Estimate(mean(values), error, len(values))

    def text(self, *, sign: bool = False) -> str:
        """For a table; a single seed is marked as such."""
        value = f"{self.mean:+.3f}" if sign else f"{self.mean:.3f}"
        if self.standard_error is None:
            return f"{value} (one seed)"
        others = f" ({self.num_runs} runs)" if self.num_runs != 3 else ""
        return f"{value} ± {self.standard_error:.3f}{others}"


class Results:
    """The accuracies of all cells that were run."""

    def __init__(self, found: Iterable[dict[str, Any]]) -> None:
        self._lines = {line["key"]: line for line in found}

    @staticmethod
    def read(runs: Path) -> Results:
        """From the study's file of runs."""
        return Results(lines(runs))

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self._lines

    def by_seed(
        self, corpus: str, method: str, epsilon: float | None, view: str = "local", *, figure: str = "accuracy"
    ) -> dict[int, float]:
        """{seed: the figure} of the seeds that were run."""
        cells = (Cell(corpus=corpus, method=method, epsilon=epsilon, view=view, seed=seed) for seed in range(100))
        return {cell.seed: float(self._lines[cell.key][figure]) for cell in cells if cell in self}

    def estimate(
        self, corpus: str, method: str, epsilon: float | None, view: str = "local", *, figure: str = "accuracy"
    ) -> Estimate | None:
        """Over the seeds that were run."""
        return Estimate.of(list(self.by_seed(corpus, method, epsilon, view, figure=figure).values()))


def difference(ones: dict[int, float], others: dict[int, float]) -> Estimate | None:
    """One less the other, seed by seed: both have the same records, split and test set."""
    return Estimate.of([ones[seed] - others[seed] for seed in sorted(ones.keys() & others.keys())])
