"""The search algorithms by name: which blocks of a target are replaced, with how many validations.

Each is a pure function `search(num_blocks, accept, **options) -> BlockSearchResult` over positions in saliency order.
The set that it returns as replaced is the largest of those that `accept` was asked about and accepted, or empty.
"""

from __future__ import annotations

from collections.abc import Callable

from fedpriv.errors import InputError
from fedpriv.models.dedup._in_order import (
    Accept,
    BlockSearchResult,
    Positions,
    dedup,
    drd,
    dred,
    greedy,
)
from fedpriv.models.dedup._mcts import mcts
from fedpriv.models.dedup.mistique import mistique

__all__ = [
    "ALGORITHMS",
    "LOSSLESS",
    "METHODS",
    "Accept",
    "BlockSearchResult",
    "Positions",
    "Search",
    "algorithm",
]

Search = Callable[..., BlockSearchResult]

ALGORITHMS: dict[str, Search] = {
    "drd": drd,
    "dred": dred,
    "greedy": greedy,
    "mcts": mcts,
    "dedup": dedup,
    "mistique": mistique,
}
"""{name of a search: the search}, for blocks that a variant may take from its base."""

LOSSLESS = "lossless"
"""Not a search: variants are stored bit for bit, see `fedpriv.models.dedup._lossless`."""

METHODS = (*ALGORITHMS, LOSSLESS)
"""Everything by which variants can be stored."""


def algorithm(name: str) -> Search:
    """The search algorithm of that name.

    Raises:
        InputError: there is none, with those that are known.
    """
    if name not in ALGORITHMS:
        raise InputError(f"algorithm = {name!r}: known are {', '.join(METHODS)}")
    return ALGORITHMS[name]
