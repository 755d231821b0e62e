"""A shared basis: every variant as one mean plus its own multiples of a few common components, in few bits.

The variants of a run are vectors x_v of all their floating-point values. With m their mean and u_1 to u_k the leading
right singular vectors of the rows x_v - m, variant v is restored as m + sum_j c_vj u_j, plus, where that is not good
enough, a residual of its own. Mean and components are stored once; a variant stores its k coefficients.

Fitting is deterministic on one machine with one number of threads, as far as LAPACK is; nothing more is promised.
Restoring is a fixed sequence of single float64 products and sums, then one rounding to the tensor's own type: the
same bits on every machine with IEEE arithmetic.

Source: shared bases are those of Gabrielsson et al. 2025, "Compress then Serve"; here whole adapters are the
vectors, because variants that differ by noise share no subspace within a layer (results/dedup.md compares).

In few bits: rows of real numbers as small integers with scales, 4 or 8 bits a value, or plain float32.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.variants.blocks import BlockLayout, Tensors, TensorSpec

# Larger values would leave float32 as scales or as sums.
_LARGEST = 1e30
_FLOATS = ("float16", "float32", "float64")
_PREFIX = "shared-basis/"


@dataclass(frozen=True, kw_only=True)
class BasisOptions:
    """The size of a basis; at most one of the first three is given, and without any, ratio = 1.

    Attributes:
        max_error: the least rank at which every variant is restored within this error, relative to its length, > 0.
        max_bytes: the largest rank at which all bases and coefficients together take at most so many bytes, >= 1.
        ratio: the same as a share of the variants' own bytes, > 0.
        bits: of a stored value: 4 or 8 (integers with scales), or 32 (float32). The mean has at least 8.

    Raises:
        InputError: a value is out of range, or two ways to choose the rank are given.
    """

    max_error: float | None = None
    max_bytes: int | None = None
    ratio: float | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        given = [name for name in ("max_error", "max_bytes", "ratio") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]}, {given[1]}: both choose the rank; give one of them")
        for name in given:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
                raise InputError(f"{name} = {value!r}: must be a finite number > 0")
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise InputError(f"bits = {self.bits!r}: must be one of {', '.join(map(str, BITS))}")


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedBasis:
    """A mean and components, as they are stored.

    Attributes:
        specs: of the tensors that they hold, one after another.
        mean: one row.
        components: k rows.
    """

    specs: tuple[TensorSpec, ...]
    mean: _FewBits
    components: _FewBits

    @property
    def rank(self) -> int:
        """Number of components."""
        return len(self.components.values)

    def restore(self, encoded: Encoded) -> Tensors:
        """A variant's floating-point tensors; equal arguments give equal bits on every machine."""
        vector = self._vector(encoded)
        ends = np.cumsum([spec.size for spec in self.specs])
        return {
            spec.name: vector[end - spec.size : end].reshape(spec.shape).astype(spec.dtype)
            for spec, end in zip(self.specs, ends, strict=True)
        }

    def tensors(self, held: Mapping[str, NDArray[Any]]) -> Tensors:
        """A model's tensors, from its share of the basis and the tensors that a basis does not hold.

        Raises:
            ValueError: in one line, what is missing or of another shape.
        """
        encoded, others = Encoded.from_tensors(held, self.specs)
        return {**self.restore(encoded), **others}

    def with_residual(self, encoded: Encoded, vector: NDArray[np.float64], bits: int) -> Encoded:
        """The variant with what the basis misses of it [size], in so many bits."""
        missing = vector - self._vector(encoded)
        return replace(encoded, residual=few_bits(missing[None], self.mean.segments, bits))

    def truncated(self, rank: int) -> SharedBasis:
        """The basis of the first components."""
        return replace(self, components=self.components.first(rank))

    def to_bytes(self) -> bytes:
        """The basis's file: equal bases give equal bytes."""
        return safetensors.numpy.save(
            {
                "mean": self.mean.values,
                "mean-scales": self.mean.scales,
                "components": np.ascontiguousarray(self.components.values),
                "components-scales": np.ascontiguousarray(self.components.scales),
            }
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], layout: BlockLayout) -> SharedBasis:
        """The basis in the tensors of such a file, of models of this layout.

        Raises:
            ValueError: in one line, why it is not.
        """
        specs = covered(layout)
        try:
            mean, components = (_rows(tensors, name, specs) for name in ("mean", "components"))
        except KeyError as error:
            raise ValueError(f"not a shared basis ({error})") from None
        return cls(specs=specs, mean=mean, components=components)

    def _vector(self, encoded: Encoded) -> NDArray[np.float64]:
        """[size] The sum in a fixed order; no matrix product, whose order of additions would depend on the machine."""
        if encoded.coefficients.shape != (self.rank,):
            raise ValueError(f"{encoded.coefficients.size} coefficients for a basis of {self.rank} components")
        total = self.mean.row(0)
        for index, coefficient in enumerate(encoded.coefficients.tolist()):
            total += coefficient * self.components.row(index)
        return total if encoded.residual is None else total + encoded.residual.row(0)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A variant's share of what it is restored from.

    Attributes:
        coefficients: [k] float32, of the components.
        residual: one row, or None: what is added to the sum of the components.
    """

    coefficients: NDArray[np.float32]
    residual: _FewBits | None = None

    def to_tensors(self) -> Tensors:
        """Tensors to be stored with a model's extras; `from_tensors` reads them."""
        found: Tensors = {f"{_PREFIX}coefficients": self.coefficients}
        if self.residual is not None:
            found[f"{_PREFIX}residual"] = self.residual.values
            found[f"{_PREFIX}residual-scales"] = self.residual.scales
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec]) -> tuple[Encoded, Tensors]:
        """A model's share of a basis of such tensors, and its others, from the tensors of both.

        Raises:
            ValueError: in one line, what is missing or of another shape.
        """
        own = {name.removeprefix(_PREFIX): array for name, array in tensors.items() if name.startswith(_PREFIX)}
        if "coefficients" not in own:
            raise ValueError("has no coefficients")
        residual = _rows(own, "residual", specs) if "residual" in own else None
        extras = {name: array for name, array in tensors.items() if not name.startswith(_PREFIX)}
        return cls(own["coefficients"], residual), extras


