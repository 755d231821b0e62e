"""The rounds of a run: in a row of phases, each asks every client for the same kind of update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from fedpriv.aggregation.rules import RULES
from fedpriv.config import RunConfig
from fedpriv.training.local_update import UpdateSpec


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Rounds with one specification.

    Attributes:
        name: `start`, `head` or `all`.
        spec: of each client's update.
        num_rounds: >= 1.
    """

    name: str
    spec: UpdateSpec
    num_rounds: int


@dataclass(frozen=True)
class RunSchedule:
    """The phases of a run, in order."""

    phases: tuple[Phase, ...]

    @staticmethod
    def of(config: RunConfig) -> RunSchedule:
        """The start of the head, rounds that train the head alone, and rounds that train everything.

        Raises:
            ValueError: the learning rate is still to be derived.
        """
        everything = UpdateSpec.of(config)
        num_all = num_lora_rounds(config)
        phases = []
        if config.head_start:
            phases.append(Phase(name="start", spec=_start(config, everything), num_rounds=1))
        if num_head := config.rounds - config.head_start - num_all:
            # The start of the head is what makes the features' mean known.
            spec = replace(everything, trains="head", centred=config.head_start)
            phases.append(Phase(name="head", spec=spec, num_rounds=num_head))
        if num_all:
            spec = everything if config.lora_rounds is None else _joint(config, everything)
            phases += _in_turn(spec, RULES[config.aggregation].turns, num_all)
        return RunSchedule(tuple(phases))

    def phase(self, round_: int) -> Phase:
        """The phase of a round, from 1; that of the last one for rounds beyond the run."""
        last = 0
        for phase in self.phases:
            last += phase.num_rounds
            if round_ <= last:
                return phase
        return self.phases[-1]

    def spec(self, round_: int) -> UpdateSpec:
        """The update that a client is asked for in a round, from 1."""
        return self.phase(round_).spec

    def following(self, after: int, num_rounds: int) -> list[tuple[Phase, int]]:
        """The phases of the next rounds, and how many rounds each of them takes.

        Args:
            after: the last finished round, >= 0.
            num_rounds: >= 0, at most those that are left.
        """
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


def _in_turn(spec: UpdateSpec, turns: Sequence[str], num_rounds: int) -> list[Phase]:
    """Rounds after the head's: one phase or, where they train different tensors in turn, a phase for each round."""
    if len(turns) == 1:
        return [Phase(name="all", spec=replace(spec, trains=turns[0]), num_rounds=num_rounds)]
    return [
        Phase(name="all", spec=replace(spec, trains=turn), num_rounds=1) for turn in islice(cycle(turns), num_rounds)
    ]


def _joint(config: RunConfig, spec: UpdateSpec) -> UpdateSpec:
    """A step of A, B and head, with noise, sampling and rates of its own where the configuration has them."""
    rates = config.lora_head_learning_rate, config.lora_learning_rate
    if "auto" in rates:
        raise ValueError(f"lora_head_learning_rate, lora_learning_rate = {rates}: have not been derived yet")
    of_head, of_lora = map(float, rates)
    noise = spec.noise_multiplier if config.lora_noise_multiplier is None else config.lora_noise_multiplier
    return replace(
        spec,
        sampling_probability=config.lora_sampling_probability or spec.sampling_probability,
        noise_multiplier=noise,
        learning_rate=of_head,
        lora_learning_rate=of_lora,
    )


def num_lora_rounds(config: RunConfig) -> int:
    """The number of the run's last rounds, which train A and B as well."""
    if config.train == "head":
        return 0
    after_start = config.rounds - config.head_start
    return after_start if config.lora_rounds is None else min(config.lora_rounds, after_start)


def _start(config: RunConfig, spec: UpdateSpec) -> UpdateSpec:
    """One release of all records' features, summed by class."""
    if config.start_noise_multiplier is None:
        raise ValueError("start_noise_multiplier: has not been derived yet")
    return replace(
        spec,
        trains="head",
        objective="class-sums",
        sampling_probability=1.0,
        learning_rate=1.0,
        clip_norm=1.0,
        noise_multiplier=config.start_noise_multiplier,
    )
