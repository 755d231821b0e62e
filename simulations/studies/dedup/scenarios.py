"""The scenarios: which models are trained on which records and how, at which epsilons and within which bounds.

Those of Guan et al. 2025, Table 1, with its numbers of models, epsilons and bounds, on other data and smaller networks;
its seven heterogeneous models; and a cluster of MiniLM. Each architecture's public start and private steps were chosen
on tuning records only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fedpriv.models.dedup import MAX_DISTANCE, Fairness
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from simulations.studies.dedup.data import NUM_PUBLIC, Split, Task, source
from simulations.studies.dedup.dp_sgd import DpSgdSchedule
from simulations.studies.dedup.networks import Architecture

# At most one over the number of records of each data set, as in the paper.
DELTA = 1e-5
BLOCK_SIZE = 512
# Of transformers with millions of weights: 260 to 440 blocks.
LARGE_BLOCK_SIZE = 8192


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
    epsilon: float
    split: Split = "private"
    part: tuple[int, int] = (0, 1)

    @property
    def data_set(self) -> str:
        """Id of the records; different ids within a scenario share no record."""
        name = f"{source(self.task)}-{self.split}"
        return name if self.part == (0, 1) else f"{name}-{self.part[0]}-of-{self.part[1]}"

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.architecture}-{self.task}-{self.data_set}-eps{self.epsilon:g}"

    @property
    def key(self) -> str:
        """The name: a model of several scenarios is trained once."""
        return self.name

    @property
    def tags(self) -> frozenset[str]:
        """The public facts about its task and data."""
        return frozenset({self.task, f"{source(self.task)}-{self.split}"})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Models that are deduplicated together.

    Attributes:
        name: as in the paper's Table 1.
        models: possible targets, and bases of each other.
        base: a model of another data set, whose own accuracy does not count.
        candidates: for the base, each tried alone, and compared with what base selection finds among the models.
        epsilon_bound, utility_bound: for every model.
        validation_epsilon: of a target's private validation, which keeps every target within its epsilon bound.
        fairness: `outcome` where the epsilons differ by less than the base's epsilon.
        block_size: values in a block.
        max_distance: see `fedpriv.models.dedup.planning.DedupSettings`.
        parts: the scenarios that it is the union of, whose bounds their models keep.
    """

    name: str
    models: tuple[Model, ...]
    epsilon_bound: float
    utility_bound: float
    validation_epsilon: float
    base: Model | None = None
    candidates: tuple[Model, ...] = ()
    fairness: Fairness = "bounds"
    block_size: int = BLOCK_SIZE
    max_distance: float = MAX_DISTANCE
    parts: tuple[Scenario, ...] = ()

    @property
    def all_models(self) -> tuple[Model, ...]:
        """With the base of another data set, and all candidates."""
        return (*([self.base] if self.base else []), *self.candidates, *self.models)

    def stored(self, candidate: str) -> tuple[Model, ...]:
        """The models of one store, with the candidate of this name alone."""
        return tuple(each for each in self.all_models if each not in self.candidates or each.name == candidate)


def _models(
    architecture: Architecture, task: Task, *epsilons: float, part: tuple[int, int] = (0, 1)
) -> tuple[Model, ...]:
    return tuple(Model(architecture=architecture, task=task, epsilon=epsilon, part=part) for epsilon in epsilons)


def _tenths(first: int, last: int) -> tuple[float, ...]:
    return tuple(tenths / 10 for tenths in range(first, last + 1))


def _medquad(*epsilons: float) -> tuple[Model, ...]:
    # A quarter of the records, since all of them make every model as good as the base, and then one model would do.
    return _models("perceptron", "medquad", *epsilons, part=(0, 4))


