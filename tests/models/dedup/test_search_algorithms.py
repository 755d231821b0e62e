"""What each search algorithm asks, traced by hand, and how many validations they need next to each other."""

import itertools
import random

import numpy as np
import pytest

from fedpriv.errors import InputError
from fedpriv.models.dedup.algorithms import ALGORITHMS, minhash_similarity


def trace(name, num_blocks, salient, **options):
    """The positions that each validation adds to what passed before, with the result; a set that holds one of
    `salient` fails."""
    accepted, asked = frozenset(), []

    def accept(positions):
        nonlocal accepted
        asked.append(sorted(positions - accepted))
        passed = not positions & set(salient)
        accepted = positions if passed else accepted
        return passed

    return asked, ALGORITHMS[name](num_blocks, accept, **options)


# Algorithm 4 by hand for |B| = 8, L = 1 (ranges of one block are left, which is min_batch = 2), salient block 5.
# Recursion(0, 7): m = 3, 0..3 pass. Recursion(4, 7): m = 5, 4..5 fail. Recursion(4, 5): m = 4, 4 passes.
# Recursion(5, 5): r - l = 0 < 1, left. Recursion(6, 7): m = 6, 6 passes. Recursion(7, 7): left.
def test_drd_asks_what_algorithm_4_asks():
    asked, result = trace("drd", 8, [5], min_batch=2)
    assert asked == [[0, 1, 2, 3], [4, 5], [4], [6]]
    assert result.replaced == {0, 1, 2, 3, 4, 6}
    assert result.num_validations == 4


# |B| = 11, L = 2 (min_batch = 3), salient block 1: m = 5, 0..5 fail. Recursion(0, 5): m = 2, 0..2 fail.
# Recursion(0, 2): m = 1, 0..1 fail. Recursion(0, 1): r - l = 1 < 2, left. Recursion(2, 2): left.
# Recursion(3, 5): m = 4, 3..4 pass. Recursion(5, 5): left. Recursion(6, 10): m = 8, 6..8 pass. Recursion(9, 10): left.
def test_drd_searches_a_failed_half_before_it_goes_on():
    asked, result = trace("drd", 11, [1], min_batch=3)
    assert asked == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1], [3, 4], [6, 7, 8]]
    assert result.replaced == {3, 4, 6, 7, 8}


def algorithm_4(num_blocks, accept, least):
    """The listing, line by line, and the sets that it validates; `least` is its L."""
    asked, replaced = [], set()

    def recursion(begin, end):
        if end - begin < least:
            return
        middle = (end + begin) // 2
        tried = replaced | set(range(begin, middle + 1))
        asked.append(frozenset(tried))
        if accept(asked[-1]):
            replaced.update(tried)
        elif begin < end:
            recursion(begin, middle)
        recursion(middle + 1, end)

    recursion(0, num_blocks - 1)
    return asked, replaced


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("least", [1, 2, 7])
def test_drd_is_the_listing(seed, least):
    generator = random.Random(seed)
    num_blocks, salient = generator.randrange(80), set(generator.sample(range(80), generator.randrange(9)))
    asked = []

    def accept(positions):
        return not positions & salient

    expected, replaced = algorithm_4(num_blocks, accept, least)
    result = ALGORITHMS["drd"](num_blocks, lambda some: asked.append(some) or accept(some), min_batch=least + 1)
    assert asked == expected
    assert result.replaced == replaced


# The same with line 17 to |B| - 1 = 10: after Recursion(0, 1), which is left, comes Recursion(2, 10): m = 6, 2..6 pass.
# Recursion(7, 10): m = 8, 7..8 pass. Recursion(9, 10): left. What outer calls would ask again is not asked.
def test_dred_expands_what_follows_to_the_last_block():
    asked, result = trace("dred", 11, [1], min_batch=3)
    assert asked == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1], [2, 3, 4, 5, 6], [7, 8]]
    assert result.replaced == {2, 3, 4, 5, 6, 7, 8}


# |B| = 5, L = 0: m = 2, m = 1, m = 0 fail in turn; block 0 alone is not tried again, as Recursion(0, 0) would.
@pytest.mark.parametrize(
    ("name", "after"), [("drd", [[1], [2], [3], [4]]), ("dred", [[1, 2], [3], [4]])], ids=["drd", "dred"]
)
def test_single_blocks_are_tried_with_a_least_batch_of_one_but_never_twice(name, after):
    asked, result = trace(name, 5, [0, 3], min_batch=1)
    assert asked == [[0, 1, 2], [0, 1], [0], *after]
    assert result.replaced == {1, 2, 4}


