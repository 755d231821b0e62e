"""Samples of the discrete Gaussian follow its exact law, and no other, on the fast path and on the slow one."""

import math
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from fedpriv.privacy.mechanisms import discrete_sampler
from fedpriv.privacy.mechanisms.discrete_sampler import _exp_of_minus, discrete_gaussian
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource, SeededSource
from tests.marks import slow
from tests.privacy.mechanisms.test_discrete_gaussian import law

FALSE_ALARM = 1e-6
SIGMAS = [0.5, 1.0, 3.7, 2**10 + 0.3, 2.0**20]


class ForcedWords(RandomSource):
    """The given words first, then those of a seeded source."""

    name = "forced"

    def __init__(self, *words):
        self._words, self._then = list(words), SeededSource("then")

    def words(self, num):
        first = [self._words.pop(0) for _ in range(min(num, len(self._words)))]
        return np.concatenate([np.array(first, dtype=np.uint64), self._then.words(num - len(first))])


def fits(values, sigma):
    """Chi-square against the probabilities of single integers, or of 200 bins of about equal probability."""
    if sigma < 64:
        reach = math.ceil(40 * sigma)
        chance = law(sigma, reach)
        observed = np.bincount(np.clip(values, -reach, reach) + reach, minlength=len(chance))
    else:
        # A bin (a, b] holds Phi((b + 1/2) / sigma) - Phi((a + 1/2) / sigma): the error of this midpoint rule is 1e-8 at
        # sigma = 2^10.
        bounds = np.round(sigma * special.ndtri(np.arange(1, 200) / 200))
        chance = np.diff(special.ndtr((bounds + 0.5) / sigma), prepend=0.0, append=1.0)
        observed = np.bincount(np.searchsorted(bounds, values), minlength=200)
    expected = chance * len(values)
    inner = expected >= 10
    expected = np.append(expected[inner], expected[~inner].sum())
    observed = np.append(observed[inner], observed[~inner].sum())
    if expected[-1] < 10:
        expected, observed = expected[:-1], observed[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return stats.chi2.sf(statistic, len(expected) - 1) > FALSE_ALARM


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("source", [SecureSource, lambda: SeededSource("law")], ids=["secure", "seeded"])
def test_samples_have_the_stated_law_and_no_other(sigma, source):
    values = discrete_gaussian(sigma, 20_000, source())
    assert [scale for scale in (2 / 3, 1, 3 / 2) if fits(values, scale * sigma)] == [1]
    negative, positive = int((values < 0).sum()), int((values > 0).sum())
    assert stats.binomtest(negative, negative + positive).pvalue > FALSE_ALARM, "both signs are equally likely"
    if sigma < 64:  # nor is a zero drawn twice, with either sign
        zeros, (at_zero,) = int((values == 0).sum()), law(sigma, 0)
        assert stats.binomtest(zeros, len(values), 2 * at_zero / (1 + at_zero)).pvalue < FALSE_ALARM


@pytest.mark.parametrize("sigma", [0.25, 70.0, 2.0**31 - 0.125, 2.0**40])
def test_small_and_large_sigma_are_drawn_too(sigma):
    assert fits(discrete_gaussian(sigma, 20_000, SeededSource("range")), sigma)
    assert not discrete_gaussian(2.0**-10, 2000, SeededSource("nothing")).any(), "its probability is below 10^-200000"


@pytest.mark.parametrize("sigma", [0.5, 3.7, 2.0**20])
def test_exact_decisions_alone_give_the_same_values(monkeypatch, sigma):
    fast = discrete_gaussian(sigma, 2000, SeededSource("both"))
    decided = []

    def recorded(*arguments):
        decided.append(exact(*arguments))
        return decided[-1]

    exact = discrete_sampler._is_below
    monkeypatch.setattr(discrete_sampler, "_is_below", recorded)
    stairs = discrete_sampler._staircase(sigma)
    monkeypatch.setattr(discrete_sampler, "_MARGIN", math.inf)
    monkeypatch.setattr(discrete_sampler, "_staircase", lambda sigma: stairs)
    slow = discrete_gaussian(sigma, 2000, SeededSource("both"))
    assert len(decided) > 50, "every cell that the curve crosses is decided exactly"
    # Both draw the same first words; a comparison that takes more bits shifts the later ones.
    np.testing.assert_array_equal(slow[:50], fast[:50])
    assert fits(slow, sigma)
    assert not fits(slow, sigma * 3 / 2)


def test_a_point_on_the_curve_is_decided_by_more_bits():
    sigma = 2.0**20
    stairs = discrete_sampler._staircase(sigma)
    cell = stairs.num_inside + int(np.flatnonzero(stairs.blocks[stairs.num_inside :][: len(stairs.levels)] == 7)[0])
    point = (7 << stairs.width_bits) + 2**stairs.width_bits - 1
    level = int(stairs.levels[cell - stairs.num_inside])
    context = Context(prec=60)
    exact = context.exp(context.divide(Decimal(-(point**2)), Decimal(2 * int(sigma) ** 2)))
    part = Fraction(exact) / Fraction(stairs.cell_height) - level
    num_bits = 47 - stairs.width_bits
    assert 0 < part < 1
    height = math.floor(part * 2**num_bits)
    on_it = cell | (2**stairs.width_bits - 1) << 16 | height << (16 + stairs.width_bits)
    more = math.floor((part * 2**num_bits - height) * 2**64)
    far = discrete_gaussian(sigma, 1, SeededSource("then"))[0]
    for last, expected in ((more - 1, point), (more + 1, far)):
        assert discrete_gaussian(sigma, 1, ForcedWords(on_it, last))[0] == expected
    below, above = (on_it + (step << (16 + stairs.width_bits)) for step in (-1, 1))
    assert discrete_gaussian(sigma, 1, ForcedWords(below))[0] == point
    assert discrete_gaussian(sigma, 1, ForcedWords(above))[0] == far


@pytest.mark.parametrize("sigma", [1.0, *slow(3.7), 2.0**20])
def test_the_tail_has_its_law(sigma):
    stairs = discrete_sampler._staircase(sigma)
    source = SeededSource("tail")
    tried = (discrete_sampler._tail_point(stairs, source) for _ in range(3000 if sigma > 64 else 10_000))
    points = [point for point in tried if point is not None]
    assert min(points) >= stairs.tail_begin
    assert len(points) > 100
    # The same law as a lattice: P(x >= a + k) over P(x >= a), by summing or, for the large one, by the continuous law.
    if sigma < 64:
        integers = np.arange(stairs.tail_begin, stairs.tail_begin + 40 * math.ceil(sigma))
        chance = np.exp(-(integers.astype(float) ** 2 - stairs.tail_begin**2) / (2 * sigma**2))
        mean = float((integers * chance).sum() / chance.sum())
        spread = math.sqrt(float(((integers - mean) ** 2 * chance).sum() / chance.sum()))
    else:
        law = stats.truncnorm(stairs.tail_begin / sigma, np.inf, scale=sigma)
        mean, spread = law.mean(), law.std()
    score = (np.mean(points) - mean) / (spread / math.sqrt(len(points)))
    assert 2 * stats.norm.sf(abs(score)) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [*SIGMAS, 2.0**-10, 63.9, 64.0, 2.0**40])
