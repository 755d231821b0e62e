"""The interface of privacy events: each answers an accountant's questions itself, so nobody branches on its type.

A new noise distribution is one file with a subclass of `Event` and one line in `events.EVENTS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, get_args

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# How neighbouring data sets differ. `record`: one record of one client is added or removed. `person`: one person with
# all of their records at one client is. `client`: one client's whole data set, or one record of it, is replaced.
# Guarantees for different units never combine into one epsilon.
Unit = Literal["record", "person", "client"]

Accountant = Literal["pld", "rdp"]

# Renyi divergences below this are lost in rounding errors (dp-accounting even returns negative ones).
SMALLEST_DIVERGENCE = 1e-12


class Event(ABC):
    """`count` releases of one kind, and what accountants, views and a data holder's guard need to know about them.

    A subclass is a frozen dataclass of plain values, among them `count` and `unit`. Construction checks what follows.

    Attributes:
        count: number of releases, >= 1.
        unit: what is protected.
        sampling_probability: q in [0, 1], with which each record is included, independently; 1 without sampling.
        noise_adds_up: whether a sum of independent draws follows the same kind of distribution, so that a sum over
            clients has the effective noise multiplier that the summed variances give.
    """

    noise_adds_up: ClassVar[bool] = False

    if TYPE_CHECKING:  # at run time these would become defaults of the subclasses' fields

        @property
        def count(self) -> int: ...

        @property
        def unit(self) -> Unit: ...

        @property
        def sampling_probability(self) -> float: ...

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= 2**53:
            raise ValueError(f"count = {short(self.count)}: must be a whole number >= 1")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit = {short(self.unit)}: must be one of {', '.join(get_args(Unit))}")
        check_probability("sampling_probability", self.sampling_probability)
        if self.unit == "client" and self.sampling_probability not in (0, 1):
            raise ValueError(
                f"sampling_probability = {self.sampling_probability}: the server knows which client sends, so a "
                "release with unit = client has 1"
            )

    @abstractmethod
    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all `count` releases at orders > 1; infinite where no bound is known."""

    def pld(self, value_interval: float) -> Any:
        """A privacy loss distribution, on a grid of this interval, that bounds all releases; None if none is known."""
        return None

    @abstractmethod
    def with_noise(self, factor: float) -> Self:
        """The same releases with the noise multiplied by a factor > 0; unchanged if the event states no noise."""

    def with_count(self, count: int) -> Self:
        """The same release, `count` times."""
        repeated: Self = replace(cast(Any, self), count=count)
        return repeated

    @property
    @abstractmethod
    def effective_noise_multiplier(self) -> float:
        """Noise over sensitivity, regardless of sampling; 0 if the event says nothing about its noise.

        Noise that is not Gaussian states the multiplier of the Gaussian noise to which it is equivalent.
        """

    @property
    def is_noised(self) -> bool:
        """Whether there is any noise to speak of; without it the cost is infinite."""
        return True

    @property
    def has_pld(self) -> bool:
        """Whether `pld` gives the privacy loss distribution."""
        return False

    @property
    def caveat(self) -> str:
        """Why the cost is not a privacy guarantee, as a clause that ends a sentence; empty if it is one."""
        return ""

    @property
    def proven(self) -> Self:
        """The same releases by accounting that is proven."""
        return self

    @property
    def is_guarantee(self) -> bool:
        """Whether the cost is proven."""
        return not self.caveat

    @property
    def total_delta(self) -> float:
        """The part of delta to subtract for all `count` releases before anything is converted."""
        return 0.0

    @property
    def max_loss(self) -> float:
        """The largest privacy loss of all `count` releases: epsilon at delta 0, >= 0; infinite for most noise."""
        return math.inf

    @property
    def loss_scale(self) -> float:
        """Typical privacy loss of one release, which limits how coarse a grid of losses may be; 0 keeps the finest."""
        return 0.0

    @classmethod
    def rdp_of_many(cls, events: Sequence[Self], orders: npt.ArrayLike) -> Array:
        """[events, orders] `rdp` of each; to be overridden where thousands of events can be computed faster.

        Args:
            events: with noise, all alike but for q, in (0, 1), and count.
            orders: Renyi orders a > 1, [orders].
        """
        return np.stack([event.rdp(orders) for event in events])

    def to_fields(self) -> dict[str, Any]:
        """The event as plain values that JSON can hold."""
        return asdict(cast(Any, self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_fields`; TypeError for a missing or unknown field, ValueError for a value out of range."""
        return cls(**fields)


def check_non_negative(name: str, value: float) -> None:
    """Refuse anything but a finite number >= 0."""
    # An integer beyond the range of a float would overflow inside an accountant.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1.7e308:
        raise ValueError(f"{name} = {short(value)}: must be finite and >= 0")


def check_probability(name: str, value: float) -> None:
    """Refuse anything but a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {short(value)}: must lie in [0, 1]")


def short(value: object) -> str:
    """The value, shortened for a one-line message: untrusted JSON may hold a million digits, or a thousand brackets."""
    try:
        return repr(value)[:60]
    except ValueError:  # Python refuses to print an integer of more than 4300 digits
        return "a number out of range"
    except RecursionError:
        return "a value nested too deeply"
