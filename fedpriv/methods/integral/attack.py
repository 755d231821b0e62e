"""The model comparison attack: membership inference by comparing a model with models of guessed training sets.

The intruder knows the architecture, the initial weights, the training algorithm and the order of its batches, some
records that were used (the background S*), and a pool of candidates that contains the other used ones. They draw
training sets from the pool, train on each, and rank these generators by how close their model comes to the target.
Records that the best generators share are classified as members.

A game plays the attack against a target of some kind. Each trial deals disjoint stratified subsamples. The target is
computed from one or more of them. The pool consists of one subsample that was used, the members, and, for each member
that the intruder does not know already, one unused record of the same class. Within a class, members and others are
exchangeable, so random guesses are right half the time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.methods.integral._networks import (
    PrivateSchedule,
    TrainingSchedule,
    aligned,
    metrics,
    train_clipped_stacked,
    train_privately,
    train_stacked,
)
from fedpriv.methods.integral._selection import (
    Indices,
    Linkage,
    Measure,
    Vectors,
    disjoint_subsamples,
    distances,
    select,
)
from fedpriv.methods.integral.procedure import Data
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.mechanisms.sources import RandomSource, SeededSource

Comparison = Literal["largest", "norm", "projection"]

_CONFIDENCE = 0.95

CHANCE = 0.5
"""Success rate of guessing membership at random when half of the candidates are members."""

Train = Callable[[Indices], Tensor]
"""Trains models, [networks, values], on training sets, int64 [networks, size]; used by owners and intruder."""


@dataclass(frozen=True, kw_only=True)
class _AttackRow:
    """The result of the attack on one kind of target.

    Attributes:
        success: share of correctly classified candidates, over all trials; None if there was no target.
        low, high: Student's t confidence interval of it, over trials: candidates within a trial are not independent,
            and trials that share records of a table are only nearly so.
        beats_chance: whether the whole interval lies above one half.
        num_generators: subsamples used for a target, mean over trials.
        note: why there was no target; otherwise empty.
    """

    name: str = ""
    success: float | None = None
    low: float | None = None
    high: float | None = None
    beats_chance: bool | None = None
    test_accuracy: float | None = None
    num_generators: float | None = None
    note: str = ""


def _draw_generators(
    labels: Indices, background: Indices, class_counts: Indices, num: int, generator: np.random.Generator
) -> Indices:
    """The intruder's guessed training sets, int64 [num, size]: the background S* and a uniform draw of the pool.

    The draw keeps the class counts of the true training set: these follow the whole data set's and are not secret.
    """
    drawn = [np.tile(background, (num, 1))]
    for label, count in enumerate(class_counts):
        own = np.flatnonzero(labels == label)
        others, known = np.setdiff1d(own, background), np.intersect1d(own, background)
        if not len(known) <= count <= len(own):
            raise InputError(f"class {label}: {count} records of it, but {len(known)} known and {len(own)} candidates")
        drawn.append(generator.permuted(np.tile(others, (num, 1)), axis=1)[:, : count - len(known)])
    return np.concatenate(drawn, axis=1).astype(np.int64)


def _rank_generators(vectors: Vectors, target: Vectors, comparison: Comparison = "norm") -> Indices:
    """Rows of the models, the one closest to the target first.

    `projection`, along the direction of the target from the models' mean, suits a target that is a mean of many models.
    """
    if comparison not in get_args(Comparison):
        raise InputError(f"comparison = {comparison!r}: must be one of {', '.join(get_args(Comparison))}")
    if comparison == "projection":
        centre = vectors.mean(axis=0, dtype=np.float64)
        scores = -(vectors - centre) @ (target - centre)
    else:
        measure: Measure = "largest" if comparison == "largest" else "norm"
        scores = distances(vectors, target, measure)
    return np.argsort(scores, kind="stable")


def _membership_scores(
    generators: Indices, order: Indices, num_candidates: int, num_best: int
) -> npt.NDArray[np.float64]:
    """[candidates] The share of the best generators, [models, size], that contain each; 1 for their intersection.

    Source: Varshney and Torra 2023, section 2.2, "dominant records from the intersection".
    """
    if not 1 <= num_best <= len(generators):
        raise InputError(f"num_best = {num_best}: must lie in 1..{len(generators)}, the number of subsamples")
    best = generators[order[:num_best]]
    return np.bincount(best.ravel(), minlength=num_candidates) / num_best


def _infer_members(
    scores: npt.NDArray[np.float64], unknown: Indices, num_members: int, generator: np.random.Generator
) -> Indices:
    """The candidates, without the background, classified as members: the highest scores, ties broken at random."""
    order = np.lexsort((generator.random(len(unknown)), -scores[unknown]))
    return np.sort(unknown[order[:num_members]])


def _success(shares: Sequence[float]) -> _AttackRow:
    """The mean of the trials' shares of correct answers, with its confidence interval at 95 %."""
    if len(shares) < 2:
        raise InputError(f"trials = {len(shares)}: a confidence interval needs at least 2")
    mean = float(np.mean(shares))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(shares) - 1)) * float(np.std(shares, ddof=1))
    half /= math.sqrt(len(shares))
    low, high = max(mean - half, 0.0), min(mean + half, 1.0)
    return _AttackRow(success=mean, low=low, high=high, beats_chance=low > CHANCE)


