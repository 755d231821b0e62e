"""Privacy events: what a release cost, in a closed vocabulary that serialises and refuses what it does not know."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from fedpriv.accounting.lmo import parameters as lmo_parameters
from fedpriv.accounting.lmo.parameters import LmoParameters

VERSION = 1

# What the two worlds of a guarantee differ in. `record`: one record of one client added or removed. `client`: one
# client's whole data, or one record of it, replaced. Guarantees of different units never add up to one epsilon.
Unit = Literal["record", "client"]
_UNITS = ("record", "client")


@dataclass(frozen=True, kw_only=True)
class SubsampledGaussian:
    """`count` compositions of a Gaussian mechanism on a Poisson sample of the records.

    Attributes:
        noise_multiplier: z_eff >= 0, the noise's standard deviation over the L2 sensitivity; 0 means no
            noise, which costs infinity.
        sampling_probability: q in [0, 1], with which each record was included, independently; 1 is the plain
            Gaussian mechanism.
        count: how many such releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or a whole client is said to be sampled.
    """

    noise_multiplier: float
    sampling_probability: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        _check_non_negative("noise_multiplier", self.noise_multiplier)
        _check_probability("sampling_probability", self.sampling_probability)
        _check_count_and_unit(self.count, self.unit)
        _check_sampled_unit(self.sampling_probability, self.unit)


@dataclass(frozen=True, kw_only=True)
class PureEpsilon:
    """`count` releases that are epsilon-DP each, by whatever mechanism.

    Attributes:
        epsilon: >= 0, finite.
        count: how many such releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite.
    """

    epsilon: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        _check_non_negative("epsilon", self.epsilon)
        _check_count_and_unit(self.count, self.unit)


@dataclass(frozen=True, kw_only=True)
class EpsilonDelta:
    """`count` releases that are (epsilon, delta)-DP each, by whatever mechanism.

    Attributes:
        epsilon: >= 0, finite.
        delta: in [0, 1].
        count: how many such releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite.
    """

    epsilon: float
    delta: float
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        _check_non_negative("epsilon", self.epsilon)
        _check_probability("delta", self.delta)
        _check_count_and_unit(self.count, self.unit)


# How the cost of LMO noise is found. `published` is the paper's curve, which holds for one number and not for a vector:
# no privacy guarantee, and no budget is ever enforced by it.
LmoAccounting = Literal["published", "sound"]


@dataclass(frozen=True, kw_only=True)
class SubsampledLmo:
    """`count` compositions of LMO noise, drawn for every coordinate, on a Poisson sample of the records.

    Attributes:
        parameters: of the noise, in units of the clip norm.
        sensitivity: L2 sensitivity over the clip norm, finite and > 0: the clipping rule's factor.
        dimension: how many coordinates are noised, >= 1.
        sampling_probability: q in [0, 1], as for a Gaussian.
        accounting: `sound`, or `published`, which is no guarantee.
        count: how many such releases, >= 1.
        unit: what is protected.

    Raises:
        ValueError: a value is out of range or not finite, or a whole client is said to be sampled.
    """

    parameters: LmoParameters
    sensitivity: float
    dimension: int
    sampling_probability: float
    accounting: LmoAccounting = "sound"
    count: int = 1
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, LmoParameters):
            raise ValueError(f"parameters = {_short(self.parameters)}: must be LmoParameters")
        _check_non_negative("sensitivity", self.sensitivity)
        if self.sensitivity == 0:
            raise ValueError("sensitivity = 0: must be > 0")
        if isinstance(self.dimension, bool) or not isinstance(self.dimension, int) or not 1 <= self.dimension <= 2**53:
            raise ValueError(f"dimension = {_short(self.dimension)}: must be a whole number >= 1")
        _check_probability("sampling_probability", self.sampling_probability)
        if self.accounting not in get_args(LmoAccounting):
            known = ", ".join(get_args(LmoAccounting))
            raise ValueError(f"accounting = {_short(self.accounting)}: must be one of {known}")
        _check_count_and_unit(self.count, self.unit)
        _check_sampled_unit(self.sampling_probability, self.unit)


Event = SubsampledGaussian | PureEpsilon | EpsilonDelta | SubsampledLmo

_KINDS: dict[str, type[Event]] = {
    "subsampled_gaussian": SubsampledGaussian,
    "pure_epsilon": PureEpsilon,
    "epsilon_delta": EpsilonDelta,
    "subsampled_lmo": SubsampledLmo,
}


def is_guarantee(event: Event) -> bool:
    """Whether the event's cost is a proven one; LMO noise accounted as published has none."""
    return not isinstance(event, SubsampledLmo) or event.accounting == "sound"


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
    values: dict[str, Any] = asdict(event)
    if isinstance(event, SubsampledLmo):
        values["parameters"] = lmo_parameters.to_dict(event.parameters)
    return json.dumps({"version": VERSION, "kind": kind, **values}, sort_keys=True)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote.

    Raises:
        ValueError: the text is no event of this version and vocabulary, or a value is out of range.
    """
    try:
        fields = json.loads(text)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"event {text[:200]!r}: must be a JSON object with version and kind") from None
    if version != VERSION:
        raise ValueError(f"event version = {version!r}: this fedpriv reads version {VERSION}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"event kind = {kind!r}: known are {', '.join(_KINDS)}")
    try:
        if kind == "subsampled_lmo" and "parameters" in fields:
            fields["parameters"] = lmo_parameters.from_dict(fields["parameters"])
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"event {text[:200]!r}: {error}") from None


def _check_non_negative(name: str, value: float) -> None:
    # Beyond a float's range a whole number would overflow inside an accountant.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1.7e308:
        raise ValueError(f"{name} = {_short(value)}: must be finite and >= 0")


def _check_probability(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {_short(value)}: must lie in [0, 1]")


def _check_count_and_unit(count: int, unit: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 2**53:
        raise ValueError(f"count = {_short(count)}: must be a whole number >= 1")
    if unit not in _UNITS:
        raise ValueError(f"unit = {unit!r}: must be one of {', '.join(_UNITS)}")


def _check_sampled_unit(sampling_probability: float, unit: str) -> None:
    if unit == "client" and sampling_probability not in (0, 1):
        raise ValueError(
            f"sampling_probability = {sampling_probability}: the server knows which client sends, so a release with "
            "unit = client has 1"
        )


def _short(value: object) -> str:
    """The value for a message of one line: a stranger's JSON may hold a number of a million digits."""
    try:
        return repr(value)[:60]
    except ValueError:  # Python refuses to print a whole number of more than 4300 digits
        return "a number out of range"
