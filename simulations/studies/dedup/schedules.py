"""How each architecture is trained: its public start and its private steps, chosen on tuning records only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fedpriv.accounting.calibration import noise_multiplier_for
from simulations.studies.dedup.data import Task
from simulations.studies.dedup.dp_sgd import DpSgdSchedule
from simulations.studies.dedup.images import NUM_PUBLIC
from simulations.studies.dedup.networks import Architecture
from simulations.studies.dedup.scenarios import DELTA


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
        steps=20,
        share=0.4,
        learning_rate=1.0,
        noisy_rate=0.7,
        public_tasks=("digits",),
        public_learning_rate=1e-3,
    ),
    "resnet": Recipe(
        steps=20,
        share=0.4,
        learning_rate=1.0,
        noisy_rate=0.5,
        public_tasks=("digits",),
        public_learning_rate=3e-3,
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
