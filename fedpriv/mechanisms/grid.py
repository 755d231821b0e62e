"""Rounding of a noised release, so that its last digits reveal nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def on_grid(values: Tensor, scale: float) -> Tensor:
    """The values, rounded in place to multiples of a power of two, some 2^-18 of the size of the noise.

    Which floats a noised sum can take depends on the sum, and can reveal it (Mironov 2012). After rounding, which is
    post-processing, all sums reach the same points, each from some 2^46 words in the middle of the distribution.

    Args:
        values: of any shape, changed in place.
        scale: standard deviation, or another typical size, of the noise; > 0.
    """
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    # The step is a power of two, so dividing and multiplying by it are exact.
    return values.div_(step).round_().mul_(step)
