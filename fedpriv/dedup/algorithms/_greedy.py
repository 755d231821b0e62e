"""Batches of a fixed size in saliency order: Greedy-N tries each on its own, Dedup stops at the first that fails."""

from __future__ import annotations

from fedpriv.dedup.algorithms._trials import Accept, BlockSearchResult, Trials, batches, check_whole, run_search


def greedy(num_blocks: int, accept: Accept, *, batch: int = 20) -> BlockSearchResult:
    """Try every batch once in saliency order; a batch that fails is rolled back, and the next one follows.

    Always takes ceil(num_blocks / batch) validations.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation; may raise `BudgetSpent`.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range.

    Source: Guan et al. 2025, section 5.1.2, Greedy-N.
    """
    return _in_batches(num_blocks, accept, batch, until_failure=False)


def dedup(num_blocks: int, accept: Accept, *, batch: int = 20) -> BlockSearchResult:
    """Replace batches in saliency order; the first one that fails is rolled back and ends the search.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation; may raise `BudgetSpent`.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range.

    Source: Zhou et al. 2022, as Guan et al. 2025 describe it in section 3.2, step 3.
    """
    return _in_batches(num_blocks, accept, batch, until_failure=True)


def _in_batches(num_blocks: int, accept: Accept, batch: int, *, until_failure: bool) -> BlockSearchResult:
    check_whole("num_blocks", num_blocks, 0)
    check_whole("batch", batch, 1)

    def walk(trials: Trials) -> None:
        for positions in batches(num_blocks, batch):
            if not trials.extend(positions) and until_failure:
                return

    return run_search(accept, walk)
