"""A model in blocks: how tensors are cut and restored, bit for bit, and a store's record of each model.

A record is a manifest, what deduplication did to the model, and the numbers of its blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from fedpriv.errors import InputError

Tensors = dict[str, NDArray[Any]]
"""{name: array} of one model"""

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LEAST_VALUES, MOST_VALUES, WANTED_BLOCKS = 64, 1024, 256
DTYPES = ("bool", *_INTEGERS, "float16", np.dtype(ml_dtypes.bfloat16).name, "float32", "float64")

# Their names in safetensors.
_CODES = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "BF16", "F32", "F64")

_BY_CODE = dict(zip(_CODES, DTYPES, strict=True))

CATALOGUE = np.dtype([("block", "<i8"), ("sha256", "u1", (32,))])
"""One row for each row of blocks: the block's number, ascending, and the SHA-256 of its values."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape, () for a single value, and dtype, one of `DTYPES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return self.size * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The tensors of a model, and the place of their values in its blocks.

    Tensors of `dtype` with at least `block_size` values are flattened and cut into blocks, one after another in the
    order of their names; the last block of each is padded with zeros. All others, the extras, are kept as they are.

    Attributes:
        block_size: values in a block, >= 1.
        dtype: of the blocks, one of `DTYPES`.
        tensors: in the order of their names.

    Raises:
        InputError: block_size, a dtype or a shape cannot be used.

    Source: Guan et al. 2025, section 4.5.
    """

    block_size: int
    dtype: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"block_size = {self.block_size}: needs at least 1 value in a block")
        for name, dtype in [("dtype", self.dtype), *((f"tensor {t.name!r}", t.dtype) for t in self.tensors)]:
            if dtype not in DTYPES:
                raise InputError(f"{name}: values of type {dtype} cannot be stored; use one of {', '.join(DTYPES)}")
        for tensor in self.tensors:
            if not all(isinstance(size, int) and size >= 0 for size in tensor.shape):
                raise InputError(f"tensor {tensor.name!r}: {list(tensor.shape)} is no shape")

    @cached_property
    def blocked(self) -> dict[str, range]:
        """{tensor that is cut into blocks: the positions of its blocks}."""
        positions, first = {}, 0
        for tensor in self.tensors:
            if tensor.dtype == self.dtype and tensor.size >= self.block_size:
                positions[tensor.name] = range(first, first + -(-tensor.size // self.block_size))
                first = positions[tensor.name].stop
        return positions

    @cached_property
    def extras(self) -> tuple[TensorSpec, ...]:
        """The tensors that are not cut into blocks."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.blocked)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a model."""
        return sum(map(len, self.blocked.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, without padding."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @cached_property
    def padded_bytes(self) -> int:
        """The bytes of all blocks and extras: the memory of a model."""
        blocks = self.num_blocks * self.block_size * np.dtype(self.dtype).itemsize
        return blocks + sum(extra.num_bytes for extra in self.extras)

    def to_blocks(self, tensors: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], Tensors]:
        """The model as blocks [num_blocks, block_size] of `dtype`, copied, and {name: extra}, the arrays given.

        InputError if the tensors have another layout, by the first that differs.
        """
        if difference := self.difference(layout_of(tensors, self.block_size, self.dtype)):
            raise InputError(f"tensors: another architecture: {difference}")
        blocks = np.zeros((self.num_blocks, self.block_size), self.dtype)
        extras = {tensor.name: tensors[tensor.name] for tensor in self.extras}
        for name, view in self.from_blocks(blocks, extras).items():
            if name in self.blocked:
                view[...] = tensors[name]
        return blocks, extras

    def from_blocks(self, blocks: NDArray[Any], extras: Mapping[str, NDArray[Any]]) -> Tensors:
        """The model's tensors, as views of contiguous blocks and as the extras given; InputError of another layout."""
        if mismatch := self.mismatch(blocks, extras):
            raise InputError(mismatch)
        return {tensor.name: self._view(blocks, tensor) for tensor in self.tensors if tensor.name in self.blocked} | {
            tensor.name: extras[tensor.name] for tensor in self.extras
        }

    def mismatch(self, blocks: NDArray[Any], extras: Mapping[str, NDArray[Any]]) -> str | None:
        """Why blocks and extras are not of this layout, in one line; None if they are."""
        shape = (self.num_blocks, self.block_size)
        if blocks.shape != shape or blocks.dtype != self.dtype:
            return f"blocks: {blocks.dtype} {list(blocks.shape)}, but the layout has {self.dtype} {list(shape)}"
        difference = _first_difference(self.extras, _specs(extras))
        return f"extras: {difference}" if difference else None

    def difference(self, other: BlockLayout) -> str | None:
        """The first difference of another layout from this one, in words; None if the two are equal."""
        if self.block_size != other.block_size:
            return f"block_size = {other.block_size} instead of {self.block_size}"
        if self.dtype != other.dtype:
            return f"blocks of {other.dtype} instead of {self.dtype}"
        return _first_difference(self.tensors, other.tensors)

    def _view(self, blocks: NDArray[Any], tensor: TensorSpec) -> NDArray[Any]:
        positions = self.blocked[tensor.name]
        return blocks[positions.start : positions.stop].reshape(-1)[: tensor.size].reshape(tensor.shape)


def tensors_in(content: bytes) -> Tensors:
    """The tensors of a safetensors file, unlike `safetensors.numpy.load` of bfloat16 too; ValueError if it is none."""
    try:
        found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(f"no safetensors ({error})") from None
    if odd := [name for name, each in found.items() if each["dtype"] not in _BY_CODE]:
        raise ValueError(f"tensor {odd[0]!r}: is of type {found[odd[0]]['dtype']}, not one of {', '.join(_CODES)}")
    return {
        name: np.frombuffer(each["data"], _BY_CODE[each["dtype"]]).reshape(each["shape"])
        for name, each in found.items()
    }


def layout_of(tensors: Mapping[str, NDArray[Any]], block_size: int, dtype: str = "float32") -> BlockLayout:
    """The layout of a model's tensors, equal for models of one architecture; InputError as `BlockLayout`."""
    return BlockLayout(block_size=block_size, dtype=dtype, tensors=_specs(tensors))


def fitting_block_size(sizes: Iterable[int]) -> int:
    """The block size for a model whose user gives none: a power of two, in [64, 1024] unless its tensors are smaller.

    The largest of these that cuts the model into at least 256 blocks, since searches leave ranges of fewer than 10 to
    30 as they are; but a block takes 40 bytes to keep track of, which 64 float32 values are worth and fewer are not.

    Args:
        sizes: values of each tensor.
    """
    known = [size for size in sizes if size]
    wanted = min(MOST_VALUES, max(LEAST_VALUES, sum(known) // WANTED_BLOCKS))
    largest = max(known, default=1)
    return 1 << (min(wanted, largest).bit_length() - 1)


def _specs(tensors: Mapping[str, NDArray[Any]]) -> tuple[TensorSpec, ...]:
    # The str of a dtype, unlike its name, shows a foreign byte order.
    return tuple(TensorSpec(name, tensors[name].shape, str(tensors[name].dtype)) for name in sorted(tensors))


def _first_difference(expected: tuple[TensorSpec, ...], actual: tuple[TensorSpec, ...]) -> str | None:
    wanted, given = ({tensor.name: tensor for tensor in tensors} for tensors in (expected, actual))
    for name in sorted(wanted.keys() | given.keys()):
        if name not in given:
            return f"tensor {wanted[name]} is missing"
        if name not in wanted:
            return f"tensor {given[name]} is one too many"
        if wanted[name] != given[name]:
            return f"tensor {given[name]} instead of {wanted[name]}"
    return None


def check_has_blocks(name: str, layout: BlockLayout) -> None:
    """Refuse a variant with an InputError if all its tensors are smaller than a block, so that it can share nothing."""
    if not layout.num_blocks:
        largest = max((each.size for each in layout.tensors if each.dtype == layout.dtype), default=0)
        raise InputError(
            f"block_size = {layout.block_size}: no {layout.dtype} tensor of {name} has so many values; "
            f"its largest one has {largest}"
        )


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
    def plain_bytes(self) -> int:
        """The bytes of the model as plain files: safetensors with their head, and its description but for uploads."""
        head = {
            t.name: {"dtype": "F32", "shape": t.shape, "data_offsets": [0, t.num_bytes]} for t in self.layout.tensors
        }
        texts = [head, *filter(None, [self.described])]
        return self.layout.num_bytes + sum(len(json.dumps(text)) for text in texts)

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
    """[k, block_size] numbered by content: one {SHA-256: number} keeps its number, others go on from `next_block`."""
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


def unproven(acceptance: str | None) -> str:
    """The loss, for people, of what was accepted without a proof, see `dedup.work.Outcome`; empty for a proof."""
    return "" if acceptance in (None, "proof") else f"unproven ({acceptance})"


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
