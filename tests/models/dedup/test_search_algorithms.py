"""Search algorithms ask what was traced by hand; what they replace was accepted, and counts are exact."""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("least", [1, 2, 7])
def test_drd_is_the_listing(least):
    for seed in range(20):
        generator = random.Random(seed)
        num_blocks, salient = generator.randrange(80), set(generator.sample(range(80), generator.randrange(9)))
        recorded = Recorded(lambda positions, salient=salient: not positions & salient)
        expected, replaced = algorithm_4(num_blocks, recorded.accept, least)
        result = ALGORITHMS["drd"](num_blocks, recorded, min_batch=least + 1)
        assert (recorded.asked, result.replaced) == (expected, replaced)


# |B| = 11, L = 2 (min_batch = 3), salient block 1: m = 5, 0..5 fail. Recursion(0, 5): m = 2, 0..2 fail.
# Recursion(0, 2): m = 1, 0..1 fail. Recursion(0, 1): r - l = 1 < 2, left. With line 17 to |B| - 1 = 10 comes
# Recursion(2, 10): m = 6, 2..6 pass. Recursion(7, 10): m = 8, 7..8 pass. Recursion(9, 10): left. What outer calls would
# ask again is not asked.
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


def test_greedy_rolls_back_and_goes_on_and_dedup_stops_at_the_first_failure():
    asked, result = trace("greedy", 8, [4], batch=3)
    assert (asked, result.replaced) == ([[0, 1, 2], [3, 4, 5], [6, 7]], {0, 1, 2, 6, 7})
    asked, result = trace("dedup", 8, [4], batch=3)
    assert (asked, result.replaced) == ([[0, 1, 2], [3, 4, 5]], {0, 1, 2})


def test_mistique_tries_similar_blocks_alone_and_without_a_similarity_is_dedup():
    asked, result = trace("mistique", 6, [5], batch=2, similarity=[0.9, 0.1, 0.5, 0.8, 0.7, 1.0], threshold=0.5)
    assert (asked, result.replaced) == ([[0, 2], [3, 4], [5]], {0, 2, 3, 4})
    assert trace("mistique", 50, [33], batch=7) == trace("dedup", 50, [33], batch=7)


def test_mcts_asks_no_set_twice_and_finds_the_best_of_a_small_tree():
    recorded = Recorded(lambda positions: len(positions) <= 3 and 0 not in positions)
    result = ALGORITHMS["mcts"](5, recorded, batch=1, iterations=1000)
    assert len(set(recorded.asked)) == len(recorded.asked) == result.num_validations
    assert frozenset().union(*recorded.asked) <= set(range(5))
    assert len(result.replaced) == 3


def test_mcts_walks_of_other_seeds_differ_and_no_iteration_begins_after_its_time():
    traces = [trace("mcts", 60, [7, 31], batch=4, iterations=5, seed=seed)[0] for seed in range(2)]
    assert traces[0] != traces[1]
    ticks = itertools.count()
    counts = [
        trace("mcts", 60, [7], batch=4, seconds=seconds, clock=lambda: next(ticks))[1].num_validations
        for seconds in (0, 1.5, 5.5)
    ]
    assert counts[0] == 0
    assert counts == sorted(set(counts))


# Log-normal damages, met in the order of a noisy saliency; the bound is the damage of the first 80 % to 95 % of them.
@pytest.mark.parametrize("name", ["drd", "dred"])
def test_dynamic_ranges_need_fewer_validations_than_greedy_20(name):
    for num_blocks, share, seed in itertools.product((277, 578), (0.8, 0.9, 0.95), range(4)):
        generator = np.random.default_rng(seed)
        damage = np.exp(generator.standard_normal(num_blocks))
        saliency = damage * np.exp(0.3 * generator.standard_normal(num_blocks))
        damage = damage[np.argsort(saliency)]
        bound = damage[: int(share * num_blocks)].sum()

        def accept(positions, damage=damage, bound=bound):
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


# Every algorithm, and `drd` and `dred` with each value of their options; `listing` is the default.
SEARCHES = ALGORITHMS | {
    f"{name}, published": partial(ALGORITHMS[name], stopping="published") for name in ("drd", "dred")
}
# Without the option that says how many positions one validation is about: for `drd` and `dred`, L by the rule.
BY_RULE = {f"{name}, by rule": search for name, search in SEARCHES.items() if name.startswith("dr")}
SEARCHES |= BY_RULE
GRAIN = {name: "min_batch" if name.startswith("dr") else "batch" for name in SEARCHES.keys() - BY_RULE.keys()}
every_algorithm = pytest.mark.parametrize("name", sorted(SEARCHES))


