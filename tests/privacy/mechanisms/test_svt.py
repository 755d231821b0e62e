"""The Sparse Vector Technique: exact noise of the right scales, a cutoff that holds, and the epsilon that it states."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedpriv.privacy.accounting.events import PureEpsilon
from fedpriv.privacy.mechanisms import svt
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource
from fedpriv.privacy.mechanisms.svt import CutoffReached, SparseVector, discrete_laplace, noise_scales
from tests.marks import slow

FALSE_ALARM = 1e-6


def probability(value, scale):
    """The closed form of Canonne, Kamath and Steinke 2020."""
    ratio = np.exp(-1 / float(scale))
    return (1 - ratio) / (1 + ratio) * ratio ** np.abs(value)


def at_least(value, scale):
    """P(noise >= value), summed in closed form."""
    ratio = math.exp(-1 / float(scale))
    return ratio**value / (1 + ratio) if value > 0 else 1 - ratio ** (1 - value) / (1 + ratio)


def fits(values, scale):
    """Whether the mean size is that of the scale, by the central limit theorem (for 2000 values or more)."""
    support = np.arange(-400, 401)
    weights = probability(support, scale)
    mean = float((np.abs(support) * weights).sum())
    variance = float((support**2 * weights).sum()) - mean**2
    z_score = (np.abs(values).mean() - mean) / math.sqrt(variance / len(values))
    return 2 * stats.norm.sf(abs(z_score)) > FALSE_ALARM


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(5, 2), *slow(Fraction(1), Fraction(43, 5))], ids=str)
def test_noise_has_the_probabilities_of_the_closed_form(scale):
    source, num = SeededSource("closed form"), 10_000
    drawn = Counter(discrete_laplace(scale, source) for _ in range(num))
    inner = [value for value in range(-60, 61) if num * probability(value, scale) >= 10]
    expected = [num * probability(value, scale) for value in inner]
    observed = [drawn[value] for value in inner]
    expected_outside = num - sum(expected)
    if expected_outside >= 10:
        expected, observed = [*expected, expected_outside], [*observed, num - sum(observed)]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert stats.chi2.sf(statistic, len(expected) - 1) > FALSE_ALARM


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (2, 2)])
def test_a_coin_of_probability_e_to_the_minus_gamma_is_exact(numerator, denominator):
    source, num = SeededSource("coin"), 10_000
    heads = sum(svt._exponential_coin(numerator, denominator, source) for _ in range(num))
    assert stats.binomtest(heads, num, math.exp(-numerator / denominator)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("num", [1, 3, 2**20 + 1, 2**64, 2**64 + 1])
def test_uniform_numbers_fill_their_range_evenly(num):
    source = SeededSource("uniform")
    values = [svt._uniform(num, source) for _ in range(3000)]
    assert 0 <= min(values) <= max(values) < num
    counts = Counter(3 * value // num for value in values)
    if num > 1:
        assert stats.chisquare([counts[third] for third in range(3)]).pvalue > FALSE_ALARM


def test_scales_are_those_of_the_paper():
    # |D| = 1000, epsilon = 1, c = 3, sensitivity 2 / |D|: in units of accuracy, 0.0086 for the threshold and 0.0156 for
    # a query.
    scales = noise_scales(1.0, 3, 2)
    assert float(scales.threshold) / 1000 == pytest.approx(2 * (1 + 6 ** (2 / 3)) / 1000, rel=1e-6)
    assert float(scales.threshold) / 1000 == pytest.approx(0.0086, abs=5e-5)
    assert float(scales.query) / 1000 == pytest.approx(0.0156, abs=5e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1 / 3, 1.0, 30.0, 1e7])
@pytest.mark.parametrize("cutoff", [1, 3, 50])
def test_scales_never_spend_more_than_epsilon(epsilon, cutoff):
    scales = noise_scales(epsilon, cutoff, 2)
    spent = 2 / scales.threshold + 2 * cutoff * 2 / scales.query
    assert spent <= Fraction(epsilon)
    if epsilon <= 30:
        assert spent >= Fraction(epsilon) * Fraction(999, 1000)


@pytest.mark.parametrize(
    "values", [(0.0, 1, 1), (-1.0, 1, 1), (math.inf, 1, 1), (math.nan, 1, 1), (1.0, 0, 1), (1.0, 1, 0)]
)
def test_epsilon_cutoff_and_sensitivity_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="must be"):
        noise_scales(*values)


def test_a_run_draws_threshold_and_query_noise_with_their_scales(monkeypatch):
    drawn, source = [], SecureSource()

    def recorded(scale, source):
        drawn.append(discrete_laplace(scale, source))
        return drawn[-1]

    monkeypatch.setattr(svt, "discrete_laplace", recorded)
    runs = [SparseVector(epsilon=1.0, cutoff=3, sensitivity=2, source=source) for _ in range(2000)]
    threshold = np.array(drawn)
    drawn.clear()
    for run in runs:
        run.reaches(0, 0)
    scales = noise_scales(1.0, 3, 2)
    for values, scale in ((threshold, scales.threshold), (np.array(drawn), scales.query)):
        assert len(values) == 2000, "threshold noise is drawn once per run, query noise once per answer"
        factors = (Fraction(2, 3), Fraction(1), Fraction(3, 2))
        assert [factor for factor in factors if fits(values, scale * factor)] == [1]


def test_no_query_is_answered_after_the_cutoff():
    run = SparseVector(epsilon=1.0, cutoff=3, sensitivity=1, source=SeededSource(0))
    assert not any(run.reaches(-10_000, 0) for _ in range(50)), "negative answers are free"
    assert [run.reaches(10_000, 0) for _ in range(3)] == [True] * 3
    for query in (10_000, -10_000):
        with pytest.raises(CutoffReached):
            run.reaches(query, 0)


def test_the_event_states_the_epsilon_of_the_whole_run():
    assert SparseVector(epsilon=0.7, cutoff=3, sensitivity=2, source=SeededSource(0)).event == PureEpsilon(epsilon=0.7)


def answers(queries, *, epsilon, cutoff, source):
    """All answers of one run that asks whether each query reaches 0, until the run ends."""
    run, given = SparseVector(epsilon=epsilon, cutoff=cutoff, sensitivity=2, source=source), []
    try:
        for query in queries:
            given.append(run.reaches(query, 0))
    except CutoffReached:
        pass
    return tuple(given)


def exact(queries, epsilon, cutoff):
    """{answers: probability}, summed over the threshold's noise: only the scales come from the code under test."""
    scales = noise_scales(epsilon, cutoff, 2)
    probabilities = Counter()
    for noise in range(-300, 301):
        weight = probability(noise, scales.threshold)
        reach = [at_least(noise - query, scales.query) for query in queries]
        for given in possible(len(queries), cutoff):
            chance = math.prod(p if a else 1 - p for p, a in zip(reach, given, strict=False))
            probabilities[given] += weight * chance
    return probabilities


