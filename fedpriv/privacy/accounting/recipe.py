"""The mathematics of the recipe `fedpriv`: how the budget is split, and the learning rate that its noise allows.

docs/appendices/recipe_noise.md derives these formulas; recipe_trials.md there says where each constant is from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

import numpy as np

from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import calibrate, noise_multiplier_for
from fedpriv.privacy.accounting.events import Event, SubsampledGaussian
from fedpriv.privacy.accounting.law import Array

# The start's share of the budget, in units of 1 / z^2: a Gaussian release costs in proportion to that.
START_SHARE = 0.15

# The standard deviation with which each of the head's weights may end, and the longest steps: with momentum 0.9 those
# on features of norm 1 are stable up to 76, and on centred ones, which point in all directions, far beyond. There a
# head of few classes has learned what is common to all records sooner, and then what is not.
_FINAL_NOISE = 0.487
_LARGEST_RATE = 75.0
_LARGEST_CENTRED_RATE = 200.0
_CENTRED_RATE_OF_A_CLASS = 50.0

# The same for the last rounds, which train A and B too: the noise of the head's weights, and how far A and B may step
# for what their noise adds up to. docs/appendices/recipe_trials.md says how both were found.
_FINAL_NOISE_BESIDE_LORA = 0.18
_LORA_NOISE = 0.016
_LARGEST_LORA_RATE = 30.0
# Sampling has noise of its own: a rate of one for so many records in a step.
_RECORDS_PER_RATE = 100.0

# Where LoRA pays, most rounds train it, with most of the budget.
LORA_PAYS = 2e-4
LORA_SHARE = 0.75
LORA_ROUNDS = 0.75
LORA_PROBABILITY = 1 / 4
LORA_PASSES = 10.0
# Adam's rate: at most so much over the noise of a round, twice that for R, and so much over the root of their number.
LORA_ADAM_NOISE = 0.1
R_ADAM_NOISE = 0.2
LORA_ADAM_WALK = 0.126
# Where noise is this small a wide R pays more, in more and shorter steps, than one of this rank in these rounds.
WIDE_PAYS = 8e-6
NARROW_RANK, NARROW_ROUNDS = 16, 53

# The rounds that there can be are enumerated up to this many, and beyond that drawn this often, always the same.
_ENUMERATED_ROUNDS = 5000


@dataclass(frozen=True, kw_only=True)
class WeightedClients:
    """The public numbers of a federation's rounds.

    Attributes:
        sizes: N_k >= 1, registered, of each client.
        weights: w_k > 0, of each client's summed gradients in the global sum.
        participation: share of the clients that each round asks, drawn again for every round, in (0, 1].
        records_of_unit: m >= 1, how many records' gradients one of the N_k may add up to: of a person, at most so many.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    participation: float = 1.0
    records_of_unit: int = 1

    @property
    def weighted_records(self) -> float:
        """Sum of w_k N_k over all clients."""
        return math.fsum(w * n for w, n in zip(self.weights, self.sizes, strict=True))

    @property
    def weighted_noise(self) -> float:
        """Root of the sum of w_k^2 over all clients: noise of the sum over that of one client."""
        return math.sqrt(math.fsum(w * w for w in self.weights))

    @property
    def noise_per_record(self) -> float:
        """sqrt(sum w_k^2) / sum w_k N_k of a round: the root mean square over whom it may ask.

        With unequal clients this is more than the ratio of the averages: a round of small clients is noisier than a
        round of large ones is quiet.
        """
        num_asked = max(1, round(self.participation * len(self.sizes)))
        if num_asked >= len(self.sizes):
            return self.weighted_noise / self.weighted_records
        weights, sizes = (np.array(values, dtype=float) for values in (self.weights, self.sizes))
        asked = _rounds(len(sizes), num_asked)
        squares = (weights[asked] ** 2).sum(axis=1) / (weights * sizes)[asked].sum(axis=1) ** 2
        return math.sqrt(squares.mean())