class _NoRecommendationError(InputError):
    """No two models are close enough, so there is no mean to attack."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _AttackTarget:
    """A published model's weights, [values], or what is computed of them, and the owner under attack, who was used."""

    vector: Tensor
    owner: int
    num_generators: int


Publish = Callable[[Train, Indices, np.random.Generator], _AttackTarget]
"""The target of a trial, from the owners' records, int64 [owners, size]."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """The parameters of the attack.

    Attributes:
        size: records of a training set, >= 2.
        num_owners: subsamples from which a target may be computed, >= 1.
        num_background: used records that the intruder knows beforehand, < size.
        num_subsamples: drawn by the intruder, >= 1.
        num_best: generators whose common records are classified as members.
        num_trials: >= 2.
    """

    size: int = 10
    num_owners: int = 20
    num_background: int = 0
    num_subsamples: int = 500
    num_best: int = 10
    num_trials: int = 20
    comparison: Comparison = "norm"

    def __post_init__(self) -> None:
        if not (self.size >= 2 and 0 <= self.num_background < self.size):
            raise InputError(
                f"size = {self.size}, num_background = {self.num_background}: must be >= 2 and in 0..size - 1"
            )
        if self.num_owners < 1 or self.num_trials < 2:
            raise InputError(f"num_owners = {self.num_owners}, num_trials = {self.num_trials}: at least 1 and 2")
        if not 1 <= self.num_best <= self.num_subsamples:
            raise InputError(f"num_best = {self.num_best}: must lie in 1..{self.num_subsamples}, the subsamples drawn")


def _play(network: nn.Module, labels: Indices, game: Game, train: Train, publish: Publish, *, seed: int) -> _AttackRow:
    """How often the intruder was right about candidates that they did not know beforehand.

    Args:
        network: the architecture, of a kind that `aligned` supports, since models are aligned to the target.
        labels: int64 [records], classes of all records from which subsamples are dealt.
        seed: of everything but the noise of private targets. One seed deals the same subsamples for each kind of
            target.
    """
    shares = []
    for trial in range(game.num_trials):
        dealer = np.random.default_rng((seed, trial))
        dealt = disjoint_subsamples(labels, game.size, dealer).records
        if len(dealt) < game.num_owners + 2:
            raise InputError(
                f"num_owners = {game.num_owners}: {len(labels)} records give {len(dealt)} subsamples of {game.size}, "
                "and two more than the owners are needed"
            )
        dealt = dealt[dealer.choice(len(dealt), game.num_owners + 2, replace=False)]
        target = publish(train, dealt[:-2], dealer)
        members = dealer.permutation(dealt[target.owner])
        shares.append(_trial(network, labels, game, train, target.vector, members, dealt[-2:].ravel(), dealer))
    return _success(shares)


def _trial(
    network: nn.Module,
    labels: Indices,
    game: Game,
    train: Train,
    target: Tensor,
    members: Indices,
    unused: Indices,
    generator: np.random.Generator,
) -> float:
    """The share of unknown candidates that are classified correctly; the first members are the background."""
    wanted = np.bincount(labels[members[game.num_background :]], minlength=int(labels.max()) + 1)
    others = [unused[labels[unused] == label][:count] for label, count in enumerate(wanted)]
    pool = np.concatenate([members, *others])
    background, unknown = np.arange(game.num_background), np.arange(game.num_background, len(pool))
    counts = np.bincount(labels[members])
    guessed = _draw_generators(labels[pool], background, counts, game.num_subsamples, generator)
    vectors = aligned(network, train(pool[guessed]), target)
    order = _rank_generators(vectors.double().numpy(), target.double().numpy(), game.comparison)
    scores = _membership_scores(guessed, order, len(pool), game.num_best)
    inferred = _infer_members(scores, unknown, int(wanted.sum()), generator)
    # Half of the unknown candidates are members, so precision equals accuracy.
    return float(np.mean(inferred < game.size))


def trainer(network: nn.Module, features: Tensor, labels: Tensor, schedule: TrainingSchedule, *, seed: int) -> Train:
    """Plain training of many networks at once, all with the same order of batches."""

    def train(records: Indices) -> Tensor:
        return train_stacked(network, features, labels, records, schedule, seed=seed)[schedule.epochs]

    return train


def plain(train: Train, owners: Indices, generator: np.random.Generator) -> _AttackTarget:
    """The model of the first owner."""
    return _AttackTarget(vector=train(owners[:1])[0], owner=0, num_generators=1)


def _mean_of_all(train: Train, owners: Indices, generator: np.random.Generator) -> _AttackTarget:
    """The mean of all owners' models, regardless of their distances."""
    return _AttackTarget(vector=train(owners).mean(dim=0), owner=0, num_generators=len(owners))


