"""Membership inference: rates and curves beside scikit-learn's, attacks where theory knows the answer."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from fedpriv.errors import InputError
from fedpriv.methods.audit._membership import (
    calibrated_scores,
    lira_scores,
    loss_scores,
    membership,
    plot_roc,
    rmia_scores,
    roc,
)


def separated(num: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    members = rng.random(num) < 0.5
    return shift * members + rng.standard_normal(num), members


def test_auc_and_curve_are_scikit_learns():
    scores, members = separated(500, 0.7)
    scores = scores.round(1)  # with ties
    assert membership(scores, members).auc == pytest.approx(metrics.roc_auc_score(members, scores))
    false, true = roc(scores, members)
    expected_false, expected_true, _ = metrics.roc_curve(members, scores, drop_intermediate=False)
    assert false == pytest.approx(expected_false)
    assert true == pytest.approx(expected_true)


def test_auc_interval_covers_the_truth_in_95_percent_of_trials():
    truth = float(stats.norm.cdf(0.7 / math.sqrt(2)))
    found = [membership(*separated(200, 0.7, seed)) for seed in range(400)]
    share = np.mean([one.auc_low <= truth <= one.auc_high for one in found])
    assert 0.9 < share < 0.99


def test_rate_at_few_false_alarms_lets_at_most_that_many_pass_and_meets_theory():
    scores, members = separated(40_000, 2.0)
    for rate in membership(scores, members, false_positive_rates=(0.001, 0.01)).rates:
        threshold = stats.norm.isf(rate.false_positive_rate)
        assert rate.true_positive_rate == pytest.approx(stats.norm.sf(threshold - 2.0), abs=0.03)
        assert rate.low < rate.true_positive_rate < rate.high
    few = membership([3.0, 2.0, 1.0, 0.0], [1, 0, 1, 0], false_positive_rates=(0.01,))
    assert few.rates[0].true_positive_rate == 0.5  # no non-member may pass among two


def test_loss_and_calibrated_scores_point_the_right_way():
    assert loss_scores([0.1, 2.0]).tolist() == [-0.1, -2.0]
    assert calibrated_scores([0.1, 2.0], [0.5, 2.0]).tolist() == pytest.approx([0.4, 0.0])
    assert calibrated_scores([1.0], [[1.0], [3.0]]).tolist() == [1.0]


def shadow_game(num_models: int, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """[models, records] losses whose log odds are Gaussian about each record's own mean, and memberships."""
    rng = np.random.default_rng(8)
    members = rng.random((num_models, 1500)) < 0.5
    odds = 2 * rng.standard_normal(1500) + effect * members + rng.standard_normal((num_models, 1500))
    return np.log1p(np.exp(-odds)), members


def test_lira_reaches_the_best_tests_auc_where_the_loss_threshold_cannot():
    losses, members = shadow_game(33, 1.5)
    lira = membership(lira_scores(losses[0], losses[1:], members[1:]), members[0])
    threshold = membership(loss_scores(losses[0]), members[0])
    best = float(stats.norm.cdf(1.5 / math.sqrt(2)))
    assert best - 0.04 < lira.auc < best + 0.03
    assert threshold.auc_high < lira.auc_low


def test_rmia_beats_the_loss_threshold_and_ranks_as_the_pairwise_attack_does():
    """The pairwise attack, written out: the share of other records whose ratio is at most half of this record's."""
    losses, members = shadow_game(33, 1.5)
    scores = rmia_scores(losses[0], losses[1:])
    assert membership(scores, members[0]).auc_low > membership(loss_scores(losses[0]), members[0]).auc_high
    likelihoods = np.exp(-losses)
    ratios = likelihoods[0] / likelihoods[1:].mean(axis=0)
    pairwise = (ratios[:, None] >= 2.0 * ratios[None, :]).mean(axis=1)
    order = np.argsort(scores)
    assert (np.diff(pairwise[order]) >= 0).all()
    assert scores == pytest.approx(np.log(ratios))


def test_lira_finds_nothing_where_nothing_is():
    losses, members = shadow_game(21, 0.0)
    found = membership(lira_scores(losses[0], losses[1:], members[1:]), members[0])
    assert abs(found.auc - 0.5) < 4 * (found.auc_high - found.auc_low) / 3.92


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: membership([1.0, 2.0], [1, 1]), "needs canaries in and out"),
        (lambda: membership([1.0, 2.0], [1, 0], false_positive_rates=(0.0,)), "false_positive_rate = 0.0"),
        (lambda: membership([1.0, 2.0], [1, 0], confidence=0.0), "confidence = 0.0"),
        (lambda: loss_scores([math.nan]), "loss = nan"),
        (lambda: calibrated_scores([1.0, 2.0], [1.0]), "1 values for 2 losses"),
        (lambda: lira_scores([1.0], [[1.0], [2.0]], [[1], [1]]), "record 0 is in 2 of 2"),
        (lambda: lira_scores([1.0], [[1.0, 2.0]], [[1, 0]]), "must be"),
        (lambda: rmia_scores([1.0], [[1.0, 2.0]]), "must be"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_plot_is_written(tmp_path):
    scores, members = separated(200, 1.0)
    plot_roc({"loss": scores}, members, tmp_path / "roc.svg")
    assert "svg" in (tmp_path / "roc.svg").read_text()[:200]
