"""Dedup: batches of a fixed size until one fails."""

from __future__ import annotations

from fedpriv.dedup.algorithms.trials import Accept, SearchResult, Trials, batches, check_whole, run_search


def dedup(num_blocks: int, accept: Accept, *, batch: int = 20) -> SearchResult:
    """Replace batches in saliency order; the first one that fails is rolled back and ends the search.

    Args:
        num_blocks: positions in saliency order, 0 the least salient; >= 0.
        accept: whether the model with exactly these positions replaced passes validation; may raise `BudgetSpent`.
        batch: N, blocks for each validation, >= 1.

    Raises:
        InputError: a number is out of range.

    Source: Zhou et al. 2022, as Guan et al. 2025 describe it in section 3.2, step 3.
    """
    check_whole("num_blocks", num_blocks, 0)
    check_whole("batch", batch, 1)

    def walk(trials: Trials) -> None:
        for positions in batches(num_blocks, batch):
            if not trials.extend(positions):
                return

    return run_search(accept, walk)
