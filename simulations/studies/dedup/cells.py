"""The cells of the study: every way in which a scenario is deduplicated, each with its own key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedpriv.models.dedup import Strategy
from fedpriv.models.dedup.planning import Acceptance
from simulations.studies.dedup.data import Split
from simulations.studies.dedup.scenarios import FIFTY, Scenario

MAIN = ("A1", "A2", "A3", "A4", "A5", "B1", "B2", "B3")
"""The scenarios of the paper's Table 2."""

SVT_SEEDS = 3
LARGE_SVT_SEEDS = 1  # of scenarios with ten models and more
MCTS_ITERATIONS = 10
THRESHOLDS = (0.0, 0.005, 0.01, 0.015, 0.02)
BLOCK_SIZES = (128, 256, 512, 1024, 2048)
IN_STEPS = "in steps"  # the row of private validation, which no search chooses for
SPARSE = ("greedy-20", "greedy-30", "drd", "dred")  # of Table 3
CUTOFF, CUTOFFS = 3, range(2, 8)  # of Tables 3 and 8
BY_RULE = ", empirical"
"""Ends the name of a table by the paper's rule, which proves nothing."""
SMALLEST_RANGES = (10, 15, 20, 30, 40, 60)
EVERYTHING = 10**6

Search = tuple[str, Mapping[str, Any]]
"""Name of the algorithm and its options."""

SEARCHES: Mapping[str, Search] = {
    "dedup-20": ("dedup", {"batch": 20}),
    "dedup-30": ("dedup", {"batch": 30}),
    "mistique-20": ("mistique", {"batch": 20}),
    "mistique-30": ("mistique", {"batch": 30}),
    "mcts-20": ("mcts", {"batch": 20, "iterations": MCTS_ITERATIONS}),
    "mcts-30": ("mcts", {"batch": 30, "iterations": MCTS_ITERATIONS}),
    "greedy-20": ("greedy", {"batch": 20}),
    "greedy-30": ("greedy", {"batch": 30}),
    "drd": ("drd", {}),
    "dred": ("dred", {}),
    "drd-published": ("drd", {"stopping": "published"}),
    "dred-published": ("dred", {"stopping": "published"}),
    "all or nothing": ("greedy", {"batch": EVERYTHING}),
}
"""The rows of the paper's Table 2, and ours; `drd` and `dred` choose L by their rule."""

BY_L: Mapping[str, Search] = {f"drd-{least}": ("drd", {"min_batch": least}) for least in SMALLEST_RANGES}

_SUB_SCENARIOS = ("C1", "C2", "C3", "C4")
"""The cells of base selection alone."""

_PUBLICLY: Mapping[str, Sequence[str]] = {
    "hetero": ("greedy-1", "greedy-20", "greedy-30", "drd", "dred"),
    "minilm": ("dedup-20", "greedy-20", "greedy-30", "drd", "dred"),
    **dict.fromkeys(_SUB_SCENARIOS, ()),
}
"""The searches of a scenario, where these are not all."""

SEARCH_OF_ROW: Mapping[str, Search] = {**SEARCHES, **BY_L, "greedy-1": ("greedy", {"batch": 1})}


@dataclass(frozen=True, kw_only=True)
class DedupCell:
    """One way to deduplicate one scenario.

    Attributes:
        scenario: by name.
        table: the results table that it belongs to.
        row: its row in that table.
        search: a key of `SEARCH_OF_ROW`.
        block_size: values in a block.
        split: the records that it is validated on; `tuning` chooses settings of the study and nothing else.
        saliency, aggregation, metric, strategy: see `fedpriv.models.dedup.planning.DedupSettings`.
        max_distance: the same.
        epsilon_bound, utility_bound: for every variant; None takes the scenario's.
        ordered: whether the order of utilities is kept too, which tightens the utility bounds.
        private: whether the validation records count as private.
        base: a candidate of the scenario, by name, from which all targets then take blocks.
        acceptance, cutoff: see `fedpriv.models.dedup.planning.DedupSettings`.
        seed: of private validation.
    """

    scenario: str
    table: str
    row: str
    search: str = "dred"
    block_size: int
    split: Split = "validation"
    saliency: str = "gradient"
    aggregation: str = "l2"
    metric: str = "l2"
    strategy: Strategy = "single"
    max_distance: float = 0.5
    epsilon_bound: float | None = None
    utility_bound: float | None = None
    ordered: bool = False
    private: bool = False
    base: str = ""
    acceptance: Acceptance = "proof"
    cutoff: int | None = None
    seed: int = field(default=0)

    @property
    def key(self) -> str:
        """Unique, and the name of a folder."""
        parts = (self.scenario, self.table, self.row, *([f"seed-{self.seed}"] if self.private else []))
        return "_".join(parts).replace(" ", "-")


