"""Privacy events: what a release cost, in a closed vocabulary that serialises and refuses what it does not know."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussian:
    """`count` compositions of a Gaussian mechanism on a Poisson sample of the records.

    Adjacency: one record of one client added or removed.

    Attributes:
        noise_multiplier: z_eff >= 0, the noise's standard deviation over the L2 sensitivity; 0 means no
            noise, which costs infinity.
        sampling_probability: q in [0, 1], with which each record was included, independently.
        count: how many such releases, >= 1.

    Raises:
        ValueError: a value is out of range or not finite.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ValueError(f"noise_multiplier = {self.noise_multiplier}: must be finite and >= 0")
        if not 0 <= self.sampling_probability <= 1:
            raise ValueError(f"sampling_probability = {self.sampling_probability}: must lie in [0, 1]")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"count = {self.count!r}: must be a whole number >= 1")


Event = SubsampledGaussian

_KINDS: dict[str, type[Event]] = {"subsampled_gaussian": SubsampledGaussian}


def group(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same composition with equal events merged into one with the summed count.

    Composition does not depend on order, so the cost is unchanged; accountants then work once for each
    distinct event instead of once for each round.
    """
    counts: Counter[Event] = Counter()
    for event in events:
        counts[replace(event, count=1)] += event.count
    return tuple(replace(event, count=count) for event, count in counts.items())


def to_json(event: Event) -> str:
    """The event as one line of JSON with its kind and the format's version."""
    kind = next(name for name, cls in _KINDS.items() if type(event) is cls)
    return json.dumps({"version": VERSION, "kind": kind, **asdict(event)}, sort_keys=True)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote.

    Raises:
        ValueError: the text is no event of this version and vocabulary, or a value is out of range.
    """
    try:
        fields = json.loads(text)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"event {text!r}: must be a JSON object with version and kind") from None
    if version != VERSION:
        raise ValueError(f"event version = {version!r}: this fedpriv reads version {VERSION}")
    if kind not in _KINDS:
        raise ValueError(f"event kind = {kind!r}: known are {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"event {text!r}: {error}") from None
