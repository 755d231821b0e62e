"""The model comparison attack finds members where the model tells them, and nobody where it tells nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedpriv.errors import InputError
from fedpriv.methods.integral import attack
from fedpriv.methods.integral._networks import TrainingSchedule, perceptron, to_vector
from fedpriv.methods.integral.attack import Game, _AttackTarget, _NoRecommendationError, _play
from tests.methods.integral.test_alignment import permuted

NETWORK = nn.Sequential(nn.Linear(29, 1))  # 30 weights, no hidden layer: the order of neurons is out of the game
LABELS = np.arange(3000) % 2
RECORDS = torch.randn(3000, 30, generator=torch.Generator().manual_seed(0))
GAME = Game(size=10, num_owners=10, num_subsamples=300, num_best=20, num_trials=30)


def mean_of_records(records):
    """A training algorithm whose model tells everything: the mean of its records."""
    return RECORDS[torch.from_numpy(records)].mean(dim=1)


@pytest.mark.parametrize("num_background", [0, 6])  # whose records are known and not scored
def test_finds_members_where_the_model_tells_them(num_background):
    game = replace(GAME, num_background=num_background)
    found = _play(NETWORK, LABELS, game, mean_of_records, attack.plain, seed=0)
    assert found.beats_chance
    assert found.success > 0.75


@pytest.mark.parametrize("comparison", ["norm", "largest", "projection"])
def test_guesses_where_the_model_is_of_other_records(comparison):
    """False alarm: of the target's own records none is in the pool. A two-sided test at 1 in 1,000."""

    def elsewhere(train, owners, generator):
        return _AttackTarget(vector=train(owners[1:2])[0], owner=0, num_generators=1)

    game = replace(GAME, num_trials=60, comparison=comparison)
    found = _play(NETWORK, LABELS, game, mean_of_records, elsewhere, seed=1)
    standard_error = (found.high - found.low) / 2 / stats.t.ppf(0.975, 59)
    assert abs(found.success - 0.5) < stats.t.ppf(0.9995, 59) * standard_error


def test_success_falls_with_the_number_of_generators():
    one, two, ten = (
        _play(NETWORK, LABELS, replace(GAME, num_owners=num), mean_of_records, attack._mean_of_all, seed=2).success
        for num in (1, 2, 10)
    )
    assert one > two > ten


def test_who_knows_the_other_generators_takes_them_off_the_mean():
    """Why integral privacy is no differential privacy: the mean of a cluster hides nothing from such an intruder."""
    bare = attack.recommended_mean(100.0, others_known=True)
    owners = np.arange(100).reshape(10, 10)
    target = bare(mean_of_records, owners, np.random.default_rng(0))
    torch.testing.assert_close(target.vector, mean_of_records(owners)[target.owner])
    hidden = _play(NETWORK, LABELS, GAME, mean_of_records, attack.recommended_mean(100.0), seed=0)
    known = _play(NETWORK, LABELS, GAME, mean_of_records, bare, seed=0)
    assert known.beats_chance
    assert known.success > hidden.success + 0.1
    # Without a cluster nothing is recommended.
    with pytest.raises(_NoRecommendationError, match="no two of 10 models are within it"):
        _play(NETWORK, LABELS, GAME, mean_of_records, attack.recommended_mean(1e-6), seed=0)


def test_a_permuted_target_is_aligned_first():
    """A publisher who shuffles hidden neurons hides nothing."""
    features = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0).long()
    network = perceptron("dnn-1", 5, 2, seed=0)
    train = attack.trainer(network, features, labels, TrainingSchedule(epochs=20), seed=0)

    def shuffled(train, owners, generator):
        target = attack.plain(train, owners, generator)
        orders = [torch.from_numpy(generator.permutation(width)) for width in (5, 10, 5)]
        return replace(target, vector=permuted(network, target.vector, orders))

    game = Game(size=10, num_owners=2, num_subsamples=100, num_best=5, num_trials=6)
    plain, hidden = (_play(network, labels.numpy(), game, train, how, seed=3) for how in (attack.plain, shuffled))
    # The permutations take draws of their own, so trials differ in their candidates only after the target is made.
    assert hidden.success > 0.5
    assert abs(plain.success - hidden.success) < 0.2


def test_generators_are_drawn_from_the_pool_with_the_background_and_the_class_counts():
    labels, background = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([0, 4])
    drawn = attack._draw_generators(labels, background, np.array([2, 2]), 500, np.random.default_rng(0))
    assert drawn.shape == (500, 4)
    assert (drawn[:, :2] == background).all()
    assert all(np.bincount(labels[row]).tolist() == [2, 2] and len(set(row)) == 4 for row in drawn)
    # Three candidates for one place: each in a third of the draws, within four standard errors.
    shares = [np.mean((drawn == candidate).any(axis=1)) for candidate in (1, 2, 3)]
    assert np.abs(np.array(shares) - 1 / 3).max() < 4 * np.sqrt(2 / 9 / 500)


def test_scores_are_shares_of_the_best_and_1_is_their_intersection():
    generators = np.array([[0, 1], [0, 2], [3, 4]])
    order = attack._rank_generators(np.array([[0.1], [0.2], [5.0]]), np.array([0.0]))
    assert order.tolist() == [0, 1, 2]
    scores = attack._membership_scores(generators, order, 5, 2)
    assert scores.tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert attack._infer_members(scores, np.arange(1, 5), 2, np.random.default_rng(0)).tolist() == [1, 2]


def test_the_interval_is_students_and_covers():
    shares = [0.4, 0.6, 0.5, 0.7]
    found = attack._success(shares)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(shares), scale=stats.sem(shares))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert not found.beats_chance
    assert attack._success([0.7, 0.71, 0.69]).beats_chance


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 1}, "size = 1"),
        ({"num_background": 10}, "num_background = 10"),
        ({"num_trials": 1}, "num_trials = 1"),
        ({"num_best": 301}, "num_best = 301"),
    ],
)
def test_a_game_that_cannot_be_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        replace(GAME, **changes)


def test_too_few_records_for_the_game():
    with pytest.raises(InputError, match="100 records give 10 subsamples of 10, and two more"):
        _play(NETWORK, LABELS[:100], GAME, mean_of_records, attack.plain, seed=0)
    with pytest.raises(InputError, match="comparison = 'cosine'"):
        attack._rank_generators(np.zeros((2, 1)), np.zeros(1), "cosine")
    assert len(to_vector(NETWORK)) == 30
