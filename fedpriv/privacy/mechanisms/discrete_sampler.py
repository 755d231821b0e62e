"""Exact samples of the discrete Gaussian: an integer x has a probability in proportion to exp(-x^2 / (2 sigma^2)).

The sampler rejects from a staircase above the half-curve p(x) = exp(-x^2 / (2 sigma^2)), x >= 0, and adds a sign. The
integers below 5 sigma are cut into blocks of 2^w; each block's column is a pile of cells of equal area, and a word of
64 bits picks one of 2^16 cells, a point in it and the sign. Above 5 sigma, stairs of width 2^(w + 6) fall by 2^-5 each,
and together are a few cells more; a cell that belongs to nothing draws again.

Why the output has exactly the stated law, given uniform words: (1) Every proposal is made of bits alone, so a point
under the staircase is exactly uniform; nothing is rounded. (2) It is accepted if it lies below p. Most cells lie below
p as a whole, by a margin beyond all rounding, and accept without a computation. (3) In the others the height is known
up to the bits that have been drawn, and p up to `ERROR`, proven for the few IEEE operations that compute it. If these
leave it open which is larger, `_is_below` decides that one point with more bits and with decimals of growing precision,
for as long as it takes. (4) Zero with a negative sign is drawn again, so that it is not counted twice.

Source of the law: Canonne, Kamath and Steinke 2020, Definition 1; their Algorithm 3 rejects from a discrete Laplace
instead.
"""

import math
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.mechanisms.sources import RandomSource, Words

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MIN_SIGMA, MAX_SIGMA = 2.0**-10, 2.0**40

# Relative error of `_curve`, and the larger one for which comparisons allow: it also covers their own roundings.
ERROR = 2.0**-44
_MARGIN = 2.0**-40

_CELL_BITS = 16
_NUM_CELLS = 2**_CELL_BITS
# Blocks reach this many sigma; the tail's stairs are 2^6 blocks wide, so at least sigma, and fall by 2^-5 where p falls
# by e^-5 or more.
_REACH = 5
_STAIR_BITS, _FALL_BITS = 6, 5
# Cells that the tail may take: p there is at most e^-12.5, and no cell is lower than 2^-16.
_MAX_TAIL_CELLS = 32


@dataclass(frozen=True, kw_only=True)
class _Staircase:
    """The cells above one half-curve: those wholly below it come first, then the others, the tail's, and spare ones.

    Attributes:
        width_bits: w, of a block of 2^w integers.
        blocks: int16 [2^16], the block of each cell; 0 for the tail's and spare ones.
        levels: int64 [open], how many cells are below it in its block.
        num_inside: cells wholly below the curve.
        num_tail: cells of the tail.
    """

    sigma: float
    width_bits: int
    cell_height: float
    blocks: npt.NDArray[np.int16]
    levels: Integers
    num_inside: int
    num_tail: int
    tail_begin: int
    tail_height: Fraction


def discrete_gaussian(sigma: float, num: int, source: RandomSource) -> Integers:
    """`num` independent values of N_Z(0, sigma^2), int64 [num]; exactly of that law if the source's words are uniform.

    It draws one word for a value and, at sigma >= 64, some 2 % more for rejected points.

    Args:
        sigma: the distribution's parameter, in [2^-10, 2^40], taken as the exact binary fraction that a float is; from
            1 on, it is the standard deviation up to 1e-6.
        num: number of values, >= 0.

    Raises:
        ValueError: sigma is out of range.
    """
    if not MIN_SIGMA <= sigma <= MAX_SIGMA:
        raise ValueError(f"sigma = {sigma}: the discrete Gaussian is drawn for sigma from 2^-10 to 2^40")
    stairs = _staircase(float(sigma))
    values, begin = np.empty(num, dtype=np.int64), 0
    while begin < num:
        accepted = _accepted(stairs, source.words(num - begin), source)
        values[begin : begin + len(accepted)] = accepted
        begin += len(accepted)
    return values


