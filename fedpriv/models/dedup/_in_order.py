"""Searches that replace blocks in saliency order, and the parts that all searches share.

Greedy-N and Dedup take batches of a fixed size: Greedy-N tries each on its own, Dedup stops at the first that fails.
Dynamic ranges start with large ranges of unimportant blocks, and halve one when its validation fails.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from fedpriv.errors import InputError
from fedpriv.privacy.mechanisms.svt import CutoffReached

Positions = frozenset[int]
Accept = Callable[[Positions], bool]
Stopping = Literal["listing", "published"]

BLOCKS_PER_VALIDATION = 20
"""The worth of a validation: Guan et al. 2025 compare their searches with Greedy-20."""

LEAST_BATCH = 5
"""The least L by the rule: of 10, 5 and 2 the one chosen on the tuning records of `simulations.studies.dedup`."""

# L, for a range that begins at a given position.
_Least = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class BlockSearchResult:
    """Positions in saliency order whose blocks are replaced, as validation accepted, and how often it was asked."""

    replaced: Positions
    num_validations: int


class Trials:
    """The validations of one search: keeps only sets that passed, and counts every answer once."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._largest: Positions = frozenset()
        self._num_validations = 0

    @property
    def result(self) -> BlockSearchResult:
        """The largest set that passed so far, the earliest among equals; the last one if sets only grow."""
        return BlockSearchResult(replaced=self._largest, num_validations=self._num_validations)

    def passes(self, positions: Positions) -> bool:
        """Whether the model with exactly these positions replaced passes validation."""
        passed = self._accept(positions)
        self._num_validations += 1
        if passed and len(positions) > len(self._largest):
            self._largest = positions
        return passed

    def extend(self, positions: Iterable[int]) -> bool:
        """Replace these positions too, or roll them back if validation fails; whether it passed."""
        return self.passes(self._largest.union(positions))


def run_search(accept: Accept, walk: Callable[[Trials], None]) -> BlockSearchResult:
    """The result of `walk` when it returns, or when no further answer is paid for."""
    trials = Trials(accept)
    with suppress(CutoffReached):
        walk(trials)
    return trials.result


def batches(num_blocks: int, batch: int) -> list[range]:
    """The positions in saliency order, `batch` at a time; the last batch may be shorter."""
    return [range(begin, min(begin + batch, num_blocks)) for begin in range(0, num_blocks, batch)]


