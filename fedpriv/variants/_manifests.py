"""The records of a store: a manifest for each model, the numbers of the blocks, and the index of what is valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.variants.blocks import BlockLayout, TensorSpec

VERSION = 2
# Version 1 had no shared bases.
_READABLE = (1, 2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Manifest:
    """The description of a stored model, without its values.

    Attributes:
        name: of the model.
        layout: its tensors and their blocks.
        blocks: [num_blocks] int64, read-only: the number of the stored block at each position. Numbers are permanent:
            two positions with the same number hold the same values, at any time and in any model.
        extras: {name of an extra tensor: SHA-256 of its values}.
        privacy: plain values, as they were given.
        provenance: plain values, as they were given.
        basis: SHA-256 of the shared basis that its values come from, and then it has no blocks, and what it adds to the
            basis is among its extras; None if its values are in blocks.
    """

    name: str
    layout: BlockLayout
    blocks: NDArray[np.int64]
    extras: Mapping[str, str]
    privacy: Mapping[str, Any]
    provenance: Mapping[str, Any]
    basis: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        layout: BlockLayout,
        blocks: NDArray[np.int64],
        extras: Mapping[str, NDArray[Any]],
        privacy: Mapping[str, Any] | None,
        provenance: Mapping[str, Any] | None,
        basis: str | None = None,
    ) -> Manifest:
        """The manifest of a model with these extra tensors."""
        return cls(
            name=name,
            layout=layout,
            blocks=blocks,
            extras={tensor: array_sha256(values) for tensor, values in extras.items()},
            privacy=dict(privacy or {}),
            provenance=dict(provenance or {}),
            basis=basis,
        )

    def to_json(self) -> bytes:
        """The manifest's file.

        Raises:
            TypeError: privacy or provenance hold more than plain values.
        """
        content = {**vars(self), "layout": asdict(self.layout), "blocks": self.blocks.tolist()}
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """The manifest in a file that `to_json` wrote."""
        values = json.loads(content)
        layout = values.pop("layout")
        tensors = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in layout.pop("tensors"))
        blocks = np.array(values.pop("blocks"), np.int64)
        blocks.flags.writeable = False
        return cls(**values, layout=BlockLayout(**layout, tensors=tensors), blocks=blocks)


@dataclass(frozen=True)
class Files:
    """SHA-256 of a model's two files, and of the shared basis that it needs, if any."""

    manifest: str
    extras: str
    basis: str | None = None


@dataclass(frozen=True, kw_only=True)
class Index:
    """The state of a store: only the files and rows named here are valid.

    Attributes:
        generation: of the block and catalogue files; every compaction starts a new one.
        block_size: values in a block; 0 before the first model.
        dtype: of the blocks.
        num_rows: valid rows in these two files.
        next_block: the number of the next new block.
        catalogue: SHA-256 of the catalogue's rows.
        models: {name: its files}.
    """

    generation: int = 0
    block_size: int = 0
    dtype: str = "float32"
    num_rows: int = 0
    next_block: int = 0
    catalogue: str = hashlib.sha256().hexdigest()
    models: Mapping[str, Files] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The content of the index file, which includes its own SHA-256."""
        return _sealed({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, content: bytes) -> Index:
        """The index in a file that `to_json` wrote.

        Raises:
            ValueError: in one line, what is wrong with it.
        """
        try:
            values = json.loads(content)["index"]
            version = values.pop("version")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError("damaged: not the JSON of an index") from None
        if content != _sealed({"version": version, **values}):
            raise ValueError("damaged: its SHA-256 does not match")
        if version not in _READABLE:
            raise ValueError(f"version {version}: this fedpriv reads versions {' and '.join(map(str, _READABLE))}")
        return cls(**{**values, "models": {name: Files(**files) for name, files in values["models"].items()}})


def _sealed(index: dict[str, Any]) -> bytes:
    text = json.dumps(index)
    return f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}", "index": {text}}}\n'.encode()


def array_sha256(array: NDArray[Any]) -> str:
    """SHA-256 of an array's values, in C order."""
    return hashlib.sha256(array.tobytes()).hexdigest()


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
