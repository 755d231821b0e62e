"""The rounds of a run: what each asks of every client, and what a client's upload counts for in a round's sum.

Rounds come in a row of phases, each of which asks for one kind of update. Public numbers give a federation's grid under
secure aggregation, and the weight of each client's upload, and of each of its records, in the sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice

from torch import Tensor

from fedpriv.config import Phase, RunConfig
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.training._coordinates import Coordinates, scaled, trained_weights
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.recipe import client_weight
from fedpriv.privacy.mechanisms.discrete_gaussian import SumGrid, largest_number_included, sum_grid


@dataclass(frozen=True, kw_only=True)
class PhaseRounds:
    """Rounds with one specification: a phase, or the part of it that trains the same tensors.

    Attributes:
        name: of the phase: `start`, `head` or `all`.
        num_rounds: >= 1.
    """

    name: str
    spec: UpdateSpec
    num_rounds: int


@dataclass(frozen=True)
class RunSchedule:
    """The phases of a run, in order.

    Attributes:
        scheduled: z of every round, and q where that is given, in place of its phase's; empty without a schedule.
    """

    phases: tuple[PhaseRounds, ...]
    scheduled: tuple[tuple[float, float | None], ...] = ()

    @staticmethod
    def of(config: RunConfig) -> RunSchedule:
        """The start of the head, rounds of the head, and rounds that train everything; ValueError unless calibrated."""
        everything = UpdateSpec.of(config)
        phases = []
        for phase in config.phases:
            if phase.name == "start":
                specs = [(_start(phase, everything), phase.num_rounds)]
            elif phase.name == "head":
                # The start of the head is what makes the features' mean known.
                spec = replace(everything, trains="head", centred=config.head_start, noise_multiplier=phase.known_noise)
                specs = [(replace(spec, sampling_probability=phase.sampling_probability or 0.0), phase.num_rounds)]
            else:
                specs = _in_turn(_joint(phase, everything), config.rule.turns, phase.num_rounds)
            phases += [PhaseRounds(name=phase.name, spec=spec, num_rounds=count) for spec, count in specs]
        return RunSchedule(tuple(phases), config.scheduled)

    def phase(self, round_: int) -> PhaseRounds:
        """The phase of a round, from 1, with the round's own noise; that of the last one for rounds beyond the run."""
        last = 0
        for phase in self.phases:
            last += phase.num_rounds
            if round_ <= last:
                break
        if not self.scheduled:
            return phase
        z, q = self.scheduled[min(round_, len(self.scheduled)) - 1]
        spec = replace(phase.spec, noise_multiplier=z, sampling_probability=q or phase.spec.sampling_probability)
        return replace(phase, spec=spec)

    def spec(self, round_: int) -> UpdateSpec:
        """The update that a client is asked for in a round, from 1."""
        return self.phase(round_).spec

    def following(self, after: int, num_rounds: int) -> list[tuple[PhaseRounds, int]]:
        """The phases of the rounds after the last finished one, and how many each takes; one by one with a schedule."""
        if self.scheduled:
            return [(self.phase(round_), 1) for round_ in range(after + 1, after + num_rounds + 1)]
        spans, first = [], 0
        for phase in self.phases:
            last = first + phase.num_rounds
            if (count := min(last, after + num_rounds) - max(first, after)) > 0:
                spans.append((phase, count))
            first = last
        return spans

    def counts(self, after: int, num_rounds: int) -> Mapping[UpdateSpec, int]:
        """{specification: how many of the next rounds have it}; arguments as for `following`."""
        counts = Counter[UpdateSpec]()
        for phase, count in self.following(after, num_rounds):
            counts[phase.spec] += count
        return counts

    @property
    def totals(self) -> Mapping[UpdateSpec, int]:
        """{specification: how many of the run's rounds have it}."""
        return self.counts(0, sum(phase.num_rounds for phase in self.phases))


def _in_turn(spec: UpdateSpec, turns: Sequence[str], num_rounds: int) -> list[tuple[UpdateSpec, int]]:
    """Rounds after the head's: all alike or, where they train different tensors in turn, one after the other."""
    if len(turns) == 1:
        return [(replace(spec, trains=turns[0]), num_rounds)]
    return [(replace(spec, trains=turn), 1) for turn in islice(cycle(turns), num_rounds)]


