"""The search algorithms by name: which blocks of a target are replaced, with how many validations.

Each is a pure function `search(num_blocks, accept, **options) -> SearchResult` over positions in saliency order. What
it returns as replaced is one of the sets that `accept` was asked about and accepted, the largest of them, or empty.
"""

from __future__ import annotations

from collections.abc import Callable

from fedpriv.dedup.algorithms.dedup import dedup
from fedpriv.dedup.algorithms.dynamic import drd, dred
from fedpriv.dedup.algorithms.greedy import greedy
from fedpriv.dedup.algorithms.mcts import mcts
from fedpriv.dedup.algorithms.mistique import mistique
from fedpriv.dedup.algorithms.trials import Accept, BudgetSpent, Positions, SearchResult
from fedpriv.errors import InputError

__all__ = [
    "ALGORITHMS",
    "METHODS",
    "SHARED_BASIS",
    "Accept",
    "BudgetSpent",
    "Positions",
    "Search",
    "SearchResult",
    "algorithm",
]

Search = Callable[..., SearchResult]

ALGORITHMS: dict[str, Search] = {
    "drd": drd,
    "dred": dred,
    "greedy": greedy,
    "mcts": mcts,
    "dedup": dedup,
    "mistique": mistique,
}
"""{name of a search: the search}, for blocks that a variant may take from its base."""

SHARED_BASIS = "shared-basis"
"""Not a search: variants are stored by a basis of their values, see `fedpriv.dedup.basis_pipeline`."""

METHODS = (*ALGORITHMS, SHARED_BASIS)
"""Everything by which variants can be stored."""


def algorithm(name: str) -> Search:
    """The search algorithm of that name.

    Raises:
        InputError: there is none, with those that are known.
    """
    if name not in ALGORITHMS:
        raise InputError(f"algorithm = {name!r}: known are {', '.join(METHODS)}")
    return ALGORITHMS[name]
