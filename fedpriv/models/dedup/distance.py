"""Distances between the blocks of two models, and for each block of one model the nearest block of the other."""

from collections.abc import Callable, Iterator

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

TILE = 1024
"""The number of targets that are compared with as many bases at once, which takes 48 bytes a pair."""


def _cosine(a: Vector, b: Vector) -> float:
    """1 - cos(a, b) in [0, 2]; 0 if both blocks are zero, 1 if one of them is."""
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if 0 in norms:
        return float(norms[0] != norms[1])
    # From unit vectors: avoids the cancellation in 1 - cos, and is exactly 0 for equal blocks.
    return 0.5 * float(np.square(a / norms[0] - b / norms[1]).sum())


METRICS: dict[str, Callable[[Vector, Vector], float]] = {
    "l2": lambda a, b: float(np.linalg.norm(a - b)),
    "l1": lambda a, b: float(np.abs(a - b).sum()),
    "cosine": _cosine,
}


def nearest(target_blocks: Blocks, base_blocks: Blocks, metric: str = "l2") -> tuple[npt.NDArray[np.int64], Vector]:
    """The nearest base block of each target block, int64 [n], and its distance, float64 [n].

    The result is that of float64 arithmetic throughout, with ties going to the smallest index: float32 products only
    exclude blocks that cannot be the nearest within their rounding errors, and the rest is compared in float64. It
    takes 48 bytes for each pair of `TILE` targets and bases, and copies of a few blocks.

    Args:
        target_blocks: [n, d], finite, any floating type; may be a memory map.
        base_blocks: [m, d], m >= 1, as the targets.
        metric: `l2`, `l1` or `cosine`; `l1` cannot use products and takes about 30 times as long.

    Raises:
        InputError: the metric is unknown, or a value is not finite.
        ValueError: the shapes do not match.
    """
    if metric not in METRICS:
        raise InputError(f"distance = {metric!r}: known are {', '.join(METRICS)}")
    if target_blocks.ndim != 2 or base_blocks.ndim != 2 or target_blocks.shape[1] != base_blocks.shape[1]:
        raise ValueError(f"blocks of shape {target_blocks.shape} and {base_blocks.shape}: must be [n, d] and [m, d]")
    if len(base_blocks) == 0:
        raise ValueError("base_blocks: must hold at least one block")
    squares = _squares(target_blocks), _squares(base_blocks)
    # In models of common origin, nearest blocks are mostly at the same position.
    num = min(len(target_blocks), len(base_blocks))
    best = np.zeros(len(target_blocks), np.int64), np.full(len(target_blocks), np.inf)
    best[0][:num] = np.arange(num)
    best[1][:num] = [_distance(target_blocks[k], base_blocks[k], metric) for k in range(num)]
    for rows in _tiles(len(target_blocks), TILE):
        for columns in _tiles(len(base_blocks), TILE):
            targets, bases = target_blocks[rows], base_blocks[columns]
            if metric == "l1":
                near = _near_by_sums(targets, bases, best[1][rows])
            else:
                near = _near(targets, bases, squares[0][rows], squares[1][columns], best[1][rows], metric)
            for row, column in np.argwhere(near):
                found = _distance(targets[row], bases[column], metric), int(column) + columns.start
                place = rows.start + row
                if found < (best[1][place], best[0][place]):
                    best[1][place], best[0][place] = found
    return best


def _distance(a: Blocks, b: Blocks, metric: str) -> float:
    return METRICS[metric](a.astype(np.float64), b.astype(np.float64))


def _squares(blocks: Blocks) -> Vector:
    """The squared norm of each block, float64 [n]; a norm that is not finite is refused."""
    rows = (row.astype(np.float64) for row in blocks)
    squares = np.array([np.dot(row, row) for row in rows], dtype=np.float64)
    if not np.isfinite(squares).all():
        raise InputError(f"block {int(np.argmin(np.isfinite(squares)))}: holds NaN, inf or too large a value")
    return squares


def _near_by_sums(targets: Blocks, bases: Blocks, distances: Vector) -> npt.NDArray[np.bool_]:
    """As `_near`, for l1, by sums in float64, which round too."""
    values, rounding = np.zeros((len(targets), len(bases))), targets.shape[1] * 2.0**-52
    for columns in _tiles(targets.shape[1], _CHUNK):
        values += cdist(targets[:, columns], bases[:, columns], "cityblock")
    limit = np.minimum(values.min(axis=1) * (1 + rounding), distances)
    near: npt.NDArray[np.bool_] = values * (1 - rounding) <= limit[:, None]
    return near


def _near(
    targets: Blocks, bases: Blocks, target_squares: Vector, base_squares: Vector, distances: Vector, metric: str
) -> npt.NDArray[np.bool_]:
    """Mark the bases that may be as near as the best so far and as any other in the tile, [targets, bases]."""
    sums = target_squares[:, None] + base_squares
    norms = np.sqrt(target_squares)[:, None] * np.sqrt(base_squares)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        values = _products(targets, bases)
        block_size = targets.shape[1]
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
        limit = np.fmin(np.fmin.reduce(values + slack, axis=1), known)
        values -= slack
        return ~((values > limit[:, None]) & np.isfinite(values))


def _products(a: Blocks, b: Blocks) -> npt.NDArray[np.float64]:
    """a @ b.T by float32 products of `_CHUNK` values each, summed in float64; NaN where float32 overflows."""
    total = np.zeros((len(a), len(b)))
    for columns in _tiles(a.shape[1], _CHUNK):
        total += a[:, columns].astype(np.float32, copy=False) @ b[:, columns].astype(np.float32, copy=False).T
    total[np.isinf(total)] = np.nan
    return total


def _tiles(num: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, num)) for begin in range(0, num, size))
