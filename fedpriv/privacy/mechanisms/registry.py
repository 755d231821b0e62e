"""The mechanisms by name, and the request for noise that each of them takes.

To add a mechanism, write a file with an object `MECHANISM` and a line in `MECHANISMS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedpriv.errors import InputError
from fedpriv.exports import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.privacy.accounting.law import Event, Unit
    from fedpriv.privacy.mechanisms.sources import RandomSource


# Characters of a mechanism's parameters: a stranger may send them, and they are kept in memory.
_MAX_LENGTH = 10_000

# Secure aggregation adds up integers, so it takes this one.
FOR_SUMS = "discrete-gaussian"


@dataclass(frozen=True, kw_only=True)
class NoiseRequest:
    """One release by each client of a stack, all with the same specification.

    Attributes:
        parameters: parameters of the mechanism, as text that it parses; empty for a mechanism that takes none.
        noise_multiplier: z >= 0, noise over clip norm.
        clip_norm: C > 0, in units of the noised quantity.
        sensitivity_factor: L2 sensitivity over C, >= 1, from the clipping rule.
        dimension: number of values per client that receive noise, >= 1.
        sampling_probabilities: [clients], q in [0, 1], from the samplers that drew the batches.
        count: number of such releases that are planned, >= 1.
        unit: what is protected.
        grids: [clients], gamma_k > 0, grid points for one unit of the noised quantity; empty where the mechanism
            chooses.
        bounds: [clients], > 0, the largest magnitude of a value of a client's sum, to which each is clamped before it
            is rounded to the grid; empty for none.

    `grids` and `bounds` are for noise on integers; other mechanisms leave them alone.

    Raises:
        ValueError: clip_norm, sensitivity_factor, a grid or a bound is out of range, or there is not one grid or bound
            for every client; the mechanism's events check the rest.
    """

    noise_multiplier: float
    clip_norm: float
    dimension: int
    sampling_probabilities: tuple[float, ...]
    parameters: str = ""
    sensitivity_factor: float = 1.0
    count: int = 1
    unit: Unit = "record"
    grids: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm = {self.clip_norm}: must be finite and > 0")
        if not 1 <= self.sensitivity_factor < math.inf:
            raise ValueError(f"sensitivity_factor = {self.sensitivity_factor}: must be finite and >= 1")
        for name, values in {"grids": self.grids, "bounds": self.bounds}.items():
            if values and len(values) != len(self.sampling_probabilities):
                raise ValueError(
                    f"{name}: {len(values)} for {len(self.sampling_probabilities)} clients; must be one for each"
                )
            for value in values:
                if not 0 < value < math.inf:
                    raise ValueError(f"{name} = {value}: must be finite and > 0")

    def check_fits(self, sums: Tensor, sources: Sequence[RandomSource]) -> None:
        """Refuse, with a ValueError, sums, [clients, values], or sources that are not one per client, or do not fit."""
        if not len(sums) == len(self.sampling_probabilities) == len(sources):
            raise ValueError(
                f"{len(sums)} sums, {len(self.sampling_probabilities)} sampling probabilities and {len(sources)} "
                "sources: must be one of each for every client"
            )
        if sums.shape[1] != self.dimension:
            raise ValueError(f"dimension = {self.dimension}: the sums have {sums.shape[1]} values")


class Mechanism(Protocol):
    """One kind of noise: its parameters are checked and its cost is planned from public numbers; it draws the noise."""

    parameters_hint: str
    """Names the parameters and where to get them, for messages; empty if it takes none, else it needs some.

    In a configuration they are a JSON object, or the name of a file that holds one.
    """
    noise_adds_up: bool
    """`Event.noise_adds_up` of its events; its standard deviation is then z C.

    Only if this is true does the `aggregate` view hold, and has the recipe `fedpriv` rates and phases for it.
    """
    cost_depends_on_dimension: bool
    """Whether clients that noise different numbers of values pay differently; `client_ranks` would need that."""

    def checked(self, parameters: str, noise_multiplier: float) -> str:
        """The parameters as one canonical line; InputError unless they and the noise multiplier are valid together."""

    def caveat(self, parameters: str) -> str:
        """`Event.caveat` of its events with these parameters; empty if their cost is a privacy guarantee."""

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] the cost of the request, from public inputs, before it is computed; ValueError if out of range."""

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        """Each client's sum with noise on every coordinate, and the event of each release, equal to the planned one.

        Guarantee: if adding or removing one record moves a client's sum by at most `sensitivity_factor * clip_norm` in
        L2, and each record is included with the probability in `sampling_probabilities`, the client's result costs what
        its event states, provided that the event is a guarantee.

        Args:
            sums: float64 [clients, values], all trainable tensors together: sums of clipped per-sample gradients.
            request: describes the release.
            sources: [clients], the source of each client's noise.

        Raises:
            ValueError: a value is out of range, or there is not exactly one probability and one source per client.
        """


class WithoutParameters:
    """The part of a mechanism whose noise has no parameters apart from its multiplier, and whose cost is proven."""

    parameters_hint = ""
    name: str

    def checked(self, parameters: str, noise_multiplier: float) -> str:
        """The empty string."""
        if parameters:
            raise InputError(f"mechanism_parameters = {parameters[:60]!r}: mechanism = {self.name} takes none")
        return ""

    def caveat(self, parameters: str) -> str:
        """Empty."""
        return ""


class _Mechanisms(Registry[Mechanism]):
    """Mechanisms by name, and the check of their parameters."""

    def checked_parameters(self, name: str, parameters: str, noise_multiplier: float) -> str:
        """The canonical parameters of this mechanism; InputError if it is unknown, or they are wrong or too long."""
        if len(parameters) > _MAX_LENGTH:
            raise InputError(f"mechanism_parameters: {len(parameters)} characters; at most {_MAX_LENGTH}")
        return self.named(name).checked(parameters, noise_multiplier)


MECHANISMS = _Mechanisms(
    "mechanism",
    {
        "gaussian": "fedpriv.privacy.mechanisms.gaussian:MECHANISM",
        "discrete-gaussian": "fedpriv.privacy.mechanisms.discrete_gaussian:MECHANISM",
        "lmo": "fedpriv.privacy.mechanisms.lmo:MECHANISM",
    },
)
"""Every mechanism by its name in a configuration."""
