"""Exact discrete Gaussian noise on sums of clipped gradients, the grid on which they become integers, and its cost.

Lemma. On integers, adding N_Z(0, sigma^2) to each of d coordinates has the law of adding N(0, sigma^2 - 9) and rounding
each result to an integer at random, whatever the data, up to 4 d exp(-18 pi^2) < 3e-77 d in the log of their ratio. So
whatever bounds the continuous mechanism, sampled or composed, bounds the discrete one: an epsilon holds up to twice
this a release, which no floating-point accountant can resolve. docs/appendices/discrete_gaussian.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpriv.privacy.accounting.events import Event, SubsampledGaussian
from fedpriv.privacy.mechanisms.discrete_sampler import MAX_SIGMA, discrete_gaussian
from fedpriv.privacy.mechanisms.registry import NoiseRequest, WithoutParameters
from fedpriv.privacy.mechanisms.sources import RandomSource

if TYPE_CHECKING:
    from torch import Tensor

# The variance of the random rounding. A larger one would cost more noise, a smaller one a larger divergence: 4 exp(-18
# pi^2) is below 3e-77.
_ROUNDING_VARIANCE = 9.0

# Below this the mechanism is not used: the noise that is charged would be noticeably less than what is drawn.
MIN_STDDEV = 2.0**10

# sqrt(sigma^2 - 9) >= CHARGED_SHARE * sigma for every sigma >= MIN_STDDEV. One factor for all of them: if variances add
# up, so does what is charged.
CHARGED_SHARE = math.sqrt(1.0 - _ROUNDING_VARIANCE / MIN_STDDEV**2)

# A sum stays within its range but for draws of so many standard deviations; a wrap costs accuracy, never privacy.
DEVIATIONS = 10.0
# Magnitudes of a sum are below 2^31 or, with 64 bits, 2^52: float64, in which sums are formed, holds integers so far.
RANGE_BITS = {32: 31, 64: 52}

# A grid of the mechanism's own choice gives the noise a standard deviation of 2^28 steps or more, less than twice as
# much: then rounding adds a few parts in 10^7 to the sensitivity of 10^4 values, and sums of 2^30 gradients stay far
# from the largest int64.
_OWN_STDDEV_BITS = 28

# Magnitudes to which all values are clamped, in steps: an int64 holds them with their noise, and a rounded product is
# 2^-5 off at most.
_LARGEST_EXACT, _LARGEST_ROUNDED = 2.0**62, 2.0**48

# More than all roundings of the few operations that compute a sensitivity.
_ROUNDING_MARGIN = 1.0 + 2.0**-40


class _DiscreteGaussian(WithoutParameters):
    """N_Z(0, sigma^2), sigma = gamma z C, on every coordinate of gamma times the sum, rounded; then divided by gamma.

    Rounding is part of the sensitivity, which is gamma factor C + sqrt(d) in steps of the grid: two neighbouring sums
    of d values are each rounded, by half a step at most. Clamping moves no two sums apart. The event is a subsampled
    Gaussian: the discrete Gaussian is a random rounding of a continuous one of variance sigma^2 - 9. A noise multiplier
    of 0 adds nothing, and its event costs infinity.

    Source: Canonne, Kamath and Steinke 2020, Section 2.
    """

    name = "discrete-gaussian"
    noise_adds_up = True
    cost_depends_on_dimension = True

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] subsampled Gaussians; ValueError if noise is below 2^10 steps of a grid, or above 2^40."""
        return [
            SubsampledGaussian(
                noise_multiplier=_charged_multiplier(request, client),
                sampling_probability=probability,
                count=request.count,
                unit=request.unit,
            )
            for client, probability in enumerate(request.sampling_probabilities)
        ]

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        """The noised grid points, in the sums' units, and their events."""
        import torch  # deferred: a configuration is checked without it

        request.check_fits(sums, sources)
        events = self.planned_events(request)
        if request.noise_multiplier == 0:
            return sums.clone(), events
        noised = torch.empty_like(sums)
        for client, (total, source) in enumerate(zip(sums, sources, strict=True)):
            grid = _grid(request, client)
            noise = torch.from_numpy(discrete_gaussian(_stddev(request, grid), request.dimension, source))
            largest = _largest(request, client)
            steps = total.double().mul(grid).clamp_(-largest, largest).round_().to(torch.int64)  # half to even
            noised[client] = steps.add_(noise.to(total.device)).double().div_(grid)
        return noised, events


