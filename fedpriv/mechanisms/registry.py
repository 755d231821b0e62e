"""The mechanisms by name. To add one, write a file with an object `MECHANISM` and a line in `MECHANISMS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from fedpriv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.accounting.composition.law import Event
    from fedpriv.mechanisms.request import NoiseRequest
    from fedpriv.mechanisms.sources import RandomSource


# Characters of a mechanism's parameters: a stranger may send them, and they are kept in memory.
_MAX_LENGTH = 10_000


class Mechanism(Protocol):
    """One kind of noise: its parameters are checked and its cost is planned from public numbers; it draws the noise."""

    @property
    def parameters_hint(self) -> str:
        """What its parameters are and where to get them, for messages; empty if it takes none, else it needs some.

        In a configuration they are a JSON object, or the name of a file that holds one.
        """

    @property
    def noise_adds_up(self) -> bool:
        """`Event.noise_adds_up` of its events; its standard deviation is then z C.

        Only if this is true does the `aggregate` view hold, and has the recipe `fedpriv` rates and phases for it.
        """

    @property
    def cost_depends_on_dimension(self) -> bool:
        """Whether clients that noise different numbers of values pay differently; `client_ranks` would need that."""

    def checked(self, parameters: str, noise_multiplier: float) -> str:
        """The parameters as one canonical line, after a check that they and the noise multiplier are valid together.

        Raises:
            InputError: they are not; one line with the name, the value and what would be valid.
        """

    def caveat(self, parameters: str) -> str:
        """`Event.caveat` of its events with these parameters; empty if their cost is a privacy guarantee."""

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] the cost of the request, from public inputs, before anything is computed.

        Raises:
            ValueError: a value is out of range.
        """

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


class Registry(MutableMapping[str, Mechanism]):
    """Mechanisms by name, each imported on first use, so that listing the names does not import torch.

    Args:
        modules: {name: module that defines the mechanism as `MECHANISM`}.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._entries: dict[str, Mechanism | str] = dict(modules)

    def __getitem__(self, name: str) -> Mechanism:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = import_module(entry).MECHANISM
        return entry

    def __setitem__(self, name: str, mechanism: Mechanism) -> None:
        if name in self._entries:
            raise ValueError(f"mechanism = {name!r}: is registered already; delete it first")
        self._entries[name] = mechanism

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def named(self, name: str) -> Mechanism:
        """The mechanism with this name.

        Raises:
            InputError: the name is unknown; the message lists the known ones.
        """
        if name not in self._entries:
            raise InputError(f"mechanism = {name[:60]!r}: must be one of {', '.join(self)}")
        return self[name]

    def checked_parameters(self, name: str, parameters: str, noise_multiplier: float) -> str:
        """The parameters of the mechanism with this name in their canonical form; see `Mechanism.checked`.

        Raises:
            InputError: the mechanism is unknown, or its parameters are wrong or too long.
        """
        if len(parameters) > _MAX_LENGTH:
            raise InputError(f"mechanism_parameters: {len(parameters)} characters; at most {_MAX_LENGTH}")
        return self.named(name).checked(parameters, noise_multiplier)


MECHANISMS = Registry(
    {
        "gaussian": "fedpriv.mechanisms.gaussian",
        "discrete-gaussian": "fedpriv.mechanisms.discrete_gaussian",
        "lmo": "fedpriv.mechanisms.lmo",
    }
)
"""Every mechanism by its name in a configuration."""


# Secure aggregation adds up integers, so it takes this one.
FOR_SUMS = "discrete-gaussian"


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration values under the current keys, of which earlier versions had others.

    Raises:
        InputError: a former key has a value that can no longer be expressed by itself, or contradicts the current one.
    """
    current = dict(values)
    if current.pop("uploads_hidden", False):
        raise InputError(
            "uploads_hidden = true: a statement proves nothing, and is no longer a key; use secure_aggregation = true"
        )
    parameters, accounting = current.pop("lmo_parameters", ""), current.pop("lmo_accounting", "sound")
    if accounting != "sound":
        raise InputError(
            f"lmo_accounting = {accounting!r}: is no longer a key; write it into mechanism_parameters, such as "
            f'{{"accounting": "{accounting}", "combination": ...}}'
        )
    if parameters and current.get("mechanism_parameters", "") not in ("", parameters):
        raise InputError("lmo_parameters: is now mechanism_parameters, which has another value here; give one of them")
    return current | ({"mechanism_parameters": parameters} if parameters else {})
