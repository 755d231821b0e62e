"""Scores of canaries through a model: all coins estimated together from what the margins gained."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedpriv.audit import canary_scores


def _world(seed: int, *, num: int = 200, values: int = 600, gain: float = 1.0):
    """Margins of canaries whose gradients have much in common, after steps on those included and on all else."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(3, values))
    losses = rng.normal(size=(num, values)) + rng.normal(size=(num, 3)) @ common
    margins = -losses * rng.uniform(0.5, 2.0, (num, 1)) + 0.3 * rng.normal(size=(num, values))
    included = rng.random(num) < 0.5
    steps = -losses / np.linalg.norm(losses, axis=1, keepdims=True)
    change = gain * included @ steps + rng.normal(size=3) @ common / values**0.5
    return margins @ (change + 0.1 * rng.normal(size=values)), margins, losses, included


def _auc(scores, included) -> float:
    return stats.mannwhitneyu(scores[included], scores[~included]).statistic / (included.sum() * (~included).sum())


@pytest.mark.parametrize("seed", range(3))
def test_what_moves_all_canaries_that_are_alike_hides_no_coin(seed):
    gains, margins, losses, included = _world(seed)
    assert _auc(gains, included) < 0.65
    assert _auc(canary_scores(gains, margins, losses), included) > 0.85


def test_scores_say_nothing_where_nothing_was_gained():
    aucs = []
    for seed in range(20):
        gains, margins, losses, included = _world(seed, gain=0.0)
        aucs.append(_auc(canary_scores(gains, margins, losses), included))
    assert abs(np.mean(aucs) - 0.5) < 4 * 0.041 / 20**0.5


def test_a_record_that_no_value_learns_from_has_a_score_too():
    gains, margins, losses, included = _world(0)
    margins[0] = losses[0] = gains[0] = 0.0
    scores = canary_scores(gains, margins, losses)
    assert np.isfinite(scores).all()
    assert _auc(scores[1:], included[1:]) > 0.85


def test_more_canaries_than_values_have_scores():
    gains, margins, losses, _ = _world(0, num=300, values=20)
    assert np.isfinite(canary_scores(gains, margins, losses)).all()


def test_canaries_of_one_outcome_have_no_margins_and_equal_scores():
    assert canary_scores(np.zeros(5), np.zeros((5, 3)), np.ones((5, 3))).tolist() == [0.0] * 5
