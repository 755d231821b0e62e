"""Monte Carlo tree search over which batches of blocks are replaced."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedpriv.models.dedup._in_order import (
    Accept,
    BlockSearchResult,
    Positions,
    Trials,
    batches,
    check_number,
    check_whole,
    run_search,
)

# A state is a set of batches, encoded in the bits of an integer: bit k is set if batch k is replaced.
State = int

# UCB1's exploration constant for rewards in [0, 1] (Kocsis and Szepesvari 2006).
_EXPLORATION = math.sqrt(2)


def mcts(
    num_blocks: int,
    accept: Accept,
    *,
    batch: int = 20,
    iterations: int = 20,
    seconds: float | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> BlockSearchResult:
    """The largest accepted set that the iterations visited.

    An iteration descends from the state without replacements: through known states by upper confidence bounds, then
    to one new state, the least salient batch first, then by random batches until a validation fails or no batch
    remains. Its reward is the share of blocks replaced by then. No state is validated twice, and the search ends
    early when everything is replaced or no state remains to be tried.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation.
        batch: N, blocks that one action replaces, >= 1.
        iterations: descents, >= 1.
        seconds: no iteration begins later than this, >= 0; None sets no time limit, so that the result depends on the
            arguments only.
        seed: of the random batches.
        clock: returns the time in seconds, for `seconds`.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, section 5.1.2; Chaslot 2010.
    """
    check_whole("num_blocks", num_blocks, 0)
    check_whole("batch", batch, 1)
    check_whole("iterations", iterations, 1)
    check_whole("seed", seed, 0)
    if seconds is not None:
        check_number("seconds", seconds, 0)

    def walk(trials: Trials) -> None:
        tree = _Tree(trials, batches(num_blocks, batch), random.Random(seed))
        begin = clock()
        for _ in range(iterations):
            if tree.exhausted or (seconds is not None and clock() - begin >= seconds):
                return
            tree.iterate()

    return run_search(accept, walk)


@dataclass
class _Tree:
    """The states visited so far: whether they passed, their visits, and the sums of their rewards."""

    trials: Trials
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

    def _positions(self, state: State) -> Positions:
        chosen = (group for k, group in enumerate(self.groups) if state >> k & 1)
        return Positions(position for group in chosen for position in group)

    def _learn(self, path: list[State]) -> None:
        """Back-propagate the share of blocks replaced in the path's last state; mark states without children."""
        reward = len(self._positions(path[-1])) / self.groups[-1].stop
        for state in dict.fromkeys(path):
            self.visits[state] = self.visits.get(state, 0) + 1
            self.rewards[state] = self.rewards.get(state, 0.0) + reward
        for state in reversed(path):
            if not self._children(state):
                self.finished.add(state)
