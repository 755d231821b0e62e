"""What a run of the recipe `fedpriv` could learn within a budget, before anything is registered: noise, rate, time.

Everything here is a function of public numbers. docs/recipes.md derives the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from fedpriv.accounting import recipe
from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.calibration import calibrate
from fedpriv.accounting.events import Event, SubsampledGaussian
from fedpriv.accounting.recipe import Federation, LearningRate, client_weight
from fedpriv.accounting.views import default_delta, rho_bar
from fedpriv.config import RunConfig
from fedpriv.errors import InputError

# Who may learn no more than the budget allows: the server, or those who see only the sums.
View = Literal["local", "aggregate"]

# The total step after which records at their classes' means differ from the middle by as much as noise would have moved
# them with nu = 1: 2 sqrt(2) C / Delta^2, with C classes whose means are Delta apart. Measured with the default model:
# 140 (embedded corpus, 8 classes), 194 (SST-2, 2), 120 (MedQuAD, 15).
NEEDED_STEP = 150.0

# Where noise allows a third of that or less, heads of the embedded corpus and SST-2 lost 54 and 19 points of accuracy.
HOPELESS_STEP = 50.0

# Noise to signal at which they lost 7 and 2 points.
GOOD_RATIO = 0.2

# LoRA is left out rather than trained on batches of a smaller share of the records than this.
_SMALLEST_LORA_SAMPLE = 0.01


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The public numbers of a run; by default the recipe's own, which are the defaults of `RunConfig`.

    Attributes:
        sizes: N_k >= 1, registered, of each client.
        epsilon: that each client may spend, > 0.
        delta: in (0, 1), of each client; None stands for 1 / (10 N_k), at most 1e-5.
        view: who may see no more than that: the server, or those who see only the sums.
        rounds: >= 1, with the head's start, if there is one, as the first.
        head_start: whether it starts with class sums of all records.
        sampling_probability: q in (0, 1] of the rounds that train the head.
        lora_rounds: the last rounds, >= 0, which train A and B too.
        lora_sampling_probability: q in (0, 1] of those.
        momentum: the server's, in [0, 1).

    Raises:
        InputError: a value is out of range.
    """

    sizes: tuple[int, ...]
    epsilon: float
    delta: float | None = None
    view: View = "local"
    rounds: int = RunConfig.rounds
    head_start: bool = RunConfig.head_start
    sampling_probability: float = RunConfig.sampling_probability or 1.0
    lora_rounds: int = RunConfig.lora_rounds or 0
    lora_sampling_probability: float = RunConfig.lora_sampling_probability or 1.0
    momentum: float = RunConfig.server_momentum

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"records = {list(self.sizes)}: needs at least one client, and each at least one record")
        if self.view not in get_args(View):
            raise InputError(f"view = {self.view!r}: must be one of {', '.join(get_args(View))}")
        if self.rounds < 1 + self.head_start:
            raise InputError(f"rounds = {self.rounds}: must be >= {1 + self.head_start}; the first starts the head")

    @property
    def num_steps(self) -> int:
        """T, the noisy steps after the start."""
        return self.rounds - self.head_start

    @property
    def num_lora_steps(self) -> int:
        """How many of them train A and B."""
        return min(self.lora_rounds, self.num_steps)

    @property
    def deltas(self) -> tuple[float, ...]:
        """[clients]."""
        return tuple(default_delta(size) if self.delta is None else self.delta for size in self.sizes)

    @property
    def federation(self) -> Federation:
        """Sizes and weights: equal ones where only the sum is seen, as in a run."""
        weights = [client_weight(size, equal=self.view == "aggregate") for size in self.sizes]
        return Federation(sizes=self.sizes, weights=weights)

    @property
    def record_passes(self) -> float:
        """Expected passes of one record through the model, of all clients together.

        The head's rounds need each record's features once, and next to nothing then; LoRA's rounds need every record
        that they draw.
        """
        not_drawn = (1 - self.sampling_probability) ** (self.num_steps - self.num_lora_steps)
        drawn = 1.0 if self.head_start else 1 - not_drawn
        return sum(self.sizes) * (drawn + self.num_lora_steps * self.lora_sampling_probability)

    def seconds(self, records_per_second: float) -> float:
        """How long the passes take, one after the other.

        Raises:
            InputError: records_per_second is not finite and > 0.
        """
        _check_positive("records_per_second", records_per_second)
        return self.record_passes / records_per_second

    def releases(self, noise_multiplier: float) -> list[Event]:
        """The steps of a client that takes part in all of them, without the start."""
        phases = (
            (self.num_steps - self.num_lora_steps, self.sampling_probability),
            (self.num_lora_steps, self.lora_sampling_probability),
        )
        return [
            SubsampledGaussian(noise_multiplier=noise_multiplier, sampling_probability=q, count=count)
            for count, q in phases
            if count
        ]


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """What taking part is expected to cost a client, by pld, on the three views.

    Attributes:
        num_records: N_k.
        delta: at which the epsilons hold.
        share: rho_k, the weight of its upload.
        epsilon_local: against the server, if it sees every upload.
        epsilon_rho: by the DP-LoRA paper's Theorem 1.
        epsilon_aggregate: against those who see only the sums, if nobody sees an upload.
    """

    num_records: int
    delta: float
    share: float
    epsilon_local: float
    epsilon_rho: float
    epsilon_aggregate: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a setting comes to.

    Attributes:
        setting: as asked for.
        noise_multiplier: z of each step of each client.
        start_noise_multiplier: z of the head's start; None without one.
        rate: the learning rate and its terms.
    """

    setting: Setting
    noise_multiplier: float
    start_noise_multiplier: float | None
    rate: LearningRate

    @property
    def final_noise(self) -> float:
        """The standard deviation with which each of the head's weights ends, from noise alone."""
        return self.rate.final_noise * self._noise_share

    @property
    def noise_to_signal(self) -> float:
        """Noise in the difference of two logits, over what the steps make of that difference.

        nu times `NEEDED_STEP`, and more where steps deliver less than the learning rate says: those on few records, and
        those that the server's momentum still holds back at the end.
        """
        return self.rate.noise_per_step_length * NEEDED_STEP * self._noise_share / self._step_share

    @property
    def misplaced(self) -> float:
        """The chance, in [0, 0.5], that noise alone moves a record at its class's mean to another given class."""
        return NormalDist().cdf(-1 / self.noise_to_signal) if self.noise_to_signal else 0.0

    @property
    def affordable_step(self) -> float:
        """0.6 / nu, the total step that brings the noise of each weight to 0.6; infinite without noise."""
        nu = self.rate.noise_per_step_length
        return recipe.FINAL_NOISE / nu if nu else math.inf

    @property
    def is_hopeless(self) -> bool:
        """Whether noise outweighs what can be learned."""
        return self.affordable_step < HOPELESS_STEP

    @property
    def needed_records(self) -> int:
        """Records of all clients together, in the same proportions, that bring noise to signal down to `GOOD_RATIO`."""
        return math.ceil(sum(self.setting.sizes) * self.noise_to_signal / GOOD_RATIO)

    @cached_property
    def costs(self) -> tuple[ClientCost, ...]:
        """[clients]."""
        federation = self.setting.federation
        shares = [
            w * n / federation.weighted_records for w, n in zip(federation.weights, federation.sizes, strict=True)
        ]
        bar = rho_bar(shares)
        return tuple(
            ClientCost(
                num_records=size,
                delta=delta,
                share=share,
                epsilon_local=self._epsilon(1.0, delta),
                epsilon_rho=self._epsilon(bar, delta),
                epsilon_aggregate=self._epsilon(federation.weighted_noise / weight, delta),
            )
            for size, delta, share, weight in zip(
                federation.sizes, self.setting.deltas, shares, federation.weights, strict=True
            )
        )

    def _epsilon(self, factor: float, delta: float) -> float:
        start = self.start_noise_multiplier
        events = self.setting.releases(self.noise_multiplier) + ([_release(start)] if start is not None else [])
        return epsilon_of([event.with_noise(factor) for event in events], delta).epsilon

    @property
    def _noise_share(self) -> float:
        arrived = recipe.arrived(self.setting.num_steps, self.setting.momentum)
        return math.sqrt(np.mean(arrived**2))

    @property
    def _step_share(self) -> float:
        arrived = recipe.arrived(self.setting.num_steps, self.setting.momentum)
        # In every round one unit of the noised sum moves the model equally far, however many records the sum is of.
        of_lora = self.setting.lora_sampling_probability / self.setting.sampling_probability
        first_lora = self.setting.num_steps - self.setting.num_lora_steps
        return float(arrived[:first_lora].sum() + of_lora * arrived[first_lora:].sum()) / self.setting.num_steps


