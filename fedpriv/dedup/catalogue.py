"""The numbers of stored blocks, and those that the blocks of a new model get."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CATALOGUE = np.dtype([("block", "<i8"), ("sha256", "u1", (32,))])
"""One row for each row of blocks: the block's number, ascending, and the SHA-256 of its values."""


@dataclass(frozen=True, eq=False)
class NumberedBlocks:
    """Blocks with their numbers.

    Attributes:
        numbers: [k] int64, equal for equal blocks.
        new: [n, block_size], the blocks that were not known, each once, in the order of their numbers.
        catalogue: [n] of `CATALOGUE`, for the new blocks.
    """

    numbers: NDArray[np.int64]
    new: NDArray[Any]
    catalogue: NDArray[Any]


def number_blocks(blocks: NDArray[Any], known: Mapping[bytes, int], next_block: int) -> NumberedBlocks:
    """Blocks numbered by content: a known block keeps its number, others are numbered from `next_block` on.

    Args:
        blocks: [k, block_size].
        known: {SHA-256 of a block: its number}.
        next_block: above all known numbers.
    """
    digests = [hashlib.sha256(block).digest() for block in np.ascontiguousarray(blocks)]
    first_index: dict[bytes, int] = {}
    for index, digest in enumerate(digests):
        if digest not in known:
            first_index.setdefault(digest, index)
    new = {digest: next_block + rank for rank, digest in enumerate(first_index)}
    catalogue = np.empty(len(new), CATALOGUE)
    catalogue["block"] = list(new.values())
    catalogue["sha256"] = np.frombuffer(b"".join(new), np.uint8).reshape(-1, 32)
    numbers = [known[digest] if digest in known else new[digest] for digest in digests]
    return NumberedBlocks(np.array(numbers, np.int64), blocks[list(first_index.values())], catalogue)


def numbers_by_digest(catalogue: NDArray[Any]) -> dict[bytes, int]:
    """{SHA-256 of a block: its number}."""
    digests = catalogue["sha256"].tobytes()
    return {digests[32 * row : 32 * row + 32]: number for row, number in enumerate(catalogue["block"].tolist())}


def rows_of(catalogue: NDArray[Any], blocks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """[k] The rows of the blocks with numbers [k]; -1 where the catalogue has no such block."""
    numbers = catalogue["block"]
    rows = np.searchsorted(numbers, blocks)
    known = rows < len(numbers)
    known[known] = numbers[rows[known]] == blocks[known]
    return np.where(known, rows, -1)
