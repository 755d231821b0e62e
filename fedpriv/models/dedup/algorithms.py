"""The search algorithms by name: which blocks of a target are replaced, with how many validations.

Each is a pure function `search(num_blocks, accept, **options) -> BlockSearchResult` over positions in saliency order.
The set that it returns as replaced is the largest of those that `accept` was asked about and accepted, or empty. Those
that take blocks in order are in `_in_order`. Here are Mistique, which validates only blocks that MinHash finds similar
to their substitutes, and a Monte Carlo tree search over which batches are replaced.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError
from fedpriv.models.dedup import _in_order

Search = Callable[..., _in_order.BlockSearchResult]

LOSSLESS = "lossless"
"""Not a search: variants are stored bit for bit, see `fedpriv.models.dedup.pipeline`."""

Blocks = npt.NDArray[np.floating]
Words = npt.NDArray[np.uint64]

# A state is a set of batches, encoded in the bits of an integer: bit k is set if batch k is replaced.
State = int

# UCB1's exploration constant for rewards in [0, 1] (Kocsis and Szepesvari 2006).
_EXPLORATION = math.sqrt(2)


def mistique(
    num_blocks: int,
    accept: _in_order.Accept,
    *,
    similarity: Sequence[float] | npt.NDArray[np.float64] | None = None,
    threshold: float = 0.5,
    batch: int = 20,
) -> _in_order.BlockSearchResult:
    """Replace similar blocks in batches in saliency order; the first batch that fails ends the search.

    Args:
        similarity: [num_blocks], in [0, 1]: of each position's block to its substitute, from `minhash_similarity`;
            None treats every block as similar, which gives `dedup`.
        threshold: in [0, 1]; blocks that are less similar are left as they are.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range, or the number of similarities is not that of the blocks.

    Source: Vartak et al. 2018, with the saliency order and the validation that Guan et al. 2025 add in section 5.1.2.
    """
    _in_order.check_whole("num_blocks", num_blocks, 0)
    _in_order.check_number("threshold", threshold, 0, 1)
    values = np.ones(num_blocks) if similarity is None else np.asarray(similarity, dtype=np.float64)
    if values.shape != (num_blocks,):
        raise InputError(f"similarity of shape {values.shape}: must be one number for each of {num_blocks} blocks")
    if not ((values >= 0) & (values <= 1)).all():
        raise InputError("similarity: every number must lie in [0, 1]")
    return _in_order.in_batches(np.flatnonzero(values >= threshold).tolist(), accept, batch, until_failure=True)


def minhash_similarity(
    blocks: Blocks, substitutes: Blocks, *, step: float, num_hashes: int = 128, seed: int = 0
) -> npt.NDArray[np.float64]:
    """MinHash estimates of each block's Jaccard similarity to its substitute, float64 [blocks], in [0, 1].

    A block is treated as the set of its pairs (index, value rounded to a multiple of `step`). If a share s of the
    indices has equal rounded values, the similarity is s / (2 - s), estimated with a standard deviation of at most
    0.5 / sqrt(num_hashes).

    Args:
        blocks: [blocks, values], finite.
        substitutes: [blocks, values], finite; row i is the substitute of block i.
        step: > 0, units of the weights, at least the largest weight times 2^-62; the resolution of equal values.
        seed: of the hash functions, >= 0.

    Raises:
        InputError: a number is out of range, or the shapes differ.

    Source: Broder 1997.
    """
    _in_order.check_number("step", step, 0)
    _in_order.check_whole("num_hashes", num_hashes, 1)
    _in_order.check_whole("seed", seed, 0)
    if step == 0:
        raise InputError("step = 0: must be > 0")
    if blocks.shape != substitutes.shape or blocks.ndim != 2:
        raise InputError(f"blocks of shape {blocks.shape} and {substitutes.shape}: must be two equal [blocks, values]")
    generator = np.random.default_rng(seed)
    factors, shifts = generator.integers(0, 2**64, size=(2, num_hashes), dtype=np.uint64)
    hashes = factors | np.uint64(1), shifts
    same = [
        np.mean(_signature(block, step, hashes) == _signature(other, step, hashes))
        for block, other in zip(blocks, substitutes, strict=True)
    ]
    return np.array(same, dtype=np.float64)


def _signature(block: npt.NDArray[np.floating], step: float, hashes: tuple[Words, Words]) -> Words:
    """The minimum of each hash function over the block's set, [hashes]."""
    cells = np.rint(block.astype(np.float64) / step).astype(np.int64).view(np.uint64)
    indices = np.arange(len(block), dtype=np.uint64)
    elements = _mixed(cells ^ _mixed(indices))
    return np.array([(elements * factor + shift).min(initial=2**64 - 1) for factor, shift in zip(*hashes, strict=True)])


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser: every bit of a word affects every bit of the result (Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mcts(
    num_blocks: int,
    accept: _in_order.Accept,
    *,
    batch: int = 20,
    iterations: int = 20,
    seconds: float | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> _in_order.BlockSearchResult:
    """The largest accepted set that the iterations visited.

    An iteration descends from the state without replacements: through known states by upper confidence bounds, then
    to one new state, the least salient batch first, then by random batches until a validation fails or no batch
    remains. Its reward is the share of blocks replaced by then. No state is validated twice, and the search ends
    early when everything is replaced or no state remains to be tried.

    Args:
        batch: N, blocks that one action replaces, >= 1.
        iterations: descents, >= 1.
        seconds: no iteration begins later than this, >= 0; None sets no time limit, so that the result depends on the
            arguments only.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, section 5.1.2; Chaslot 2010.
    """
    _in_order.check_whole("num_blocks", num_blocks, 0)
    _in_order.check_whole("batch", batch, 1)
    _in_order.check_whole("iterations", iterations, 1)
    _in_order.check_whole("seed", seed, 0)
    if seconds is not None:
        _in_order.check_number("seconds", seconds, 0)

    def walk(trials: _in_order.Trials) -> None:
        tree = _Tree(trials, _in_order.batches(num_blocks, batch), random.Random(seed))
        begin = clock()
        for _ in range(iterations):
            if tree.exhausted or (seconds is not None and clock() - begin >= seconds):
                return
            tree.iterate()

    return _in_order.run_search(accept, walk)


ALGORITHMS: dict[str, Search] = {
    "drd": _in_order.drd,
    "dred": _in_order.dred,
    "greedy": _in_order.greedy,
    "mcts": mcts,
    "dedup": _in_order.dedup,
    "mistique": mistique,
}
"""{name of a search: the search}, for blocks that a variant may take from its base."""


METHODS = (*ALGORITHMS, LOSSLESS)
"""Everything by which variants can be stored."""


@dataclass
class _Tree:
    """The states visited so far: whether they passed, their visits, and the sums of their rewards."""

    trials: _in_order.Trials
    groups: list[range]
    generator: random.Random
    passed: dict[State, bool] = field(default_factory=lambda: {0: True})
    visits: dict[State, int] = field(default_factory=dict)
    rewards: dict[State, float] = field(default_factory=dict)
    finished: set[State] = field(default_factory=set)

    @property
    def exhausted(self) -> bool:
        """Whether everything is replaced, or every reachable state is known."""
        everything = (1 << len(self.groups)) - 1
        return self.passed.get(everything, False) or 0 in self.finished

    def iterate(self) -> None:
        """One descent from the root, and back-propagation of its reward along the path."""
        path = [0]
        while (state := self._next(path[-1])) is not None:
            known = state in self.passed
            if not self._passes(state):
                break
            path.append(state)
            if not known:
                path.append(self._rollout(state))
                break
        self._learn(path)

    def _next(self, state: State) -> State | None:
        """The first new child, else the best unfinished one; None if there is no such child."""
        children = self._children(state)
        new = [child for child in children if child not in self.passed]
        if new:
            return new[0]
        return max(children, key=lambda child: self._bound(state, child), default=None)

    def _rollout(self, state: State) -> State:
        """The last state that passes when random batches are added."""
        while children := self._children(state):
            child = self.generator.choice(children)
            if not self._passes(child):
                break
            state = child
        return state

    def _children(self, state: State) -> list[State]:
        """The states with one more batch, the least salient first, except failed and finished ones."""
        bits = (1 << k for k in range(len(self.groups)))
        children = (state | bit for bit in bits if not state & bit)
        return [child for child in children if self.passed.get(child, True) and child not in self.finished]

    def _bound(self, parent: State, child: State) -> float:
        """UCB1: mean reward plus exploration term; a state reached only by a random batch comes first."""
        if not self.visits.get(child):
            return math.inf
        mean = self.rewards[child] / self.visits[child]
        # A parent reached only by random batches has no visits of its own.
        return mean + _EXPLORATION * math.sqrt(math.log(max(self.visits.get(parent, 0), 1)) / self.visits[child])

    def _passes(self, state: State) -> bool:
        """Whether the state passes validation, which is run only once for each state."""
        if state not in self.passed:
            self.passed[state] = self.trials.passes(self._positions(state))
        return self.passed[state]

    def _positions(self, state: State) -> _in_order.Positions:
        chosen = (group for k, group in enumerate(self.groups) if state >> k & 1)
        return _in_order.Positions(position for group in chosen for position in group)

    def _learn(self, path: list[State]) -> None:
        """Back-propagate the share of blocks replaced in the path's last state; mark states without children."""
        reward = len(self._positions(path[-1])) / self.groups[-1].stop
        for state in dict.fromkeys(path):
            self.visits[state] = self.visits.get(state, 0) + 1
            self.rewards[state] = self.rewards.get(state, 0.0) + reward
        for state in reversed(path):
            if not self._children(state):
                self.finished.add(state)