class Recorded:
    """An accept function that keeps what it was asked and what it answered."""

    def __init__(self, accept):
        self.accept, self.asked, self.accepted = accept, [], []

    def __call__(self, positions):
        assert isinstance(positions, frozenset)
        self.asked.append(positions)
        answer = self.accept(positions)
        if answer:
            self.accepted.append(positions)
        return answer


def summed(seed: int, num_blocks: int):
    """Accepts what damages the model less than a bound: damages add up."""
    generator = random.Random(seed)
    damage = [generator.lognormvariate(0, 2) for _ in range(num_blocks)]
    bound = generator.random() * sum(damage)
    return lambda positions: sum(damage[position] for position in sorted(positions)) <= bound


def erratic(seed: int, num_blocks: int):
    """Accepts each set by the flip of a coin of its own."""
    share = random.Random(seed).random()
    return lambda positions: random.Random(f"{seed} {sorted(positions)}").random() < share


def noisy(seed: int, num_blocks: int):
    """Flips a new coin at each call, as a noisy validation may: the same set may pass now and fail later."""
    generator = random.Random(seed)
    return lambda positions: generator.random() < 0.5


def run(name: str, num_blocks: int, accept, grain: int):
    recorded = Recorded(accept)
    options = {GRAIN[name]: grain} if name in GRAIN else {}
    return SEARCHES[name](num_blocks, recorded, **options), recorded


@every_algorithm
@settings(max_examples=25, deadline=None)
@given(
    make=st.sampled_from([summed, erratic, noisy]),
    seed=st.integers(0, 1000),
    num_blocks=st.integers(0, 60),
    grain=st.integers(1, 9),
)
def test_what_is_replaced_was_accepted_and_counts_are_exact(name, make, seed, num_blocks, grain):
    result, recorded = run(name, num_blocks, make(seed, num_blocks), grain)
    assert result.num_validations == len(recorded.asked)
    assert result.replaced in recorded.accepted or not (recorded.accepted or result.replaced)
    assert len(result.replaced) == max(map(len, recorded.accepted), default=0)
    assert all(positions and positions <= set(range(num_blocks)) for positions in recorded.asked)


@every_algorithm
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7, 64, 101])
def test_nothing_is_replaced_where_nothing_is_accepted_and_all_but_a_trailing_range_where_all_is(name, num_blocks):
    for grain in (1, 5, 20, 200):
        result, _ = run(name, num_blocks, lambda positions: False, grain)
        assert result.replaced == frozenset()
        result, _ = run(name, num_blocks, lambda positions: True, grain)
        assert result.replaced == frozenset(range(len(result.replaced))), "what is left is at the end"
        left = num_blocks - len(result.replaced)
        if name in BY_RULE:
            assert left <= 20
        elif "published" in name:
            assert left < max(grain, 2), "it has no half of a single block"
        else:
            assert left < grain if GRAIN[name] == "min_batch" else left == 0


@every_algorithm
def test_the_same_questions_are_asked_again_and_sets_only_grow_so_the_last_accepted_one_is_kept(name):
    accept = summed(2, 60)
    (result, recorded), (other, asked_again) = (run(name, 60, accept, 4) for _ in range(2))
    assert (result, recorded.asked) == (other, asked_again.asked)
    if name != "mcts":
        assert all(one < other for one, other in itertools.pairwise(recorded.accepted))
        assert recorded.accepted
        assert result.replaced == recorded.accepted[-1]


@every_algorithm
def test_a_number_out_of_range_is_refused_before_any_validation(name):
    recorded = Recorded(lambda positions: True)
    for value in (0, -1, 2.5, True, "20") if name in GRAIN else ():
        with pytest.raises(InputError, match=rf"{GRAIN[name]} = .*must be a whole number >= 1") as caught:
            SEARCHES[name](10, recorded, **{GRAIN[name]: value})
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="num_blocks = -1"):
        SEARCHES[name](-1, recorded)
    assert not recorded.asked


def test_an_option_out_of_range_is_refused_in_one_line():
    similarities = ([0.5] * 9, [0.5] * 9 + [2.0], [0.5] * 9 + [math.nan])
    for name, option, values in (
        ("mcts", "iterations", [0]),
        ("mcts", "seconds", [-1.0, math.nan]),
        ("mcts", "seed", [-1]),
        ("drd", "stopping", ["early"]),
        ("dred", "stopping", ["early", None]),
        ("mistique", "threshold", [1.5, math.nan]),
        ("mistique", "similarity", similarities),
    ):
        for value in values:
            with pytest.raises(InputError, match=option) as caught:
                ALGORITHMS[name](10, lambda positions: pytest.fail("validated"), **{option: value})
            assert "\n" not in str(caught.value)
            assert option != "stopping" or str(caught.value) == f"stopping = {value!r}: known are listing, published"