def _exp_of_minus(exponents: Floats) -> Floats:
    """e^-z for z in [0, 13], float64, with a relative error of at most 2^-45.

    Proof, with r = z / 64 <= 0.204 and eps = 2^-53, for differences, products and quotients that are rounded correctly,
    as IEEE 754 demands: the series of e^-r is cut off after r^13, which costs less than r^14 / 14! < 1e-20. A step of
    Horner's scheme adds at most (1 + 2 r / n) eps, and divides the error of the step before by n / r >= 4.9; so the
    sum, which is at least 0.81, is within 1.8 eps, or 2.3 eps of itself. Six squarings make (64 * 2.3 + 63) eps < 2^-45
    of it.
    """
    r = exponents / 64.0
    power = np.ones_like(r)
    for n in range(13, 0, -1):
        power = 1.0 - r / n * power
    for _ in range(6):
        power *= power
    return power


def _curve(points: Integers | Floats, sigma: float) -> Floats:
    """p at integers up to (5 + 1/32) sigma: its error is that of e^-z and three roundings of an exponent z <= 13."""
    exact = points.astype(np.float64)
    return _exp_of_minus(exact * exact / (2.0 * (sigma * sigma)))


@lru_cache(maxsize=64)
def _staircase(sigma: float) -> _Staircase:
    """The cells for this sigma."""
    width_bits = max(0, math.frexp(sigma)[1] - 6)  # 2^w in (sigma / 64, sigma / 32], or 1
    num_blocks = math.ceil(_REACH * sigma / 2**width_bits)
    first = np.arange(num_blocks, dtype=np.int64) << width_bits
    last = first + (2**width_bits - 1)
    highest, lowest = _curve(first, sigma) * (1 + _MARGIN), _curve(last, sigma) * (1 - _MARGIN)
    cell_height = float(highest.sum()) * (1 + _MARGIN) / (_NUM_CELLS - num_blocks - _MAX_TAIL_CELLS)
    piled = np.ceil(highest / cell_height).astype(np.int64)
    inside = np.floor(lowest / cell_height).astype(np.int64)
    inside[0] = 0  # block 0 has the zero, whose sign is looked at
    opened = piled - inside
    tail_begin = num_blocks << width_bits
    # All stairs together have 1 / (1 - 2^-5) times the area of the first one.
    stair = Fraction(cell_height) * Fraction(2**_FALL_BITS - 1, 2 ** (_FALL_BITS + _STAIR_BITS))
    num_tail = math.ceil(_exp_bounds(tail_begin, sigma, 20)[1] / stair)
    blocks = np.zeros(_NUM_CELLS, dtype=np.int16)
    index = np.arange(num_blocks)
    used = np.concatenate([np.repeat(index, inside), np.repeat(index, opened)])
    blocks[: len(used)] = used
    begins = np.cumsum(opened) - opened
    levels = np.arange(opened.sum()) - np.repeat(begins - inside, opened)
    return _Staircase(
        sigma=sigma,
        width_bits=width_bits,
        cell_height=cell_height,
        blocks=blocks,
        levels=levels,
        num_inside=int(inside.sum()),
        num_tail=num_tail,
        tail_begin=tail_begin,
        tail_height=num_tail * stair,
    )


