"""Dynamic-range deduplication: large ranges of unimportant blocks first, halved when validation fails."""

from __future__ import annotations

from fedpriv.dedup.algorithms.trials import Accept, SearchResult, Trials, check_whole, run_search

MIN_BATCH = 30


def drd(num_blocks: int, accept: Accept, *, min_batch: int = MIN_BATCH) -> SearchResult:
    """Dynamic-range deduplication: try the left half of a range, search it on failure, then do the right half.

    If every validation passes, everything is replaced except a last range shorter than `min_batch`, in at most
    log2(num_blocks) + 1 validations.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation; may raise `BudgetSpent`.
        min_batch: L >= 1; a range of fewer blocks is left as it is.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, Algorithm 4, with L as in section 4.3.3: "fewer than L blocks". The listing's `r - l < L`
    also leaves a range of exactly L, so its L is `min_batch` - 1. A single block that failed is not tried again.
    """
    _check(num_blocks, min_batch)
    return run_search(accept, lambda trials: _halve(trials, num_blocks, min_batch))


def dred(num_blocks: int, accept: Accept, *, min_batch: int = MIN_BATCH) -> SearchResult:
    """Dynamic-range-expansion deduplication: as `drd`, but the next range always extends to the last block.

    Every position is passed once: the listing's outer calls are skipped if an inner call has already reached the last
    block of their ranges; otherwise the number of validations would explode.

    Args:
        num_blocks: as for `drd`.
        accept: as for `drd`.
        min_batch: as for `drd`.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, section 4.3.3, Algorithm 4 with line 17 for |B| - 1 in place of r.
    """
    _check(num_blocks, min_batch)
    return run_search(accept, lambda trials: _halve_and_expand(trials, num_blocks, min_batch))


def _check(num_blocks: int, min_batch: int) -> None:
    check_whole("num_blocks", num_blocks, 0)
    check_whole("min_batch", min_batch, 1)


def _halve(trials: Trials, num_blocks: int, min_batch: int) -> None:
    """Algorithm 4, with a stack of ranges [begin, end) instead of recursion."""
    ranges = [(0, num_blocks)]
    while ranges:
        begin, end = ranges.pop()
        if end - begin < min_batch or begin == end:
            continue
        middle = _middle(begin, end)
        ranges.append((middle, end))
        if not trials.extend(range(begin, middle)) and middle - begin > 1:
            ranges.append((begin, middle))


def _halve_and_expand(trials: Trials, num_blocks: int, min_batch: int) -> None:
    """The expansion: a range [begin, end) shrinks until it is accepted or too short; then the next one begins."""
    begin, end = 0, num_blocks
    while begin < num_blocks:
        if end - begin < min_batch:
            begin, end = end, num_blocks
            continue
        middle = _middle(begin, end)
        if trials.extend(range(begin, middle)) or middle - begin == 1:
            begin, end = middle, num_blocks
        else:
            end = middle


def _middle(begin: int, end: int) -> int:
    """End of the left half [begin, middle): m + 1 for the listing's m = (l + r) // 2, l = begin, r = end - 1."""
    return (begin + end - 1) // 2 + 1
