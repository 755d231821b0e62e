"""What server and clients say to each other, as plain scalars; the adapters travel beside it as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch

from fedpriv.accounting import events
from fedpriv.accounting.events import Event
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.training.local_update import UpdateSpec

# Names of the records in a message.
ADAPTER = "adapter"
INSTRUCTION = "instruction"
RELEASE = "release"
REGISTRATION = "registration"

REGISTER = "query.register"

# Codes of error replies.
REFUSED = 100
FAILED = 101
RETIRED = 102

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a client states once, before training; all of it is public.

    Attributes:
        client: the partition id, by which the server samples.
        num_records: N_k, registered, >= 1.
        name: for display.
        data_set: the random id that spending attaches to.
    """

    client: int
    num_records: int
    name: str
    data_set: str


def pack_instruction(run: str, round_: int, spec: UpdateSpec) -> dict[str, Any]:
    """The server's instruction to a client as scalars."""
    return {"version": VERSION, "run": run, "round": round_, **asdict(spec)}


def unpack_instruction(fields: Mapping[str, Any]) -> tuple[str, int, UpdateSpec]:
    """Run, round and specification.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _versioned(fields)
    run, round_ = _typed(rest, "run", str), _typed(rest, "round", int)
    types = {"str": str, "int": int, "float": float}
    values = {name: _typed(rest, name, types[kind]) for name, kind in UpdateSpec.__annotations__.items()}
    _refuse_rest("instruction", rest)
    return run, round_, UpdateSpec(**values)


def pack_release(round_: int, event: Event) -> dict[str, Any]:
    """What pays for an upload, as scalars."""
    return {"version": VERSION, "round": round_, "event": events.to_json(event)}


def unpack_release(fields: Mapping[str, Any]) -> tuple[int, Event]:
    """Round and event.

    Raises:
        ValueError: another version, or a missing or mistyped field.
    """
    rest = _versioned(fields)
    round_, event = _typed(rest, "round", int), events.from_json(_typed(rest, "event", str))
    _refuse_rest("release", rest)
    return round_, event


def pack_upload(adapter: Adapter, event: Event) -> bytes:
    """An upload as bytes, to be stored before it is sent: the event, a line end, the adapter as safetensors."""
    return f"{events.to_json(event)}\n".encode() + safetensors.torch.save(adapter)


def unpack_upload(content: bytes) -> tuple[Adapter, Event]:
    """Adapter and event of a stored upload."""
    event, _, adapter = content.partition(b"\n")
    return safetensors.torch.load(adapter), events.from_json(event.decode())


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
        data_set=_typed(rest, "data_set", str),
    )
    _refuse_rest("registration", rest)
    if registration.client < 0 or registration.num_records < 1 or not 1 <= len(registration.data_set) <= 100:
        raise ValueError(f"registration: {registration}: needs client >= 0, num_records >= 1 and a data set id")
    return registration


def _versioned(fields: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(fields)
    version = rest.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version = {version!r}: this fedpriv speaks version {VERSION}")
    return rest


def _refuse_rest(kind: str, rest: Mapping[str, Any]) -> None:
    if rest:
        raise ValueError(f"{kind}: unknown fields {', '.join(sorted(rest))}")


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
