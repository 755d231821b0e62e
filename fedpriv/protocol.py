"""What server and clients say to each other: plain scalars, and beside them tensors as named arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

import fedpriv
from fedpriv.accounting import events
from fedpriv.accounting.events import Event
from fedpriv.adapters import codecs, merged
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.aggregation import cmfl as relevance
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.local_update import UpdateSpec

# Names of the records in a message. Arrays down are adapter, merged and signs, arrays up are the adapter.
ADAPTER = "adapter"
MERGED = "merged"
SIGNS = "signs"
INSTRUCTION = "instruction"
RELEASE = "release"
REGISTRATION = "registration"

REGISTER = "query.register"

# Codes of error replies.
REFUSED = 100
FAILED = 101
RETIRED = 102

VERSION = 5

# Characters of what a node says of itself.
_LONGEST = 200

# What a node runs; releases from unequal ones are not mixed in a run.
SOFTWARE = f"fedpriv {fedpriv.__version__}"

Arrays = Mapping[str, Mapping[str, Tensor]]
"""{record's name: {array's name: tensor}}"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Broadcast:
    """What a client gets to know of the global model.

    Attributes:
        adapter: the tensors that it starts from.
        merged: what aggregation has added to the frozen weights.
        signs: of the last global update, where the client is to compare its own with it.
    """

    adapter: Adapter
    merged: Merged = field(default_factory=dict)
    signs: Adapter = field(default_factory=dict)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """{part: its tensors}."""
        return {ADAPTER: self.adapter, MERGED: merged.to_tensors(self.merged), SIGNS: self.signs}