MECHANISM = _DiscreteGaussian()


def integers(noised: Tensor, grid: float) -> Tensor:
    """The noised integers behind a client's result, int64 of the same shape, exactly.

    Args:
        noised: float64, as `add_noise` returns it.
        grid: gamma > 0, that of the request.

    Raises:
        ValueError: noised is not float64, or a value is no point of the grid, or 2^52 or more steps from zero.
    """
    import torch  # deferred: a configuration is checked without it

    if noised.dtype != torch.float64:
        raise ValueError(f"noised: is {noised.dtype}; only float64 holds the integers exactly")
    # The quotient by a grid that is no power of two was rounded, and so is this product: it may be a step off. But
    # different integers have different quotients.
    nearest = (noised * grid).round_()
    if not bool((nearest.abs() < 2.0**52).all()):
        raise ValueError("noised: a value is 2^52 steps of the grid or more from zero, or not finite")
    candidates = torch.stack([nearest, nearest - 1, nearest + 1])
    matches = candidates / grid == noised
    if not bool(matches.any(dim=0).all()):
        raise ValueError(f"noised: a value is no multiple of 1 / grid, grid = {grid}")
    return candidates.gather(0, matches.byte().argmax(dim=0, keepdim=True)).squeeze(0).to(torch.int64)


def sensitivity(request: NoiseRequest, client: int) -> float:
    """The most that a record or person moves a client's integers by in L2, in steps, with their rounding; rounded up.

    Each client of a sum rounds for itself. A person at several of them moves the sum by the total of these, which is
    not in proportion to the clients' grids.
    """
    grid = _grid(request, client)
    # In exact arithmetic each value moves by half a step at most when it is rounded. The product with a grid that is no
    # power of two is rounded before.
    excess = 0.0 if _is_exact(grid) else 2.0**-52 * _largest(request, client)
    rounding = math.sqrt(request.dimension) * (1.0 + excess)
    return (grid * request.sensitivity_factor * request.clip_norm + rounding) * _ROUNDING_MARGIN


def _charged_multiplier(request: NoiseRequest, client: int) -> float:
    """The noise multiplier of a client's event: that of the continuous Gaussian, over the sensitivity with rounding."""
    if request.noise_multiplier == 0:
        return 0.0
    return _stddev(request, _grid(request, client)) * CHARGED_SHARE / sensitivity(request, client)


def _stddev(request: NoiseRequest, grid: float) -> float:
    """sigma = gamma z C, in steps."""
    stddev = grid * (request.noise_multiplier * request.clip_norm)
    if not MIN_STDDEV <= stddev <= MAX_SIGMA:
        raise ValueError(
            f"grid = {grid}, noise_multiplier = {request.noise_multiplier}, clip_norm = {request.clip_norm}: give "
            f"noise of {stddev:g} steps of the grid; must be 2^10 to 2^40"
        )
    return stddev


def _grid(request: NoiseRequest, client: int) -> float:
    """gamma: the client's, or the power of two that gives the noise 2^28 to 2^29 steps."""
    if request.grids:
        return request.grids[client]
    scale = request.noise_multiplier * request.clip_norm
    if not 1e-200 <= scale <= 1e200:
        raise ValueError(
            f"noise_multiplier = {request.noise_multiplier}: times clip_norm = {request.clip_norm} must be 1e-200 to "
            "1e200"
        )
    return math.ldexp(1.0, _OWN_STDDEV_BITS + 1 - math.frexp(scale)[1])


def _largest(request: NoiseRequest, client: int) -> float:
    """The magnitude to which a client's values are clamped, in steps."""
    grid = _grid(request, client)
    largest = _LARGEST_EXACT if _is_exact(grid) else _LARGEST_ROUNDED
    return min(largest, grid * request.bounds[client]) if request.bounds else largest


def _is_exact(grid: float) -> bool:
    """Whether products with the grid are exact, because it is a power of two."""
    return math.frexp(grid)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class ClientGrid:
    """One client's grid: `points` gamma c_k > 0 per unit of its sum, each of whose values is clamped to `bound` > 0."""

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
    # The largest e with 2^e less than what a word holds.
    exponents = {bits: math.ceil(math.log2(2.0 ** RANGE_BITS[bits] / per_step)) - 1 for bits in RANGE_BITS}
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
