"""Subsamples are disjoint, of one size by the paper's rules, and each has the class distribution of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.errors import InputError
from fedpriv.methods.integral._subsamples import _largest_remainder, advice, class_counts, disjoint_subsamples


def test_largest_remainder_is_hamiltons_apportionment():
    # Balinski and Young, Fair Representation: 10 seats for populations 4.3, 3.4, 2.3 give the largest remainder 0.4.
    assert _largest_remainder(np.array([4.3, 3.4, 2.3]), 10).tolist() == [4, 4, 2]
    assert _largest_remainder(np.array([2.0, 3.0]), 5).tolist() == [2, 3]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 40))
def test_every_count_is_a_floor_or_a_ceiling_and_no_class_runs_out(sizes, size):
    everything = sum(sizes)
    if everything < size:
        return
    counts = class_counts(sizes, size)
    assert counts.shape == (everything // size, len(sizes))
    assert (counts.sum(axis=1) == size).all()
    for label, column in enumerate(counts.T):
        floor, rest = divmod(size * sizes[label], everything)
        assert set(column.tolist()) <= ({floor, floor + 1} if rest else {floor})
        assert column.sum() <= sizes[label]


def test_rounding_each_subsample_alone_would_run_out():
    """Two subsamples of 5 from 3 and 7 records: 1.5 and 3.5 each, so one gets 2 and 3, the other 1 and 4."""
    assert sorted(map(tuple, class_counts([3, 7], 5).tolist())) == [(1, 4), (2, 3)]


def test_subsamples_are_disjoint_and_the_rest_is_counted():
    labels = np.random.default_rng(0).choice(3, size=1047, p=[0.6, 0.3, 0.1])
    found = disjoint_subsamples(labels, 100, np.random.default_rng(1))
    assert found.records.shape == (10, 100)
    assert len(np.unique(found.records)) == 1000
    assert found.share_left_over == pytest.approx(47 / 1047)
    for rows, counts in zip(found.records, found.class_counts, strict=True):
        assert np.bincount(labels[rows], minlength=3).tolist() == counts.tolist()
        assert np.abs(counts - 100 * np.bincount(labels) / 1047).max() < 1


def test_the_generator_decides_who_is_where():
    labels = np.arange(200) % 2
    first, same, other = (disjoint_subsamples(labels, 50, np.random.default_rng(seed)).records for seed in (0, 0, 1))
    assert (first == same).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("labels", "size", "words"),
    [
        ([0] * 50 + [1] * 50, 51, "100 records give 1 subsamples; two need a size of at most 50"),
        ([0] * 95 + [1] * 5, 10, "5 of 100 records, too few for one in each of 10 subsamples; a size of at least 20"),
        ([0] * 99 + [1], 10, "class 'rare' has 1 of 100 records.*merge or leave out this class"),
        ([0, 1], 0, "must be >= 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_is_said_with_its_numbers(labels, size, words):
    with pytest.raises(InputError, match=words) as caught:
        disjoint_subsamples(np.array(labels), size, np.random.default_rng(0), names=("common", "rare"))
    assert "\n" not in str(caught.value)


def test_the_advised_size_works():
    labels = np.array([0] * 95 + [1] * 5)
    assert disjoint_subsamples(labels, 20, np.random.default_rng(0)).class_counts[:, 1].min() == 1


@pytest.mark.parametrize(("weights", "records"), [(172, 1720), (197, 1970)])
def test_the_papers_examples(weights, records):
    """Section 4.1: 172 and 197 weights need 1720 and 1970 records, which leaves 5 disjoint subsamples of 10,000."""
    found = advice(weights, 10_000)
    assert found.rule_of_thumb.records == records
    assert found.rule_of_thumb.num_subsamples == 5


def test_the_pac_form():
    found = advice(100, 10**6, excess_loss=0.1, failure_probability=math.exp(-5), subsample_size=500)
    assert found.pac.records == pytest.approx(10_500, abs=1)
    assert found.pac.num_subsamples == 95
    assert found.chosen.num_subsamples == 2000
    assert advice(100, 10**6, excess_loss=0.2).pac.records < advice(100, 10**6, excess_loss=0.1).pac.records


@pytest.mark.parametrize(
    "changes",
    [
        {"num_parameters": 0},
        {"num_records": 0},
        {"subsample_size": 0},
        {"excess_loss": 1.0},
        {"failure_probability": 0.0},
    ],
)
def test_values_out_of_range_are_refused_by_name(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        advice(**({"num_parameters": 10, "num_records": 100} | changes))
