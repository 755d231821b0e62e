"""Batches are Poisson samples with exactly the probability that is accounted for."""

from __future__ import annotations

import pytest
from scipy import stats

from fedpriv.errors import InputError
from fedpriv.learning.training.private_sums import MOST_REGISTERED, PoissonSampler
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

FALSE_ALARM = 1e-6
NUM_DRAWS, NUM_RECORDS, BATCH = 400, 100, 10


def batch_sizes(source, probability_factor: float = 1.0) -> list[int]:
    sampler = PoissonSampler(
        num_registered=NUM_RECORDS, expected_batch_size=round(BATCH * probability_factor), source=source
    )
    return [len(sampler.draw(NUM_RECORDS)) for _ in range(NUM_DRAWS)]


def accepts(sizes: list[int]) -> bool:
    """Mean and variance of the batch sizes fit Binomial(100, 0.1), each at half the false-alarm rate."""
    total_test = stats.binomtest(sum(sizes), NUM_DRAWS * NUM_RECORDS, BATCH / NUM_RECORDS)
    variance = NUM_RECORDS * 0.1 * 0.9
    dispersion = sum((size - BATCH) ** 2 for size in sizes) / variance
    tails = 2 * min(stats.chi2.cdf(dispersion, NUM_DRAWS), stats.chi2.sf(dispersion, NUM_DRAWS))
    return total_test.pvalue > FALSE_ALARM / 2 and tails > FALSE_ALARM / 2


@pytest.mark.parametrize("source", [SecureSource(), SeededSource(0)], ids=["secure", "seeded"])
def test_batch_size_is_binomial(source):
    assert accepts(batch_sizes(source))


def test_the_binomial_test_rejects_other_rates_and_fixed_batch_sizes():
    assert not accepts(batch_sizes(SeededSource(0), 2 / 3))
    assert not accepts(batch_sizes(SeededSource(0), 3 / 2))
    assert not accepts([BATCH] * NUM_DRAWS), "batches of fixed size are not Poisson samples"


def test_records_are_drawn_equally_often_and_independently():
    sampler = PoissonSampler(num_registered=4, expected_batch_size=1, source=SeededSource(0))
    draws = [frozenset(sampler.draw(4)) for _ in range(4000)]
    sets = [frozenset(i for i in range(4) if mask >> i & 1) for mask in range(16)]
    observed = [draws.count(drawn) for drawn in sets]
    expected = [4000 * 0.25 ** len(drawn) * 0.75 ** (4 - len(drawn)) for drawn in sets]
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


def test_the_probability_follows_the_registered_number_not_the_actual_one():
    sampler = PoissonSampler(num_registered=200, expected_batch_size=50, source=SeededSource(0))
    assert sampler.sampling_probability == 0.25
    sampler.draw(10)
    assert sampler.sampling_probability == 0.25


def test_every_record_is_drawn_at_probability_one():
    assert PoissonSampler(num_registered=7, expected_batch_size=7, source=SeededSource(0)).draw(7) == list(range(7))


def test_one_record_more_than_may_be_registered_does_not_decide_whether_the_others_count():
    """Before, it failed the draw, and the upload was noise alone."""
    sampler = PoissonSampler(num_registered=MOST_REGISTERED, expected_batch_size=16, source=SecureSource())
    held = [len(sampler.draw(MOST_REGISTERED + more)) for more in (0, 1)]
    assert all(stats.poisson.cdf(number, 16) < 1 - 1e-9 for number in held)
    with pytest.raises(InputError, match="at most 16777216"):  # which is public, and so refused before the charge
        PoissonSampler(num_registered=MOST_REGISTERED + 1, expected_batch_size=16, source=SecureSource())


@pytest.mark.parametrize(("registered", "batch"), [(10, 11), (10, 0), (0, 1)])
def test_an_impossible_batch_size_is_refused(registered, batch):
    with pytest.raises(InputError):
        PoissonSampler(num_registered=registered, expected_batch_size=batch, source=SeededSource(0))
