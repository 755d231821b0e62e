"""Scores of canaries through a model: the gain on a canary's own outcome above what is usual."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedpriv.audit import canary_scores


def _world(rng, num: int, outcomes: int, drift: float, gain: float):
    """Log probabilities before and after: canaries move with their context and outcome, and by their own gain."""
    before = rng.normal(-12, 2, (num, outcomes))
    own = np.arange(num) % outcomes
    included = rng.random(num) < 0.5
    after = before + drift * rng.normal(size=(num, 1)) + drift * rng.normal(size=outcomes)
    after += rng.normal(size=(num, outcomes))
    after[np.arange(num), own] += gain * included
    return before, after, own, included


def _auc(scores, included) -> float:
    return stats.mannwhitneyu(scores[included], scores[~included]).statistic / (included.sum() * (~included).sum())


@pytest.mark.parametrize("outcomes", [400, 40, 5])
def test_what_moves_a_whole_context_or_an_outcome_for_all_does_not_hide_a_canarys_own_gain(outcomes):
    before, after, own, included = _world(np.random.default_rng(1), 400, outcomes, drift=20.0, gain=2.0)
    plain = (after - before)[np.arange(400), own]
    assert _auc(plain, included) < 0.6
    assert _auc(canary_scores(before, after, own), included) > 0.85


def test_scores_say_nothing_where_nothing_was_gained():
    before, after, own, included = _world(np.random.default_rng(2), 2000, 50, drift=5.0, gain=0.0)
    assert abs(_auc(canary_scores(before, after, own), included) - 0.5) < 4 * 0.013


def test_a_canary_whose_context_is_noisy_is_trusted_less():
    """Two canaries with the same gain; the outcomes of the second one's context scatter ten times as much."""
    rng = np.random.default_rng(3)
    before = np.zeros((100, 100))
    after = rng.normal(size=(100, 100))
    after[1] *= 10
    after[0, 0] = after[1, 1] = 5.0
    scores = canary_scores(before, after, np.arange(100))
    assert scores[0] > 5 * scores[1] > 0


def test_two_classes_have_scores():
    before, after, own, included = _world(np.random.default_rng(4), 300, 2, drift=3.0, gain=3.0)
    scores = canary_scores(before, after, own)
    assert np.isfinite(scores).all()
    assert _auc(scores, included) > 0.75
