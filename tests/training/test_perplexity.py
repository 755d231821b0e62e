"""Perplexity is that of all tokens together, and its change has the standard error that resampling finds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedpriv.training.evaluation import TokenLosses, log_perplexity_change, mean_estimate


def draw(num: int, seed: int) -> tuple[TokenLosses, TokenLosses]:
    """Losses before and after: every token gains, those of short records more, and lengths vary more than gains."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, num)
    per_token = rng.gamma(4, 0.8, num)
    change = -0.5 + rng.normal(0, 0.1, num) - 1 / (counts + 5)
    before = TokenLosses(sums=counts * per_token, counts=counts)
    return before, TokenLosses(sums=counts * (per_token + change), counts=counts)


def test_every_token_counts_the_same():
    losses = TokenLosses(sums=np.array([8 * math.log(2), math.log(16)]), counts=np.array([8, 1]))
    assert losses.perplexity == pytest.approx(2 ** (12 / 9))


def test_without_tokens_there_is_no_perplexity():
    empty = TokenLosses(sums=np.zeros(2), counts=np.zeros(2, dtype=np.int64))
    assert empty.perplexity is None
    assert log_perplexity_change(empty, empty) is None
    assert TokenLosses(sums=np.array([1e6]), counts=np.array([1])).perplexity == math.inf


def test_the_change_is_the_difference_of_the_log_perplexities():
    before, after = draw(50, seed=0)
    expected = math.log(after.perplexity) - math.log(before.perplexity)
    assert log_perplexity_change(before, after).mean == pytest.approx(expected)


def test_the_standard_error_is_that_of_resampled_records():
    before, after = draw(400, seed=1)
    rng = np.random.default_rng(2)
    differences = after.sums - before.sums
    chosen = rng.integers(0, 400, (4000, 400))
    resampled = differences[chosen].sum(axis=1) / after.counts[chosen].sum(axis=1)
    # 4,000 resamples know their deviation to 1.1 %; the delta method errs by O(1 / 400).
    assert log_perplexity_change(before, after).standard_error == pytest.approx(resampled.std(), rel=0.05)


def test_the_standard_error_is_the_deviation_over_independent_test_sets():
    changes = [log_perplexity_change(*draw(200, seed)) for seed in range(2000)]
    deviation = np.std([found.mean for found in changes])
    assert np.mean([found.standard_error for found in changes]) == pytest.approx(deviation, rel=0.08)


def test_records_of_another_set_are_refused():
    with pytest.raises(ValueError, match="not of the same records"):
        log_perplexity_change(draw(5, seed=0)[0], draw(5, seed=1)[0])


def test_one_record_has_no_standard_error():
    assert mean_estimate(np.array([0.25])).standard_error is None
    assert mean_estimate(np.array([0.0, 1.0])).standard_error == pytest.approx(0.5)