def test_the_stairs_cover_the_curve_and_have_cells_of_equal_area(sigma):
    stairs = discrete_sampler._staircase(sigma)
    unit, width, num_open = Fraction(stairs.cell_height), 2**stairs.width_bits, len(stairs.levels)
    opened = stairs.blocks[stairs.num_inside : stairs.num_inside + num_open]
    inside = np.bincount(stairs.blocks[: stairs.num_inside], minlength=int(opened.max()) + 1)
    piled = inside + np.bincount(opened)
    assert stairs.num_inside + num_open + stairs.num_tail <= 2**16
    assert len(piled) * width == stairs.tail_begin >= 5 * sigma
    for block in {0, 1, 2, len(piled) // 2, len(piled) - 1} & set(range(len(piled))):
        assert piled[block] * unit >= discrete_sampler._exp_bounds(block * width, sigma, 40)[1]
        assert inside[block] * unit <= discrete_sampler._exp_bounds((block + 1) * width - 1, sigma, 40)[0]
        levels = stairs.levels[opened == block]
        assert levels.tolist() == list(range(inside[block], piled[block]))
    for stair in range(4):
        begin = stairs.tail_begin + stair * 64 * width
        assert stairs.tail_height / 32**stair >= discrete_sampler._exp_bounds(begin, sigma, 40)[1]
    area = stairs.tail_height * 64 * width / (1 - Fraction(1, 32))
    assert area == stairs.num_tail * unit * width


def test_the_bound_of_the_exponential_holds_against_high_precision():
    rng = np.random.default_rng(0)
    exponents = np.concatenate([rng.uniform(0, 13, 1500), 10.0 ** rng.uniform(-20, 1, 500), [0.0, 13.0]])
    exact = [Context(prec=50).exp(-Decimal(z)) for z in exponents.tolist()]
    errors = [float(abs(Decimal(y) / e - 1)) for y, e in zip(_exp_of_minus(exponents).tolist(), exact, strict=True)]
    assert max(errors) < 2.0**-45 < discrete_sampler.ERROR
    error = Fraction(discrete_sampler.ERROR)
    for sigma in SIGMAS:
        points = rng.integers(0, math.ceil(5 * sigma) + 1, 200)
        for point, value in zip(points.tolist(), discrete_sampler._curve(points, sigma).tolist(), strict=True):
            low, high = discrete_sampler._exp_bounds(point, sigma, 40)
            assert low * (1 - error) <= Fraction(value) <= high * (1 + error)


def test_bounds_of_any_number_of_digits_enclose_the_exponential():
    for point, sigma in ((0, 1.0), (3, 0.7), (5_000_000, 2.0**20), (9, 2.0**-3)):
        finest = discrete_sampler._exp_bounds(point, sigma, 400)
        assert finest[1] - finest[0] < Fraction(1, 10**390)
        for digits in (1, 5, 30, 90):
            low, high = discrete_sampler._exp_bounds(point, sigma, digits)
            assert low <= finest[0] <= finest[1] <= high


def test_a_seed_gives_the_same_values_and_none_gives_none():
    first, second = (discrete_gaussian(100.0, 500, SeededSource("again")) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == np.int64
    assert discrete_gaussian(100.0, 0, SeededSource("none")).shape == (0,)


def test_few_words_are_drawn_beyond_one_for_each_value():
    drawn = []

    class Counted(SeededSource):
        def words(self, num):
            drawn.append(num)
            return super().words(num)

    discrete_gaussian(2.0**20, 20_000, Counted("count"))
    assert 20_000 < sum(drawn) < 20_800


@pytest.mark.parametrize("sigma", [0.0, -1.0, 2.0**-11, 2.0**40 * 1.001, math.inf, math.nan])
def test_sigma_out_of_range_is_refused_by_name(sigma):
    with pytest.raises(ValueError, match="sigma = "):
        discrete_gaussian(sigma, 1, SeededSource(0))
