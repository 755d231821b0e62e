"""Distances between the blocks of two models, and for each block of one model the nearest block of the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from fedpriv.errors import InputError

Blocks = npt.NDArray[np.floating]
Vector = npt.NDArray[np.float64]

# Unit roundoff of float32, and its smallest normal number.
_UNIT, _TINY = 2.0**-24, 2.0**-126

# How many values one float32 product sums: few enough for tight bounds, enough to keep the product fast.
_CHUNK = 2048


def _l2(a: Vector, b: Vector) -> float:
    return float(np.linalg.norm(a - b))


def _l1(a: Vector, b: Vector) -> float:
    return float(np.abs(a - b).sum())


def _cosine(a: Vector, b: Vector) -> float:
    """1 - cos(a, b) in [0, 2]; 0 if both blocks are zero, 1 if one of them is."""
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if 0 in norms:
        return float(norms[0] != norms[1])
    # From unit vectors: avoids the cancellation in 1 - cos, and is exactly 0 for equal blocks.
    return 0.5 * float(np.square(a / norms[0] - b / norms[1]).sum())


METRICS: dict[str, Callable[[Vector, Vector], float]] = {"l2": _l2, "l1": _l1, "cosine": _cosine}


def nearest(
    target_blocks: Blocks, base_blocks: Blocks, metric: str = "l2", memory_bytes: int = 2**28
) -> tuple[npt.NDArray[np.int64], Vector]:
    """The nearest base block of each target block, int64 [n], and its distance, float64 [n].

    The result is that of float64 arithmetic throughout, with ties going to the smallest index: float32 products only
    exclude blocks that cannot be the nearest within their rounding errors, and the rest is compared in float64.

    Args:
        target_blocks: [n, d], finite, any floating type; may be a memory map.
        base_blocks: [m, d], m >= 1, as the targets.
        metric: `l2`, `l1` or `cosine`; `l1` cannot use products and takes about 30 times as long.
        memory_bytes: for working arrays, in addition to the blocks themselves; at least `least_memory(d)`.

    Raises:
        InputError: the metric is unknown, the memory is too small, or a value is not finite.
        ValueError: the shapes do not match.
    """
    _metric(metric)
    if target_blocks.ndim != 2 or base_blocks.ndim != 2 or target_blocks.shape[1] != base_blocks.shape[1]:
        raise ValueError(f"blocks of shape {target_blocks.shape} and {base_blocks.shape}: must be [n, d] and [m, d]")
    if len(base_blocks) == 0:
        raise ValueError("base_blocks: must hold at least one block")
    size = _tile_size(target_blocks.shape[1], memory_bytes)
    targets, bases = (_Normed(target_blocks, _squares(target_blocks)), _Normed(base_blocks, _squares(base_blocks)))
    best = _initial_best(target_blocks, base_blocks, metric)
    compare = _compare_sums if metric == "l1" else _compare_products
    for rows in _tiles(len(target_blocks), size):
        for columns in _tiles(len(base_blocks), size):
            compare(targets.part(rows), bases.part(columns), columns.start, best.part(rows), metric)
    return best.indices, best.distances


def aligned(target_blocks: Blocks, base_blocks: Blocks, metric: str = "l2") -> Vector:
    """The distance of each target block to the base block at the same position, float64 [n].

    Args:
        target_blocks: [n, d], any floating type; may be a memory map.
        base_blocks: [n, d], as the targets.
        metric: `l2`, `l1` or `cosine`.

    Raises:
        InputError: an unknown metric.
        ValueError: the shapes differ.
    """
    exact = _metric(metric)
    if target_blocks.shape != base_blocks.shape or target_blocks.ndim != 2:
        raise ValueError(f"blocks of shape {target_blocks.shape} and {base_blocks.shape}: must be equal [n, d]")
    pairs = zip(target_blocks, base_blocks, strict=True)
    return np.array([exact(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs], dtype=np.float64)


def least_memory(block_size: int) -> int:
    """The smallest `memory_bytes` for blocks of this many values, bytes."""
    return _bytes(1, block_size)


def _metric(name: str) -> Callable[[Vector, Vector], float]:
    if name not in METRICS:
        raise InputError(f"distance = {name!r}: known are {', '.join(METRICS)}")
    return METRICS[name]


@dataclass(frozen=True, eq=False)
class _Normed:
    """Blocks [n, d] and their squared norms, float64 [n]."""

    blocks: Blocks
    squares: Vector

    def part(self, rows: slice) -> _Normed:
        return _Normed(self.blocks[rows], self.squares[rows])


@dataclass(frozen=True, eq=False)
class _Nearest:
    """The nearest base block found so far for each target, and its distance; updated in place."""

    indices: npt.NDArray[np.int64]
    distances: Vector

    def part(self, rows: slice) -> _Nearest:
        return _Nearest(self.indices[rows], self.distances[rows])


def _squares(blocks: Blocks) -> Vector:
    """The squared norm of each block, float64 [n]; a norm that is not finite is refused."""
    rows = (row.astype(np.float64) for row in blocks)
    squares = np.array([np.dot(row, row) for row in rows], dtype=np.float64)
    if not np.isfinite(squares).all():
        raise InputError(f"block {int(np.argmin(np.isfinite(squares)))}: holds NaN, inf or too large a value")
    return squares


def _initial_best(targets: Blocks, bases: Blocks, metric: str) -> _Nearest:
    """Start of the search: in models of common origin, nearest blocks are mostly at the same position."""
    best = _Nearest(np.zeros(len(targets), dtype=np.int64), np.full(len(targets), np.inf))
    if metric != "l1":
        num = min(len(targets), len(bases))
        best.indices[:num], best.distances[:num] = np.arange(num), aligned(targets[:num], bases[:num], metric)
    return best


def _compare_sums(targets: _Normed, bases: _Normed, first: int, best: _Nearest, metric: str) -> None:
    """Update the best match of a tile's targets for l1, by float64 sums."""
    values = np.zeros((len(targets.blocks), len(bases.blocks)))
    for columns in _tiles(targets.blocks.shape[1], _CHUNK):
        values += cdist(targets.blocks[:, columns], bases.blocks[:, columns], "cityblock")
    indices = values.argmin(axis=1)
    distances = np.take_along_axis(values, indices[:, None], axis=1)[:, 0]
    better = distances < best.distances
    best.indices[better] = first + indices[better]
    best.distances[better] = distances[better]