def _rounds(num_clients: int, num_asked: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[rounds, num_asked]: indices of the clients of every round that there can be, or of many of them."""
    if math.comb(num_clients, num_asked) <= _ENUMERATED_ROUNDS:
        return np.array(list(combinations(range(num_clients), num_asked)), dtype=np.int64)
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(num_clients)[:num_asked] for _ in range(_ENUMERATED_ROUNDS)])


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A learning rate, and the terms that it was derived from.

    Attributes:
        noise_per_step_length: nu, the standard deviation of each of the head's weights per unit of `total_step`, if the
            server adds up the steps as they come.
        total_step: tau, the sum of all rounds' learning rates.
        learning_rate: of each round.
        largest_learning_rate: that it is held to.
        delivered_noise: in (0, 1], how much of the noise the server's momentum has delivered when the run ends.
    """

    noise_per_step_length: float
    total_step: float
    learning_rate: float
    largest_learning_rate: float
    delivered_noise: float

    @property
    def final_noise(self) -> float:
        """The standard deviation with which each of the head's weights ends, from noise alone."""
        return self.delivered_noise * self.noise_per_step_length * self.total_step


def start_noise_multiplier(epsilon: float, delta: float, *, fixed: Sequence[Event] = ()) -> float:
    """z of the head's start: it may spend `START_SHARE` of what one Gaussian release within (epsilon, delta) may.

    Args:
        epsilon: of the whole run, finite, > 0.
        delta: in (0, 1).
        fixed: further releases of the run, whose noise is given.

    Raises:
        ValueError: a value is out of range, or no noise suffices.
    """
    return _gaussian_multiplier(epsilon, delta, tuple(fixed)) / math.sqrt(START_SHARE)


def noise_multiplier_of_share(
    share: float,
    epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    num_steps: int,
    fixed: Sequence[Event] = (),
) -> float:
    """z of sampled steps that together cost what a Gaussian release with this share of the budget costs.

    Args:
        share: in (0, 1), of 1 / z^2 of the single Gaussian release that the run may afford.
        epsilon, delta, fixed: as for `start_noise_multiplier`.
        sampling_probability: q in (0, 1].
        num_steps: J >= 1.

    Raises:
        ValueError: a value is out of range, or no noise suffices.
    """
    alone = SubsampledGaussian(
        noise_multiplier=_gaussian_multiplier(epsilon, delta, tuple(fixed)) / math.sqrt(share), sampling_probability=1.0
    )
    return noise_multiplier_for(
        epsilon_of([alone], delta).epsilon, delta, sampling_probability=sampling_probability, steps=num_steps
    )


@lru_cache(maxsize=64)
def _gaussian_multiplier(epsilon: float, delta: float, fixed: tuple[Event, ...]) -> float:
    """z of the single Gaussian release, of the fixed ones' unit, that is left within (epsilon, delta)."""
    unit = fixed[0].unit if fixed else "record"

    def alone(z: float) -> list[Event]:
        return [SubsampledGaussian(noise_multiplier=z, sampling_probability=1.0, count=1, unit=unit)]

    return calibrate(alone, epsilon, delta, fixed=fixed)


def start_noise_for_steps(noise_multiplier: float, num_steps: int) -> float:
    """z of the head's start that spends the same share as with T >= 1 full-batch steps whose noise z >= 0 is given."""
    return noise_multiplier * math.sqrt((1 - START_SHARE) / (START_SHARE * num_steps))


def noise_per_step_length(
    federation: WeightedClients, *, noise_stddev: float, sampling_probability: float, num_steps: int
) -> float:
    """nu = z C sqrt(sum w_k^2) / (q sqrt(T) sum w_k N_k): the noise of a weight per unit of its total step.

    Args:
        noise_stddev: z C >= 0, of each client's noise in a sum of clipped gradients.
        sampling_probability: q in (0, 1].
        num_steps: T >= 1.
    """
    return noise_stddev * federation.noise_per_record / (sampling_probability * math.sqrt(num_steps))


def learning_rate(
    federation: WeightedClients,
    *,
    noise_stddev: float,
    sampling_probability: float,
    num_steps: int,
    num_after: int = 0,
    momentum: float = 0.0,
    centred_classes: int | None = None,
) -> LearningRate:
    """The learning rate with which each of the head's weights ends with noise of about 0.49, up to a largest one.

    tau = min(75 T, 0.487 / (a nu)), or min(50 c T, 200 T, 0.487 / (a nu)) where features are centred and the head has c
    classes, and the rate is tau / T. a is the root mean square of what momentum delivers of each step's noise; see
    `arrived`. Where a person's records are summed, gradients are one to m times as large, and the largest rate is lower
    by sqrt(m), the middle of that.

    Args:
        federation, noise_stddev, sampling_probability, num_steps: as for `noise_per_step_length`.
        num_after: rounds of the run that follow these steps, >= 0.
        momentum: of the server, in [0, 1).
        centred_classes: classes, >= 2, of a head whose steps are taken with features less their mean; else None.
    """
    nu = noise_per_step_length(
        federation,
        noise_stddev=noise_stddev,
        sampling_probability=sampling_probability,
        num_steps=num_steps,
    )
    delivered = delivered_noise(num_steps, momentum, num_after=num_after)
    largest = _LARGEST_RATE
    if centred_classes is not None:
        largest = min(_LARGEST_CENTRED_RATE, _CENTRED_RATE_OF_A_CLASS * centred_classes)
    largest /= math.sqrt(federation.records_of_unit)
    tau = min(largest * num_steps, affordable_step(delivered * nu))
    return LearningRate(
        noise_per_step_length=nu,
        total_step=tau,
        learning_rate=tau / num_steps,
        largest_learning_rate=largest,
        delivered_noise=delivered,
    )


def delivered_noise(num_steps: int, momentum: float, *, num_after: int) -> float:
    """The root mean square of `arrived`, whose arguments it takes: in (0, 1]."""
    return math.sqrt(np.mean(arrived(num_steps, momentum, num_after=num_after) ** 2))


def affordable_step(noise_per_step_length: float) -> float:
    """The total step after which each of the head's weights has noise of 0.487; infinite without noise."""
    return _FINAL_NOISE / noise_per_step_length if noise_per_step_length else math.inf


@dataclass(frozen=True, kw_only=True)
class _JointRates:
    """Learning rates of rounds that train A, B and head."""

    head: float
    lora: float


def joint_rates(
    federation: WeightedClients, *, noise_stddev: float, sampling_probability: float, num_steps: int, num_values: int
) -> _JointRates:
    """The rates of the last rounds: tau = 0.18 / nu for the head, 0.016 / (nu^2 d) for A and B, each over J.

    They are at most 75 / sqrt(m) and 30 / m, and the head's at most one for each hundred records of an expected step.
    At too large a rate a head swings, but A and B diverge, so theirs suits m records of everyone; see `learning_rate`.

    Args:
        federation, noise_stddev, sampling_probability: as for `learning_rate`, of these rounds.
        num_steps: J >= 1.
        num_values: d >= 1, in A and B.
    """
    nu = noise_per_step_length(
        federation,
        noise_stddev=noise_stddev,
        sampling_probability=sampling_probability,
        num_steps=num_steps,
    )
    of_sampling = federation.participation * sampling_probability * math.fsum(federation.sizes) / _RECORDS_PER_RATE
    head = _FINAL_NOISE_BESIDE_LORA / nu if nu else math.inf
    lora = _LORA_NOISE / (nu**2 * num_values) if nu else math.inf
    of_unit = federation.records_of_unit
    return _JointRates(
        head=min(head / num_steps, _LARGEST_RATE / math.sqrt(of_unit), of_sampling),
        lora=min(lora / num_steps, _LARGEST_LORA_RATE / of_unit),
    )


def lora_noise(
    federation: WeightedClients, *, noise_stddev: float, sampling_probability: float, num_steps: int, num_values: int
) -> float:
    """nu^2 d: the squared length of the noise in A and B per unit of total step, to be held against `LORA_PAYS`."""
    nu = noise_per_step_length(
        federation,
        noise_stddev=noise_stddev,
        sampling_probability=sampling_probability,
        num_steps=num_steps,
    )
    return nu**2 * num_values


def arrived(num_steps: int, momentum: float, *, num_after: int = 0) -> Array:
    """[T], in (0, 1]: the share of each round's step that the server's momentum has delivered by the end of the run.

    With V <- m V + (1 - m) D and theta <- theta + eta V, the step that comes s rounds before the end (itself counted)
    has arrived up to the factor 1 - m^s. The mean is the share of the total step, the root mean square that of its
    noise: 0.78 and 0.81 after 40 rounds with m = 0.9.

    Args:
        num_steps: T >= 1.
        momentum: m in [0, 1).
        num_after: rounds that follow them, >= 0.
    """
    return np.asarray(1 - momentum ** np.arange(num_steps + num_after, num_after, -1))


def client_weight(num_records: int, weighting: Literal["uniform", "records", "root-records"]) -> float:
    """w_k, of each record of a client, whose upload then counts for w_k N_k.

    The root of N_k lets large clients count more where their noise is the same as a small one's; 1 is for where only
    the sum of all is seen; and with 1 / N_k each client counts for as much as any other.

    Args:
        num_records: N_k >= 1.
        weighting: what uploads count in proportion to: nothing, N_k or N_k^1.5.
    """
    return {"uniform": 1 / num_records, "records": 1.0, "root-records": math.sqrt(num_records)}[weighting]
