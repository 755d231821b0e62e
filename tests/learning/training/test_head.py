"""The sum of a head's clipped gradients is exact: that of fractions, whatever else is in it and in whichever order."""

import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.learning.training import _head
from fedpriv.learning.training._head import ClippedSums, HeadInputs, minus_classes, residuals
from tests.marks import slow
from tests.threads import with_threads

WIDTH, CLASSES = 33, 5
JOINT, APART = [slice(0, WIDTH + 1)], [slice(0, WIDTH), slice(WIDTH, WIDTH + 1)]
SIZES = (1e-45, 1e-30, 1e-9, 0.3, 1.0, 1e4, 3e38)


def features(num: int, *, size: float = 1.0, seed: int = 0) -> torch.Tensor:
    values = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (values / values.norm(dim=1, keepdim=True) * size).float()


def weights(size: float = 1.0, seed: int = 1) -> torch.Tensor:
    return size * torch.randn(CLASSES, WIDTH + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(num: int) -> torch.Tensor:
    return torch.randint(CLASSES, (num,), generator=torch.Generator().manual_seed(2))


def found(rows: torch.Tensor, weight: torch.Tensor, truth: torch.Tensor) -> tuple[HeadInputs, torch.Tensor]:
    inputs = HeadInputs.of(rows, 0.7)
    return inputs, residuals(inputs.logits(slice(0, len(rows)), weight), truth)


def total(rows, weight, truth, clip_norm=0.5, parts=JOINT) -> torch.Tensor:
    inputs, differences = found(rows, weight, truth)
    sums = ClippedSums(1, (CLASSES, WIDTH + 1), clip_norm, parts)
    sums.add(inputs, differences, [(0, slice(0, len(rows)))])
    return sums.totals()[0]


def in_fractions(tensor: torch.Tensor) -> list[list[Fraction]]:
    return [[Fraction(value) for value in row] for row in tensor.tolist()]


@pytest.mark.parametrize(("size", "weight_size"), [*((size, 1.0) for size in SIZES), (0.3, 1e-30), (1.0, 8192.0)])
def test_logits_are_those_of_fractions_to_the_last_bit(size, weight_size):
    """Of the numbers on the grids, whose cutting is checked below."""
    rows, weight = features(7, size=size), weights(weight_size)
    inputs = HeadInputs.of(rows, 0.7)
    scale = float(_head._power_above(weight.square().sum(dim=1).amax().sqrt() * (1 + 2.0**-40)))
    steps = (weight * (2.0**_head._WEIGHT_BITS / scale)).trunc()
    unit = Fraction(scale) / 2 ** (_head._WEIGHT_BITS + _head._FEATURE_BITS)
    logits = inputs.logits(slice(0, 7), weight)
    assert torch.isfinite(logits).all()
    for row, one, of_record in zip(in_fractions(inputs.steps), inputs.scales.tolist(), logits.tolist(), strict=True):
        for own, logit in zip(in_fractions(steps), of_record, strict=True):
            exact = sum(x * w for x, w in zip(row, own, strict=True)) * unit * Fraction(one)
            assert logit == float(exact)
    plain = torch.cat([rows.double(), torch.full((7, 1), 0.7)], dim=1) @ weight.T
    bound = 2.0**-18 * (1 + size) * weight_size * 10
    torch.testing.assert_close(logits, plain, atol=bound, rtol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_features_are_cut_towards_zero_and_their_norms_bounded(size):
    rows = features(50, size=size)
    for scale in (None, 0.7):
        inputs = HeadInputs.of(rows, scale)
        assert (inputs.steps == inputs.steps.trunc()).all()
        exact = [sum(value**2 for value in row) for row in in_fractions(inputs.steps)]
        assert max(exact) <= 4**_head._FEATURE_BITS
        assert size == 1e-45 or min(exact) >= 4 ** (_head._FEATURE_BITS - 2), "half of the bits lie idle"
        given_ = rows.double() if scale is None else torch.cat([rows.double(), torch.full((50, 1), scale)], dim=1)
        kept = inputs.steps * (inputs.scales * 2.0**-_head._FEATURE_BITS).unsqueeze(1)
        assert (kept.abs() <= given_.abs()).all()
        assert ((given_ - kept).abs() <= (inputs.scales * 2.0**-_head._FEATURE_BITS).unsqueeze(1)).all()


def test_exp_is_right_and_residuals_are_those_of_a_softmax():
    values = -torch.logspace(-12, 2.84, 20_001, dtype=torch.float64)
    expected = np.exp(values.numpy().astype(np.longdouble))
    assert np.abs(_head._exp(values).numpy() / expected - 1).max() < 1e-15
    assert _head._exp(torch.zeros(1, dtype=torch.float64)) == 1
    logits = 10 * torch.randn(200, CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    truth = labels(200)
    expected = logits.softmax(dim=1) + minus_classes(truth, CLASSES)
    torch.testing.assert_close(residuals(logits, truth), expected, atol=2.0**-26, rtol=0)


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(
    size=st.sampled_from(SIZES),
    clip_norm=st.sampled_from([1e-30, 1e-3, 0.5, 1.0, 1.9999, 100.0]),
    weight_size=st.sampled_from([0.0, 1.0, 8192.0]),
    seed=st.integers(0, 999),
)
def test_no_part_of_a_record_exceeds_the_clip_norm_in_fractions(size, clip_norm, weight_size, seed):
    rows, truth = features(1, size=size, seed=seed), labels(1)
    for parts in (JOINT, APART):
        one = total(rows, weights(weight_size), truth, clip_norm, parts)
        for part in parts:
            exact = sum(value**2 for row in in_fractions(one[:, part]) for value in row)
            assert exact <= Fraction(clip_norm) ** 2
    inputs, differences = found(rows, weights(weight_size), truth)
    (gradient,) = inputs.gradients(differences)
    plain, expected = float(gradient.norm()), total(rows, weights(weight_size), truth, clip_norm)
    factor = min(1.0, clip_norm / plain) if plain else 1.0
    torch.testing.assert_close(expected, factor * gradient, atol=clip_norm * 2.0**-15, rtol=0)


@pytest.mark.parametrize("threads", [3, *slow(1, 7)])
@pytest.mark.parametrize("parts", [JOINT, APART], ids=["joint", "apart"])
def test_a_sum_is_that_of_its_records_by_themselves_in_any_order(threads, parts):
    num = 150
    rows, truth, weight = features(num), labels(num), weights(8.0)
    rows[::7] *= 1e6
    with with_threads(threads):
        alone = [total(rows[i : i + 1], weight, truth[i : i + 1], parts=parts) for i in range(num)]
        order = torch.randperm(num, generator=torch.Generator().manual_seed(4))
        for chosen in (order, order[:1], torch.arange(num - 1)):
            together = total(rows[chosen], weight, truth[chosen], parts=parts)
            exact = [[Fraction(0)] * (WIDTH + 1) for _ in range(CLASSES)]
            for i in chosen.tolist():
                for row, own in zip(exact, in_fractions(alone[i]), strict=True):
                    row[:] = [a + b for a, b in zip(row, own, strict=True)]
            assert in_fractions(together) == exact


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_cannot_be_used_counts_as_zero_and_changes_no_other(bad):
    rows, truth, weight = features(9), labels(9), weights()
    broken = rows.clone()
    broken[4, 3] = bad
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert torch.equal(total(broken, weight, truth), total(rows[others], weight, truth[others]))
    for value in (bad, 1e159):  # whose square is no number, and beside which others would be rounded
        weight[1, WIDTH] = value
        assert not total(rows, weight, truth).any(), "a head that gives no numbers teaches nothing"


def test_class_sums_and_plain_sums_are_those_of_the_rows():
    rows, truth = features(60), labels(60)
    inputs = HeadInputs.of(rows, None)
    expected = -torch.zeros(CLASSES, WIDTH, dtype=torch.float64).index_add_(0, truth, rows.double())
    sums = ClippedSums(2, (CLASSES, WIDTH), 10.0, [slice(0, WIDTH)])
    sums.add(inputs, minus_classes(truth, CLASSES), [(0, slice(0, 20)), (1, slice(20, 60))])
    close = partial(torch.testing.assert_close, atol=1e-3, rtol=0)
    close(sums.totals().sum(dim=0), expected)
    close(inputs.plain_sum(slice(0, 60), minus_classes(truth, CLASSES)), expected)
    assert not torch.equal(*sums.totals())


def test_the_largest_number_of_records_fits():
    """The most that each may add, 2^30 times in all, and 2^14 times in the 53 bits of a product."""
    rows, truth = 10 * features(1), torch.zeros(1, dtype=torch.int64)
    for clip_norm, sign in itertools.product((1.0, 1.9999999, 0.7), (1, -1)):
        sums = ClippedSums(1, (CLASSES, WIDTH), clip_norm, [slice(0, WIDTH)])
        assert sums._most * (1 + 2.0**-40) * _head.ROWS_OF_A_PRODUCT <= 2**53
        one = [HeadInputs.of(rows, None), sign * minus_classes(truth, CLASSES), [(0, slice(0, 1))]]
        sums.add(*one)
        single = in_fractions(sums.totals()[0])
        for _ in range(30):  # as many again, each time
            sums._words *= 2
            sums.add(HeadInputs.of(rows[:0], None), one[1][:0], [(0, slice(0, 0))])
        before = sums.totals()[0]
        assert in_fractions(before) == [[2**30 * value for value in row] for row in single]
        sums.add(*one)
        assert float((sums.totals()[0] - before).norm()) <= clip_norm