def recommended_mean(epsilon: float, clustering: Linkage = "first-member", *, others_known: bool = False) -> Publish:
    """The mean of the largest cluster; the intruder attacks one of its generators.

    The returned function raises NoRecommendationError if no two models are within epsilon.

    Args:
        epsilon: units of the weights.
        others_known: the intruder knows all other generators of the cluster. They train on these, subtract the models
            from the mean, and obtain the model of the generator under attack.
    """

    def publish(train: Train, owners: Indices, generator: np.random.Generator) -> _AttackTarget:
        vectors = train(owners)
        (cluster,) = select(vectors.numpy(), list(owners), epsilon=epsilon, clustering=clustering, top=1)
        if cluster.recurrence < 2:
            raise _NoRecommendationError(
                f"epsilon = {epsilon:g}: no two of {len(owners)} models are within it, so no mean is recommended; "
                "raise it or train less"
            )
        owner = int(generator.choice(cluster.members))
        mean = torch.from_numpy(cluster.mean)
        if others_known:
            others = [row for row in cluster.members if row != owner]
            mean = cluster.recurrence * mean - vectors[others].double().sum(dim=0)
        return _AttackTarget(vector=mean.to(vectors), owner=owner, num_generators=cluster.recurrence)

    return publish


def _private(
    network: nn.Module, data: Data, schedule: PrivateSchedule, noise_multiplier: float, source: RandomSource
) -> Publish:
    """A model trained by DP-SGD on the first owner's records."""

    def publish(train: Train, owners: Indices, generator: np.random.Generator) -> _AttackTarget:
        own = torch.from_numpy(owners[0])
        features, labels = data.train_features[own], data.train_labels[own]
        vector, _ = train_privately(
            network, features, labels, schedule, noise_multiplier=noise_multiplier, source=source
        )
        return _AttackTarget(vector=vector, owner=0, num_generators=1)

    return publish