def _compare_products(targets: _Normed, bases: _Normed, first: int, best: _Nearest, metric: str) -> None:
    """Update the best match of a tile's targets, exactly, among the bases that the bounds do not exclude."""
    exact = METRICS[metric]
    candidates = _candidates_by_prefix(targets, bases, best.distances) if metric == "l2" else None
    if candidates is None:
        candidates = _candidates(targets, bases, best.distances, metric)
    known = best.indices - first  # their distances are exact already
    rows = np.flatnonzero((known >= 0) & (known < len(bases.blocks)) & np.isfinite(best.distances))
    candidates[rows, known[rows]] = False
    for row in np.flatnonzero(candidates.any(axis=1)):
        target = targets.blocks[row].astype(np.float64)
        for index in np.flatnonzero(candidates[row]):
            distance = exact(target, bases.blocks[index].astype(np.float64))
            if (distance, first + index) < (best.distances[row], best.indices[row]):
                best.indices[row], best.distances[row] = first + index, distance


def _candidates_by_prefix(targets: _Normed, bases: _Normed, distances: Vector) -> npt.NDArray[np.bool_] | None:
    """The candidates by the first values alone, whose l2 distance is a lower bound; None if they leave too many."""
    target_prefix, base_prefix = targets.blocks[:, :_CHUNK], bases.blocks[:, :_CHUNK]
    near = _candidates(
        _Normed(target_prefix, _squares(target_prefix)),
        _Normed(base_prefix, _squares(base_prefix)),
        distances,
        "l2",
        prefix=True,
    )
    return near if np.count_nonzero(near) <= 2 * len(near) else None


def _candidates(
    targets: _Normed, bases: _Normed, distances: Vector, metric: str, prefix: bool = False
) -> npt.NDArray[np.bool_]:
    """Mark the bases that may be as near as the best so far and as any other in the tile, [targets, bases].

    Distances of prefixes are lower bounds, so they are compared with the best so far only.
    """
    sums = targets.squares[:, None] + bases.squares
    norms = np.sqrt(targets.squares)[:, None] * np.sqrt(bases.squares)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        values = _products(targets.blocks, bases.blocks)
        block_size = targets.blocks.shape[1]
        # Higham 2002, section 3.1: sums of _CHUNK float32 products of factors rounded to float32; then underflow
        # below the normal range, and the rounding of the float64 sums.
        slack = norms * (_CHUNK + 4) * _UNIT * 1.01
        slack += (_TINY * block_size) * (1 + sums) + (8 * block_size * 2.0**-53) * sums
        if metric == "l2":
            values *= -2
            values += sums
            slack *= 2
        else:
            values /= -norms
            values += 1
            slack /= norms
        values[~np.isfinite(slack)] = np.nan
        # Where float32 overflows or a norm is 0, nothing is known, and every comparison below is false.
        known = distances**2 if metric == "l2" else distances
        limit = known if prefix else np.fmin(np.fmin.reduce(values + slack, axis=1), known)
        values -= slack
        return ~((values > limit[:, None]) & np.isfinite(values))


def _products(a: Blocks, b: Blocks) -> npt.NDArray[np.float64]:
    """a @ b.T by float32 products of `_CHUNK` values each, summed in float64; NaN where float32 overflows."""
    total = np.zeros((len(a), len(b)))
    for columns in _tiles(a.shape[1], _CHUNK):
        total += a[:, columns].astype(np.float32, copy=False) @ b[:, columns].astype(np.float32, copy=False).T
    total[np.isinf(total)] = np.nan
    return total


def _bytes(size: int, block_size: int) -> int:
    """Memory of a tile of size x size blocks: chunks of both sides, bounds on distances, some whole blocks."""
    return 16 * size * min(block_size, _CHUNK) + 48 * size * size + 48 * block_size + 2**16


def _tile_size(block_size: int, memory_bytes: int) -> int:
    """The largest number of blocks on each side of a tile that fits into memory."""
    least = _bytes(1, block_size)
    if memory_bytes < least:
        raise InputError(f"memory_bytes = {memory_bytes}: blocks of {block_size} values need at least {least}")
    size = math.isqrt(memory_bytes // 48) + 1
    while _bytes(size, block_size) > memory_bytes:
        size -= 1
    return size


def _tiles(num: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, num)) for begin in range(0, num, size))
