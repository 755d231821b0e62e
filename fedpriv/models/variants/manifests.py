"""A store's records of its models: a manifest for each, what deduplication did to it, and the numbers of the blocks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.models.variants.blocks import BlockLayout, TensorSpec

CATALOGUE = np.dtype([("block", "<i8"), ("sha256", "u1", (32,))])
"""One row for each row of blocks: the block's number, ascending, and the SHA-256 of its values."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Manifest:
    """The description of a stored model, without its values.

    Attributes:
        layout: its tensors and their blocks.
        blocks: [num_blocks] int64, read-only: the number of the stored block at each position. Numbers are permanent:
            two positions with the same number hold the same values, at any time and in any model.
        extras: {name of an extra tensor: SHA-256 of its values}.
        privacy: plain values, as they were given.
        provenance: plain values, as they were given.
        basis: SHA-256 of what it is restored from together with its extras, and then it has no blocks; None for one of
            blocks.
        blocks_sha256: SHA-256 of the values of all its blocks in a row, which is sooner found than that of each block;
            None for one that a basis restores.
        described: see `Store.describe`, as plain values; its uploads are in the index, each once for all models.
    """

    name: str
    layout: BlockLayout
    blocks: NDArray[np.int64]
    extras: Mapping[str, str]
    privacy: Mapping[str, Any]
    provenance: Mapping[str, Any]
    basis: str | None = None
    blocks_sha256: str | None = None
    described: Mapping[str, Any] | None = None

    @property
    def bases(self) -> tuple[str, ...]:
        """The models whose values it may hold, as its provenance says."""
        return tuple(self.provenance.get("bases", ()))

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The outcome of its deduplication, see `dedup.work.Outcome`; empty if it was not deduplicated."""
        return self.provenance.get("outcome") or {}

    def to_json(self) -> bytes:
        """The manifest as the index keeps it, before it is compressed; TypeError if it holds more than plain values."""
        content = {**vars(self), "layout": asdict(self.layout), "blocks": self.blocks.tolist()}
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """The manifest that `to_json` wrote; ValueError, in one line, if it did not."""
        try:
            values = json.loads(content)
            specs = values.pop("layout")
            tensors = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in specs.pop("tensors"))
            layout = BlockLayout(**specs, tensors=tensors)
            blocks = np.array(values.pop("blocks"), np.int64)
            blocks.flags.writeable = False
            found = cls(**values, layout=layout, blocks=blocks)
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no manifest ({type(error).__name__}: {error})") from None
        if blocks.shape != (0 if found.basis else layout.num_blocks,):
            raise ValueError(f"no manifest: blocks {list(blocks.shape)} for a layout of {layout.num_blocks}")
        return found


def array_sha256(array: NDArray[Any]) -> str:
    """SHA-256 of an array's values, in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


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
    digests = [hashlib.sha256(block).digest() for block in np.ascontiguousarray(blocks).view(np.uint8)]
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
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:  # as before any compaction: none is left out
        rows = np.asarray(blocks, np.int64) - numbers[0]
    else:
        rows = np.searchsorted(numbers, blocks)
    known = (rows >= 0) & (rows < len(numbers))
    known[known] = numbers[rows[known]] == blocks[known]
    return np.where(known, rows, -1)


def utilities(outcome: Mapping[str, Any]) -> tuple[float, float] | None:
    """The mean utility before and after, on the records that validated the variant; None if private."""
    before, after = outcome.get("utility_before"), outcome.get("utility_after")
    return None if before is None or after is None else (before, after)


def is_accuracy(outcome: Mapping[str, Any]) -> bool:
    """Whether its utility is accuracy; else it is minus the mean logarithm of the perplexity of responses."""
    return bool(outcome.get("utility", "accuracy") == "accuracy")


def accuracy_after(outcome: Mapping[str, Any]) -> float | None:
    """The accuracy of the variant as it is stored; None if its records are private, or it has a perplexity."""
    found = utilities(outcome)
    return found[1] if found and is_accuracy(outcome) else None


def perplexity_after(outcome: Mapping[str, Any]) -> float | None:
    """The perplexity of responses of the variant as it is stored; None if it has an accuracy, or if it is unknown."""
    found = utilities(outcome)
    return perplexity(found[1]) if found and not is_accuracy(outcome) else None


def perplexity(utility: float) -> float:
    """The perplexity of a mean log likelihood; infinite where that is none."""
    return math.exp(-utility) if utility > -700 else math.inf
