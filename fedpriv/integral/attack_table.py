"""The model comparison attack against every kind of target, one row for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fedpriv.accounting.calibration import noise_multiplier_for
from fedpriv.accounting.views import default_delta
from fedpriv.integral import attack
from fedpriv.integral.attack import AttackTarget, Game, Publish, Train, play
from fedpriv.integral.networks import metrics
from fedpriv.integral.procedure import Data
from fedpriv.integral.selection import Linkage
from fedpriv.integral.subsamples import Indices
from fedpriv.integral.training import PrivateSchedule, TrainingSchedule
from fedpriv.mechanisms.sources import SeededSource


@dataclass(frozen=True, kw_only=True)
class AttackPlan:
    """Which targets are attacked.

    Attributes:
        epsilon: of the integrally private mean, units of weights.
        clustering: of its models.
        schedule: of the mean's models, and of a plain model for comparison.
        overfit_epochs: of the overfitted models.
        dp_epsilons: of the DP-SGD models, under add-or-remove adjacency, at delta 1 / (10 N), at most 1e-5.
        dp_steps: noisy steps on all records.
        dp_learning_rate: of these steps.
    """

    epsilon: float
    clustering: Linkage = "first-member"
    schedule: TrainingSchedule
    overfit_epochs: int = 200
    dp_epsilons: tuple[float, ...] = (0.1, 0.5, 1.0)
    dp_steps: int = 20
    dp_learning_rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class AttackRow:
    """The result of the attack on one kind of target.

    Attributes:
        name: of the kind of target.
        success, low, high: as in `Success`; None if there was no target.
        beats_chance: whether the interval lies above one half.
        test_accuracy: of the targets, mean over trials.
        num_generators: subsamples used for a target, mean over trials.
        note: why there was no target; otherwise empty.
    """

    name: str
    success: float | None = None
    low: float | None = None
    high: float | None = None
    beats_chance: bool | None = None
    test_accuracy: float | None = None
    num_generators: float | None = None
    note: str = ""


def attack_table(network: nn.Module, data: Data, game: Game, plan: AttackPlan, *, seed: int) -> Iterator[AttackRow]:
    """A row for each kind of target, all attacked on the same subsamples.

    Args:
        network: with the initial weights, which the intruder knows.
        data: subsamples are dealt from its training part; the test part is only used to measure the targets.
        game: parameters of the attack.
        plan: which targets are attacked.
        seed: of everything, including the noise; only for data that may be treated as public.
    """
    features, labels = data.train_features, data.train_labels
    short, long = plan.schedule, replace(plan.schedule, epochs=plan.overfit_epochs)
    trainers = {s: attack.trainer(network, features, labels, s, seed=seed) for s in (short, long)}
    mean = attack.recommended_mean(plan.epsilon, plan.clustering)
    yield attacked("plain, overfitted", network, data, game, trainers[long], attack.plain, seed)
    yield attacked("mean of all owners, overfitted", network, data, game, trainers[long], attack.mean_of_all, seed)
    yield attacked(f"recommended mean, overfitted, {plan.epsilon:g}", network, data, game, trainers[long], mean, seed)
    yield attacked("plain, trained as the mean's models", network, data, game, trainers[short], attack.plain, seed)
    yield attacked(f"recommended mean, {plan.epsilon:g}", network, data, game, trainers[short], mean, seed)
    bare = attack.recommended_mean(plan.epsilon, plan.clustering, others_known=True)
    yield attacked("the same, all other generators known", network, data, game, trainers[short], bare, seed)
    dp_schedule = PrivateSchedule(
        steps=plan.dp_steps, learning_rate=plan.dp_learning_rate, expected_batch_size=game.size
    )
    train = attack.clipped_trainer(network, features, labels, dp_schedule)
    for epsilon in (None, *plan.dp_epsilons):
        noise = 0.0 if epsilon is None else noise_multiplier(epsilon, dp_schedule, game.size)
        source = SeededSource("integral attack", seed, str(epsilon))
        publish = attack.private(network, features, labels, dp_schedule, noise_multiplier=noise, source=source)
        name = "DP-SGD without its noise" if epsilon is None else f"DP-SGD, epsilon {epsilon:g}"
        yield attacked(name, network, data, game, train, publish, seed)


def noise_multiplier(epsilon: float, schedule: PrivateSchedule, num_records: int) -> float:
    """The noise multiplier at which a schedule on this many records costs epsilon, at the default delta."""
    probability = schedule.expected_batch_size / num_records
    delta = default_delta(num_records)
    return noise_multiplier_for(epsilon, delta, sampling_probability=probability, steps=schedule.steps)


def attacked(
    name: str, network: nn.Module, data: Data, game: Game, train: Train, publish: Publish, seed: int
) -> AttackRow:
    """The row of one kind of target; see `play` for the arguments."""
    accuracies, counts = [], []

    def observed(train: Train, owners: Indices, generator: np.random.Generator) -> AttackTarget:
        target = publish(train, owners, generator)
        accuracies.append(metrics(network, target.vector, data.test_features, data.test_labels).accuracy)
        counts.append(target.num_generators)
        return target

    try:
        success = play(network, data.train_labels.numpy(), game, train, observed, seed=seed)
    except attack.NoRecommendationError as error:
        return AttackRow(name=name, note=str(error))
    return AttackRow(
        name=name,
        success=success.mean,
        low=success.low,
        high=success.high,
        beats_chance=success.beats_chance,
        test_accuracy=float(np.mean(accuracies)),
        num_generators=float(np.mean(counts)),
    )
