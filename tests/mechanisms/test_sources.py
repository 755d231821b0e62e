"""The randomness is what it says: right distributions, never repeated, never shared between processes."""

from __future__ import annotations

import copy
import math
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.mechanisms.sources import SecureSource, SeededSource, bernoulli_from_words, normal_from_words

FALSE_ALARM = 1e-6
NUM = 200_000
SOURCES = [SecureSource, lambda: SeededSource(0)]


@pytest.mark.parametrize("make", SOURCES, ids=["secure", "seeded"])
def test_normal_values_fit_and_other_scales_do_not(make):
    values = make().normal(NUM).numpy().astype(float)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    for scale in (2 / 3, 3 / 2):
        assert stats.kstest(values * scale, "norm").pvalue < FALSE_ALARM


@pytest.mark.parametrize("make", SOURCES, ids=["secure", "seeded"])
def test_tails_are_neither_cut_nor_heavy(make):
    values = np.abs(make().normal(2_000_000).numpy())
    for threshold in (3.0, 4.0):
        expected = 2 * stats.norm.sf(threshold)
        assert stats.binomtest(int((values > threshold).sum()), len(values), expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("make", SOURCES, ids=["secure", "seeded"])
def test_neighbouring_values_are_uncorrelated(make):
    values = make().normal(NUM).numpy()
    assert stats.pearsonr(values[:-1], values[1:]).pvalue > FALSE_ALARM


@pytest.mark.parametrize("make", SOURCES, ids=["secure", "seeded"])
def test_coins_have_their_probability(make):
    heads = int(make().bernoulli(NUM, 0.01).sum())
    assert stats.binomtest(heads, NUM, 0.01).pvalue > FALSE_ALARM
    for other in (0.01 * 2 / 3, 0.015):
        assert stats.binomtest(heads, NUM, other).pvalue < FALSE_ALARM


def test_extreme_words_give_finite_mirrored_values():
    words = np.array([0, 2**64 - 1, 2**63, 2**63 - 1], dtype=np.uint64)
    values = normal_from_words(words).tolist()
    assert values[0] == -values[1]
    assert values[2] == -values[3] > 0
    assert all(math.isfinite(value) for value in values)
    assert 8.1 < values[1] < 8.3


def test_values_invert_the_distribution_function():
    words = np.array([int(p * 2**64) for p in (0.025, 0.5, 0.84134475)], dtype=np.uint64)
    assert normal_from_words(words).tolist() == pytest.approx([-1.959964, 0.0, 1.0], abs=1e-6)


def test_coins_are_exact_at_the_ends_and_round_down_between():
    words = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert bernoulli_from_words(words, 0.0).tolist() == [False, False]
    assert bernoulli_from_words(words, 1.0).tolist() == [True, True]
    border = math.floor(math.ldexp(0.1, 64))
    assert bernoulli_from_words(np.array([border - 1, border], dtype=np.uint64), 0.1).tolist() == [True, False]
    assert bernoulli_from_words(words, 1e-30).tolist() == [False, False]
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="probability"):
            bernoulli_from_words(words, bad)


def test_secure_sources_never_agree_and_never_repeat():
    one, two = SecureSource(), SecureSource()
    first = one.normal(64)
    assert not torch.equal(first, two.normal(64))
    assert not torch.equal(first, one.normal(64))


def test_no_seed_touches_the_secure_source():
    draws = []
    source = SecureSource()
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # the global state is what must not matter
        draws.append(source.normal(16))
    assert not torch.equal(*draws)


def test_a_forked_child_draws_other_values():
    source = SecureSource()
    source.normal(1)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, source._words(4).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    in_child = np.frombuffer(os.read(reader, 32), dtype="<u8")
    os.close(reader)
    os.close(writer)
    assert not set(in_child.tolist()) & set(source._words(4).tolist())


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secure_source_cannot_be_duplicated(duplicate):
    with pytest.raises(TypeError, match="belongs to its process"):
        duplicate(SecureSource())


def test_seeded_source_repeats_by_its_labels_alone():
    one = SeededSource(0, 3, "noise").normal(8)
    assert torch.equal(one, SeededSource(0, 3, "noise").normal(8))
    for labels in ((1, 3, "noise"), (0, 4, "noise"), (0, 3, "inclusion")):
        assert not torch.equal(one, SeededSource(*labels).normal(8))
