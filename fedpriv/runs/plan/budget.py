"""Plan what a run could learn within a budget, before anything is registered: noise, rates, epsilons, time.

Everything here is a function of public numbers; noise and rates are computed by what a run computes them with.
docs/appendices/recipe_noise.md derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
import torch

from fedpriv.config import WITH_AUTO, RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import INNER_SUFFIX, Adapter, leading_block
from fedpriv.learning.training.noise_plan import (
    calibrated,
    decided,
    federation_of,
    momentum_of,
    planned_releases,
    view_scale,
    with_learning_rates,
)
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.private_evaluation import planned_event as planned_evaluation
from fedpriv.learning.training.rounds import PhaseRounds, RunSchedule, client_masses, record_weights
from fedpriv.privacy.accounting import recipe
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.accounting.recipe import NARROW_RANK
from fedpriv.privacy.accounting.views import PlannedView, aggregate_scale, default_delta, num_readers, rho_bar
from fedpriv.privacy.mechanisms.registry import FOR_SUMS

# The total step after which records at their classes' means differ from the middle by as much as noise would have moved
# them with nu = 1: 2 sqrt(2) C / Delta^2, with C classes whose means are Delta apart. Measured with the default model:
# 140 (embedded corpus, 8 classes), 194 (SST-2, 2), 120 (MedQuAD, 15).
NEEDED_STEP = 150.0

# Where noise allows a quarter of that, heads of the embedded corpus and SST-2 lost 54 and 19 points of accuracy.
HOPELESS_STEP = 40.0

# Noise to signal at which they lost 7 and 2 points.
GOOD_RATIO = 0.2

# LoRA is left out rather than trained on batches of a smaller share of the records than this.
_SMALLEST_LORA_SAMPLE = 0.01

# A and B in the default model: rank 4, for query and value of its last layer, whose matrices are 384 x 384.
LORA_VALUES = 2 * 4 * (384 + 384)

# Matrices R in the default model, which `train = auto` is about: for query and value of its six layers.
_R_MATRICES = 6 * 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The public numbers of a run.

    Attributes:
        sizes: N_k >= 1, registered, of each client: records, or persons if these are the configuration's unit.
        config: of the run, with the recipe `fedpriv`: its `target_epsilon` is what each client may spend on its
            `privacy_view`.
        num_lora_values: d >= 1, in A and B, or in all R of rank 16, or of the configuration's rank if that is less.
        num_classes: c >= 2, of the head.

    Raises:
        InputError: a value is out of range.
    """

    sizes: tuple[int, ...]
    config: RunConfig
    num_lora_values: int = LORA_VALUES
    num_classes: int = 2

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"records = {list(self.sizes)}: needs at least one client, and each at least one record")
        if self.config.min_clients > len(self.sizes):
            raise InputError(f"min_clients = {self.config.min_clients}: there are {len(self.sizes)} clients")
        if self.num_lora_values < 1:
            raise InputError(f"lora_values = {self.num_lora_values}: must be >= 1")
        if self.num_classes < 2:
            raise InputError(f"classes = {self.num_classes}: must be >= 2")

    @staticmethod
    def of(
        sizes: tuple[int, ...],
        *,
        epsilon: float,
        view: PlannedView = "local",
        num_lora_values: int | None = None,
        num_classes: int = 2,
        **keys: Any,
    ) -> Setting:
        """A run with these clients and the recipe's own numbers, but for the keys that are given and not None.

        Args:
            sizes: N_k of every client.
            num_lora_values: of A and B, or of the factor that is trained; by default of the default model.
            num_classes: of the head, >= 2.
            epsilon: that each client may spend, > 0.
            view: who may learn no more than that: the server, or those who see only sums; unless `min_clients` is
                given, these are of all clients.

        Raises:
            InputError: a value is out of range.
        """
        if view not in get_args(PlannedView):
            raise InputError(f"view = {view!r}: must be one of {', '.join(get_args(PlannedView))}")
        values = {key: value for key, value in keys.items() if value is not None}
        least = num_readers(values.get("colluding_clients", 0)) + 2
        hidden = {"secure_aggregation": True, "min_clients": max(least, len(sizes))} if view == "aggregate" else {}
        config = parse({"target_epsilon": epsilon, "privacy_view": view} | hidden | values)
        if num_lora_values is None:
            num_lora_values = LORA_VALUES
            if config.rule.trains == "lora-r":
                num_lora_values = _R_MATRICES * min(config.rank, NARROW_RANK) ** 2
        return Setting(sizes=sizes, config=config, num_lora_values=num_lora_values, num_classes=num_classes)

    @property
    def num_lora_rounds(self) -> int:
        """The number of rounds that train A and B."""
        return self.config.num_lora_rounds

    @property
    def deltas(self) -> tuple[float, ...]:
        """The delta of each client, [clients]."""
        return tuple(self.config.delta or default_delta(size) for size in self.sizes)

    @property
    def adapter(self) -> Adapter:
        """A stand-in for the run's adapter: Gaussian noise costs the same for any; rates depend on d and c alone."""
        head = {"classifier.bias": torch.empty(self.num_classes, device="meta")}
        if self.config.rule.trains != "lora-r":
            return {"layer.lora_A.weight": torch.empty(self.num_lora_values, device="meta")} | head
        rank = self.config.rank
        numbers = range(self._num_matrices)
        of_r = {f"{number}{INNER_SUFFIX}": torch.empty(rank, rank, device="meta") for number in numbers}
        return leading_block(of_r, self.config.trained_rank or rank) | head

    @property
    def _num_matrices(self) -> int:
        """How many matrices R have so many values."""
        return max(1, round(self.num_lora_values / min(self.config.rank, NARROW_RANK) ** 2))

    @property
    def record_passes(self) -> float:
        """Expected passes of one record through the model, of all clients together.

        The head's rounds need each record's features once, and next to nothing then; LoRA's rounds need every record
        that they draw. A person counts as the most records that one may have in a step.
        """
        config = self.config
        q = config.sampling_probability or 1.0
        drawn = 1 - (1 - q) ** (config.rounds - config.head_start - self.num_lora_rounds)
        with_lora = (phase for phase in config.phases if phase.name == "all")
        of_lora = sum(phase.num_rounds * (phase.sampling_probability or 1.0) for phase in with_lora)
        return self.num_records * ((1.0 if config.head_start else drawn) + of_lora)

    @property
    def num_records(self) -> int:
        """Records of all clients together, as many of each person as count in a step."""
        return sum(self.sizes) * max(1, self.config.most_of_a_person)

    def seconds(self, records_per_second: float) -> float:
        """The seconds that the passes take, one after the other; InputError if the speed is not finite and > 0."""
        _check_positive("records_per_second", records_per_second)
        return self.record_passes / records_per_second

    def changed(self, **keys: Any) -> Setting:
        """The setting with other values of these keys of its configuration."""
        return replace(self, config=replace(self.config, **keys))


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """The expected cost of taking part for a client, by pld, on the three views.

    Attributes:
        num_records: N_k, of persons where these are the unit.
        share: rho_k, the weight of its upload.
        epsilon_local: against the server, if it sees every upload.
        epsilon_rho: at the noise of the DP-LoRA paper's Theorem 1.
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
    """The noise, the steps and the costs that follow from a setting.

    Attributes:
        setting: as asked for, with numbers for all noise and all learning rates in its configuration.
    """

    setting: Setting

    @cached_property
    def phases(self) -> tuple[PhaseRounds, ...]:
        """The start of the head, if there is one, rounds of the head, and rounds of A, B and head."""
        return RunSchedule.of(self.setting.config).phases

    @property
    def steps(self) -> tuple[PhaseRounds, ...]:
        """The phases after the start."""
        return tuple(phase for phase in self.phases if phase.name != "start")

    @property
    def noise_per_step_length(self) -> float:
        """nu of the rounds of the head, or of all where there are none: noise of its weights per unit of their step."""
        spec = self.steps[0].spec
        return recipe.noise_per_step_length(
            federation_of(self.setting.config, self.setting.sizes),
            noise_stddev=spec.noise_multiplier * spec.clip_norm,
            sampling_probability=spec.sampling_probability,
            num_steps=self.steps[0].num_rounds,
        )

    @property
    def total_step(self) -> float:
        """tau of the same rounds, the sum of their learning rates."""
        return self.steps[0].spec.learning_rate * self.steps[0].num_rounds

    @property
    def affordable_step(self) -> float:
        """0.487 / nu, the step that may arrive until noise is 0.487 in each weight; infinite without noise."""
        return recipe.affordable_step(self.noise_per_step_length)

    @property
    def final_noise(self) -> float:
        """The standard deviation with which the noise of all steps leaves each of the head's weights."""
        noise = federation_of(self.setting.config, self.setting.sizes).noise_per_record
        specs = [phase.spec for phase in self.steps]
        stddevs = [spec.noise_multiplier * spec.clip_norm * noise / spec.sampling_probability for spec in specs]
        of_rounds = self._each_round([spec.learning_rate * x for spec, x in zip(specs, stddevs, strict=True)])
        return math.sqrt(np.sum(of_rounds**2))

    @property
    def noise_to_signal(self) -> float:
        """Noise in the difference of two logits, over what the steps make of that difference.

        `NEEDED_STEP` times the noise that has arrived in a weight by the end of the run, over the step that has.
        """
        step = float(np.sum(self._each_round([phase.spec.learning_rate for phase in self.steps])))
        return NEEDED_STEP * self.final_noise / step

    @property
    def misplaced(self) -> float:
        """The chance, in [0, 0.5], that noise alone moves a record at its class's mean to another given class."""
        return NormalDist().cdf(-1 / self.noise_to_signal) if self.noise_to_signal else 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether noise outweighs what can be learned."""
        return self.affordable_step < HOPELESS_STEP

    @property
    def needed_records(self) -> int:
        """Records or persons of all clients together, in proportion, that bring the ratio to `GOOD_RATIO`."""
        return math.ceil(sum(self.setting.sizes) * self.noise_to_signal / GOOD_RATIO)

    @cached_property
    def costs(self) -> tuple[ClientCost, ...]:
        """The cost of each client, [clients], if all take part in every round."""
        config, sizes = self.setting.config, dict(enumerate(self.setting.sizes))
        masses = client_masses(config, sizes)
        shares = {client: mass / math.fsum(masses.values()) for client, mass in masses.items()}
        bar = rho_bar(shares.values())
        # The same q at every client: a gradient counts for the same in every phase.
        weights = record_weights(config, self.phases[-1].spec, sizes)
        # The noise of a sum of all clients over the client's own, for those who may read it.
        scales = {client: aggregate_scale(weights, client, colluding=config.colluding_clients) for client in sizes}
        return tuple(
            ClientCost(
                num_records=size,
                delta=delta,
                share=shares[client],
                epsilon_local=self._epsilon(sizes, client, 1.0, delta),
                epsilon_rho=self._epsilon(sizes, client, bar, delta),
                epsilon_aggregate=self._epsilon(sizes, client, scales[client], delta),
            )
            for (client, size), delta in zip(sizes.items(), self.setting.deltas, strict=True)
        )

    def releases(self, client: int) -> list[Event]:
        """The releases of a client that takes part in all rounds, on the run's view, even if all others drop out.

        A trillionth of the noise is left off, so that a run's own arithmetic never ends below it.
        """
        config, sizes = self.setting.config, dict(enumerate(self.setting.sizes))
        factor = view_scale(config, self.setting.sizes) * (1 - 1e-12)
        events = [event.with_noise(factor) for event in planned_releases(config, sizes, client, self.setting.adapter)]
        evaluation = EvaluationSpec.of(config)
        return [*events, planned_evaluation(evaluation)] if evaluation else events

    def _epsilon(self, sizes: Mapping[int, int], client: int, factor: float, delta: float) -> float:
        events = planned_releases(self.setting.config, sizes, client, self.setting.adapter)
        return epsilon_of([event.with_noise(factor) for event in events], delta).epsilon

    def _each_round(self, values: list[float]) -> Array:
        """[rounds after the start]: a value of each of their phases, times what momentum has delivered by the end."""
        rounds = np.repeat(values, [phase.num_rounds for phase in self.steps])
        return np.asarray(rounds * recipe.arrived(len(rounds), momentum_of(self.setting.config)))


def plan(setting: Setting) -> Plan:
    """The least noise that keeps every client within the budget, and what follows from it.

    Raises:
        InputError: the budget is out of range, or no noise meets it.
    """
    return _plan(setting)


@lru_cache(maxsize=64)
def _plan(setting: Setting) -> Plan:
    if setting.config.train == "auto":
        setting, _ = lora_choice(setting)
    config = calibrated(setting.config, setting.sizes, setting.adapter)
    return Plan(setting=replace(setting, config=with_learning_rates(config, setting.sizes, setting.adapter)))


@lru_cache(maxsize=64)
def lora_choice(setting: Setting) -> tuple[Setting, str]:
    """The setting that `train = auto` stands for, and why; InputError if no noise meets the budget."""
    if setting.config.train != "auto":
        of_r = setting.num_lora_values
        if setting.config.rule.trains == "lora-r":
            of_r = setting._num_matrices * NARROW_RANK**2
        elif of_r == LORA_VALUES:
            of_r = _R_MATRICES * NARROW_RANK**2
        setting = replace(setting.changed(train="auto", trained_rank=None, **WITH_AUTO), num_lora_values=of_r)
    config, reason = decided(setting.config, setting.sizes, setting.adapter)
    return replace(setting, config=replace(config, train="all")), reason


def alternatives(setting: Setting) -> dict[str, Plan]:
    """The plans of settings that differ from this one in one respect, by what that is."""
    config, num_clients = setting.config, len(setting.sizes)
    q, of_lora = config.sampling_probability or 1.0, config.lora_sampling_probability or 1.0
    others = {f"q = {other:g}": setting.changed(sampling_probability=other) for other in (1.0, 0.1) if other != q}
    for rounds in (config.rounds // 2, 2 * config.rounds):
        if rounds > config.head_start:
            others[f"{rounds} rounds"] = setting.changed(rounds=rounds)
    if setting.num_lora_rounds:
        larger = min(1.0, 4 * of_lora)
        if larger > of_lora:
            others[f"LoRA q = {larger:g}"] = setting.changed(lora_sampling_probability=larger)
        others["head alone"] = setting.changed(lora_rounds=0)
    chosen, _ = lora_choice(setting)
    if chosen.num_lora_rounds and chosen != setting:
        others["train = auto"] = chosen
    if num_clients > 1:
        largest = tuple(sorted(setting.sizes, reverse=True)[: math.ceil(num_clients / 2)])
        if not config.secure_aggregation or len(largest) >= num_readers(config.colluding_clients) + 2:
            fewer = setting.changed(min_clients=min(config.min_clients, len(largest)))
            others[f"{len(largest)} largest of {num_clients} clients"] = replace(fewer, sizes=largest)
        if config.secure_aggregation:
            seen = setting.changed(privacy_view="local", secure_aggregation=False, min_clients=1, mechanism="gaussian")
            others["uploads seen by the server"] = seen
        elif num_clients >= num_readers(config.colluding_clients) + 2:
            hidden = setting.changed(
                privacy_view="aggregate", secure_aggregation=True, min_clients=num_clients, mechanism=FOR_SUMS
            )
            others["secure aggregation"] = hidden
    return {name: plan(other) for name, other in others.items()}


def fitted(setting: Setting, *, seconds: float, records_per_second: float) -> tuple[Setting, tuple[str, ...]]:
    """The setting with as much of LoRA, then of full batches, as the time allows; and what was left out.

    Args:
        seconds: for the passes of all clients, one after the other, > 0.
        records_per_second: that pass through the model, > 0.

    Raises:
        InputError: a value is out of range.
    """
    _check_positive("seconds", seconds)
    if setting.seconds(records_per_second) <= seconds:
        return setting, ()
    affordable = seconds * records_per_second / setting.num_records  # passes of every record
    q, asked = (affordable - 1) / max(1, setting.num_lora_rounds), setting.config.lora_sampling_probability
    if q >= _SMALLEST_LORA_SAMPLE:
        return setting.changed(lora_sampling_probability=q), (
            f"{seconds:g} seconds are too short for LoRA with q = {asked:g}: q = {q:.3g}",
        )
    head = setting.changed(lora_rounds=0)
    left_out = "LoRA: the head alone is trained"
    if affordable >= 1:
        return head, (f"{seconds:g} seconds are too short for {left_out}",)
    q = 1 - (1 - affordable) ** (1 / setting.config.rounds)
    return head.changed(head_start=False, sampling_probability=q), (
        f"{seconds:g} seconds are too short for {left_out}",
        f"and too short for full batches: q = {q:.3g}, without the head's start, which needs every record",
    )


def most_helpful(plans: dict[str, Plan]) -> str:
    """The alternative with the least noise to signal."""
    return min(plans, key=lambda name: plans[name].noise_to_signal)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} = {value}: must be finite and > 0")
