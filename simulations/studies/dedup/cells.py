"""The cells of the study: every way in which a scenario is deduplicated, each with its own key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedpriv.dedup.base_selection import Strategy
from simulations.studies.dedup.scenarios import Scenario

SVT_SEEDS = 3
MCTS_ITERATIONS = 10
THRESHOLDS = (0.0, 0.005, 0.01, 0.015, 0.02)
BLOCK_SIZES = (32, 64, 128, 256, 512)
CUTOFFS = (2, 3, 4, 5, 6, 7)
EVERYTHING = 10**6

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dedup-20": ("dedup", {"batch": 20}),
    "dedup-30": ("dedup", {"batch": 30}),
    "mistique-20": ("mistique", {"batch": 20}),
    "mcts-20": ("mcts", {"batch": 20, "iterations": MCTS_ITERATIONS}),
    "greedy-20": ("greedy", {"batch": 20}),
    "greedy-30": ("greedy", {"batch": 30}),
    "drd": ("drd", {}),
    "dred": ("dred", {}),
    "all or nothing": ("greedy", {"batch": EVERYTHING}),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to deduplicate one scenario.

    Attributes:
        scenario: by name.
        table: the results table that it belongs to.
        row: its row in that table.
        algorithm: a key of `ALGORITHMS`.
        block_size: values in a block.
        saliency, aggregation, metric, strategy: see `fedpriv.dedup.planning.Settings`.
        epsilon_bound, utility_bound: for every variant; None takes the scenario's.
        ordered: whether the order of utilities is kept too, which tightens the utility bounds.
        cutoff: of private validation; None validates on public records.
        seed: of private validation.
    """

    scenario: str
    table: str
    row: str
    algorithm: str = "dred"
    block_size: int
    saliency: str = "gradient"
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: Strategy = "single"
    epsilon_bound: float | None = None
    utility_bound: float | None = None
    ordered: bool = False
    cutoff: int | None = None
    seed: int = field(default=0)

    @property
    def key(self) -> str:
        """Unique, and the name of a folder."""
        parts = (self.scenario, self.table, self.row, *([f"seed-{self.seed}"] if self.cutoff else []))
        return "_".join(parts).replace(" ", "-")


def cells(scenario: Scenario) -> Iterator[Cell]:
    """All cells of a scenario."""

    def cell(table: str, row: object, **values: Any) -> Cell:
        return Cell(**{"scenario": scenario.name, "table": table, "row": str(row), "block_size": size, **values})

    size = scenario.block_size
    for name in ALGORITHMS:
        yield cell("algorithms", name, algorithm=name)
    for name in ("greedy-20", "greedy-30", "drd", "dred"):
        for seed in range(SVT_SEEDS):
            yield cell("private validation", name, algorithm=name, cutoff=3, seed=seed)
    yield cell("ordered utilities", "dred", ordered=True)
    if scenario.name in ("A1", "A4", "B1"):
        for threshold in THRESHOLDS:
            yield cell("threshold", threshold, utility_bound=threshold)
    if scenario.name == "A4":
        for block_size in BLOCK_SIZES:
            yield cell("block size", block_size, block_size=block_size)
        for cutoff in CUTOFFS:
            for seed in range(SVT_SEEDS):
                yield cell("cut-off", cutoff, cutoff=cutoff, seed=seed)
    if scenario.name == "A1":
        for name in ("magnitude", "wanda", "fisher", "gradient"):
            yield cell("saliency", name, saliency=name)
        for name in ("l1", "l2", "linf", "q75"):
            yield cell("aggregation", name, aggregation=name)
        for name in ("l1", "l2", "cosine"):
            yield cell("distance", name, metric=name)
    if scenario.name in ("A1", "A3", "B1"):
        # The paper's section 5.2.2: the bound of each is the sum of the first three epsilons.
        relaxed = sum(model.epsilon for model in scenario.models[:3])
        for strategy in ("single", "multi", "cross"):
            yield cell("bases", strategy, strategy=strategy, epsilon_bound=relaxed)