@dataclass(frozen=True, kw_only=True)
class Release:
    """What a client says of its upload.

    Attributes:
        round: of the run.
        event: the privacy event that was charged for it.
        num_records: N_k as registered; the server checks it, and weighs by its own.
        silent: the client was charged, but holds its update back as irrelevant.
    """

    round: int
    event: Event
    num_records: int
    silent: bool = False


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a client states once, before training; all of it is public.

    Attributes:
        client: the partition id, by which the server samples.
        num_records: N_k, registered, >= 1.
        name: for display.
        data_set: the random id that spending attaches to.
        keeps_replies: whether the node stores its replies, so that the same request gets the same bytes again.
        software: what the node runs.
        signature: of `statement_of` by the node's key, in base64; empty from a node without one.
    """

    client: int
    num_records: int
    name: str
    data_set: str
    keeps_replies: bool = False
    software: str = SOFTWARE
    signature: str = ""


def check_arrays(arrays: Mapping[str, bytes]) -> None:
    """Refuse arrays that hold objects, or whose header asks for another amount of memory than their bytes fill.

    Reading an array allocates what its header says, so this comes first.

    Args:
        arrays: {name: NumPy's file format}.

    Raises:
        ValueError: names the array.
    """
    for name, data in arrays.items():
        stream = BytesIO(data)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(np.lib.format.read_magic(stream))
        if read_header is None:
            raise ValueError(f"{name}: unknown version of NumPy's format")
        shape, _, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError(f"{name}: holds objects")
        claimed, there = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
        if claimed != there:
            raise ValueError(f"{name}: claims {claimed} bytes, {there} are there")


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


def pack_broadcast(broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource) -> Arrays:
    """A broadcast as arrays; records that would be empty are left out.

    Args:
        broadcast: what to say.
        spec: says how the adapter is written.
        initial: the tensors at the start of the run, to which ternary codes refer.
        source: of a codec's rounding.
    """
    arrays: dict[str, Mapping[str, Tensor]] = {
        ADAPTER: codecs.encode(broadcast.adapter, initial, spec.broadcast_codec, source)
        if spec.broadcast_codec != "float32"
        else broadcast.adapter
    }
    if broadcast.merged:
        arrays[MERGED] = merged.to_tensors(broadcast.merged)
    if broadcast.signs:
        arrays[SIGNS] = {SIGNS: relevance.pack_signs(broadcast.signs)}
    return arrays


def unpack_broadcast(arrays: Arrays, spec: UpdateSpec, initial: Adapter) -> Broadcast:
    """What `pack_broadcast` wrote, as far as the codec keeps it.

    Raises:
        ValueError: a record or array is missing, unknown or malformed.
    """
    if odd := sorted(arrays.keys() - {ADAPTER, MERGED, SIGNS}):
        raise ValueError(f"broadcast: unknown records {', '.join(odd)}")
    if ADAPTER not in arrays:
        raise ValueError(f"broadcast: {ADAPTER} is missing")
    adapter = dict(arrays[ADAPTER])
    if spec.broadcast_codec != "float32":
        adapter = codecs.decode(adapter, initial, spec.broadcast_codec)
    signs = {}
    if SIGNS in arrays:
        if arrays[SIGNS].keys() != {SIGNS}:
            raise ValueError(f"{SIGNS}: must hold one array of this name")
        signs = relevance.unpack_signs(arrays[SIGNS][SIGNS], adapter)
    return Broadcast(adapter=adapter, merged=merged.from_tensors(arrays.get(MERGED, {})), signs=signs)


def pack_upload(
    adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource
) -> dict[str, Tensor]:
    """A trained adapter as the specification's codec writes it."""
    return codecs.encode(adapter, _reference(broadcast, spec, initial), spec.codec, source)


def unpack_upload(arrays: Mapping[str, Tensor], broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """The adapter that an upload carries.

    Raises:
        ValueError: an array that is missing, too many, or of another type or shape.
    """
    return codecs.decode(arrays, _reference(broadcast, spec, initial), spec.codec)


def _reference(broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """What an upload's codec refers to: ternary training takes three values around the start of the run."""
    return initial if spec.quantization == "ternary" else broadcast.adapter


def pack_release(release: Release) -> dict[str, Any]:
    """What a client says of its upload, as scalars."""
    return {"version": VERSION, **asdict(release), "event": events.to_json(release.event)}


def unpack_release(fields: Mapping[str, Any]) -> Release:
    """What a client says of its upload.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _versioned(fields)
    release = Release(
        round=_typed(rest, "round", int),
        event=events.from_json(_typed(rest, "event", str)),
        num_records=_typed(rest, "num_records", int),
        silent=_typed(rest, "silent", bool),
    )
    _refuse_rest("release", rest)
    return release


def pack_reply(release: Release, arrays: Mapping[str, Tensor]) -> bytes:
    """A reply as bytes, to be stored before it is sent: its scalars as JSON, a line end, the arrays as safetensors."""
    return f"{json.dumps(pack_release(release), sort_keys=True)}\n".encode() + safetensors.torch.save(dict(arrays))


def unpack_reply(content: bytes) -> tuple[Release, dict[str, Tensor]]:
    """What a stored reply says and carries."""
    release, _, arrays = content.partition(b"\n")
    return unpack_release(json.loads(release)), safetensors.torch.load(arrays)


def pack_registration(registration: Registration) -> dict[str, Any]:
    """A registration as scalars."""
    return {"version": VERSION, **asdict(registration)}


def statement_of(registration: Registration) -> bytes:
    """What a node signs: all that it registers."""
    fields = pack_registration(replace(registration, signature=""))
    return json.dumps(fields, sort_keys=True).encode()


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
        keeps_replies=_typed(rest, "keeps_replies", bool),
        software=_typed(rest, "software", str),
        signature=_typed(rest, "signature", str),
    )
    _refuse_rest("registration", rest)
    for name in ("name", "data_set", "software", "signature"):
        if len(getattr(registration, name)) > _LONGEST:
            raise ValueError(f"{name}: has {len(getattr(registration, name))} characters; at most {_LONGEST}")
    if registration.client < 0 or registration.num_records < 1 or not registration.data_set:
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
