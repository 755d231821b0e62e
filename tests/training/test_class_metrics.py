"""Metrics from a confusion matrix agree with scikit-learn's from labels and predictions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from fedpriv.training.evaluation import accuracy_standard_error, confusion_matrix, macro_f1, majority_share


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


def test_rows_are_true_classes():
    assert confusion_matrix([0, 0, 1], [1, 1, 1], 3) == ((0, 2, 0), (0, 1, 0), (0, 0, 0))


def test_a_model_that_always_guesses_the_largest_class_has_its_share_and_a_low_f1():
    confusion = ((60, 0), (40, 0))
    assert majority_share(confusion) == 0.6
    assert macro_f1(confusion) == pytest.approx(0.5 * (2 * 60 / (120 + 40)))
    assert accuracy_standard_error(confusion) == pytest.approx((0.6 * 0.4 / 100) ** 0.5)


def test_the_standard_error_is_the_spread_of_the_accuracy_over_test_sets():
    hits = np.random.default_rng(0).binomial(500, 0.8, size=4000) / 500
    assert accuracy_standard_error(((400, 100), (0, 0))) == pytest.approx(hits.std(), rel=0.05)
