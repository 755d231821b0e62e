"""What every search algorithm owes: only accepted sets are replaced, and counts are exact."""

import itertools
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InputError
from fedpriv.models.dedup.algorithms import ALGORITHMS
from fedpriv.models.dedup.planning import DedupSettings

# Every algorithm, and `drd` and `dred` with each value of their options; `listing` is the default.
SEARCHES = ALGORITHMS | {
    f"{name}, published": partial(ALGORITHMS[name], stopping="published") for name in ("drd", "dred")
}
# Without the option that says how many positions one validation is about: for `drd` and `dred`, L by the rule.
BY_RULE = {f"{name}, by rule": search for name, search in SEARCHES.items() if name.startswith("dr")}
SEARCHES |= BY_RULE
GRAIN = {name: "min_batch" if name.startswith("dr") else "batch" for name in SEARCHES.keys() - BY_RULE.keys()}
every_algorithm = pytest.mark.parametrize("name", sorted(SEARCHES))
every_grain = pytest.mark.parametrize("name", sorted(GRAIN))


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


def monotone(seed: int, num_blocks: int):
    """Accepts what damages the model less than a bound."""
    generator = random.Random(seed)
    damage = [generator.lognormvariate(0, 1) for _ in range(num_blocks)]
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
@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from([monotone, erratic, noisy]),
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
@pytest.mark.parametrize("grain", [1, 5, 20, 200])
def test_nothing_changes_when_nothing_is_accepted(name, num_blocks, grain):
    result, _ = run(name, num_blocks, lambda positions: False, grain)
    assert result.replaced == frozenset()


@every_algorithm
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7, 64, 101])
@pytest.mark.parametrize("grain", [1, 5, 20, 200])
def test_all_is_replaced_when_all_is_accepted_but_a_trailing_range(name, num_blocks, grain):
    result, _ = run(name, num_blocks, lambda positions: True, grain)
    assert result.replaced == frozenset(range(len(result.replaced))), "what is left is at the end"
    left = num_blocks - len(result.replaced)
    if name in BY_RULE:
        assert left <= 20
    elif "published" in name:
        assert left < max(grain, 2), "it has no half of a single block"
    else:
        assert left < grain if GRAIN[name] == "min_batch" else left == 0


@pytest.mark.parametrize("name", sorted(set(SEARCHES) - {"mcts"}))
def test_sets_only_grow_so_the_last_accepted_one_is_kept(name):
    result, recorded = run(name, 60, monotone(2, 60), 4)
    assert all(one < other for one, other in itertools.pairwise(recorded.accepted))
    assert recorded.accepted
    assert result.replaced == recorded.accepted[-1]


@every_algorithm
def test_the_same_questions_are_asked_again(name):
    accept = monotone(2, 50)
    (one, asked), (other, asked_again) = (run(name, 50, accept, 5) for _ in range(2))
    assert one == other
    assert asked.asked == asked_again.asked


@every_grain
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "20"])
def test_a_batch_out_of_range_is_refused_before_any_validation(name, value):
    recorded = Recorded(lambda positions: True)
    with pytest.raises(InputError, match=rf"{GRAIN[name]} = .*must be a whole number >= 1") as caught:
        SEARCHES[name](10, recorded, **{GRAIN[name]: value})
    assert "\n" not in str(caught.value)
    assert not recorded.asked


@every_algorithm
def test_a_negative_number_of_blocks_is_refused(name):
    with pytest.raises(InputError, match="num_blocks = -1"):
        SEARCHES[name](-1, lambda positions: True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mcts", {"iterations": 0}),
        ("mcts", {"seconds": -1.0}),
        ("mcts", {"seconds": float("nan")}),
        ("mcts", {"seed": -1}),
        ("drd", {"stopping": "never"}),
        ("dred", {"stopping": None}),
        ("mistique", {"threshold": 1.5}),
        ("mistique", {"threshold": float("nan")}),
        ("mistique", {"similarity": [0.5] * 9}),
        ("mistique", {"similarity": [0.5] * 9 + [2.0]}),
        ("mistique", {"similarity": [0.5] * 9 + [float("nan")]}),
    ],
)
def test_an_option_out_of_range_is_refused_in_one_line(name, options):
    with pytest.raises(InputError, match=next(iter(options))) as caught:
        ALGORITHMS[name](10, lambda positions: True, **options)
    assert "\n" not in str(caught.value)


def test_unknown_algorithms_are_refused_with_the_known_ones():
    with pytest.raises(InputError, match="algorithm = 'bogus': known are drd, dred, greedy, mcts, dedup, mistique"):
        DedupSettings(algorithm="bogus")
