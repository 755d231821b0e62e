"""The mechanisms by name. A new one is a file with an object `MECHANISM`, and a line in `MECHANISMS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from fedpriv.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.accounting.law import Event
    from fedpriv.mechanisms.request import NoiseRequest
    from fedpriv.mechanisms.sources import RandomSource


class Mechanism(Protocol):
    """Noise of one kind: what it costs, checked and planned from public numbers, and the noise itself."""

    @property
    def parameters_hint(self) -> str:
        """What its parameters are and where they come from, for a message; empty where it takes none."""

    @property
    def noise_adds_up(self) -> bool:
        """As `Event.noise_adds_up` of its events: only then does the `aggregate` view hold."""

    @property
    def cost_depends_on_dimension(self) -> bool:
        """Whether clients with different numbers of values pay differently, which `client_ranks` would need."""

    def checked(self, parameters: str, noise_multiplier: float) -> str:
        """The parameters in one canonical line, if they and the noise multiplier make sense together.

        Raises:
            InputError: one line with the name, the value and what would be right.
        """

    def caveat(self, parameters: str) -> str:
        """As `Event.caveat` of its events with these parameters; empty where their cost is a privacy guarantee."""

    def planned_events(self, request: NoiseRequest) -> list[Event]:
        """[clients] what the request costs, from public inputs, before anything is computed.

        Raises:
            ValueError: a value is out of range.
        """

    def add_noise(
        self, sums: Tensor, request: NoiseRequest, sources: Sequence[RandomSource]
    ) -> tuple[Tensor, list[Event]]:
        """Each client's sum with noise on every coordinate, and the event of each release: the planned ones.

        Guarantee: where adding or removing one record moves a client's sum by at most `sensitivity_factor * clip_norm`
        in L2, and a record is included with its `sampling_probabilities` entry, the client's result costs what its
        event costs, if that is a guarantee.

        Args:
            sums: float32 [clients, values], all trainable tensors together: sums of clipped gradients.
            request: of the release.
            sources: [clients], where each client's noise comes from.

        Raises:
            ValueError: a value is out of range, or there is not one probability and source for each client.
        """


class Registry(MutableMapping[str, Mechanism]):
    """Mechanisms by name, each imported when it is first asked for: the names alone cost no import of torch.

    Args:
        modules: {name: module that has the mechanism as `MECHANISM`}.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._entries: dict[str, Mechanism | str] = dict(modules)

    def __getitem__(self, name: str) -> Mechanism:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = import_module(entry).MECHANISM
        return entry

    def __setitem__(self, name: str, mechanism: Mechanism) -> None:
        self._entries[name] = mechanism

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def named(self, name: str) -> Mechanism:
        """The mechanism of this name.

        Raises:
            InputError: it is unknown; the message lists the known ones.
        """
        if name not in self._entries:
            raise InputError(f"mechanism = {name[:60]!r}: must be one of {', '.join(self)}")
        return self[name]


MECHANISMS = Registry(
    {
        "gaussian": "fedpriv.mechanisms.gaussian",
        "lmo": "fedpriv.mechanisms.lmo",
    }
)


def with_present_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration values by their present keys: up to version 0.1, LMO noise had two keys of its own.

    Raises:
        InputError: a former key has a value that has no place any more.
    """
    values = dict(values)
    parameters, accounting = values.pop("lmo_parameters", ""), values.pop("lmo_accounting", "sound")
    if accounting != "sound":
        raise InputError(
            f"lmo_accounting = {accounting!r}: is no key any more; write it into mechanism_parameters, such as "
            f'{{"accounting": "{accounting}", "combination": ...}}'
        )
    if parameters:
        values.setdefault("mechanism_parameters", parameters)
    return values