def check_whole(name: str, value: int, minimum: int) -> None:
    """Refuse, with an InputError, a value that is not a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name} = {value!r}: must be a whole number >= {minimum}")


def check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse, with an InputError, a value that is not a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        bounds = f"must lie in [{low:g}, {high:g}]" if high < math.inf else f"must be finite and >= {low:g}"
        raise InputError(f"{name} = {value!r}: {bounds}")


def greedy(num_blocks: int, accept: Accept, *, batch: int = 20) -> BlockSearchResult:
    """Try every batch once in saliency order; a batch that fails is rolled back, and the next one follows.

    Always takes ceil(num_blocks / batch) validations.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, section 5.1.2, Greedy-N.
    """
    check_whole("num_blocks", num_blocks, 0)
    return in_batches(range(num_blocks), accept, batch, until_failure=False)


def dedup(num_blocks: int, accept: Accept, *, batch: int = 20) -> BlockSearchResult:
    """Replace batches in saliency order; the first one that fails is rolled back and ends the search.

    Arguments and errors are those of `greedy`.

    Source: Zhou et al. 2022, as Guan et al. 2025 describe it in section 3.2, step 3.
    """
    check_whole("num_blocks", num_blocks, 0)
    return in_batches(range(num_blocks), accept, batch, until_failure=True)


def in_batches(positions: Sequence[int], accept: Accept, batch: int, *, until_failure: bool) -> BlockSearchResult:
    """Try these positions, a batch at a time, and end at the first that fails if asked for."""
    check_whole("batch", batch, 1)

    def walk(trials: Trials) -> None:
        for part in batches(len(positions), batch):
            if not trials.extend(positions[part.start : part.stop]) and until_failure:
                return

    return run_search(accept, walk)


def drd(
    num_blocks: int, accept: Accept, *, min_batch: int | None = None, stopping: Stopping = "listing"
) -> BlockSearchResult:
    """Dynamic-range deduplication: try the left half of a range, search it on failure, then do the right half.

    By default it takes fewer validations than Greedy-20, see `shortest_range`. If every validation passes, everything
    is replaced except a last range shorter than L, in at most log2(num_blocks) + 1 validations.

    Args:
        min_batch: L >= 1; a range of fewer blocks is left as it is. None takes `shortest_range` for each range.
        stopping: `listing` does every right half, as Algorithm 4 does. `published` does it only where more than half of
            the blocks of the left were replaced, as the authors' code does, which also rounds the middle of an odd
            range down instead of up.

    Raises:
        InputError: a number is out of range, or `stopping` is unknown.

    Source: Guan et al. 2025, Algorithm 4, with L as in section 4.3.3: "fewer than L blocks". The listing's `r - l < L`
    also leaves a range of exactly L, so its L is `min_batch` - 1. A single block that failed is not tried again.
    `published`: batch_dedup/drd.py of their code (asu-cactus/DP_Dedup), where L = 1 never ends and is taken as 2.
    """
    return _by_ranges(_halve, num_blocks, accept, min_batch, stopping)


def dred(
    num_blocks: int, accept: Accept, *, min_batch: int | None = None, stopping: Stopping = "listing"
) -> BlockSearchResult:
    """Dynamic-range-expansion deduplication: as `drd`, but the next range always extends to the last block.

    Every position is passed once: the listing's outer calls are skipped if an inner call has already reached the last
    block of their ranges; otherwise the number of validations would explode.

    Args:
        num_blocks, accept, min_batch: as for `drd`.
        stopping: `listing` leaves a range that is too short and goes on after it. `published` ends the search there, as
            the authors' code does, which also rounds the middle of an odd range down instead of up.

    Raises:
        InputError: a number is out of range, or `stopping` is unknown.

    Source: Guan et al. 2025, section 4.3.3, Algorithm 4 with line 17 for |B| - 1 in place of r. `published`:
    batch_dedup/dred.py of their code (asu-cactus/DP_Dedup), where L = 1 never ends and is taken as 2.
    """
    return _by_ranges(_halve_and_expand, num_blocks, accept, min_batch, stopping)


def shortest_range(num_blocks: int, begin: int, num_validations: int) -> float:
    """L by the rule: half of the blocks from `begin` on that come to each validation that is still affordable.

    A search may take one validation fewer than Greedy-20 would. What large ranges save at first is spent on short ones
    later, and what is spent on failures makes the next ranges longer. Known from the number of blocks and from answers
    already given, so that private validation pays for nothing else.

    Args:
        num_blocks: of the target, >= 0.
        begin: first position of the range, in [0, num_blocks]; all positions before it are decided.
        num_validations: so far, >= 0.

    Returns:
        Blocks, at least `LEAST_BATCH`; infinity once no validation is affordable.
    """
    affordable = math.ceil(num_blocks / BLOCKS_PER_VALIDATION) - 1 - num_validations
    if affordable <= 0:
        return math.inf
    return max(LEAST_BATCH, (num_blocks - begin) / (2 * affordable))


def _by_ranges(
    search: Callable[..., object], num_blocks: int, accept: Accept, min_batch: int | None, stopping: Stopping
) -> BlockSearchResult:
    check_whole("num_blocks", num_blocks, 0)
    if min_batch is not None:
        check_whole("min_batch", min_batch, 1)
    if stopping not in get_args(Stopping):
        raise InputError(f"stopping = {stopping!r}: known are {', '.join(get_args(Stopping))}")

    def walk(trials: Trials) -> None:
        search(trials, 0, num_blocks, least=_least(trials, num_blocks, min_batch, stopping), stopping=stopping)

    return run_search(accept, walk)


def _least(trials: Trials, num_blocks: int, min_batch: int | None, stopping: Stopping) -> _Least:
    if min_batch is None:
        return lambda begin: shortest_range(num_blocks, begin, trials.result.num_validations)
    # The published code would validate the empty left half of a single block for ever.
    least = max(min_batch, 2) if stopping == "published" else min_batch
    return lambda begin: least


def _halve(trials: Trials, begin: int, end: int, *, least: _Least, stopping: Stopping) -> int:
    """Algorithm 4 on the range [begin, end); the number of its blocks that were replaced."""
    if end - begin < least(begin):
        return 0
    halve = partial(_halve, trials, least=least, stopping=stopping)
    middle = _middle(begin, end, stopping)
    length = replaced = middle - begin
    if not trials.extend(range(begin, middle)):
        replaced = halve(begin, middle) if length > 1 else 0
    if stopping == "listing" or 2 * replaced > length:
        replaced += halve(middle, end)
    return replaced


def _halve_and_expand(trials: Trials, begin: int, num_blocks: int, *, least: _Least, stopping: Stopping) -> None:
    """The expansion: a range [begin, end) shrinks until it is accepted or too short; then the next one begins."""
    end = num_blocks
    while begin < num_blocks:
        if end - begin < least(begin):
            if stopping == "published":
                return
            begin, end = end, num_blocks
            continue
        middle = _middle(begin, end, stopping)
        if trials.extend(range(begin, middle)) or (middle - begin == 1 and stopping == "listing"):
            begin, end = middle, num_blocks
        else:
            end = middle


def _middle(begin: int, end: int, stopping: Stopping) -> int:
    """End of the left half [begin, middle): m + 1 for the listing's m = (l + r) // 2, l = begin, r = end - 1."""
    return begin + (end - begin + (stopping == "listing")) // 2
