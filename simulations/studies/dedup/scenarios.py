"""The scenarios: which models are trained on which records, at which epsilons and within which bounds.

Shaped like A1 to A4 and B1 of Guan et al. 2025, Table 1. Its data sets hold 60,000 records and more, ours 110 to 550;
so where it has epsilons below one on the fewest records (A2, A3), all epsilons of the scenario are five times as large.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedpriv.dedup.base_selection import Fairness
from simulations.studies.dedup.digits import Digits, Split, Task, digits
from simulations.studies.dedup.networks import Architecture

DELTA = 1e-4


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model to be trained.

    Attributes:
        architecture: of the network.
        task: what it learns.
        split: the records that it learns from.
        part: (index, number of parts) of the split.
        epsilon: the most that its training may cost, at `DELTA`.
    """

    architecture: Architecture
    task: Task
    split: Split
    epsilon: float
    part: tuple[int, int] = (0, 1)

    @property
    def data_set(self) -> str:
        """Id of the records; different ids share no record."""
        return self.split if self.part == (0, 1) else f"{self.split}-{self.part[0]}-of-{self.part[1]}"

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.architecture}-{self.task}-{self.data_set}-eps{self.epsilon:g}"

    @property
    def records(self) -> Digits:
        """The records that it is trained on."""
        return digits(self.split, self.task).part(*self.part)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Models that are deduplicated together.

    Attributes:
        name: as in the paper's Table 1.
        models: possible targets, and bases of each other.
        base: a model of another task, whose own accuracy does not count.
        task: of the validation records.
        epsilon_bound, utility_bound: for every model.
        validation_epsilon: of a target's private validation, which keeps every target within its epsilon bound.
        fairness: `outcome` where the epsilons differ by less than the base's epsilon.
        block_size: values in a block.
    """

    name: str
    models: tuple[Model, ...]
    epsilon_bound: float
    utility_bound: float
    block_size: int
    validation_epsilon: float
    task: Task = "upright"
    base: Model | None = None
    fairness: Fairness = "bounds"

    @property
    def all_models(self) -> tuple[Model, ...]:
        """With the base of another task."""
        return (self.base, *self.models) if self.base else self.models


def _models(architecture: Architecture, task: Task, split: Split, *epsilons: float) -> tuple[Model, ...]:
    return tuple(Model(architecture=architecture, task=task, split=split, epsilon=epsilon) for epsilon in epsilons)


_PARTS = tuple(
    Model(architecture="vit", task="upright", split="train", epsilon=epsilon, part=(index, 5))
    for index, epsilon in enumerate((1.0, 2.0, 4.0, 8.0, 10.0))
)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="A1",
            models=_models("vit", "upright", "train", 1, 2, 4, 6, 7),
            epsilon_bound=1.0,
            utility_bound=0.015,
            block_size=128,
            validation_epsilon=2.9,
        ),
        Scenario(
            name="A2",
            models=_models("vit", "mirrored", "other", 1.5, 2, 3, 4, 5),
            base=_PARTS[0],
            task="mirrored",
            epsilon_bound=0.25,
            utility_bound=0.015,
            block_size=128,
            validation_epsilon=1.7,
        ),
        Scenario(
            name="A3", models=_PARTS, epsilon_bound=1.0, utility_bound=0.015, block_size=128, validation_epsilon=2.9
        ),
        Scenario(
            name="A4",
            models=_models("vit", "upright", "train", 0.5, 0.6, 0.75, 1, 2),
            epsilon_bound=0.5,
            utility_bound=0.02,
            fairness="outcome",
            block_size=128,
            validation_epsilon=1.05,
        ),
        Scenario(
            name="B1",
            models=_models("mlp", "upright", "train", *range(1, 11)),
            epsilon_bound=1.0,
            utility_bound=0.015,
            block_size=64,
            validation_epsilon=2.9,
        ),
    )
}

# The union of these is the paper's fifty models.
FIFTY = ("A2", "A3", "B1", "B2", "B3")
