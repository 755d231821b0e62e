"""The integers on which a federation's sums are taken: fine enough for the noise, with no wrap of the modulus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedpriv.privacy.accounting.discrete_gaussian import MIN_STDDEV

# A sum stays within its range but for draws of so many standard deviations; a wrap costs accuracy, never privacy.
DEVIATIONS = 10.0
# Magnitudes of a sum are below 2^31 or, with 64 bits, 2^52: float64, in which sums are formed, holds integers so far.
RANGE_BITS = {32: 31, 64: 52}


@dataclass(frozen=True, kw_only=True)
class ClientGrid:
    """The grid on which one client's sum becomes integers.

    Attributes:
        points: gamma c_k > 0, grid points per unit of the sum.
        bound: > 0, largest magnitude of any value of the sum, in its units, to which it is clamped.
    """

    points: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class SumGrid:
    """The grid on which all clients' sums become integers that can be added modulo 2^bits.

    Attributes:
        modulus_bits: m, 32 or 64.
        exponent: gamma = 2^exponent, grid points per unit of a sum with scale 1.
        scales: {client: c_k in (0, 1]}, public.
        bounds: {client: largest magnitude of any value of its sum}, in units of the sum.
    """

    modulus_bits: int
    exponent: int
    scales: Mapping[int, float]
    bounds: Mapping[int, float]

    @property
    def gamma(self) -> float:
        """Grid points per unit of a sum with scale 1."""
        return 2.0**self.exponent

    def of(self, client: int) -> ClientGrid:
        """The grid of one client."""
        return ClientGrid(points=self.gamma * self.scales[client], bound=self.bounds[client])


def sum_grid(
    *, clip_norm: float, noise_multiplier: float, weights: Mapping[int, float], num_included: Mapping[int, float]
) -> SumGrid:
    """The finest grid of a power of two whose sums fit the modulus; 32 bits, or 64 where those leave too little noise.

    gamma is the largest power of two with gamma C sum_k c_k n_k + 10 sqrt(sum_k sigma_k^2) below 2^31, where
    sigma_k = gamma c_k z C; below 2^52 with 64 bits.

    Args:
        clip_norm: C > 0, units of the sums.
        noise_multiplier: z >= 0, each client's noise over C.
        weights: {client: v_k > 0}, what one unit of its sum counts for, up to a common factor.
        num_included: {client: n_k}, how many vectors of norm C its sum has at most.
    """
    largest = max(weights.values())
    scales = {client: weight / largest for client, weight in weights.items()}
    per_step = clip_norm * (
        math.fsum(scales[client] * num_included[client] for client in scales)
        + DEVIATIONS * noise_multiplier * math.hypot(*scales.values())
    )
    smallest_noise = noise_multiplier * clip_norm * min(scales.values())
    exponents = {bits: _largest_exponent(2.0 ** RANGE_BITS[bits] / per_step) for bits in RANGE_BITS}
    bits = 32 if noise_multiplier == 0 or smallest_noise * 2.0 ** exponents[32] >= MIN_STDDEV else 64
    return SumGrid(
        modulus_bits=bits,
        exponent=exponents[bits],
        scales=scales,
        bounds={client: clip_norm * num for client, num in num_included.items()},
    )


def largest_number_included(num_records: int, sampling_probability: float) -> float:
    """n_k: N_k without sampling, else B_k + 10 sqrt(B_k), which a Poisson sample hardly ever exceeds."""
    if sampling_probability == 1:
        return float(num_records)
    expected = sampling_probability * num_records
    return min(float(num_records), expected + DEVIATIONS * math.sqrt(expected))


def _largest_exponent(below: float) -> int:
    """The largest e with 2^e < `below`."""
    return math.ceil(math.log2(below)) - 1
