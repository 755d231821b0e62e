"""Subsamples are disjoint, with the whole's classes; clusters of near models, their means, and planted ones found."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import InputError
from fedpriv.methods.integral._selection import (
    _complete_clusters,
    _first_member_clusters,
    _largest_remainder,
    advice,
    anonymity,
    class_counts,
    disjoint_subsamples,
    distances,
    select,
    statement,
)

MODELS = hnp.arrays(np.float64, st.tuples(st.integers(1, 12), st.just(2)), elements=st.floats(0, 1, width=32))


def test_largest_remainder_is_hamiltons_apportionment():
    # Balinski and Young, Fair Representation: 10 seats for populations 4.3, 3.4, 2.3 give the largest remainder 0.4.
    assert _largest_remainder(np.array([4.3, 3.4, 2.3]), 10).tolist() == [4, 4, 2]
    assert _largest_remainder(np.array([2.0, 3.0]), 5).tolist() == [2, 3]
    # Rounding each subsample of 5 alone would run out: 3 and 7 records give 1.5 and 3.5 each.
    assert sorted(map(tuple, class_counts([3, 7], 5).tolist())) == [(1, 4), (2, 3)]


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


def test_subsamples_are_disjoint_and_the_rest_is_counted():
    labels = np.random.default_rng(0).choice(3, size=1047, p=[0.6, 0.3, 0.1])
    found = disjoint_subsamples(labels, 100, np.random.default_rng(1))
    assert found.records.shape == (10, 100)
    assert len(np.unique(found.records)) == 1000
    assert found.share_left_over == pytest.approx(47 / 1047)
    for rows, counts in zip(found.records, found.class_counts, strict=True):
        assert np.bincount(labels[rows], minlength=3).tolist() == counts.tolist()
        assert np.abs(counts - 100 * np.bincount(labels) / 1047).max() < 1


def test_the_generator_decides_who_is_where_and_a_size_that_is_advised_below_works():
    rare = np.array([0] * 95 + [1] * 5)
    assert disjoint_subsamples(rare, 20, np.random.default_rng(0)).class_counts[:, 1].min() == 1
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


def test_advice_is_that_of_the_paper_by_thumb_and_of_the_pac_form():
    """Section 4.1: 172 and 197 weights need 1720 and 1970 records, which leaves 5 disjoint subsamples of 10,000."""
    for weights, records in ((172, 1720), (197, 1970)):
        by_thumb = advice(weights, 10_000).rule_of_thumb
        assert (by_thumb.records, by_thumb.num_subsamples) == (records, 5)
    found = advice(100, 10**6, excess_loss=0.1, failure_probability=math.exp(-5), subsample_size=500)
    assert found.pac.records == pytest.approx(10_500, abs=1)
    assert found.pac.num_subsamples == 95
    assert found.chosen.num_subsamples == 2000
    assert advice(100, 10**6, excess_loss=0.2).pac.records < advice(100, 10**6, excess_loss=0.1).pac.records


def test_values_out_of_range_are_refused_by_name():
    least = dict.fromkeys(("num_parameters", "num_records", "subsample_size"), 0)
    for name, value in (least | {"excess_loss": 1.0, "failure_probability": 0.0}).items():
        with pytest.raises(InputError, match=name):
            advice(**({"num_parameters": 10, "num_records": 100} | {name: value}))


def disjoint(num):
    return [np.arange(10 * place, 10 * place + 10) for place in range(num)]


def gap(a, b, measure):
    gaps = np.abs(a - b)
    return float({"largest": gaps.max, "norm": lambda: np.sqrt(np.square(gaps).sum()), "mean": gaps.mean}[measure]())


def test_distances_are_of_all_weights():
    vectors = np.array([[0.0, 0.0, 0.0], [0.3, -0.4, 0.0]])
    assert distances(vectors, np.zeros(3), "largest") == pytest.approx([0, 0.4])
    assert distances(vectors, np.zeros(3), "norm") == pytest.approx([0, 0.5])
    assert distances(vectors, np.zeros(3), "mean") == pytest.approx([0, 0.7 / 3])


@settings(max_examples=60)
@given(MODELS, st.floats(0, 0.5, width=32), st.sampled_from(["largest", "norm", "mean"]))
def test_first_member_clusters_are_algorithm_1(vectors, epsilon, measure):
    """Oracle: the published pseudo-code, word by word."""
    expected: list[list[int]] = []
    for row, vector in enumerate(vectors):
        present = False
        for cluster in expected:
            if float(distances(vector[np.newaxis], vectors[cluster[0]], measure)[0]) <= epsilon:
                cluster.append(row)
                present = True
                break
        if not present:
            expected.append([row])
    assert [list(cluster) for cluster in _first_member_clusters(vectors, epsilon, measure)] == expected


@settings(max_examples=60)
@given(MODELS, st.floats(0, 0.5, width=32), st.sampled_from(["largest", "norm", "mean"]))
def test_complete_clusters_hold_only_near_pairs_and_the_mean_is_near_all(vectors, epsilon, measure):
    clusters = _complete_clusters(vectors, epsilon, measure)
    assert sorted(row for cluster in clusters for row in cluster) == list(range(len(vectors)))
    for cluster in clusters:
        pairs = itertools.combinations(cluster, 2)
        assert all(gap(vectors[a], vectors[b], measure) <= epsilon + 1e-12 for a, b in pairs)
        mean = vectors[list(cluster)].mean(axis=0)
        assert all(gap(vectors[row], mean, measure) <= epsilon + 1e-12 for row in cluster)


def test_first_member_clusters_ensure_neither_near_pairs_nor_a_mean_near_all():
    """Why `near_mean` is counted: 0.05 about the first member, but 0.1 between others and 0.0667 from the mean."""
    vectors = np.array([[0.0], [0.05], [0.05], [0.05], [0.05], [-0.05]])
    (cluster,) = select(vectors, disjoint(6), epsilon=0.05)
    assert cluster.recurrence == 6
    assert cluster.largest_difference == pytest.approx(0.1)
    assert cluster.near_mean == (0, 1, 2, 3, 4)
    assert cluster.anonymity.k == 5
    strict = select(vectors, disjoint(6), epsilon=0.05, clustering="complete")
    assert strict[0].anonymity.k >= strict[0].recurrence == 5


def test_a_model_outside_the_cluster_may_count_for_its_mean():
    vectors = np.array([[0.0], [0.06], [0.04]])
    largest = select(vectors, disjoint(3), epsilon=0.05)[0]
    assert largest.members == (0, 2)
    assert largest.near_mean == (0, 1, 2)
    assert largest.anonymity.k == 3


@pytest.mark.parametrize("clustering", ["first-member", "complete"])
@pytest.mark.parametrize("measure", ["largest", "norm", "mean"])
def test_planted_near_models_are_found_with_the_right_k(clustering, measure):
    rng = np.random.default_rng(0)
    centres, sizes = rng.normal(size=(3, 50)), (9, 5, 2)
    planted = [
        centre + rng.uniform(-1, 1, size=(size, 50)) * 0.02 / 50 for centre, size in zip(centres, sizes, strict=True)
    ]
    vectors = np.concatenate([*planted, rng.normal(size=(7, 50))])
    order = rng.permutation(len(vectors))
    found = select(vectors[order], disjoint(len(vectors)), epsilon=0.05, measure=measure, clustering=clustering, top=4)
    assert [cluster.recurrence for cluster in found] == [9, 5, 2, 1]
    assert [cluster.anonymity.k for cluster in found] == [9, 5, 2, 1]
    for cluster, models in zip(found, planted, strict=False):
        np.testing.assert_allclose(cluster.mean, models.mean(axis=0))
        assert "k of at least 2" not in statement(cluster, 0.05)


def test_equal_models_recur_at_epsilon_0_and_no_two_models_near_is_said():
    vectors = np.full((3, 4), 0.1)
    for clustering in ("first-member", "complete"):
        (cluster,) = select(vectors, disjoint(3), epsilon=0.0, clustering=clustering)
        assert cluster.recurrence == cluster.anonymity.k == 3
    (first, *_) = select(np.arange(5.0)[:, np.newaxis], disjoint(5), epsilon=0.05)
    assert first.recurrence == first.anonymity.k == 1
    assert not first.anonymity.holds
    assert "is not 0.05-integrally private for any k of at least 2" in statement(first, 0.05)


def test_generators_that_share_records_are_no_anonymity():
    assert anonymity(disjoint(3)).holds
    all_share = anonymity([np.array([1, 2]), np.array([1, 3]), np.array([1, 4])])
    some_share = anonymity([np.array([1, 2]), np.array([2, 3]), np.array([4])])
    assert (all_share.intersection_is_empty, some_share.intersection_is_empty) == (False, True)
    assert not some_share.pairwise_disjoint
    assert not any(each.holds for each in (all_share, some_share, anonymity(disjoint(1)), anonymity([])))
    assert anonymity([np.array([1, 1]), np.array([2])]).holds, "a record twice in one generator is one record"


@given(MODELS, st.floats(0, 0.25, width=32), st.floats(0, 0.25, width=32))
def test_more_epsilon_never_lowers_what_is_near_the_first_model(vectors, epsilon, more):
    def near(radius):
        return len(_first_member_clusters(vectors, radius)[0])

    assert near(epsilon) <= near(epsilon + more)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": -0.1}, "epsilon = -0.1"),
        ({"epsilon": float("nan")}, "epsilon = nan"),
        ({"measure": "l1"}, "measure = 'l1'"),
        ({"clustering": "single"}, "clustering = 'single'"),
        ({"top": 0}, "top = 0"),
        ({"generators": disjoint(2)}, "2 of them for 3 models"),
        ({"vectors": np.array([[0.0], [np.nan], [1.0]])}, "model 1: has a weight that is not finite"),
    ],
)
def test_bad_values_are_refused_by_name(changes, words):
    given = {"vectors": np.zeros((3, 1)), "generators": disjoint(3), "epsilon": 0.05} | changes
    for clustering in ("first-member", "complete"):
        with pytest.raises(InputError, match=words):
            select(**({"clustering": clustering} | given))
