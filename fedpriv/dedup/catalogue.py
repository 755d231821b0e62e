"""Which stored block has which number, and which number the blocks of a new model get."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CATALOGUE = np.dtype([("block", "<i8"), ("sha256", "u1", (32,))])
"""A row for each row of blocks: the block's number, rising, and the SHA-256 of its values."""


@dataclass(frozen=True, eq=False)
class Numbered:
    """Blocks with their numbers.

    Attributes:
        numbers: [k] int64, equal for equal blocks.
        new: [n, block_size], those of them that were not known, each once, in the order of their numbers.
        catalogue: [n] of `CATALOGUE`, for these.
    """

    numbers: NDArray[np.int64]
    new: NDArray[Any]
    catalogue: NDArray[Any]


def numbered(blocks: NDArray[Any], known: Mapping[bytes, int], next_block: int) -> Numbered:
    """Blocks numbered by content: with the known number where there is one, else from the next on.

    Args:
        blocks: [k, block_size].
        known: {SHA-256 of a block: its number}.
        next_block: above all known numbers.
    """
    digests = [hashlib.sha256(block).digest() for block in np.ascontiguousarray(blocks)]
    places: dict[bytes, int] = {}
    for place, digest in enumerate(digests):
        if digest not in known:
            places.setdefault(digest, place)
    fresh = {digest: next_block + rank for rank, digest in enumerate(places)}
    catalogue = np.empty(len(fresh), CATALOGUE)
    catalogue["block"] = list(fresh.values())
    catalogue["sha256"] = np.frombuffer(b"".join(fresh), np.uint8).reshape(-1, 32)
    numbers = [known[digest] if digest in known else fresh[digest] for digest in digests]
    return Numbered(np.array(numbers, np.int64), blocks[list(places.values())], catalogue)


def numbers_by_digest(catalogue: NDArray[Any]) -> dict[bytes, int]:
    """{SHA-256 of a block: its number}."""
    digests = catalogue["sha256"].tobytes()
    return {digests[32 * row : 32 * row + 32]: number for row, number in enumerate(catalogue["block"].tolist())}


def rows_of(catalogue: NDArray[Any], blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """[k] The rows of blocks with the numbers [k]; -1 where a catalogue has no such block."""
    numbers = catalogue["block"]
    rows = np.searchsorted(numbers, blocks)
    known = rows < len(numbers)
    known[known] = numbers[rows[known]] == blocks[known]
    return np.where(known, rows, -1)
