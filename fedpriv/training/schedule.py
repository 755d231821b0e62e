"""The rounds of a run: in a row of phases, each asks every client for the same kind of update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedpriv.accounting.events import Event
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
class Schedule:
    """The phases of a run, in order."""

    phases: tuple[Phase, ...]

    @staticmethod
    def of(config: RunConfig) -> Schedule:
        """The start of the head, rounds that train the head alone, and rounds that train everything.

        In all steps one unit of the noised sum moves the model equally far, however many records it is expected to hold:
        the learning rate of the last phase is in proportion to its sampling probability.

        Raises:
            ValueError: the learning rate is still to be derived.
        """
        everything = UpdateSpec.of(config)
        num_all = num_lora_rounds(config)
        phases = []
        if config.head_start:
            phases.append(Phase(name="start", spec=_start(config, everything), num_rounds=1))
        if num_head := config.rounds - config.head_start - num_all:
            phases.append(Phase(name="head", spec=replace(everything, trains="head"), num_rounds=num_head))
        if num_all:
            q, of_all = config.sampling_probability, config.lora_sampling_probability
            if q and of_all and config.lora_rounds is not None:
                everything = replace(
                    everything, sampling_probability=of_all, learning_rate=everything.learning_rate * of_all / q
                )
            phases.append(Phase(name="all", spec=everything, num_rounds=num_all))
        return Schedule(tuple(phases))

    def phase(self, round_: int) -> Phase:
        """The phase of a round, from 1; that of the last one for rounds beyond the run."""
        last = 0
        for phase in self.phases:
            last += phase.num_rounds
            if round_ <= last:
                return phase
        return self.phases[-1]

    def spec(self, round_: int) -> UpdateSpec:
        """What a client is asked in a round, from 1."""
        return self.phase(round_).spec

    def events(self, num_rounds: int, event_of: Callable[[UpdateSpec], Event]) -> list[Event]:
        """The releases of a client that takes part in each of the first rounds, one event for each phase.

        Args:
            num_rounds: >= 0, at most those of the run.
            event_of: what one round with a specification costs the client.
        """
        events = []
        for phase in self.phases:
            count = min(num_rounds, phase.num_rounds)
            if count:
                event = event_of(phase.spec)
                events.append(event.with_count(count * event.count))
            num_rounds -= count
        return events


def num_lora_rounds(config: RunConfig) -> int:
    """How many of the run's last rounds train A and B as well."""
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
