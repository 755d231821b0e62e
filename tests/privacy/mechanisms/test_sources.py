"""Randomness has the right distributions, never repeats and is never shared between processes."""

import copy
import json
import math
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource, _bernoulli_from_words, normal_from_words
from tests.privacy.ledger.test_ledger import in_another_process

FALSE_ALARM = 1e-6
NUM = 200_000


@pytest.fixture(params=[SecureSource, lambda: SeededSource(0)], ids=["secure", "seeded"])
def make(request):
    """Makes a source of each kind."""
    return request.param


# 100 equally likely cells between two tails: of 1e6 values 233 are expected beyond 3.5 on either side, 32 beyond 4.
def test_normal_values_have_the_standard_law_and_no_other_scale_and_are_uncorrelated(make):
    cells = stats.norm.ppf(np.arange(1, 100) / 100)
    edges = np.concatenate([[-np.inf, -4, -3.5], cells, [3.5, 4, np.inf]])
    values = make().normal(1_000_000).numpy().astype(float)

    def pvalue(scale):
        return stats.chisquare(np.histogram(values * scale, edges)[0], np.diff(stats.norm.cdf(edges)) * 1e6).pvalue

    assert [scale for scale in (2 / 3, 1, 3 / 2) if pvalue(scale) > FALSE_ALARM] == [1]
    assert stats.pearsonr(values[:-1], values[1:]).pvalue > FALSE_ALARM


def test_coins_have_the_given_probability_and_no_other(make):
    heads = int(make().bernoulli(NUM, 0.01).sum())
    assert stats.binomtest(heads, NUM, 0.01).pvalue > FALSE_ALARM
    for other in (0.01 * 2 / 3, 0.015):
        assert stats.binomtest(heads, NUM, other).pvalue < FALSE_ALARM


def test_extreme_words_give_finite_mirrored_values_and_others_invert_the_distribution_function():
    words = np.array([0, 2**64 - 1, 2**63, 2**63 - 1], dtype=np.uint64)
    values = normal_from_words(words).tolist()
    assert values[0] == -values[1]
    assert values[2] == -values[3] >= 0
    assert all(math.isfinite(value) for value in values)
    assert 9.1 < values[1] < 9.2
    tail = normal_from_words(np.arange(8, dtype=np.uint64)).tolist()
    assert tail == sorted(set(tail)), "each cell of the tail must have a value of its own"
    words = np.array([int(p * 2**64) for p in (0.025, 0.5, 0.84134475)], dtype=np.uint64)
    assert normal_from_words(words).tolist() == pytest.approx([-1.959964, 0.0, 1.0], abs=1e-6)


def test_coins_are_exact_at_0_and_1_and_round_down_in_between():
    words = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert _bernoulli_from_words(words, 0.0).tolist() == [False, False]
    assert _bernoulli_from_words(words, 1.0).tolist() == [True, True]
    boundary = math.floor(math.ldexp(0.1, 64))
    assert _bernoulli_from_words(np.array([boundary - 1, boundary], dtype=np.uint64), 0.1).tolist() == [True, False]
    assert _bernoulli_from_words(words, 1e-30).tolist() == [False, False]
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="probability"):
            _bernoulli_from_words(words, bad)


def test_secure_sources_never_agree_and_never_repeat_whatever_the_global_seed():
    one, two = SecureSource(), SecureSource()
    draws = []
    for source in (one, two, one):
        torch.manual_seed(0)
        np.random.seed(0)  # deliberate: the global state must not matter
        draws.append(tuple(source.normal(64).tolist()))
    assert len(set(draws)) == 3


@pytest.mark.parametrize("same_id", [False, True])
def test_a_forked_child_draws_different_values_even_with_the_same_process_id(monkeypatch, same_id):
    if same_id:  # ids repeat: the system gives them to new processes
        monkeypatch.setattr(os, "getpid", lambda: 4711)
    source = SecureSource()
    source.normal(1)
    in_child = json.loads(in_another_process(lambda: source.words(4).tolist()))
    assert len(in_child) == 4
    assert not set(in_child) & set(source.words(4).tolist())


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secure_source_cannot_be_pickled_or_copied(duplicate):
    with pytest.raises(TypeError, match="belongs to its process"):
        duplicate(SecureSource())


def test_a_seeded_source_is_determined_by_its_labels_their_types_and_their_order():
    labels = [(0, 3, "noise"), (1, 3, "noise"), (0, 4, "noise"), (0, 3, "inclusion"), (1, 2), (2, 1), ("1", 2), (12,)]
    streams = [tuple(SeededSource(*each).normal(8).tolist()) for each in labels]
    assert len(set(streams)) == len(streams)
    assert tuple(SeededSource(*labels[0]).normal(8).tolist()) == streams[0]


WORD = st.integers(0, 2**64 - 1)


@given(WORD, WORD)
def test_values_increase_with_words_and_mirrored_words_give_mirrored_values(a, b):
    words = np.array([*sorted((a, b)), 2**64 - 1 - a, a], dtype=np.uint64)
    low, high, mirrored, value = normal_from_words(words).tolist()
    assert low <= high
    assert mirrored == -value


def test_consecutive_draws_continue_the_stream_and_none_are_empty(make):
    assert make().normal(0).shape == make().bernoulli(0, 0.5).shape == (0,)
    one, two = SeededSource("a"), SeededSource("a")
    at_once = one.normal(6)
    assert torch.equal(torch.cat([two.normal(2), two.normal(4)]), at_once)
    assert not torch.equal(two.normal(6), at_once)


@given(st.floats(0, 1), WORD)
def test_a_coin_is_true_with_at_most_its_probability(probability, word):
    (coin,) = _bernoulli_from_words(np.array([word], dtype=np.uint64), probability).tolist()
    # In integers: true only if word + 1 <= p 2^64, so the number of true words is at most p 2^64.
    numerator, denominator = probability.as_integer_ratio()
    assert coin == ((word + 1) * denominator <= numerator * 2**64)


def test_threads_that_share_a_source_draw_different_values():
    source, drawn, failures = SecureSource(), [], []

    def draw():
        try:
            for _ in range(300):
                drawn.extend(source.words(512).tolist())
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == len(drawn)
    assert failures == []