def plan(setting: Setting) -> Plan:
    """The least noise that keeps every client within the budget, and what follows from it.

    Raises:
        InputError: the budget is out of range, or no noise meets it.
    """
    # Noise is the same at every client, and the smallest delta needs most of it.
    try:
        start, noise_multiplier = _calibrated(replace(setting, sizes=(1,), view="local", delta=min(setting.deltas)))
    except ValueError as error:
        raise InputError(str(error)) from None
    if setting.view == "aggregate":
        # Weights are equal, so the noise of K clients adds up to sqrt(K) times that of each.
        of_sum = math.sqrt(len(setting.sizes))
        start, noise_multiplier = None if start is None else start / of_sum, noise_multiplier / of_sum
    rate = recipe.learning_rate(
        setting.federation,
        noise_multiplier=noise_multiplier,
        sampling_probability=setting.sampling_probability,
        num_steps=setting.num_steps,
    )
    return Plan(setting=setting, noise_multiplier=noise_multiplier, start_noise_multiplier=start, rate=rate)


def alternatives(setting: Setting) -> dict[str, Plan]:
    """The plans of settings that differ from this one in one respect, by what that is."""
    q, of_lora, num_clients = setting.sampling_probability, setting.lora_sampling_probability, len(setting.sizes)
    largest = tuple(sorted(setting.sizes, reverse=True)[: math.ceil(num_clients / 2)])
    changed = {f"q = {other:g}": replace(setting, sampling_probability=other) for other in (1.0, 0.1) if other != q}
    for rounds in (setting.rounds // 2, 2 * setting.rounds):
        if rounds > setting.head_start:
            changed[f"{rounds} rounds"] = replace(setting, rounds=rounds)
    if setting.num_lora_steps:
        larger = min(1.0, 4 * of_lora)
        if larger > of_lora:
            changed[f"LoRA q = {larger:g}"] = replace(setting, lora_sampling_probability=larger)
        changed["head alone"] = replace(setting, lora_rounds=0)
    if num_clients > 1:
        changed[f"{len(largest)} largest of {num_clients} clients"] = replace(setting, sizes=largest)
        other_view: View = "local" if setting.view == "aggregate" else "aggregate"
        name = "secure aggregation" if other_view == "aggregate" else "uploads seen by the server"
        changed[name] = replace(setting, view=other_view)
    return {name: plan(other) for name, other in changed.items()}


def fitted(setting: Setting, *, seconds: float, records_per_second: float) -> tuple[Setting, tuple[str, ...]]:
    """The setting with as much of LoRA, then of full batches, as the time allows; and what was left out.

    Args:
        setting: without a limit of time.
        seconds: for the passes of all clients, one after the other, > 0.
        records_per_second: that pass through the model, > 0.

    Raises:
        InputError: a value is out of range.
    """
    _check_positive("seconds", seconds)
    if setting.seconds(records_per_second) <= seconds:
        return setting, ()
    affordable = seconds * records_per_second / sum(setting.sizes)  # passes of every record
    q = (affordable - 1) / max(1, setting.num_lora_steps)
    if q >= _SMALLEST_LORA_SAMPLE:
        return replace(setting, lora_sampling_probability=q), (
            f"{seconds:g} seconds are too short for LoRA with q = {setting.lora_sampling_probability:g}: q = {q:.3g}",
        )
    head = replace(setting, lora_rounds=0)
    left_out = "LoRA: the head alone is trained"
    if affordable >= 1:
        return head, (f"{seconds:g} seconds are too short for {left_out}",)
    q = 1 - (1 - affordable) ** (1 / setting.rounds)
    return replace(head, head_start=False, sampling_probability=q), (
        f"{seconds:g} seconds are too short for {left_out}",
        f"and too short for full batches: q = {q:.3g}, without the head's start, which needs every record",
    )


def most_helpful(plans: dict[str, Plan]) -> str:
    """The alternative with the least noise to signal."""
    return min(plans, key=lambda name: plans[name].noise_to_signal)


@lru_cache(maxsize=64)
def _calibrated(setting: Setting) -> tuple[float | None, float]:
    """z of the start, if there is one, and of the steps, of a client whose uploads are seen."""
    (delta,) = setting.deltas
    if not setting.head_start:
        return None, calibrate(setting.releases, setting.epsilon, delta)
    start = recipe.start_noise_multiplier(setting.epsilon, delta)
    return start, calibrate(setting.releases, setting.epsilon, delta, fixed=[_release(start)])


def _release(noise_multiplier: float) -> Event:
    """The head's start."""
    return SubsampledGaussian(noise_multiplier=noise_multiplier, sampling_probability=1.0, count=1)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} = {value}: must be finite and > 0")