@dataclass(frozen=True, kw_only=True)
class RestoreError:
    """The difference between a restored variant and the original.

    Attributes:
        absolute: the largest difference of two values.
        relative: the length of the difference as a vector over that of the original; 0 if both are zero.
    """

    absolute: float
    relative: float


def covered(layout: BlockLayout) -> tuple[TensorSpec, ...]:
    """The tensors that a basis holds: all of floating-point values."""
    return tuple(spec for spec in layout.tensors if spec.dtype in _FLOATS)


def flattened(name: str, tensors: Mapping[str, NDArray[Any]], layout: BlockLayout) -> NDArray[np.float64]:
    """[size] A variant's floating-point values, tensor after tensor.

    Raises:
        InputError: one of them is not finite or is larger than 1e30, or a tensor's name is a basis's own.
    """
    if odd := [each for each in tensors if each.startswith(_PREFIX)]:
        raise InputError(f"{name}: tensor {odd[0]!r}: names that begin with {_PREFIX} are the store's own")
    parts = [tensors[spec.name].astype(np.float64).reshape(-1) for spec in covered(layout)]
    vector = np.concatenate([np.empty(0), *parts])
    if not (np.abs(vector) <= _LARGEST).all():
        raise InputError(
            f"{name}: holds values that are not finite or exceed {_LARGEST:g}; a shared basis cannot hold it"
        )
    return vector


def restore_error(original: NDArray[np.float64], restored: NDArray[np.float64]) -> RestoreError:
    """The error of a restored variant [size]."""
    missing = restored - original
    length, of = float(np.linalg.norm(missing)), float(np.linalg.norm(original))
    relative = 0.0 if length == 0 else length / of if of else float("inf")
    return RestoreError(absolute=float(np.abs(missing).max(initial=0.0)), relative=relative)


