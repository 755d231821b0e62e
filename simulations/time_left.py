"""How long a run still takes, from what its rounds have taken so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from fedpriv.config import RunConfig
from fedpriv.training.schedule import num_lora_rounds

# The first round of a phase reads records whose states later ones keep, so it says little once there are others.
_NUM_RECENT = 3
# A smaller share of a round says too little of the rest.
_SMALLEST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """An estimate.

    Attributes:
        seconds: >= 0.
        is_least: whether rounds are ahead of a kind that has not been timed, so that it takes longer.
    """

    seconds: float
    is_least: bool


def phases_of(config: RunConfig) -> list[str]:
    """What each round of a run does: `start`, `head` or `all`; rounds that do the same take about as long."""
    num_all = num_lora_rounds(config)
    num_head = config.rounds - config.head_start - num_all
    return [*["start"] * config.head_start, *["head"] * num_head, *["all"] * num_all]


def time_left(
    seconds: Mapping[str, Sequence[float]], ahead: Sequence[str], spent: float, share: float | None
) -> TimeLeft | None:
    """How long the rest takes; None as long as nothing is known.

    Args:
        seconds: {phase: what its rounds have taken, in order}.
        ahead: the phases of the rounds that are not over, the current one first.
        spent: seconds that the current round has taken.
        share: of the current round that is done, in [0, 1]; None if that is not known.
    """
    if not ahead:
        return TimeLeft(seconds=0.0, is_least=False)
    usual = {phase: mean(took[-_NUM_RECENT:]) for phase, took in seconds.items() if took}
    current, *later = ahead
    if share is not None and share >= _SMALLEST_SHARE:
        usual.setdefault(current, spent / share)
    if not usual:
        return None
    now = max(0.0, usual.get(current, spent) - spent)
    known = [usual[phase] for phase in later if phase in usual]
    return TimeLeft(seconds=now + sum(known), is_least=current not in usual or len(known) < len(later))