def _joint(phase: Phase, everything: UpdateSpec) -> UpdateSpec:
    """A step of A, B and head, with the noise, sampling and rates of its phase."""
    rates = phase.learning_rate, phase.lora_learning_rate
    if "auto" in rates:
        raise ValueError(f"lora_head_learning_rate, lora_learning_rate = {rates}: have not been derived yet")
    return replace(
        everything,
        sampling_probability=phase.sampling_probability or 0.0,
        noise_multiplier=phase.known_noise,
        learning_rate=float(phase.learning_rate),
        lora_learning_rate=float(phase.lora_learning_rate or 0.0),
    )


def _start(phase: Phase, everything: UpdateSpec) -> UpdateSpec:
    """One release of all records' features, summed by class."""
    return replace(
        everything,
        trains="head",
        objective="class-sums",
        sampling_probability=1.0,
        learning_rate=1.0,
        clip_norm=1.0,
        noise_multiplier=phase.known_noise,
    )


def grid_of(config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int]) -> SumGrid | None:
    """The grid of a round's sum of all clients of the run, {client: registered N_k}, whichever take part in it.

    None without secure aggregation.
    """
    return _grid_of(config, spec, tuple(sorted(sizes.items()))) if config.secure_aggregation else None


@lru_cache(maxsize=64)
def _grid_of(config: RunConfig, spec: UpdateSpec, sizes: tuple[tuple[int, int], ...]) -> SumGrid:
    return sum_grid(
        clip_norm=spec.clip_norm,
        noise_multiplier=spec.noise_multiplier,
        weights=record_weights(config, spec, dict(sizes)),
        num_included={client: num_included(spec, size) for client, size in sizes},
    )


def num_included(spec: UpdateSpec, num_registered: int) -> float:
    """n_k: how many vectors of norm C a client's sum has at most; one under `batch`, and with noise on the upload."""
    if spec.noise_on == "upload" or spec.clipping == "batch":
        return 1.0
    return largest_number_included(num_registered, spec.probability(num_registered))


def mean_of_sum(
    config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int], total: Tensor, survivors: Collection[int]
) -> Tensor:
    """The weighted average of what uploads are made of, sum_k rho_k s_k / B_k, float64 [values]; with noise.

    With v_k in proportion to rho_k / B_k and c_k = v_k / max v, the total is gamma sum_k c_k s_k.

    Args:
        sizes: {client: registered N_k} of all clients of the run.
        total: int64 [values], the sum of the survivors' integers.
        survivors: the clients in it, at least one.
    """
    grid = grid_of(config, spec, sizes)
    if grid is None:
        raise ValueError("secure_aggregation = false: there is no sum")
    masses = client_masses(config, sizes)
    unit = max(record_weights(config, spec, sizes).values()) / math.fsum(masses[client] for client in survivors)
    return total.double().mul_(unit / grid.gamma)


def mean_upload(adapter: Adapter, spec: UpdateSpec, mean: Tensor) -> Adapter:
    """The weighted average of the uploads of an update from its step's, or its updates', average.

    Equal to rounding errors to the average of the adapters that the clients would have uploaded one by one.

    Args:
        spec: of the update; one step of sgd, or noise on the upload.
        mean: float64 [values], the weighted average of the clients' noised gradients or updates.
    """
    coordinates = Coordinates.of(spec, {name: tensor.shape for name, tensor in adapter.items()})
    start, centre = coordinates.start(adapter)
    if spec.noise_on == "upload":
        moved = (start + scaled(mean, coordinates.scales)).float()
    else:
        weights = trained_weights(spec, start.unsqueeze(0), adapter, coordinates.layout)
        weights.step(coordinates.step_of(mean.float()).unsqueeze(0))
        moved = weights.values()[0]
    return coordinates.moved(adapter, moved, centre)


def client_masses(config: RunConfig, sizes: Mapping[int, int]) -> dict[int, float]:
    """{client: w_k N_k}, from registered N_k: what its weight rho_k in a round's sum is in proportion to."""
    if config.weighting == "uniform":
        return dict.fromkeys(sizes, 1.0)  # equal to the bit, which (1 / N_k) N_k is not
    return {client: client_weight(size, config.weighting) * size for client, size in sizes.items()}


def record_weights(config: RunConfig, spec: UpdateSpec, sizes: Mapping[int, int]) -> dict[int, float]:
    """{client: rho_k / B_k}, up to a common factor: what one of its clipped gradients counts for in a round's sum.

    Its noise of scale z C counts for the same. B_k is the expected batch size; rho_k alone where the clipped vector and
    its noise are not divided by it: under the clipping rule `batch`, and with noise on the upload.
    """
    masses = client_masses(config, sizes)
    if spec.clipping == "batch" or spec.noise_on == "upload":
        return masses
    return {client: mass / (spec.probability(sizes[client]) * sizes[client]) for client, mass in masses.items()}
