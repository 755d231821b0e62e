"""What every privacy event answers for itself, so that no accountant asks which kind it is.

A law of noise is one file with a class that derives from `Event`, and one line in `events.EVENTS`.
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

# What the two worlds of a guarantee differ in. `record`: one record of one client added or removed. `client`: one
# client's whole data, or one record of it, replaced. Guarantees of different units never add up to one epsilon.
Unit = Literal["record", "client"]

Accountant = Literal["pld", "rdp"]

# Renyi divergences below this are lost in rounding (dp-accounting even returns negative ones).
SMALLEST_DIVERGENCE = 1e-12


class Event(ABC):
    """`count` releases of one kind: what an accountant, a view or a data holder's guard needs to know of them.

    A subclass is a frozen dataclass of plain values, among them `count` and `unit`, checked at construction.

    Attributes:
        count: how many such releases, >= 1.
        unit: what is protected.
        sampling_probability: q in [0, 1], with which each record was included, independently; 1 without sampling.
        has_pld: whether the privacy loss distribution is known.
        noise_adds_up: whether the sum of independent noises of this law is a noise of this law, so that a sum over
            clients has the effective noise multiplier of the summed variances.
    """

    has_pld: ClassVar[bool] = False
    noise_adds_up: ClassVar[bool] = False

    if TYPE_CHECKING:  # at run time they would be defaults of the subclasses' fields

        @property
        def count(self) -> int: ...

        @property
        def unit(self) -> Unit: ...

        @property
        def sampling_probability(self) -> float: ...

    @abstractmethod
    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all `count` releases; infinite at orders where no bound is known.

        Args:
            orders: a > 1, [orders].
        """

    def pld(self, value_interval: float) -> Any:
        """The privacy loss distribution of all `count` releases, from above; None where none is known.

        Args:
            value_interval: of the discretised privacy loss, > 0.
        """
        return None

    @abstractmethod
    def with_noise(self, factor: float) -> Self:
        """The same releases with the noise multiplied by a factor > 0; unchanged where no noise is stated."""

    def with_count(self, count: int) -> Self:
        """The same release, `count` times."""
        changed: Self = replace(cast(Any, self), count=count)
        return changed

    @property
    @abstractmethod
    def effective_noise_multiplier(self) -> float:
        """Noise over sensitivity, whoever is sampled; 0 where the event says nothing of its noise.

        A law other than the Gaussian states the Gaussian noise that it is as good as.
        """

    @property
    def is_noised(self) -> bool:
        """Whether there is any noise at all."""
        return True

    @property
    def caveat(self) -> str:
        """Why the cost is no privacy guarantee, in a clause that ends a sentence; empty where it is one."""
        return ""

    @property
    def is_guarantee(self) -> bool:
        """Whether the cost is proven."""
        return not self.caveat

    @property
    def total_delta(self) -> float:
        """What all `count` releases take off delta before anything is converted."""
        return 0.0

    @property
    def max_loss(self) -> float:
        """The largest privacy loss of all `count` releases: epsilon at delta 0, >= 0; infinite for most noise."""
        return math.inf

    @property
    def loss_scale(self) -> float:
        """Typical privacy loss of one release, by which a grid of losses may be coarsened; 0 keeps the finest."""
        return 0.0

    @classmethod
    def rdp_of_many(cls, events: Sequence[Self], orders: npt.ArrayLike) -> Array:
        """[events, orders] as `rdp` gives each; a law with a faster way for thousands of events overrides this."""
        curves = {event: event.rdp(orders) for event in set(events)}
        return np.stack([curves[event] for event in events]) if events else np.empty((0, np.size(orders)))

    @classmethod
    def epsilon_bounds_of_many(
        cls, events: Sequence[Self], deltas: Sequence[float], accountant: Accountant, workers: int
    ) -> tuple[Array, Array] | None:
        """Lower and upper bounds, [events] each, as in `many_clients`; None leaves them to `rdp_of_many`."""
        return None

    def to_fields(self) -> dict[str, Any]:
        """The event as plain values that JSON takes."""
        return asdict(cast(Any, self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The event that `to_fields` described.

        Raises:
            TypeError: a field is missing or unknown.
            ValueError: a value is out of range.
        """
        return cls(**fields)


def check_non_negative(name: str, value: float) -> None:
    """Refuse what is no finite number >= 0."""
    # Beyond a float's range a whole number would overflow inside an accountant.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1.7e308:
        raise ValueError(f"{name} = {short(value)}: must be finite and >= 0")


def check_probability(name: str, value: float) -> None:
    """Refuse what is no number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {short(value)}: must lie in [0, 1]")


def check_count_and_unit(count: int, unit: str) -> None:
    """Refuse a count that is no whole number >= 1, and an unknown unit."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 2**53:
        raise ValueError(f"count = {short(count)}: must be a whole number >= 1")
    if unit not in get_args(Unit):
        raise ValueError(f"unit = {unit!r}: must be one of {', '.join(get_args(Unit))}")


def check_sampled_unit(sampling_probability: float, unit: str) -> None:
    """Refuse amplification by sampling for a whole client."""
    if unit == "client" and sampling_probability not in (0, 1):
        raise ValueError(
            f"sampling_probability = {sampling_probability}: the server knows which client sends, so a release with "
            "unit = client has 1"
        )


def short(value: object) -> str:
    """The value for a message of one line: a stranger's JSON may hold a number of a million digits."""
    try:
        return repr(value)[:60]
    except ValueError:  # Python refuses to print a whole number of more than 4300 digits
        return "a number out of range"
