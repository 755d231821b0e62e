"""Rounding of a noised release, so that its last digits tell nothing."""

from __future__ import annotations

import math

from torch import Tensor


def on_grid(values: Tensor, scale: float) -> Tensor:
    """The values, in place, rounded to multiples of a power of two, some 2^-18 of the noise's size.

    Which floats a sum with noise can reach depends on the sum, and tells it (Mironov 2012). After rounding, a step of
    post-processing, all sums reach the same points, each by some 2^46 words in the middle of the distribution.

    Args:
        values: of any shape, changed in place.
        scale: standard deviation, or another typical size, of the noise, > 0.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    # In place: the values are a power of two times their quotients, so both steps are exact.
    return values.div_(step).round_().mul_(step)