def fit(
    vectors: NDArray[np.float64], layout: BlockLayout, options: BasisOptions
) -> tuple[SharedBasis, NDArray[np.float32]]:
    """The basis of some variants, and their coefficients [variants, k].

    Coefficients are the least-squares ones for the components as they are stored, so that they make up for rounding.
    Takes about 32 bytes of memory for each value of each variant.

    Args:
        vectors: [variants, size], from `flattened`; at least one.
        layout: of the variants.
        options: how large the basis is; `max_bytes` counts for these variants.

    Raises:
        InputError: no rank is within the options.
    """
    specs = covered(layout)
    segments = [spec.size for spec in specs]
    mean = few_bits(vectors.mean(axis=0)[None], segments, max(options.bits, 8))
    centered = vectors - mean.row(0)
    directions = _directions(vectors - vectors.mean(axis=0))
    num_affordable = affordable_rank(len(vectors), specs, options)
    components = few_bits(directions[: max(num_affordable, 0)], segments, options.bits)
    basis = SharedBasis(specs=specs, mean=mean, components=components)
    rows = np.array([components.row(index) for index in range(basis.rank)]).reshape(basis.rank, sum(segments))
    gram, products = rows @ rows.T, centered @ rows.T

    def coefficients(rank: int) -> NDArray[np.float32]:
        solved = np.linalg.lstsq(gram[:rank, :rank], products[:, :rank].T, rcond=None)[0]
        return np.ascontiguousarray(solved.T, np.float32)

    def reaches(rank: int) -> bool:
        restored = coefficients(rank).astype(np.float64) @ rows[:rank] + mean.row(0)
        errors = [restore_error(*pair).relative for pair in zip(vectors, restored, strict=True)]
        return max(errors) <= (options.max_error or np.inf)

    rank = min(num_affordable, basis.rank)
    if options.max_error is not None:
        rank = bisect.bisect_left(range(basis.rank + 1), True, key=reaches)
    if not 0 <= rank <= basis.rank:
        raise InputError(f"{_asked(options)}: no basis of {len(vectors)} variants is within it; allow more")
    return basis.truncated(rank), coefficients(rank)


def _directions(centered: NDArray[np.float64]) -> NDArray[np.float64]:
    """[k, size] The right singular vectors of positive singular values; the largest entry of each is positive."""
    _, values, vectors = np.linalg.svd(centered, full_matrices=False)
    # A mean of n rows makes one of n directions a rounding error.
    found: NDArray[np.float64] = vectors[values > 1e-10 * values.max(initial=0.0)]
    largest = np.abs(found).argmax(axis=1) if found.size else np.empty(0, int)
    signs: NDArray[np.float64] = np.sign(found[np.arange(len(found)), largest])
    return found * signs[:, None]


def affordable_rank(num_variants: int, specs: Sequence[TensorSpec], options: BasisOptions) -> int:
    """The largest rank of a basis of variants of these tensors within the bytes allowed; -1 if not even a mean fits."""
    if options.max_error is not None:
        return num_variants - 1
    segments = [spec.size for spec in specs]
    plain = num_variants * sum(spec.num_bytes for spec in specs)
    budget = options.max_bytes if options.max_bytes is not None else (options.ratio or 1.0) * plain
    left = budget - row_bytes(segments, max(options.bits, 8))
    each = row_bytes(segments, options.bits) + 4 * num_variants
    return -1 if left < 0 else min(int(left // each), num_variants - 1)


def _asked(options: BasisOptions) -> str:
    for name in ("max_error", "max_bytes"):
        if getattr(options, name) is not None:
            return f"{name} = {getattr(options, name)}"
    return f"ratio = {options.ratio or 1.0}"


def _rows(arrays: Mapping[str, NDArray[Any]], name: str, specs: Sequence[TensorSpec]) -> _FewBits:
    found = _FewBits(arrays[name], arrays[f"{name}-scales"], tuple(spec.size for spec in specs))
    if mismatch := found.mismatch():
        raise ValueError(f"{name}: {mismatch}")
    return found


BITS = (4, 8, 32)

# Trial scales, as shares of the one that reaches the largest value: with few bits, cutting outliers loses less.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, eq=False)
class _FewBits:
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
        """The bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def row(self, index: int) -> NDArray[np.float64]:
        """[size] A row, each value one float64 product of exact numbers: the same bits on every machine."""
        scales: NDArray[np.float64] = np.repeat(self.scales[index].astype(np.float64), self.segments)
        return self._integers(index) * scales

    def first(self, num_rows: int) -> _FewBits:
        """The first rows."""
        return _FewBits(self.values[:num_rows], self.scales[:num_rows], self.segments)

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


def few_bits(rows: NDArray[np.float64], segments: Sequence[int], bits: int) -> _FewBits:
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
        return _FewBits(rows.astype(np.float32), scales, tuple(segments))
    integers = np.zeros(rows.shape, np.int8)
    for row, part in np.ndindex(scales.shape):
        integers[row, parts[part]], scales[row, part] = _rounded(rows[row, parts[part]], 2 ** (bits - 1) - 1)
    return _FewBits(integers if bits == 8 else _packed(integers), scales, tuple(segments))


def row_bytes(segments: Sequence[int], bits: int) -> int:
    """The bytes of one row, scales included."""
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
