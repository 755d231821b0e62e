"""Rows of real numbers as small integers with scales: 4 or 8 bits a value, or plain float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = (4, 8, 32)

# Trial scales, as shares of the one that reaches the largest value: with few bits, cutting outliers loses less.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, eq=False)
class FewBits:
    """Rows of values, each value an integer times its segment's scale.

    Attributes:
        values: [n, size] float32; [n, size] int8; or, at 4 bits, [n, ceil(size / 2)] uint8: two integers from -7 to 7
            in each byte, as integer + 8, the first of them in the high half.
        scales: [n, segments] float32; 1 where values are float32.
        segments: lengths of the segments, which add up to size.
    """

    values: NDArray[Any]
    scales: NDArray[np.float32]
    segments: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def row(self, index: int) -> NDArray[np.float64]:
        """[size] A row, each value one float64 product of exact numbers: the same bits on every machine."""
        scales: NDArray[np.float64] = np.repeat(self.scales[index].astype(np.float64), self.segments)
        return self._integers(index) * scales

    def first(self, num_rows: int) -> FewBits:
        """The first rows."""
        return FewBits(self.values[:num_rows], self.scales[:num_rows], self.segments)

    def mismatch(self) -> str | None:
        """Why these are not rows of such segments, in one line; None if they are."""
        size, width = sum(self.segments), self.values.shape[-1]
        expected = (size + 1) // 2 if self.values.dtype == np.uint8 else size
        if self.values.ndim != 2 or width != expected or self.values.dtype not in ("uint8", "int8", "float32"):
            return f"{self.values.dtype} {list(self.values.shape)} for {size} values a row"
        if self.scales.shape != (len(self.values), len(self.segments)) or self.scales.dtype != np.float32:
            return f"scales {self.scales.dtype} {list(self.scales.shape)} for {len(self.segments)} tensors"
        return None

    def _integers(self, index: int) -> NDArray[np.float64]:
        if self.values.dtype != np.uint8:
            return np.asarray(self.values[index], np.float64)
        packed = self.values[index]
        both = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: sum(self.segments)]
        return both.astype(np.float64) - 8.0


def few_bits(rows: NDArray[np.float64], segments: Sequence[int], bits: int) -> FewBits:
    """Rows rounded to so many bits a value; every segment of a row has a scale of its own.

    Args:
        rows: [n, size], finite and within float32's range.
        segments: lengths that add up to size.
        bits: one of `BITS`.

    Raises:
        ValueError: bits is not one of these.
    """
    if bits not in BITS:
        raise ValueError(f"bits = {bits}: must be one of {', '.join(map(str, BITS))}")
    ends = np.cumsum(segments)
    parts = [slice(end - size, end) for size, end in zip(segments, ends, strict=True)]
    scales = np.ones((len(rows), len(parts)), np.float32)
    if bits == 32:
        return FewBits(rows.astype(np.float32), scales, tuple(segments))
    integers = np.zeros(rows.shape, np.int8)
    for row, part in np.ndindex(scales.shape):
        integers[row, parts[part]], scales[row, part] = _rounded(rows[row, parts[part]], 2 ** (bits - 1) - 1)
    return FewBits(integers if bits == 8 else _packed(integers), scales, tuple(segments))


def row_bytes(segments: Sequence[int], bits: int) -> int:
    """What one row takes, scales included."""
    return (sum(segments) * bits + 7) // 8 + 4 * len(segments)


def _rounded(values: NDArray[np.float64], largest: int) -> tuple[NDArray[np.float64], np.float32]:
    """Integers from -largest to largest, and the scale, among the trial ones, of the least squared error."""
    found, best, least = np.zeros_like(values), np.float32(1), np.inf
    reach = float(np.abs(values).max(initial=0.0)) / largest
    for scale in (np.float32(share * reach) for share in _SHARES):
        if scale == 0:  # all are zero, or too small for float32
            break
        integers = np.clip(np.round(values / float(scale)), -largest, largest)
        error = float(np.sum((integers * float(scale) - values) ** 2))
        if error < least:
            found, best, least = integers, scale, error
    return found, best


def _packed(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two integers in a byte."""
    padded = np.pad(integers, [(0, 0), (0, integers.shape[1] % 2)]).astype(np.int16) + 8
    packed: NDArray[np.uint8] = ((padded[:, ::2] << 4) | padded[:, 1::2]).astype(np.uint8)
    return packed
