"""The mathematics of the recipe `fedpriv`: how the budget is split, and the learning rate that its noise allows.

docs/recipes.md derives these formulas and says where each constant is from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.accounting.calibration import calibrate
from fedpriv.accounting.events import Event, SubsampledGaussian

# Of the budget, in units of 1 / z^2: a Gaussian release costs in proportion to that.
START_SHARE = 0.15

# The standard deviation with which each of the head's weights may end, and the longest step that is ever useful.
_FINAL_NOISE = 0.6
_LARGEST_RATE = 50.0


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The public numbers of a federation's rounds.

    Attributes:
        sizes: N_k >= 1, registered, of each client.
        weights: w_k > 0, of each client's summed gradients in the global sum.
        participation: share of the clients that each round asks, in (0, 1].
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    participation: float = 1.0

    @property
    def weighted_records(self) -> float:
        """Sum of w_k N_k, of the clients of a round on average."""
        return self.participation * math.fsum(w * n for w, n in zip(self.weights, self.sizes, strict=True))

    @property
    def weighted_noise(self) -> float:
        """Root of the sum of w_k^2, of the clients of a round on average: noise of the sum over that of one client."""
        return math.sqrt(self.participation * math.fsum(w * w for w in self.weights))


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A learning rate, and the terms that it was derived from.

    Attributes:
        noise_per_step_length: nu, the standard deviation of each of the head's weights per unit of `total_step`.
        total_step: tau, the sum of all rounds' learning rates.
        learning_rate: of each round.
    """

    noise_per_step_length: float
    total_step: float
    learning_rate: float

    @property
    def final_noise(self) -> float:
        """The standard deviation with which each of the head's weights ends."""
        return self.noise_per_step_length * self.total_step


def start_noise_multiplier(epsilon: float, delta: float, *, fixed: Sequence[Event] = ()) -> float:
    """z of the head's start: it may spend `START_SHARE` of what one Gaussian release within (epsilon, delta) may.

    Args:
        epsilon: of the whole run, finite, > 0.
        delta: in (0, 1).
        fixed: further releases of the run, whose noise is given.

    Raises:
        ValueError: a value is out of range, or no noise suffices.
    """

    def alone(z: float) -> list[Event]:
        return [SubsampledGaussian(noise_multiplier=z, sampling_probability=1.0, count=1)]

    return calibrate(alone, epsilon, delta, fixed=fixed) / math.sqrt(START_SHARE)


def start_noise_beside(noise_multiplier: float, num_steps: int) -> float:
    """z of the head's start beside full-batch steps whose noise is given, so that it spends the same share.

    Args:
        noise_multiplier: z of each step, >= 0.
        num_steps: T >= 1.
    """
    return noise_multiplier * math.sqrt((1 - START_SHARE) / (START_SHARE * num_steps))


def learning_rate(
    federation: Federation, *, noise_multiplier: float, sampling_probability: float, num_steps: int
) -> LearningRate:
    """The learning rate with which each of the head's weights ends with noise of about 0.6, and at most 50.

    nu = z sqrt(sum w_k^2) / (q sqrt(T) sum w_k N_k), tau = min(50 T, 0.6 / nu), and the rate is tau / T.

    Args:
        federation: of the rounds.
        noise_multiplier: z >= 0 of each client's noise.
        sampling_probability: q in (0, 1].
        num_steps: T >= 1.
    """
    noise = noise_multiplier * federation.weighted_noise
    nu = noise / (sampling_probability * math.sqrt(num_steps) * federation.weighted_records)
    tau = min(_LARGEST_RATE * num_steps, _FINAL_NOISE / nu if nu else math.inf)
    return LearningRate(noise_per_step_length=nu, total_step=tau, learning_rate=tau / num_steps)


def client_weight(num_records: int, *, equal: bool) -> float:
    """w_k: 1, or the root of N_k, which lets large clients count more where their noise is the same as a small one's.

    Args:
        num_records: N_k >= 1.
        equal: whether every client has weight 1, as where only the sum of all is seen.
    """
    return 1.0 if equal else math.sqrt(num_records)
