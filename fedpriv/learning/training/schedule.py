"""The rounds of a run: in a row of phases, each asks every client for the same kind of update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from fedpriv.config import Phase, RunConfig
from fedpriv.learning.training.local_update import UpdateSpec


@dataclass(frozen=True, kw_only=True)
class PhaseRounds:
    """Rounds with one specification: a phase, or the part of it that trains the same tensors.

    Attributes:
        name: of the phase: `start`, `head` or `all`.
        spec: of each client's update.
        num_rounds: >= 1.
    """

    name: str
    spec: UpdateSpec
    num_rounds: int


@dataclass(frozen=True)
class RunSchedule:
    """The phases of a run, in order."""

    phases: tuple[PhaseRounds, ...]

    @staticmethod
    def of(config: RunConfig) -> RunSchedule:
        """The start of the head, rounds that train the head alone, and rounds that train everything.

        Raises:
            ValueError: the noise or a learning rate is still to be derived.
        """
        everything = UpdateSpec.of(config)
        phases = []
        for phase in config.phases:
            if phase.name == "start":
                specs = [(_start(phase, everything), phase.num_rounds)]
            elif phase.name == "head":
                # The start of the head is what makes the features' mean known.
                spec = replace(everything, trains="head", centred=config.head_start)
                specs = [(spec, phase.num_rounds)]
            else:
                specs = _in_turn(_joint(phase, everything), config.rule.turns, phase.num_rounds)
            phases += [PhaseRounds(name=phase.name, spec=spec, num_rounds=count) for spec, count in specs]
        return RunSchedule(tuple(phases))

    def phase(self, round_: int) -> PhaseRounds:
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

    def following(self, after: int, num_rounds: int) -> list[tuple[PhaseRounds, int]]:
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