def possible(num, cutoff):
    """Every sequence of answers that a run over `num` queries can give: it ends with them or at the cutoff."""
    for end in range(1, num + 1):
        for given in itertools.product([False, True], repeat=end):
            if (sum(given) == cutoff and given[-1]) or (sum(given) < cutoff and end == num):
                yield given


@pytest.mark.parametrize("cutoff", [*slow(1), 2])
@pytest.mark.parametrize("queries", [(-3, 4, 0), (-8, -8, -8), (6, -6, 2)])
def test_exact_probabilities_on_neighbouring_data_are_within_a_factor_e_to_the_epsilon(queries, cutoff):
    epsilon, worst = 1.0, 0.0
    here = exact(queries, epsilon, cutoff)
    assert sum(here.values()) == pytest.approx(1, abs=1e-9)
    for shifts in itertools.product([-2, 0, 2], repeat=len(queries)):
        there = exact([q + s for q, s in zip(queries, shifts, strict=True)], epsilon, cutoff)
        worst = max(worst, *(math.log(here[given] / there[given]) for given in here))
    assert 0.3 * epsilon < worst <= epsilon


def with_one_kind_of_noise(monkeypatch, kept):
    monkeypatch.setattr(svt, "discrete_laplace", lambda scale, s: discrete_laplace(scale, s) if scale == kept else 0)


def test_a_run_answers_with_the_exact_probabilities_and_one_that_omits_a_kind_of_noise_does_not(monkeypatch):
    queries, scales = (-3, 4, 0, -1), noise_scales(1.0, 2, 2)
    expected = exact(queries, 1.0, 2)

    def pvalue(num):
        source = SeededSource("frequencies")
        seen = Counter(answers(queries, epsilon=1.0, cutoff=2, source=source) for _ in range(num))
        assert set(seen) <= set(expected)
        pairs = [(seen[given], num * chance) for given, chance in expected.items()]
        assert min(e for _, e in pairs) > 10
        return stats.chi2.sf(sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1)

    assert pvalue(5000) > FALSE_ALARM
    for kept in (scales.threshold, scales.query):
        with_one_kind_of_noise(monkeypatch, kept)
        assert pvalue(2000) < FALSE_ALARM


def shown_epsilon(one, other, *, num, epsilon, cutoff):
    """A lower bound on epsilon, at confidence 1 - FALSE_ALARM, from runs on two neighbouring data sets."""
    source = SeededSource("worlds", str(one), str(other))
    options = {"epsilon": epsilon, "cutoff": cutoff, "source": source}
    seen = [Counter(answers(world, **options) for _ in range(num)) for world in (one, other)]
    level, shown = FALSE_ALARM / (4 * len(seen[0] | seen[1])), 0.0
    for given in seen[0] | seen[1]:
        for a, b in ((seen[0][given], seen[1][given]), (seen[1][given], seen[0][given])):
            low = stats.beta.ppf(level, a, num - a + 1) if a else 0.0
            high = stats.beta.ppf(1 - level, b + 1, num - b)
            shown = max(shown, math.log(low / high) if low > 0 else 0.0)
    return shown


# Neighbouring data for which one kind of noise alone is not enough: one record swaps two queries, or moves all.
SWAPPED = {"one": (-1, 0), "other": (0, -1), "cutoff": 1, "num": 5000}
MOVED = {"one": (-2,) * 10, "other": (0,) * 10, "cutoff": 1, "num": 40_000}


# Each takes many runs to tell its data sets apart; the exact probabilities above hold every day.
@pytest.mark.slow
@pytest.mark.parametrize(("worlds", "noisy"), [(SWAPPED, 0), (MOVED, 1)], ids=["only threshold", "only queries"])
def test_runs_on_neighbouring_data_show_no_more_than_epsilon_unless_some_noise_is_omitted(monkeypatch, worlds, noisy):
    assert shown_epsilon(**worlds, epsilon=1.0) <= 1.0
    scales = noise_scales(1.0, 1, 2)
    with_one_kind_of_noise(monkeypatch, (scales.threshold, scales.query)[noisy])
    assert shown_epsilon(**worlds, epsilon=1.0) > 1.0
