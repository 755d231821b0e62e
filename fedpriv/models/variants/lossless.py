"""Models without loss, as what differs from one of them: bytes XORed, grouped by significance, and compressed.

Two fine-tunes of one model have sign, exponent and leading bits of most values in common: after an exclusive or these
are zero. The bytes of one significance, of many values in a row, then compress well, whatever the others look like. A
model is restored bit for bit, payloads of NaNs included, and so holds nothing of the reference's values.

Source: the exclusive or with a base is ZipLLM's (Wang et al. 2026), grouping bytes by significance is ZipNN's
(Hershcovitch et al. 2024).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.models.variants.blocks import BlockLayout, Tensors, TensorSpec, tensors_in

PREFIX = "lossless/"
"""How the names of a packed model's tensors begin in a store."""

Values = Mapping[int, NDArray[np.uint8]]
"""{bytes of a value: [values, bytes] of all tensors whose values have so many, one after another}"""

# Values that are compressed at once: many enough for one set of tables, few enough to keep all processors busy.
_PIECE = 2**20

# Of zstandard: higher levels look for repetitions, which weights do not have; they are slower and save nothing.
_LEVEL = 1

# Values of a model, at least, by which a reference is chosen.
_SAMPLED = 2**16

_SIZES = "-sizes"
_NO_BYTES, _NO_SIZES = np.empty(0, np.uint8), np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Reference:
    """A model of which others are stored as what differs from it.

    Attributes:
        specs: of its tensors, and of theirs.
        values: of its tensors; empty for a model of zeros.
    """

    specs: tuple[TensorSpec, ...]
    values: Values

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[Any]], layout: BlockLayout) -> Reference:
        """The reference with these tensors of a layout."""
        return cls(layout.tensors, _values_of(tensors, layout.tensors))

    @classmethod
    def zeros(cls, layout: BlockLayout) -> Reference:
        """The reference from which a model differs in each of its values."""
        return cls(layout.tensors, {})

    def pack(self, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
        """Tensors that say what differs in a model, which a store holds of it beside the reference."""
        return _packed(_values_of(tensors, self.specs), self.values)

    def tensors(self, held: Mapping[str, NDArray[Any]]) -> Tensors:
        """The tensors of a model of which `held` is what differs; ValueError, in one line, if it is not."""
        values, found = _unpacked(held, self.specs, self.values), {}
        for width, of_width in _by_width(self.specs).items():
            parts = np.split(values[width], np.cumsum([spec.size for spec in of_width]))[:-1]
            for spec, part in zip(of_width, parts, strict=True):
                found[spec.name] = part.reshape(-1).view(spec.dtype).reshape(spec.shape)
        return found

    def to_bytes(self) -> bytes:
        """The reference's file, made once."""
        return self._file

    @classmethod
    def from_bytes(cls, content: bytes, layout: BlockLayout) -> Reference:
        """The reference in such a file, of models of this layout; ValueError, in one line, if it is none."""
        tensors = tensors_in(content)
        return cls(layout.tensors, _unpacked(tensors, layout.tensors, {}) if tensors else {})

    @cached_property
    def _file(self) -> bytes:
        return safetensors.numpy.save(_packed(self.values, {}))


def sample(tensors: Mapping[str, NDArray[Any]], layout: BlockLayout) -> Values:
    """Some values of a model, the same of all models of a layout, for `best_reference`."""
    values = _values_of(tensors, layout.tensors)
    return {width: own[:: max(1, len(own) // _SAMPLED)].copy() for width, own in values.items()}


def best_reference(samples: Sequence[Values], num_models: int) -> int | None:
    """Which of some models is the best reference of all, by samples of them; None if zeros are.

    Args:
        samples: of models of one layout, at least one, see `sample`.
        num_models: of this layout, of which these are some; the others are taken to be like them.
    """
    alone = [_num_bytes(own, {}) for own in samples]
    each_other = (num_models - 1) / max(1, len(samples) - 1)
    found, least = None, num_models * sum(alone) / len(samples)
    for index, reference in enumerate(samples):
        others = sum(_num_bytes(own, reference) for other, own in enumerate(samples) if other != index)
        if (total := alone[index] + each_other * others) < least:
            found, least = index, total
    return found


def _num_bytes(own: Values, reference: Values) -> int:
    return sum(part.nbytes for part in _packed(own, reference).values())


def _by_width(specs: Sequence[TensorSpec]) -> dict[int, list[TensorSpec]]:
    """{bytes of a value: the tensors whose values have so many}."""
    found: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        found.setdefault(np.dtype(spec.dtype).itemsize, []).append(spec)
    return found


def _values_of(tensors: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec]) -> Values:
    return {
        width: np.concatenate(
            [np.ascontiguousarray(tensors[spec.name]).reshape(-1, 1).view(np.uint8) for spec in of_width]
        )
        for width, of_width in _by_width(specs).items()
    }


def _packed(values: Values, reference: Values) -> Tensors:
    held: Tensors = {}
    for width, own in values.items():
        pieces = _in_parallel(partial(_pack_piece, own, reference.get(width)), _pieces(len(own)))
        held[f"{PREFIX}{width}"] = np.frombuffer(b"".join(pieces), np.uint8)
        held[f"{PREFIX}{width}{_SIZES}"] = np.array([len(piece) for piece in pieces], np.int64)
    return held


def _unpacked(held: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec], reference: Values) -> Values:
    values: dict[int, NDArray[np.uint8]] = {}
    for width, of_width in _by_width(specs).items():
        num_values = sum(spec.size for spec in of_width)
        packed = held.get(f"{PREFIX}{width}", _NO_BYTES)
        sizes = held.get(f"{PREFIX}{width}{_SIZES}", _NO_SIZES)
        kinds = packed.dtype == np.uint8 and packed.ndim == 1 and sizes.dtype == np.int64
        if not kinds or sizes.shape != (-(-num_values // _PIECE),):
            raise ValueError(f"packed values of {width} bytes: not the pieces of {num_values} values")
        if (sizes < 0).any() or sizes.sum() != len(packed):
            raise ValueError(f"packed values of {width} bytes: {len(packed)} bytes are not those of their pieces")
        own, pieces = np.empty((num_values, width), np.uint8), list(_pieces(num_values))
        frames = np.split(packed, np.cumsum(sizes))[:-1]
        try:
            _in_parallel(partial(_unpack_piece, own, reference.get(width)), zip(pieces, frames, strict=True))
        except OSError as error:  # zstandard's
            raise ValueError(f"packed values of {width} bytes: {error}") from None
        values[width] = own
    return values


def _pieces(num_values: int) -> Iterator[slice]:
    return (slice(first, first + _PIECE) for first in range(0, num_values, _PIECE))


def _pack_piece(own: NDArray[np.uint8], reference: NDArray[np.uint8] | None, piece: slice) -> bytes:
    differing = own[piece] if reference is None else own[piece] ^ reference[piece]
    packed: bytes = _codec().compress(np.ascontiguousarray(differing.T), asbytes=True)
    return packed


def _unpack_piece(
    own: NDArray[np.uint8], reference: NDArray[np.uint8] | None, piece_and_frame: tuple[slice, NDArray[np.uint8]]
) -> None:
    piece, frame = piece_and_frame
    target = own[piece]
    planes = np.frombuffer(_codec().decompress(frame, decompressed_size=target.size), np.uint8)
    for byte, plane in enumerate(planes.reshape(target.shape[::-1])):  # several times as fast as one transposition
        target[:, byte] = plane
    if reference is not None:
        target ^= reference[piece]


def _codec() -> Any:
    import pyarrow as pa  # deferred: stores without packed models are read without it

    return pa.Codec("zstd", compression_level=_LEVEL)


def _in_parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The function of each; NumPy and zstandard leave other threads to run."""
    if len(given := list(items)) <= 1:  # to start a thread takes longer than a small model
        return [function(item) for item in given]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, given))
