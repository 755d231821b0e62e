"""Games that play the model comparison attack against targets of several kinds.

Each trial deals disjoint stratified subsamples. The target is computed from one or more of them. The intruder's pool
consists of one subsample that was used, the members, and, for each member that they do not know already, one unused
record of the same class. Within a class, members and others are exchangeable, so random guesses are right half the
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.errors import InputError
from fedpriv.integral import attack
from fedpriv.integral.alignment import aligned
from fedpriv.integral.attack import Comparison, Success
from fedpriv.integral.private_training import PrivateSchedule, train_clipped_stacked, train_privately
from fedpriv.integral.selection import Linkage, select
from fedpriv.integral.stacked_training import Schedule, train_stacked
from fedpriv.integral.subsamples import Indices, disjoint_subsamples
from fedpriv.mechanisms.sources import RandomSource


class NoRecommendationError(InputError):
    """No two models are close enough, so there is no mean to attack."""


Train = Callable[[Indices], Tensor]
"""Trains models, [networks, values], on training sets, int64 [networks, size]; used by owners and intruder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A published model.

    Attributes:
        vector: its weights, [values], or what the intruder computes from them.
        owner: of the subsample under attack, which was used.
        num_generators: how many subsamples were used.
    """

    vector: Tensor
    owner: int
    num_generators: int


Publish = Callable[[Train, Indices, np.random.Generator], Target]
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
        comparison: how models are compared.
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


def play(network: nn.Module, labels: Indices, game: Game, train: Train, publish: Publish, *, seed: int) -> Success:
    """How often the intruder was right about candidates that they did not know beforehand.

    Args:
        network: the architecture, of a kind that `aligned` supports, since models are aligned to the target.
        labels: int64 [records], classes of all records from which subsamples are dealt.
        game: see `Game`.
        train: the intruder's training algorithm, which is also passed to `publish`.
        publish: makes the target.
        seed: of everything but the noise of private targets. One seed deals the same subsamples for each kind of
            target.

    Raises:
        InputError: there are too few records for the owners and for two further subsamples, the non-members.
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
    return attack.success(shares)


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
    guessed = attack.draw_generators(labels[pool], background, counts, game.num_subsamples, generator)
    vectors = aligned(network, train(pool[guessed]), target)
    order = attack.rank_generators(vectors.double().numpy(), target.double().numpy(), game.comparison)
    scores = attack.membership_scores(guessed, order, len(pool), game.num_best)
    inferred = attack.infer_members(scores, unknown, int(wanted.sum()), generator)
    # Half of the unknown candidates are members, so precision equals accuracy.
    return float(np.mean(inferred < game.size))


def trainer(network: nn.Module, features: Tensor, labels: Tensor, schedule: Schedule, *, seed: int) -> Train:
    """Plain training of many networks at once, all with the same order of batches."""

    def train(records: Indices) -> Tensor:
        return train_stacked(network, features, labels, records, schedule, seed=seed)[schedule.epochs]

    return train


def clipped_trainer(network: nn.Module, features: Tensor, labels: Tensor, schedule: PrivateSchedule) -> Train:
    """The private algorithm without its noise: the best choice of an intruder who does not know the noise."""

    def train(records: Indices) -> Tensor:
        return train_clipped_stacked(network, features, labels, records, schedule)

    return train


def plain(train: Train, owners: Indices, generator: np.random.Generator) -> Target:
    """The model of the first owner."""
    return Target(vector=train(owners[:1])[0], owner=0, num_generators=1)


def mean_of_all(train: Train, owners: Indices, generator: np.random.Generator) -> Target:
    """The mean of all owners' models, regardless of their distances."""
    return Target(vector=train(owners).mean(dim=0), owner=0, num_generators=len(owners))


def recommended_mean(epsilon: float, clustering: Linkage = "first-member", *, others_known: bool = False) -> Publish:
    """The mean of the largest cluster; the intruder attacks one of its generators.

    The returned function raises NoRecommendationError if no two models are within epsilon.

    Args:
        epsilon: units of the weights.
        clustering: as for `select`.
        others_known: the intruder knows all other generators of the cluster. They train on these, subtract the models
            from the mean, and obtain the model of the generator under attack.
    """

    def publish(train: Train, owners: Indices, generator: np.random.Generator) -> Target:
        vectors = train(owners)
        (cluster,) = select(vectors.numpy(), list(owners), epsilon=epsilon, clustering=clustering, top=1)
        if cluster.recurrence < 2:
            raise NoRecommendationError(
                f"epsilon = {epsilon:g}: no two of {len(owners)} models are within it, so no mean is recommended; "
                "raise it or train less"
            )
        owner = int(generator.choice(cluster.members))
        mean = torch.from_numpy(cluster.mean)
        if others_known:
            others = [row for row in cluster.members if row != owner]
            mean = cluster.recurrence * mean - vectors[others].double().sum(dim=0)
        return Target(vector=mean.to(vectors), owner=owner, num_generators=cluster.recurrence)

    return publish


def private(
    network: nn.Module,
    features: Tensor,
    labels: Tensor,
    schedule: PrivateSchedule,
    *,
    noise_multiplier: float,
    source: RandomSource,
) -> Publish:
    """A model trained by DP-SGD on the first owner's records."""

    def publish(train: Train, owners: Indices, generator: np.random.Generator) -> Target:
        own = torch.from_numpy(owners[0])
        vector, _ = train_privately(
            network, features[own], labels[own], schedule, noise_multiplier=noise_multiplier, source=source
        )
        return Target(vector=vector, owner=0, num_generators=1)

    return publish