_PARTS = tuple(
    Model(architecture="perceptron", task="sst2", split="parts", epsilon=epsilon, part=(index, 5))
    for index, epsilon in enumerate((0.2, 0.4, 0.8, 1.6, 2.0))
)
_VIEW_TASKS: tuple[Task, ...] = ("digits", "mirrored", "upside-down", "turned")
_VIEWS = tuple(
    Model(architecture="vit-large", task=task, epsilon=2.0, part=(index, len(_VIEW_TASKS)))
    for index, task in enumerate(_VIEW_TASKS)
)
_MINILM = _models("minilm", "sst2", 1, 2, 4, 5, 7)

_A1 = Scenario(
    name="A1", models=_medquad(1, 2, 4, 6, 7), epsilon_bound=1.0, utility_bound=0.015, validation_epsilon=2.9
)
_A2 = Scenario(
    name="A2",
    models=_models("perceptron", "sst2", 0.3, 0.4, 0.6, 0.8, 1.0),
    base=_PARTS[0],
    epsilon_bound=0.05,
    utility_bound=0.015,
    validation_epsilon=0.34,
)
_A3 = Scenario(name="A3", models=_PARTS, epsilon_bound=0.2, utility_bound=0.015, validation_epsilon=0.59)
_A4 = Scenario(
    name="A4",
    models=_models("vit", "digits", 0.5, 0.6, 0.75, 1, 2),
    epsilon_bound=0.5,
    utility_bound=0.02,
    validation_epsilon=1.05,
    fairness="outcome",
)
_A5 = replace(_A4, name="A5", models=_models("resnet", "digits", 0.4, 0.6, 0.8, 1, 2))

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        _A1,
        _A2,
        _A3,
        _A4,
        _A5,
        replace(_A1, name="B1", models=_medquad(*range(1, 11))),
        replace(
            _A4,
            name="B2",
            models=_models("vit", "digits", *(hundredths / 100 for hundredths in range(50, 100, 5))),
            validation_epsilon=1.0,
        ),
        replace(
            _A5,
            name="B3",
            models=_models("resnet", "digits", *_tenths(2, 21)),
            epsilon_bound=0.2,
            validation_epsilon=0.49,
        ),
        replace(
            _A1,
            name="C1",
            models=_medquad(*range(5, 10)),
            candidates=_medquad(*range(1, 5)),
            epsilon_bound=5.0,
            validation_epsilon=10.9,
        ),
        replace(_A4, name="C2", candidates=_models("vit", "digits", *_tenths(1, 4))),
        replace(
            _A5,
            name="C3",
            models=_models("resnet", "digits", 0.7, 0.8, 0.9, 1, 2),
            candidates=_models("resnet", "digits", 0.2, 0.4),
            epsilon_bound=0.7,
            validation_epsilon=1.45,
        ),
        replace(
            _A3,
            name="C4",
            models=_PARTS[1:],
            candidates=(_PARTS[0], *_models("perceptron", "sst2", 0.2), *_medquad(0.2)),
            epsilon_bound=0.3,
            validation_epsilon=1.05,
        ),
        Scenario(
            name="minilm",
            models=_MINILM,
            epsilon_bound=1.0,
            utility_bound=0.015,
            validation_epsilon=2.9,
            block_size=LARGE_BLOCK_SIZE,
        ),
        Scenario(
            name="hetero",
            models=(*_VIEWS, _MINILM[3], *_models("minilm", "medquad", 5), *_models("minilm", "hospital", 5)),
            epsilon_bound=0.5,
            utility_bound=0.02,
            validation_epsilon=2.4,
            block_size=LARGE_BLOCK_SIZE,
            max_distance=2.0,  # one base for all, as in the paper
        ),
    )
}

