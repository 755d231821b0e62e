"""Figures of evaluations agree with scikit-learn's, and their errors with resampling."""

import math

import numpy as np
import pytest
from sklearn import metrics

from fedpriv.learning.training.evaluation import TokenLosses, confusion_matrix
from server.figures import accuracy_standard_error, log_perplexity_change, macro_f1, majority_share, mean_estimate


@pytest.mark.parametrize("num_classes", [2, 3, 21])
@pytest.mark.parametrize("num", [1, 7, 400])
def test_scikit_learn_finds_the_same(num, num_classes):
    generator = np.random.default_rng(num)
    labels = generator.integers(num_classes, size=num)
    predicted = np.where(generator.random(num) < 0.6, labels, generator.integers(num_classes, size=num))
    confusion = confusion_matrix(labels, predicted, num_classes)
    expected = metrics.confusion_matrix(labels, predicted, labels=range(num_classes))
    assert np.array_equal(confusion, expected)
    assert macro_f1(confusion) == pytest.approx(metrics.f1_score(labels, predicted, average="macro", zero_division=0))


def test_a_model_that_always_guesses_the_largest_class_has_its_share_and_a_low_f1():
    confusion = ((60, 0), (40, 0))
    assert majority_share(confusion) == 0.6
    assert macro_f1(confusion) == pytest.approx(0.5 * (2 * 60 / (120 + 40)))
    assert accuracy_standard_error(confusion) == pytest.approx((0.6 * 0.4 / 100) ** 0.5)


def test_the_standard_error_is_the_spread_of_the_accuracy_over_test_sets():
    hits = np.random.default_rng(0).binomial(500, 0.8, size=4000) / 500
    assert accuracy_standard_error(((400, 100), (0, 0))) == pytest.approx(hits.std(), rel=0.05)


def draw(num: int, seed: int) -> tuple[TokenLosses, TokenLosses]:
    """Losses before and after: every token gains, those of short records more, and lengths vary more than gains."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, num)
    per_token = rng.gamma(4, 0.8, num)
    change = -0.5 + rng.normal(0, 0.1, num) - 1 / (counts + 5)
    before = TokenLosses(sums=counts * per_token, counts=counts)
    return before, TokenLosses(sums=counts * (per_token + change), counts=counts)


def test_the_change_is_the_difference_of_the_log_perplexities_and_its_error_that_of_resampled_records():
    before, after = draw(400, seed=1)
    found = log_perplexity_change(before, after)
    assert found.mean == pytest.approx(math.log(after.perplexity) - math.log(before.perplexity))
    differences = after.sums - before.sums
    chosen = np.random.default_rng(2).integers(0, 400, (4000, 400))
    resampled = differences[chosen].sum(axis=1) / after.counts[chosen].sum(axis=1)
    # 4,000 resamples know their deviation to 1.1 %; the delta method errs by O(1 / 400).
    assert found.standard_error == pytest.approx(resampled.std(), rel=0.05)


def test_the_standard_error_is_the_deviation_over_independent_test_sets():
    changes = [log_perplexity_change(*draw(200, seed)) for seed in range(2000)]
    deviation = np.std([found.mean for found in changes])
    assert np.mean([found.standard_error for found in changes]) == pytest.approx(deviation, rel=0.08)


def test_records_of_another_set_are_refused_and_without_tokens_nothing_changes():
    with pytest.raises(ValueError, match="not of the same records"):
        log_perplexity_change(draw(5, seed=0)[0], draw(5, seed=1)[0])
    empty = TokenLosses(sums=np.zeros(2), counts=np.zeros(2, dtype=np.int64))
    assert log_perplexity_change(empty, empty) is None


def test_one_record_has_no_standard_error():
    assert mean_estimate(np.array([0.25])).standard_error is None
    assert mean_estimate(np.array([0.0, 1.0])).standard_error == pytest.approx(0.5)
