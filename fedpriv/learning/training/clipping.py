"""Clipping of per-sample gradients, or of persons' sums of them, by parts: it bounds one's influence on a step.

Gradients are the rows of a matrix [records, values]; a part is a slice of its columns. Norms and sums are float64: the
square of every float32 value is a float64, so nothing under- or overflows. A row's clipped values depend on this row
alone where it is the only one of its call: kernels may round otherwise for another number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Parts = Sequence[slice]

MOST_ROWS = 2**30
"""Rows whose clipped sum is exact, far more than a process holds, so that no record decides whether others count."""

# Keeps every norm, clipped or not, below the clip norm: the rounding error of a float64 norm of 10^7 values is < 2e-9,
# and turning two sums of 2^30 rows into float64 errs by less than 2^-22.
ROUNDING_MARGIN = 1.0 - 2.0**-21

# A clipped value is a multiple of 2^-32 C or less, and less than 2^33 of these.
_GRID_BITS = 32

# Far below every float32 gradient, and far above the smallest float64.
_SMALLEST_CLIP_NORM = 1e-100

# Columns whose float64 copies are made at once: they stay in the CPU's caches. Fixed, so that a row's norm depends
# neither on the other rows nor on their number.
_COLUMNS_AT_ONCE = 2**14


def part_norms(rows: Tensor, parts: Parts) -> Tensor:
    """L2 norm of each part of each row, float64 [parts, records]; NaN or inf if the part is not finite."""
    norms = rows.new_zeros((len(parts), len(rows)), dtype=torch.float64)
    for index, part in enumerate(parts):
        for columns in _pieces(part):
            norms[index] += rows[:, columns].to(torch.float64, copy=True).square_().sum(dim=1)
    return norms.sqrt_()


def clipped_rows(rows: Tensor, clip_norm: float, parts: Parts) -> Tensor:
    """The rows with each part clipped to `clip_norm`, float64; a row with any value that is not finite becomes zero.

    Guarantee: the results for any two rows differ by at most 2 sqrt(parts) * clip_norm in L2.

    Source: Liu et al., Algorithm 1, line 14, for a batch's mean under the `batch` rule.
    """
    rows, scales = _finite_rows_and_scales(rows, clip_norm, parts)
    return torch.cat([scale.unsqueeze(1) * rows[:, part] for part, scale in zip(parts, scales, strict=True)], dim=1)


def add_clipped(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
    """Add to each owner's total the sum of its rows, with each part clipped to `clip_norm`.

    Guarantee: adding or removing one row moves each part of its owner's total by at most `clip_norm` in L2, hence the
    whole by at most sqrt(parts) * clip_norm, and no other total. A row that is not finite counts as zero. Clipped
    values are truncated towards zero to multiples of a power of two, so sums of up to `MOST_ROWS` rows are exact: they
    do not depend on the order of the rows, and a sum with a row differs from that without it by this row alone.

    Args:
        totals: int64 [owners, values], changed in place; holds sums of earlier calls with the same clip norm, which
            `clipped_sums` turns into gradient units.
        rows: [records, values], gradient units; there may be none.
        owners: int64 [records], the row of `totals` to which each record is added.
        clip_norm: C, finite, >= 1e-100, gradient units.
        parts: slices that together cover every column once.

    Raises:
        ValueError: clip_norm is out of range, or totals are not int64.

    Source: Abadi et al. 2016, Algorithm 1, for one part.
    """
    if totals.dtype != torch.int64:
        raise ValueError(f"totals: are {totals.dtype}; only int64 sums keep the guarantee")
    rows, scales = _finite_rows_and_scales(rows, clip_norm, parts)
    for part, scale in zip(parts, scales, strict=True):
        factor = (scale / clip_unit(clip_norm)).unsqueeze(1)
        for columns in _pieces(part):
            # Conversion to integers truncates.
            totals[:, columns].index_add_(0, owners, (rows[:, columns] * factor).to(torch.int64))


def clipped_sums(totals: Tensor, clip_norm: float) -> Tensor:
    """The sums that `add_clipped` made, float64, gradient units; arguments as there."""
    return totals.double() * clip_unit(clip_norm)


def clip_unit(clip_norm: float) -> float:
    """The power of two of which clipped values are multiples, gradient units."""
    return 2.0 ** (math.frexp(clip_norm)[1] - 1 - _GRID_BITS)


def add_finite(totals: Tensor, rows: Tensor, owners: Tensor) -> None:
    """Add its rows, unclipped, to each owner's total, for the `batch` rule; a row that is not finite counts as zero.

    Args:
        totals, rows, owners: as for `add_clipped`.
    """
    whole_row = (slice(0, rows.shape[1]),)
    rows, _ = _finite_rows(rows, part_norms(rows, whole_row))
    for columns in _pieces(*whole_row):
        totals[:, columns].index_add_(0, owners, rows[:, columns].double())


def add_in_turn(totals: Tensor, rows: Tensor, targets: Tensor) -> None:
    """Add each row, unclipped, to its own total, one after the other; a row that is not finite counts as zero.

    Guarantee: a total is the sum of its rows in the order in which these come, to the bit, whatever other rows there
    are and however the rows are shared out among calls.

    Args:
        totals: float64 [totals, values], changed in place.
        rows: [records, values], gradient units; there may be none.
        targets: int64 [records], the total to which each row is added.
    """
    whole_row = (slice(0, rows.shape[1]),)
    rows, _ = _finite_rows(rows, part_norms(rows, whole_row))
    left = list(enumerate(targets.tolist()))
    while left:  # each time the first that is left of each total, so that no index occurs twice
        first: dict[int, int] = {}
        for row, target in left:
            first.setdefault(target, row)
        chosen = torch.tensor(list(first.values()), device=rows.device)
        totals[torch.tensor(list(first), device=totals.device)] += rows[chosen].double()
        left = [(row, target) for row, target in left if first[target] != row]


def check_clip_norm(clip_norm: float) -> None:
    """Refuse one that is out of range, with a ValueError."""
    if not _SMALLEST_CLIP_NORM <= clip_norm < math.inf:
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and at least {_SMALLEST_CLIP_NORM}")


def _pieces(part: slice) -> list[slice]:
    """The part, cut into pieces of bounded length."""
    starts = range(part.start, part.stop, _COLUMNS_AT_ONCE)
    return [slice(start, min(start + _COLUMNS_AT_ONCE, part.stop)) for start in starts]


def _finite_rows_and_scales(rows: Tensor, clip_norm: float, parts: Parts) -> tuple[Tensor, Tensor]:
    """The rows, zero where not finite, and the scales that clip their parts, float64 [parts, records]."""
    check_clip_norm(clip_norm)
    norms = part_norms(rows, parts)
    rows, finite = _finite_rows(rows, norms)
    at_most = clip_norm * ROUNDING_MARGIN
    scales = torch.where(norms > at_most, at_most / norms, torch.ones_like(norms))
    return rows, torch.where(finite, scales, torch.zeros_like(scales))


def _finite_rows(rows: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, with zeros for those whose norm is not finite, and which norms are finite, bool [records]."""
    finite = torch.isfinite(norms).all(dim=0)
    if _is_on_cpu(rows) and bool(finite.all()):  # a GPU would have to be waited for
        return rows, finite
    return torch.where(finite.unsqueeze(1), rows, torch.zeros_like(rows)), finite


def _is_on_cpu(rows: Tensor) -> bool:
    return rows.device.type == "cpu"
