"""Samples are Poisson with exactly the probability that is accounted for, and clipping bounds a record's effect.

The bound holds for the effect of one record on its client's sum, under every rule and for gradients of every size.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InputError
from fedpriv.learning.training import private_sums
from fedpriv.learning.training.private_sums import PoissonSampler, add_clipped, clipped_rows, clipped_sums
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource
from tests.marks import slow

FALSE_ALARM = 1e-6
NUM_DRAWS, NUM_RECORDS, BATCH = 400, 100, 10

NUM_VALUES = 170
JOINT, TWO = (slice(0, NUM_VALUES),), (slice(0, 120), slice(120, NUM_VALUES))


def batch_sizes(source, factor: float = 1.0) -> list[int]:
    sampler = PoissonSampler(num_registered=NUM_RECORDS, expected_batch_size=round(BATCH * factor), source=source)
    return [len(sampler.draw(NUM_RECORDS)) for _ in range(NUM_DRAWS)]


def accepts(sizes: list[int]) -> bool:
    """Mean and variance of the batch sizes fit Binomial(100, 0.1), each at half the false-alarm rate."""
    total_test = stats.binomtest(sum(sizes), NUM_DRAWS * NUM_RECORDS, BATCH / NUM_RECORDS)
    variance = NUM_RECORDS * 0.1 * 0.9
    dispersion = sum((size - BATCH) ** 2 for size in sizes) / variance
    tails = 2 * min(stats.chi2.cdf(dispersion, NUM_DRAWS), stats.chi2.sf(dispersion, NUM_DRAWS))
    return total_test.pvalue > FALSE_ALARM / 2 and tails > FALSE_ALARM / 2


def test_batch_size_is_binomial_and_other_rates_and_fixed_sizes_would_be_seen():
    assert accepts(batch_sizes(SecureSource()))
    assert accepts(batch_sizes(SeededSource(0)))
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


def test_the_probability_follows_the_registered_number_and_at_one_every_record_is_drawn():
    sampler = PoissonSampler(num_registered=200, expected_batch_size=50, source=SeededSource(0))
    sampler.draw(10)
    assert sampler.sampling_probability == 0.25
    for registered, batch in ((10, 11), (10, 0), (0, 1)):
        with pytest.raises(InputError):
            PoissonSampler(num_registered=registered, expected_batch_size=batch, source=SeededSource(0))
    assert PoissonSampler(num_registered=7, expected_batch_size=7, source=SeededSource(0)).draw(7) == list(range(7))


def test_one_record_more_than_may_be_registered_does_not_decide_whether_the_others_count():
    """Before, it failed the draw, and the upload was noise alone."""
    sampler = PoissonSampler(num_registered=private_sums.MOST_REGISTERED, expected_batch_size=16, source=SecureSource())
    held = [len(sampler.draw(private_sums.MOST_REGISTERED + more)) for more in (0, 1)]
    assert all(stats.poisson.cdf(number, 16) < 1 - 1e-9 for number in held)
    with pytest.raises(InputError, match="at most 16777216"):  # which is public, and so refused before the charge
        PoissonSampler(num_registered=private_sums.MOST_REGISTERED + 1, expected_batch_size=16, source=SecureSource())


def norm(values: torch.Tensor) -> float:
    return float(values.double().norm())


def random_rows(num: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(num, NUM_VALUES, generator=torch.Generator().manual_seed(seed))


def clipped_sum(rows: torch.Tensor, clip_norm: float = 1.0, parts=()) -> torch.Tensor:
    """The clipped sum of rows that all belong to one client; of whole rows unless in parts."""
    totals, parts = torch.zeros(1, rows.shape[1], dtype=torch.int64), parts or (slice(0, rows.shape[1]),)
    add_clipped(totals, rows, torch.zeros(len(rows), dtype=torch.int64), clip_norm, parts)
    return clipped_sums(totals, clip_norm)[0]


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 6),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1e-6, 0.01, 1.0, 100.0, 1e12]),
    clip_norm=st.sampled_from([1e-3, 1.0, 7.5]),
)
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(num, seed, scale, clip_norm):
    rows = random_rows(num, seed, scale)
    full, rest, last = (clipped_sum(some, clip_norm) for some in (rows, rows[:-1], rows[-1:]))
    assert norm(last) <= clip_norm
    assert norm(full.double() - rest.double()) <= clip_norm * (1 + 1e-9)


def test_a_norm_that_rounds_to_the_clip_norm_does_not_exceed_it():
    for seed in range(20):
        row = random_rows(1, seed)
        clip_norm = float(private_sums.part_norms(row, JOINT))
        for clipped in (clipped_rows(row, clip_norm, JOINT)[0], clipped_sum(row, clip_norm)):
            exact = sum(Fraction(value) ** 2 for value in clipped.tolist())
            assert Fraction(clip_norm * (1 - 1e-6)) ** 2 <= exact <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("values", [27_656, 10**6, *slow(10**7)])
@pytest.mark.parametrize("kind", ["normal", "equal", "few large"])
def test_norms_of_long_rows_are_accurate_enough_for_the_clip_norm_to_hold(values, kind):
    generator = torch.Generator().manual_seed(0)
    row = {
        "normal": torch.randn(1, values, generator=generator),
        "equal": torch.full((1, values), 0.3),
        "few large": torch.rand(1, values, generator=generator) ** 8,
    }[kind]
    assert 1 - 2e-6 <= norm(clipped_rows(row, 0.7, (slice(0, values),))) / 0.7 <= 1


def test_small_gradients_pass_unchanged_and_large_ones_keep_their_direction_in_each_part():
    small, large = random_rows(1, seed=0, scale=1e-3), random_rows(1, seed=0, scale=10.0)
    torch.testing.assert_close(clipped_sum(small), small[0].double(), rtol=0, atol=2**-32)  # the grid of the sums
    clipped = clipped_sum(large)
    assert norm(clipped) == pytest.approx(1.0, abs=1e-5)
    whole = clipped * private_sums.part_norms(large, JOINT)[0, 0]
    torch.testing.assert_close(whole, large[0].double(), rtol=1e-6, atol=1e-6)
    large[:, TWO[1]] *= 1e-3
    in_parts, unscaled = clipped_sum(large, 1.0, TWO), large[0, TWO[1]].double()
    assert norm(in_parts[TWO[0]]) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(in_parts[TWO[1]], unscaled, rtol=0, atol=2**-32, msg="a large part scaled a small one")


@pytest.mark.parametrize("parts", [JOINT, TWO], ids=["whole", "in parts"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_in_a_part_counts_as_zero_and_leaves_the_others_unchanged(bad, parts):
    rows = random_rows(3, seed=1)
    rows[1, :3] = bad
    assert torch.equal(clipped_sum(rows, 1.0, parts), clipped_sum(rows[[0, 2]], 1.0, parts))
    before = rows.clone()
    assert not clipped_rows(rows, 1.0, parts)[1].any()
    assert torch.equal(rows.nan_to_num(), before.nan_to_num()), "clipping changed its input"
    totals = torch.zeros(1, NUM_VALUES, dtype=torch.float64)
    private_sums.add_finite(totals, rows[:2], torch.tensor([0, 0]))
    assert torch.equal(totals[0], rows[0].double())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("clip_norm", [1.0, 1.9999999, 0.7])
def test_a_record_moves_the_largest_sum_by_no_more_than_the_clip_norm(clip_norm, sign):
    """2^30 - 1 equal rows before it, as large as they may be, in one place: the int64 is full but for one row."""
    totals, row = torch.zeros(1, 8, dtype=torch.int64), sign * torch.eye(8)[:1] * 1e30
    one = torch.zeros(1, dtype=torch.int64)
    add_clipped(totals, row, one, clip_norm, (slice(0, 8),))
    single = int(totals[0, 0])
    totals *= private_sums.MOST_ROWS - 1
    before = clipped_sums(totals, clip_norm)
    add_clipped(totals, row, one, clip_norm, (slice(0, 8),))
    assert int(totals[0, 0]) == private_sums.MOST_ROWS * single
    assert 0 < norm(clipped_sums(totals, clip_norm) - before) <= clip_norm


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, 1e-101, math.inf, math.nan])
def test_a_clip_norm_out_of_range_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm"):
        clipped_sum(random_rows(1, seed=0), clip_norm)


@pytest.mark.parametrize("parts", [JOINT, TWO])
def test_records_count_for_their_own_client_alone(parts):
    rows, owners = random_rows(7, seed=2, scale=3.0), torch.tensor([4, 0, 4, 2, 0, 4, 2])  # in any order; 1 and 3 none
    totals = torch.ones(5, NUM_VALUES, dtype=torch.int64)
    add_clipped(totals, rows, owners, 1.0, parts)
    for client in range(5):
        expected = clipped_sum(rows[owners == client].flip(0), 1.0, parts)
        assert torch.equal(clipped_sums(totals[client] - 1, 1.0), expected)
    assert torch.equal(totals[[1, 3]], torch.ones(2, NUM_VALUES, dtype=torch.int64))


@pytest.mark.parametrize("clip_norm", [1e-36, 1e-30, 1e-12, 1.0, 100.0])
def test_every_float32_gradient_is_clipped(clip_norm):
    for size in (1e-45, 1e-38, 1e-30, 1e-23, 1e-19, 1e-3, 1.0, 1e19, 1e30, 3e38):
        row = torch.full((1, 8), size, dtype=torch.float32)
        true_norm = math.sqrt(8) * float(row[0, 0])
        for clipped in (clipped_sum(row, clip_norm), clipped_rows(row, clip_norm, (slice(0, 8),))[0]):
            assert float(clipped.norm()) <= min(clip_norm, true_norm)
            assert float(clipped.norm()) >= 0.999999 * min(clip_norm, true_norm) - 3 * clip_norm / 2**32


@pytest.mark.parametrize("place", [17_500, *slow(0, 32_767)])
def test_no_crafted_set_lets_one_record_move_the_sum_by_more_than_the_clip_norm(place):
    """Many equal rows make the sum large, so that each later addition rounds; one row decides which way."""
    generator = torch.Generator().manual_seed(place)
    rows = torch.full((32_768, 8), 0.35)
    rows[::3] *= 1 + 1e-3 * torch.rand(len(rows[::3]), 1, generator=generator)
    without = torch.cat([rows[:place], rows[place + 1 :]])
    whole, rest = (sum(clipped_sum(part, 1.0) for part in some.chunk(3)) for some in (rows, without))
    assert 0.9 < float((whole - rest).norm()) <= 1 + 1e-9
