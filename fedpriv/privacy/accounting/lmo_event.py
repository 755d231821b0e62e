"""The event of LMO noise on a Poisson sample of the records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.accounting.law import (
    SMALLEST_DIVERGENCE,
    Array,
    Event,
    Unit,
    check_non_negative,
    short,
)
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoAccounting, LmoParameters
from fedpriv.privacy.accounting.lmo_renyi import poisson_sampled, sound, unsampled_curve

PUBLISHED_CAVEAT = "LMO noise was accounted as published, which bounds no gradient"

# The Renyi order at which the noise is compared with Gaussian noise.
_COMPARED_AT = 8


@dataclass(frozen=True, kw_only=True)
class SubsampledLmo(Event):
    """`count` compositions of LMO noise, drawn for every coordinate, on a Poisson sample of the records.

    Attributes:
        parameters: of the noise, in units of the clip norm.
        sensitivity: L2 sensitivity over the clip norm, finite and > 0: the clipping rule's factor.
        dimension: how many coordinates are noised, >= 1.
        sampling_probability: q in [0, 1], with which each record was included, independently.
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
            raise ValueError(f"parameters = {short(self.parameters)}: must be LmoParameters")
        check_non_negative("sensitivity", self.sensitivity)
        if self.sensitivity == 0:
            raise ValueError("sensitivity = 0: must be > 0")
        if isinstance(self.dimension, bool) or not isinstance(self.dimension, int) or not 1 <= self.dimension <= 2**53:
            raise ValueError(f"dimension = {short(self.dimension)}: must be a whole number >= 1")
        if self.accounting not in get_args(LmoAccounting):
            known = ", ".join(get_args(LmoAccounting))
            raise ValueError(f"accounting = {short(self.accounting)}: must be one of {known}")
        super().__post_init__()

    def rdp(self, orders: npt.ArrayLike) -> Array:
        """[orders] Renyi divergence of all releases, known at whole orders only."""
        orders = np.asarray(orders, dtype=float)
        if self.sampling_probability == 0:
            return np.zeros(orders.shape)
        is_whole = (orders >= 2) & (orders == np.floor(orders))
        curve = np.full(orders.shape, math.inf)
        curve[is_whole] = self._whole_orders(tuple(orders[is_whole].astype(int).tolist()))
        return np.asarray(self.count * np.maximum(curve, SMALLEST_DIVERGENCE))

    def _whole_orders(self, orders: tuple[int, ...]) -> Array:
        noise = (self.parameters, self.accounting, self.dimension, self.sensitivity)
        if self.sampling_probability == 1 or not orders:
            return _unsampled(*noise, orders, sampled=False)
        every = _unsampled(*noise, tuple(range(2, max(orders) + 1)), sampled=True)
        return poisson_sampled(every, np.array(orders), self.sampling_probability)

    def with_noise(self, factor: float) -> Self:
        """The same noise for a sensitivity divided by the factor, which costs the same as the multiplied noise."""
        return replace(self, sensitivity=self.sensitivity / factor)

    @property
    def effective_noise_multiplier(self) -> float:
        """That of the Gaussian noise with the same sound divergence at order 8, where a Gaussian has a / (2 z^2)."""
        return _gaussian_equal(self.parameters, self.dimension, self.sensitivity)

    @property
    def caveat(self) -> str:
        """The claim that `published` accounting leaves unproven; empty for `sound`."""
        return PUBLISHED_CAVEAT if self.accounting == "published" else ""

    def to_fields(self) -> dict[str, Any]:
        """The event as plain values that JSON takes."""
        return asdict(self) | {"parameters": self.parameters.to_dict()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The event that `to_fields` described."""
        values = dict(fields)
        if "parameters" in values:
            values["parameters"] = LmoParameters.from_dict(values["parameters"])
        return cls(**values)


# Clients of a federation differ in q alone, so that one curve without sampling serves thousands of events.
@lru_cache(maxsize=256)
def _unsampled(
    parameters: LmoParameters,
    accounting: LmoAccounting,
    dimension: int,
    sensitivity: float,
    orders: tuple[int, ...],
    *,
    sampled: bool,
) -> Array:
    if not orders:
        return np.empty(0)
    return unsampled_curve(
        Columns.of(parameters),
        np.array(orders),
        accounting=accounting,
        dimension=dimension,
        sensitivity=sensitivity,
        sampled=sampled,
    )


@lru_cache(maxsize=1024)
def _gaussian_equal(parameters: LmoParameters, dimension: int, sensitivity: float) -> float:
    curve = sound(Columns.of(parameters), [_COMPARED_AT], dimension=dimension, sensitivity=sensitivity)
    return math.sqrt(_COMPARED_AT / (2 * float(curve[..., 0])))