def test_greedy_rolls_back_and_goes_on():
    asked, result = trace("greedy", 8, [4], batch=3)
    assert asked == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert result.replaced == {0, 1, 2, 6, 7}


def test_dedup_stops_at_the_first_failure():
    asked, result = trace("dedup", 8, [4], batch=3)
    assert asked == [[0, 1, 2], [3, 4, 5]]
    assert result.replaced == {0, 1, 2}


def test_mistique_tries_similar_blocks_alone():
    asked, result = trace("mistique", 6, [5], batch=2, similarity=[0.9, 0.1, 0.5, 0.8, 0.7, 1.0], threshold=0.5)
    assert asked == [[0, 2], [3, 4], [5]]
    assert result.replaced == {0, 2, 3, 4}


def test_mistique_without_a_similarity_is_dedup():
    assert trace("mistique", 50, [33], batch=7) == trace("dedup", 50, [33], batch=7)


def test_mcts_asks_no_set_twice_and_finds_the_best_of_a_small_tree():
    asked = []

    def accept(positions):
        asked.append(positions)
        return len(positions) <= 3 and 0 not in positions

    result = ALGORITHMS["mcts"](5, accept, batch=1, iterations=1000)
    assert len(set(asked)) == len(asked) == result.num_validations
    possible = [set(chosen) for num in range(1, 6) for chosen in itertools.combinations(range(5), num)]
    assert set(asked) <= set(map(frozenset, possible))
    assert len(result.replaced) == 3


def test_mcts_walks_of_other_seeds_differ():
    traces = [trace("mcts", 60, [7, 31], batch=4, iterations=5, seed=seed)[0] for seed in range(2)]
    assert traces[0] != traces[1]


def test_mcts_begins_no_iteration_after_its_time():
    ticks = itertools.count()
    results = [
        ALGORITHMS["mcts"](
            60, lambda positions: 7 not in positions, batch=4, seconds=seconds, clock=lambda: next(ticks)
        )
        for seconds in (0, 1.5, 5.5)
    ]
    counts = [result.num_validations for result in results]
    assert counts[0] == 0
    assert counts == sorted(set(counts))


# Log-normal damages, met in the order of a noisy saliency; the bound is the damage of the first 80 % to 95 % of them.
@pytest.mark.parametrize("num_blocks", [277, 578])
@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["drd", "dred"])
def test_dynamic_ranges_need_fewer_validations_than_greedy_20(name, seed, share, num_blocks):
    generator = np.random.default_rng(seed)
    damage = np.exp(generator.standard_normal(num_blocks))
    saliency = damage * np.exp(0.3 * generator.standard_normal(num_blocks))
    damage = damage[np.argsort(saliency)]
    bound = damage[: int(share * num_blocks)].sum()

    def accept(positions):
        return damage[list(positions)].sum() <= bound

    dynamic, greedy = ALGORITHMS[name](num_blocks, accept), ALGORITHMS["greedy"](num_blocks, accept, batch=20)
    assert dynamic.num_validations < greedy.num_validations
    assert len(dynamic.replaced) >= len(greedy.replaced) - 0.05 * num_blocks


# 200 pairs of a standard deviation of at most 0.5 / sqrt(256) each; 5 of them are a false alarm of 6e-7 for each pair.
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_minhash_estimates_the_share_of_equal_values(share):
    generator = np.random.default_rng(1)
    blocks = generator.standard_normal((200, 500)).astype(np.float32)
    others = blocks.copy()
    num_changed = round((1 - share) * 500)
    others[:, :num_changed] += 1
    found = minhash_similarity(blocks, others, step=0.01, num_hashes=256)
    expected = share / (2 - share)
    assert np.abs(found - expected).max() <= 5 * 0.5 / 16
    assert found.mean() == pytest.approx(expected, abs=5 * 0.5 / 16 / np.sqrt(200) + 0.003)


def test_minhash_takes_rounding_for_equality_and_refuses_a_step_of_zero():
    blocks = np.full((2, 30), 0.5)
    assert minhash_similarity(blocks, blocks + 1e-6, step=0.1).tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="step = 0"):
        minhash_similarity(blocks, blocks, step=0.0)
    with pytest.raises(InputError, match="shape"):
        minhash_similarity(blocks, blocks[:1], step=0.1)
