"""Scores of canaries through a model: all coins estimated together from what the margins gained."""

import numpy as np
import pytest
from scipy import stats

from fedpriv.learning.training.canaries import CanaryPlan, audited_client
from fedpriv.learning.training.model import TrainingModel
from fedpriv.methods.audit import black_box, canary_scores
from fedpriv.privacy.mechanisms.sources import SeededSource


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


def test_a_record_that_no_value_learns_from_has_a_score_too_and_so_have_more_canaries_than_values():
    gains, margins, losses, included = _world(0)
    margins[0] = losses[0] = gains[0] = 0.0
    scores = canary_scores(gains, margins, losses)
    assert np.isfinite(scores).all()
    assert _auc(scores[1:], included[1:]) > 0.85
    assert np.isfinite(canary_scores(*_world(0, num=300, values=20)[:3])).all()
    assert canary_scores(np.zeros(5), np.zeros((5, 3)), np.ones((5, 3))).tolist() == [0.0] * 5, "of one outcome"


def test_sums_of_many_values_keep_the_inner_products_of_gradients(encoder, make_records, monkeypatch):
    """A model's gradients by all values, and by random sums of them; the products' rounding is their root's inverse."""
    model = TrainingModel(encoder(), memory_limit=2**30)
    plan = CanaryPlan(num=20, num_tokens=8)
    sources = {"canary_source": SeededSource(1), "coins": SeededSource(2)}
    client = audited_client(make_records(20), plan, num_labels=3, vocabulary=15, **sources)
    canaries = black_box._Canaries.of([client])
    exact = black_box._slopes(model, model.initial, canaries)
    num = exact[0].shape[1]
    assert num == sum(parameter.numel() for parameter in model.parameters.values())
    monkeypatch.setattr(black_box, "_MOST_VALUES", num // 2)
    for found, expected in zip(black_box._slopes(model, model.initial, canaries), exact, strict=True):
        assert found.shape == (20, num // 2)
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        summed = found / np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.abs(summed @ summed.T - unit @ unit.T).max() < 6 * (2 / num) ** 0.5