def _accepted(stairs: _Staircase, words: Words, source: RandomSource) -> Integers:
    """The values that the points of these words give, int64 [accepted]; more bits come from the source."""
    # A word from its lowest bit: 16 bits of a cell, w of a point, 47 - w of a height within the cell, and the sign.
    cells = (words & np.uint64(_NUM_CELLS - 1)).astype(np.int64)
    points = (words >> np.uint64(_CELL_BITS)).view(np.int64) & (2**stairs.width_bits - 1)
    points |= stairs.blocks.take(cells).astype(np.int64) << stairs.width_bits
    signs = words.view(np.int64) >> 63  # 0 or -1
    accepted = cells < stairs.num_inside
    undecided = np.flatnonzero(~accepted)
    open_cells = cells[undecided] - stairs.num_inside
    is_block = open_cells < len(stairs.levels)
    of_blocks = undecided[is_block]
    heights = (words[of_blocks] << np.uint64(1)) >> np.uint64(_CELL_BITS + stairs.width_bits + 1)
    below = _are_below(stairs, points[of_blocks], stairs.levels[open_cells[is_block]], heights, source)
    accepted[of_blocks] = below & ~((points[of_blocks] == 0) & (signs[of_blocks] < 0))
    is_tail = ~is_block & (open_cells < len(stairs.levels) + stairs.num_tail)
    for index in undecided[is_tail]:
        point = _tail_point(stairs, source)
        if point is not None:
            points[index], accepted[index] = point, True
    signed: Integers = (points ^ signs) - signs
    return signed[accepted]


def _are_below(
    stairs: _Staircase, points: Integers, levels: Integers, heights: Words, source: RandomSource
) -> npt.NDArray[np.bool_]:
    """Whether points lie below the curve, [points]; the height of each is a level and 47 - w bits of a fraction."""
    num_bits = 63 - _CELL_BITS - stairs.width_bits
    lower = (levels + heights.astype(np.float64) * 2.0**-num_bits) * stairs.cell_height
    curve = _curve(points, stairs.sigma)
    gaps = curve - lower
    errors = _MARGIN * (curve + lower)
    below = gaps > errors + stairs.cell_height * 2.0**-num_bits
    for index in np.flatnonzero(~below & (gaps > -errors)):
        level, height = int(levels[index]), int(heights[index])
        scale = Fraction(stairs.cell_height)
        below[index] = _is_below(int(points[index]), stairs.sigma, level * scale, scale, height, num_bits, source)
    return below


def _tail_point(stairs: _Staircase, source: RandomSource) -> int | None:
    """A uniform point under the stairs of the tail if it lies below the curve, else None."""
    stair = 0
    while _bits(_FALL_BITS, source) == 0:
        stair += 1
    width_bits = stairs.width_bits + _STAIR_BITS
    point = stairs.tail_begin + (stair << width_bits) + _bits(width_bits, source)
    height = stairs.tail_height / 2 ** (_FALL_BITS * stair)
    return point if _is_below(point, stairs.sigma, Fraction(0), height, 0, 0, source) else None


def _is_below(
    point: int, sigma: float, base: Fraction, scale: Fraction, known: int, num_bits: int, source: RandomSource
) -> bool:
    """Whether base + scale * U < p(point), for a uniform U in [0, 1) that begins with the known bits."""
    digits = 30
    while True:
        low, high = _exp_bounds(point, sigma, digits)
        unit = scale / 2**num_bits
        lower = base + known * unit
        if lower >= high:
            return False
        if lower + unit <= low:
            return True
        known, num_bits = (known << 64) | _bits(64, source), num_bits + 64
        digits += 20


def _exp_bounds(point: int, sigma: float, digits: int) -> tuple[Fraction, Fraction]:
    """Numbers below and above exp(-point^2 / (2 sigma^2)).

    They have some `digits` equal decimals, or are 0 and 10^-digits if it is far below that. The exponent's quotient and
    `Decimal.exp` are rounded correctly: relative errors of at most 10^(1 - precision) each, of which the first is
    multiplied by the exponent.
    """
    exponent = Fraction(point * point) / (2 * Fraction(sigma) ** 2)
    if exponent > 3 * digits:
        return Fraction(0), Fraction(1, 10**digits)
    precision = digits + len(str(math.ceil(exponent)))
    context = Context(prec=precision, rounding=ROUND_HALF_EVEN)
    value = Fraction(context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))))
    error = Fraction(3 * (math.ceil(exponent) + 1), 10 ** (precision - 1))
    return value * (1 - error), value * (1 + error)


def _bits(num: int, source: RandomSource) -> int:
    """A uniform integer of `num` <= 64 bits; 0 for none."""
    return int(source.words(1)[0]) >> (64 - num) if num else 0
