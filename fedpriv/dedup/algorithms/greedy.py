"""Greedy-N: batches of a fixed size, each kept or rolled back on its own."""

from __future__ import annotations

from fedpriv.dedup.algorithms.trials import Accept, SearchResult, Trials, batches, check_whole, run_search


def greedy(num_blocks: int, accept: Accept, *, batch: int = 20) -> SearchResult:
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
    check_whole("num_blocks", num_blocks, 0)
    check_whole("batch", batch, 1)

    def walk(trials: Trials) -> None:
        for positions in batches(num_blocks, batch):
            trials.extend(positions)

    return run_search(accept, walk)
