"""What server and clients say to each other, as plain scalars; the adapters travel beside it as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedpriv.accounting import events
from fedpriv.accounting.events import Event
from fedpriv.training.local_update import UpdateSpec

# Names of the records in a message.
ADAPTER = "adapter"
INSTRUCTION = "instruction"
RELEASE = "release"
REGISTRATION = "registration"

REGISTER = "query.register"

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a client states once, before training; all of it is public.

    Attributes:
        client: the partition id, by which the server samples.
        num_records: N_k, registered, >= 1.
        name: for display.
    """

    client: int
    num_records: int
    name: str


def pack_instruction(round_: int, spec: UpdateSpec) -> dict[str, Any]:
    """The server's instruction to a client as scalars."""
    return {"version": VERSION, "round": round_, **asdict(spec)}


def unpack_instruction(fields: Mapping[str, Any]) -> tuple[int, UpdateSpec]:
    """Round and specification.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _versioned(fields)
    round_ = _typed(rest, "round", int)
    types = {"str": str, "int": int, "float": float}
    values = {name: _typed(rest, name, types[kind]) for name, kind in UpdateSpec.__annotations__.items()}
    if rest:
        raise ValueError(f"instruction: unknown fields {', '.join(sorted(rest))}")
    return round_, UpdateSpec(**values)


def pack_release(round_: int, event: Event) -> dict[str, Any]:
    """What pays for an upload, as scalars."""
    return {"version": VERSION, "round": round_, "event": events.to_json(event)}


def unpack_release(fields: Mapping[str, Any]) -> tuple[int, Event]:
    """Round and event.

    Raises:
        ValueError: another version, or a missing or mistyped field.
    """
    rest = _versioned(fields)
    return _typed(rest, "round", int), events.from_json(_typed(rest, "event", str))


def pack_registration(registration: Registration) -> dict[str, Any]:
    """A registration as scalars."""
    return {"version": VERSION, **asdict(registration)}


def unpack_registration(fields: Mapping[str, Any]) -> Registration:
    """A registration.

    Raises:
        ValueError: another version, a missing or mistyped field, or a value out of range.
    """
    rest = _versioned(fields)
    registration = Registration(
        client=_typed(rest, "client", int),
        num_records=_typed(rest, "num_records", int),
        name=_typed(rest, "name", str),
    )
    if registration.client < 0 or registration.num_records < 1:
        raise ValueError(f"registration: {registration}: needs client >= 0 and num_records >= 1")
    return registration


def _versioned(fields: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(fields)
    version = rest.pop("version", None)
    if version != VERSION:
        raise ValueError(f"version = {version!r}: this fedpriv speaks version {VERSION}")
    return rest


def _typed(fields: dict[str, Any], name: str, kind: type) -> Any:
    """Take a field out, refusing a missing one or one of another type."""
    if name not in fields:
        raise ValueError(f"{name}: missing")
    value = fields.pop(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} = {value!r}: must be of type {kind.__name__}")
    return value