# The union of these is the paper's fifty models.
FIFTY = ("A2", "A3", "B1", "B2", "B3")
_PARTS_OF_FIFTY = tuple(SCENARIOS[name] for name in FIFTY)
SCENARIOS["fifty"] = Scenario(
    name="fifty",
    models=tuple(model for part in _PARTS_OF_FIFTY for model in part.models),
    epsilon_bound=max(part.epsilon_bound for part in _PARTS_OF_FIFTY),
    utility_bound=max(part.utility_bound for part in _PARTS_OF_FIFTY),
    validation_epsilon=min(part.validation_epsilon for part in _PARTS_OF_FIFTY),
    fairness="outcome",
    parts=_PARTS_OF_FIFTY,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the models of an architecture are trained.

    Attributes:
        steps: noisy steps.
        share: of the records, expected in a batch.
        least_batch: expected in a batch whatever the share, where there are so many.
        clip_norm: C, gradient units.
        learning_rate: the largest.
        noisy_rate: the learning rate where a mean gradient's coordinates have noise of 0.01; it falls with more.
        public_tasks: whose public records the start is trained on; none means the model's own task.
        public_records: at most so many of each task.
        public_epochs, public_learning_rate: of that.
        public_prefix: of the names of the weights that the start trains; the others stay as they were published.
    """

    steps: int
    share: float
    least_batch: int = 1
    clip_norm: float = 1.0
    learning_rate: float
    noisy_rate: float
    public_tasks: tuple[Task, ...] = ()
    public_records: int = NUM_PUBLIC
    public_epochs: int = 1
    public_learning_rate: float
    public_prefix: str = ""

    def rate(self, batch_size: int, noise_multiplier: float) -> float:
        """The learning rate, by a rule that depends on no record."""
        noise = noise_multiplier * self.clip_norm / batch_size
        return min(self.learning_rate, self.noisy_rate * 0.01 / noise) if noise else self.learning_rate


RECIPES: Mapping[Architecture, Recipe] = {
    "perceptron": Recipe(
        steps=30,
        share=0.3,
        learning_rate=4.0,
        noisy_rate=1.0,
        public_tasks=("sst2", "medquad"),
        public_epochs=2,
        public_learning_rate=1e-3,
    ),
    "vit": Recipe(
        steps=20, share=0.4, learning_rate=1.0, noisy_rate=0.7, public_tasks=("digits",), public_learning_rate=1e-3
    ),
    "resnet": Recipe(
        steps=20, share=0.4, learning_rate=1.0, noisy_rate=0.5, public_tasks=("digits",), public_learning_rate=3e-3
    ),
    "vit-large": Recipe(
        steps=15,
        share=0.5,
        learning_rate=0.5,
        noisy_rate=0.5,
        public_tasks=("digits", "mirrored", "upside-down", "turned"),
        public_records=4800,
        public_learning_rate=3e-4,
    ),
    "minilm": Recipe(
        steps=30,
        share=0.05,
        least_batch=500,
        # Its gradients have norms of 4 to 14: at 1 all records would count alike, however sure the model is of them.
        clip_norm=10.0,
        learning_rate=0.035,
        noisy_rate=0.05,
        public_epochs=5,
        public_learning_rate=0.03,
        public_prefix="classifier",
    ),
}


@cache
def schedule(architecture: Architecture, num_records: int, epsilon: float) -> tuple[DpSgdSchedule, float]:
    """How a model is trained on so many records, and the noise multiplier that keeps it within an epsilon.

    Args:
        architecture: of the model.
        num_records: of its data set, >= 1.
        epsilon: > 0, at `DELTA`; infinite for training without noise.
    """
    recipe = RECIPES[architecture]
    batch_size = min(num_records, max(recipe.least_batch, round(recipe.share * num_records)))
    noise = 0.0
    if math.isfinite(epsilon):
        probability = batch_size / num_records
        noise = noise_multiplier_for(epsilon, DELTA, sampling_probability=probability, steps=recipe.steps)
    how = DpSgdSchedule(
        steps=recipe.steps,
        expected_batch_size=batch_size,
        learning_rate=recipe.rate(batch_size, noise),
        clip_norm=recipe.clip_norm,
    )
    return how, noise