def cells(scenario: Scenario) -> Iterator[DedupCell]:
    """All cells of a scenario."""

    def cell(table: str, row: object, **values: Any) -> DedupCell:
        common = {"scenario": name, "table": table, "row": str(row), "block_size": scenario.block_size}
        return DedupCell(**{**common, "max_distance": scenario.max_distance, **values})

    def by_rule(table: str, row: object, **values: Any) -> DedupCell:
        return cell(table + BY_RULE, row, **values, acceptance="empirical")

    name = scenario.name
    for made in (cell, by_rule):
        for row in _PUBLICLY.get(name, tuple(SEARCHES)):
            yield made("algorithms", row, search=row)
        yield from _ablations(name, made)
        yield from _bases(scenario, made)
    seeds = range(LARGE_SVT_SEEDS if len(scenario.models) >= 10 else SVT_SEEDS)
    if name not in ("hetero", "fifty", *_SUB_SCENARIOS):
        for seed in seeds:
            yield cell("private validation", IN_STEPS, private=True, seed=seed)
    for seed, row in product(seeds, SPARSE if name in (*MAIN, "fifty") else ()):
        yield cell("sparse vector", row, search=row, private=True, cutoff=CUTOFF, seed=seed)
    for seed, cutoff in product(seeds, CUTOFFS if name in ("A1", "A4") else ()):
        yield cell("cutoff", cutoff, private=True, cutoff=cutoff, seed=seed)
    if name in MAIN:
        yield cell("ordered utilities", "dred", ordered=True)
        for row in ("greedy-20", "drd", "dred", *BY_L):
            yield cell("tuning", row, search=row, split="tuning")
        for row in BY_L:
            yield cell("L", row, search=row)


def _bases(scenario: Scenario, cell: Any) -> Iterator[DedupCell]:
    """Figures 6 and 9."""
    name = scenario.name
    if name in FIFTY:
        # The paper's section 5.2.2: the bound of each is the sum of the first three epsilons.
        relaxed = sum(model.epsilon for model in scenario.models[:3])
        for strategy in ("single", "multi", "cross"):
            yield cell("bases", strategy, strategy=strategy, epsilon_bound=relaxed)
    if name in _SUB_SCENARIOS:
        for strategy in ("single", "multi", "cross"):
            yield cell("bases", strategy, strategy=strategy, epsilon_bound=scenario.epsilon_bound)
        for each in scenario.candidates:  # of the least epsilon in one cluster of all, so that each target chooses it
            bounds = {"epsilon_bound": scenario.epsilon_bound, "max_distance": 2.0}
            yield cell("base", each.name, base=each.name, **bounds)


def _ablations(name: str, cell: Any) -> Iterator[DedupCell]:
    """Tables 6 to 8."""
    if name in ("A1", "A4", "A5"):
        for threshold in THRESHOLDS:
            yield cell("threshold", threshold, utility_bound=threshold)
    if name == "A4":
        for block_size in BLOCK_SIZES:
            yield cell("block size", block_size, block_size=block_size)
    if name == "A1":
        for saliency in ("magnitude", "wanda", "fisher", "gradient"):
            yield cell("saliency", saliency, saliency=saliency)
        for aggregation in ("l1", "l2", "linf", "q75"):
            yield cell("aggregation", aggregation, aggregation=aggregation)
        for metric in ("l1", "l2", "cosine"):
            yield cell("distance", metric, metric=metric)