@dataclass(frozen=True, kw_only=True)
class AttackPlan:
    """The targets that are attacked.

    Attributes:
        epsilon: of the integrally private mean, units of weights.
        dp_epsilons: of the DP-SGD models, under add-or-remove adjacency, at delta 1 / (10 N), at most 1e-5.
        dp_steps: noisy steps on all records.
    """

    epsilon: float
    clustering: Linkage = "first-member"
    schedule: TrainingSchedule
    overfit_epochs: int = 200
    dp_epsilons: tuple[float, ...] = (0.1, 0.5, 1.0)
    dp_steps: int = 20
    dp_learning_rate: float = 0.5


def attack_table(network: nn.Module, data: Data, game: Game, plan: AttackPlan, *, seed: int) -> Iterator[_AttackRow]:
    """A row for each kind of target, all attacked on the same subsamples.

    Args:
        network: with the initial weights, which the intruder knows.
        data: subsamples are dealt from its training part; the test part is only used to measure the targets.
        seed: of everything, including the noise; only for data that may be treated as public.
    """
    features, labels = data.train_features, data.train_labels
    short, long = plan.schedule, replace(plan.schedule, epochs=plan.overfit_epochs)
    trainers = {s: trainer(network, features, labels, s, seed=seed) for s in (short, long)}
    mean = recommended_mean(plan.epsilon, plan.clustering)
    yield attacked("plain, overfitted", network, data, game, trainers[long], plain, seed)
    yield attacked("mean of all owners, overfitted", network, data, game, trainers[long], _mean_of_all, seed)
    yield attacked(f"recommended mean, overfitted, {plan.epsilon:g}", network, data, game, trainers[long], mean, seed)
    yield attacked("plain, trained as the mean's models", network, data, game, trainers[short], plain, seed)
    yield attacked(f"recommended mean, {plan.epsilon:g}", network, data, game, trainers[short], mean, seed)
    bare = recommended_mean(plan.epsilon, plan.clustering, others_known=True)
    yield attacked("the same, all other generators known", network, data, game, trainers[short], bare, seed)
    dp_schedule = PrivateSchedule(
        steps=plan.dp_steps, learning_rate=plan.dp_learning_rate, expected_batch_size=game.size
    )

    def train(records: Indices) -> Tensor:
        """The private algorithm without its noise: the best choice of an intruder who does not know the noise."""
        return train_clipped_stacked(network, features, labels, records, dp_schedule)

    for epsilon in (None, *plan.dp_epsilons):
        noise = 0.0 if epsilon is None else noise_multiplier(epsilon, dp_schedule, game.size)
        source = SeededSource("integral attack", seed, str(epsilon))
        publish = _private(network, data, dp_schedule, noise, source)
        name = "DP-SGD without its noise" if epsilon is None else f"DP-SGD, epsilon {epsilon:g}"
        yield attacked(name, network, data, game, train, publish, seed)


def noise_multiplier(epsilon: float, schedule: PrivateSchedule, num_records: int) -> float:
    """The noise multiplier at which a schedule on this many records costs epsilon, at the default delta."""
    probability = schedule.expected_batch_size / num_records
    delta = default_delta(num_records)
    return noise_multiplier_for(epsilon, delta, sampling_probability=probability, steps=schedule.steps)


def attacked(
    name: str, network: nn.Module, data: Data, game: Game, train: Train, publish: Publish, seed: int
) -> _AttackRow:
    """The row of one kind of target; see `_play` for the arguments."""
    accuracies, counts = [], []

    def observed(train: Train, owners: Indices, generator: np.random.Generator) -> _AttackTarget:
        target = publish(train, owners, generator)
        accuracies.append(metrics(network, target.vector, data.test_features, data.test_labels).accuracy)
        counts.append(target.num_generators)
        return target

    try:
        found = _play(network, data.train_labels.numpy(), game, train, observed, seed=seed)
    except _NoRecommendationError as error:
        return _AttackRow(name=name, note=str(error))
    return replace(found, name=name, test_accuracy=float(np.mean(accuracies)), num_generators=float(np.mean(counts)))
