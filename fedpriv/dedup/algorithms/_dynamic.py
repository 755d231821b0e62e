"""Dynamic-range deduplication: large ranges of unimportant blocks first, halved when validation fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from fedpriv.dedup.algorithms._trials import Accept, BlockSearchResult, Trials, check_whole, run_search
from fedpriv.errors import InputError

Stopping = Literal["listing", "published"]

BLOCKS_PER_VALIDATION = 20
"""The worth of a validation: Guan et al. 2025 compare their searches with Greedy-20."""

LEAST_BATCH = 5
"""The least L by the rule: of 10, 5 and 2 the one chosen on the tuning records of `simulations.studies.dedup`."""

# L, for a range that begins at a given position.
_Least = Callable[[int], float]


def drd(
    num_blocks: int, accept: Accept, *, min_batch: int | None = None, stopping: Stopping = "listing"
) -> BlockSearchResult:
    """Dynamic-range deduplication: try the left half of a range, search it on failure, then do the right half.

    By default it takes fewer validations than Greedy-20, see `shortest_range`. If every validation passes, everything
    is replaced except a last range shorter than L, in at most log2(num_blocks) + 1 validations.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation; may raise `BudgetSpent`.
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
    _check(num_blocks, min_batch, stopping)

    def walk(trials: Trials) -> None:
        least = _least(trials, num_blocks, min_batch, stopping)
        _halve(trials, 0, num_blocks, least=least, stopping=stopping)

    return run_search(accept, walk)


def dred(
    num_blocks: int, accept: Accept, *, min_batch: int | None = None, stopping: Stopping = "listing"
) -> BlockSearchResult:
    """Dynamic-range-expansion deduplication: as `drd`, but the next range always extends to the last block.

    Every position is passed once: the listing's outer calls are skipped if an inner call has already reached the last
    block of their ranges; otherwise the number of validations would explode.

    Args:
        num_blocks: as for `drd`.
        accept: as for `drd`.
        min_batch: as for `drd`.
        stopping: `listing` leaves a range that is too short and goes on after it. `published` ends the search there, as
            the authors' code does, which also rounds the middle of an odd range down instead of up.

    Raises:
        InputError: a number is out of range, or `stopping` is unknown.

    Source: Guan et al. 2025, section 4.3.3, Algorithm 4 with line 17 for |B| - 1 in place of r. `published`:
    batch_dedup/dred.py of their code (asu-cactus/DP_Dedup), where L = 1 never ends and is taken as 2.
    """
    _check(num_blocks, min_batch, stopping)

    def walk(trials: Trials) -> None:
        least = _least(trials, num_blocks, min_batch, stopping)
        _halve_and_expand(trials, num_blocks, least=least, stopping=stopping)

    return run_search(accept, walk)


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


def _check(num_blocks: int, min_batch: int | None, stopping: str) -> None:
    check_whole("num_blocks", num_blocks, 0)
    if min_batch is not None:
        check_whole("min_batch", min_batch, 1)
    if stopping not in get_args(Stopping):
        raise InputError(f"stopping = {stopping!r}: known are {', '.join(get_args(Stopping))}")


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


def _halve_and_expand(trials: Trials, num_blocks: int, *, least: _Least, stopping: Stopping) -> None:
    """The expansion: a range [begin, end) shrinks until it is accepted or too short; then the next one begins."""
    begin, end = 0, num_blocks
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
