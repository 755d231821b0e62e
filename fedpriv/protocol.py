"""Messages between server and clients: plain scalars, and tensors as named arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import safetensors.torch
from torch import Tensor

import fedpriv
from fedpriv.accounting import events
from fedpriv.accounting.composition.law import short
from fedpriv.accounting.events import Event
from fedpriv.adapters import arithmetic, codecs
from fedpriv.adapters.arithmetic import Adapter, Merged
from fedpriv.aggregation import cmfl as relevance
from fedpriv.ledger.receipts import FIELD, from_text
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.local_update import UpdateSpec
from fedpriv.training.private_evaluation import EvaluationSpec, NoisedCounts

# Names of a message's records. The server sends the arrays adapter, merged and signs; a client sends adapter alone.
ADAPTER = "adapter"
MERGED = "merged"
SIGNS = "signs"
INSTRUCTION = "instruction"
RELEASE = "release"
REGISTRATION = "registration"

REGISTER = "query.register"
EVALUATE = "query.evaluate"

# In a request to register, that the node shall send receipts of its charges; in others the newest one that is known of
# it. A node sends its own in answers to requests that have the field, and one that is older does not know it.
RECEIPT = FIELD

# What a train message and its reply hold besides these under secure aggregation: terms and sealed shares, as texts, and
# the masked vector in place of the adapter.
TERMS = "terms"
SEALED = "sealed"
SUM = "sum"

# The exchanges around it, and their texts.
ADVERTISE = "query.advertise"
SHARE = "query.share"
CHECK = "query.check"
CONFIRM = "query.confirm"
REVEAL = "query.reveal"
STEP = "step"
MESSAGE = "message"

VERSION = 9

# The longest text, in characters, that a registration may hold.
_MAX_TEXT_LENGTH = 300

# What a node runs; all nodes of a run must run the same version.
SOFTWARE = f"fedpriv {fedpriv.__version__}"

Arrays = Mapping[str, Mapping[str, Tensor]]
"""{record's name: {array's name: tensor}}"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Broadcast:
    """The global model as a client learns it.

    Attributes:
        adapter: the tensors that the client starts from.
        merged: what aggregation has added to the frozen weights.
        signs: signs of the last global update, if the client is to compare its own update with them.
    """

    adapter: Adapter
    merged: Merged = field(default_factory=dict)
    signs: Adapter = field(default_factory=dict)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """{part: its tensors}."""
        return {ADAPTER: self.adapter, MERGED: arithmetic.merged_to_tensors(self.merged), SIGNS: self.signs}


def request_digest(broadcast: Broadcast, spec: UpdateSpec | EvaluationSpec) -> str:
    """SHA-256, in hex, of all that a release depends on, except the data, the noise and the key's other parts."""
    digest = hashlib.sha256(repr(sorted(asdict(spec).items())).encode())
    for part, tensors in broadcast.tensors().items():
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{part} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class UploadRelease:
    """A client's statement about its upload.

    Attributes:
        round: the run's round, from 1.
        event: the privacy event that was charged for it.
        num_records: N_k as registered; the server compares it with its own N_k, which sets the weight.
        silent: the client was charged, but withholds its update as irrelevant.
        receipt: of the node's last charge, as text; empty if the request did not ask for it.
    """

    round: int
    event: Event
    num_records: int
    silent: bool = False
    receipt: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluationRelease:
    """A client's answer to an evaluation.

    Attributes:
        round: the round that the request named.
        event: the privacy event that was charged for the counts.
        counts: on the client's records, with noise.
        receipt: as in `Release`.
    """

    round: int
    event: Event
    counts: NoisedCounts
    receipt: str = ""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A client's statement before training, made once; all of it is public.

    Attributes:
        client: the partition id, by which the server samples clients.
        num_records: N_k, registered, >= 1.
        name: for display.
        data_set: random id of the data set, to which spending is charged.
        keeps_replies: whether the node stores its replies, so that the same request gets the same bytes again.
        software: name and version of what the node runs.
        identity: public line of the vault's key; empty if it has none.
        signature: by that key, of `statement_of`, in base64; empty if it has none.
        receipt: as in `Release`.
    """

    client: int
    num_records: int
    name: str
    data_set: str
    keeps_replies: bool = False
    software: str = SOFTWARE
    identity: str = ""
    signature: str = ""
    receipt: str = ""


def pack_instruction(run: str, round_: int, spec: UpdateSpec | EvaluationSpec) -> dict[str, Any]:
    """The server's instruction to a client as scalars."""
    return {"version": VERSION, "run": run, "round": round_, **asdict(spec)}


def unpack_instruction(fields: Mapping[str, Any]) -> tuple[str, int, UpdateSpec]:
    """Run, round and specification.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _without_version({name: value for name, value in fields.items() if name not in (TERMS, SEALED, RECEIPT)})
    run, round_ = _typed(rest, "run", str), _typed(rest, "round", int)
    types = {"str": str, "int": int, "float": float, "bool": bool}
    values = {name: _typed(rest, name, types[kind]) for name, kind in UpdateSpec.__annotations__.items()}
    _refuse_unknown("instruction", rest)
    return run, round_, UpdateSpec(**values)


def unpack_evaluation(fields: Mapping[str, Any]) -> tuple[str, int, EvaluationSpec]:
    """Run, round and specification of an evaluation.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _without_version({name: value for name, value in fields.items() if name != RECEIPT})
    run, round_ = _typed(rest, "run", str), _typed(rest, "round", int)
    spec = EvaluationSpec(noise_multiplier=_typed(rest, "noise_multiplier", float))
    _refuse_unknown("instruction", rest)
    return run, round_, spec


def pack_step(run: str, attempt: str, message: str) -> dict[str, Any]:
    """A message of secure aggregation, for the node's session of this attempt, as scalars."""
    return {"version": VERSION, "run": run, "attempt": attempt, MESSAGE: message}


def unpack_step(fields: Mapping[str, Any]) -> tuple[str, str, str]:
    """Run, attempt and message.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _without_version(fields)
    values = _typed(rest, "run", str), _typed(rest, "attempt", str), _typed(rest, MESSAGE, str)
    _refuse_unknown("step", rest)
    return values


def pack_model(broadcast: Broadcast) -> Arrays:
    """A model to evaluate, as float32 arrays; empty records are left out."""
    return {name: tensors for name, tensors in broadcast.tensors().items() if tensors}


def unpack_model(arrays: Arrays) -> Broadcast:
    """The model that `pack_model` wrote.

    Raises:
        ValueError: a record is missing or unknown.
    """
    if unknown := sorted(arrays.keys() - {ADAPTER, MERGED}):
        raise ValueError(f"model: unknown records {', '.join(unknown)}")
    if ADAPTER not in arrays:
        raise ValueError(f"model: {ADAPTER} is missing")
    return Broadcast(adapter=dict(arrays[ADAPTER]), merged=arithmetic.merged_from_tensors(arrays.get(MERGED, {})))


def pack_broadcast(broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource) -> Arrays:
    """A broadcast as arrays; empty records are left out.

    Args:
        broadcast: what to send.
        spec: says how the adapter is encoded.
        initial: the tensors at the start of the run, to which ternary codes refer.
        source: of the randomness in a codec's rounding.
    """
    arrays: dict[str, Mapping[str, Tensor]] = {
        ADAPTER: codecs.encode(broadcast.adapter, initial, spec.broadcast_codec, source)
        if spec.broadcast_codec != "float32"
        else broadcast.adapter
    }
    if broadcast.merged:
        arrays[MERGED] = arithmetic.merged_to_tensors(broadcast.merged)
    if broadcast.signs:
        arrays[SIGNS] = {SIGNS: relevance.pack_signs(broadcast.signs)}
    return arrays


def unpack_broadcast(arrays: Arrays, spec: UpdateSpec, initial: Adapter) -> Broadcast:
    """The broadcast that `pack_broadcast` wrote, to the codec's precision.

    Raises:
        ValueError: a record or array is missing, unknown or malformed.
    """
    if unknown := sorted(arrays.keys() - {ADAPTER, MERGED, SIGNS}):
        raise ValueError(f"broadcast: unknown records {', '.join(unknown)}")
    if ADAPTER not in arrays:
        raise ValueError(f"broadcast: {ADAPTER} is missing")
    adapter = dict(arrays[ADAPTER])
    if spec.broadcast_codec != "float32":
        adapter = codecs.decode(adapter, initial, spec.broadcast_codec)
    signs = {}
    if SIGNS in arrays:
        if arrays[SIGNS].keys() != {SIGNS}:
            raise ValueError(f"{SIGNS}: must hold exactly one array, of this name")
        signs = relevance.unpack_signs(arrays[SIGNS][SIGNS], adapter)
    return Broadcast(adapter=adapter, merged=arithmetic.merged_from_tensors(arrays.get(MERGED, {})), signs=signs)


def pack_upload(
    adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource
) -> dict[str, Tensor]:
    """A trained adapter, encoded by the specification's codec."""
    return codecs.encode(adapter, _reference(broadcast, spec, initial), spec.codec, source)


def unpack_upload(arrays: Mapping[str, Tensor], broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """The adapter that an upload carries.

    Raises:
        ValueError: an array is missing, unexpected, or of the wrong type or shape.
    """
    return codecs.decode(arrays, _reference(broadcast, spec, initial), spec.codec)


def _reference(broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """The tensors that an upload is encoded against: the run's initial ones in ternary training, else the broadcast."""
    return initial if spec.quantization == "ternary" else broadcast.adapter


def pack_release(release: UploadRelease) -> dict[str, Any]:
    """A client's statement about its upload, as scalars."""
    return _with_receipt({"version": VERSION, **asdict(release), "event": events.to_json(release.event)})


def unpack_release(fields: Mapping[str, Any]) -> UploadRelease:
    """A client's statement about its upload.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    rest = _without_version(fields)
    release = UploadRelease(
        round=_typed(rest, "round", int),
        event=events.from_json(_typed(rest, "event", str)),
        num_records=_typed(rest, "num_records", int),
        silent=_typed(rest, "silent", bool),
        receipt=_receipt(rest),
    )
    _refuse_unknown("release", rest)
    return release


def pack_reply(release: UploadRelease, arrays: Mapping[str, Tensor]) -> bytes:
    """A reply as bytes, to be stored before it is sent: scalars as JSON, a newline, and the arrays as safetensors."""
    return f"{json.dumps(pack_release(release), sort_keys=True)}\n".encode() + safetensors.torch.save(dict(arrays))


def unpack_reply(content: bytes) -> tuple[UploadRelease, dict[str, Tensor]]:
    """The scalars and arrays of a stored reply."""
    release, _, arrays = content.partition(b"\n")
    return unpack_release(json.loads(release)), safetensors.torch.load(arrays)


def pack_evaluation_release(release: EvaluationRelease) -> dict[str, Any]:
    """A client's answer to an evaluation, as scalars."""
    scalars = {"round": release.round, "event": events.to_json(release.event)}
    return _with_receipt({"version": VERSION, **scalars, **asdict(release.counts), RECEIPT: release.receipt})


def unpack_evaluation_release(fields: Mapping[str, Any]) -> EvaluationRelease:
    """A client's answer to an evaluation.

    Raises:
        ValueError: another version, or a missing, unknown, mistyped or infinite field.
    """
    rest = _without_version(fields)
    release = EvaluationRelease(
        round=_typed(rest, "round", int),
        event=events.from_json(_typed(rest, "event", str)),
        counts=NoisedCounts(hits=_typed(rest, "hits", float), misses=_typed(rest, "misses", float)),
        receipt=_receipt(rest),
    )
    _refuse_unknown("evaluation", rest)
    if not (math.isfinite(release.counts.hits) and math.isfinite(release.counts.misses)):
        raise ValueError(f"evaluation: {release.counts}: must be finite")
    return release


def pack_evaluation_reply(release: EvaluationRelease) -> bytes:
    """A reply to an evaluation as bytes, to be stored before it is sent."""
    return json.dumps(pack_evaluation_release(release), sort_keys=True).encode()


def unpack_evaluation_reply(content: bytes) -> EvaluationRelease:
    """A stored reply to an evaluation."""
    return unpack_evaluation_release(json.loads(content))


def pack_registration(registration: Registration) -> dict[str, Any]:
    """A registration as scalars."""
    return _with_receipt({"version": VERSION, **asdict(registration)})


def statement_of(registration: Registration) -> bytes:
    """The bytes that a node signs: everything that it registers."""
    fields = pack_registration(replace(registration, signature=""))
    return json.dumps(fields, sort_keys=True).encode()


def unpack_registration(fields: Mapping[str, Any]) -> Registration:
    """A registration.

    Raises:
        ValueError: another version, a missing or mistyped field, or a value out of range.
    """
    rest = _without_version(fields)
    registration = Registration(
        client=_typed(rest, "client", int),
        num_records=_typed(rest, "num_records", int),
        name=_typed(rest, "name", str),
        data_set=_typed(rest, "data_set", str),
        keeps_replies=_typed(rest, "keeps_replies", bool),
        software=_typed(rest, "software", str),
        identity=_typed(rest, "identity", str),
        signature=_typed(rest, "signature", str),
        receipt=_receipt(rest),
    )
    _refuse_unknown("registration", rest)
    for name in ("name", "data_set", "software", "identity", "signature"):
        if (length := len(getattr(registration, name))) > _MAX_TEXT_LENGTH:
            raise ValueError(f"{name}: has {length} characters; at most {_MAX_TEXT_LENGTH} are allowed")
    if registration.client < 0 or registration.num_records < 1 or not registration.data_set:
        raise ValueError(f"registration: {registration}: needs client >= 0, num_records >= 1 and a data set id")
    return registration


def _with_receipt(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without an empty receipt, which a reader that knows none would refuse."""
    return fields if fields[RECEIPT] else {name: value for name, value in fields.items() if name != RECEIPT}


def _receipt(fields: dict[str, Any]) -> str:
    """Take out the receipt, as text; empty if there is none.

    Raises:
        ValueError: it is malformed.
    """
    text = fields.pop(RECEIPT, "")
    if text != "":
        from_text(text)
    return str(text)


def _without_version(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the fields without the version, which must be the one that this code speaks."""
    rest = dict(fields)
    version = rest.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version = {version!r}: this fedpriv speaks version {VERSION}")
    return rest


def _refuse_unknown(kind: str, rest: Mapping[str, Any]) -> None:
    if rest:
        raise ValueError(f"{kind}: unknown fields {', '.join(sorted(rest))}")


def _typed(fields: dict[str, Any], name: str, kind: type) -> Any:
    """Take out a field; refuse it if it is missing or of another type."""
    if name not in fields:
        raise ValueError(f"{name}: missing")
    value = fields.pop(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} = {short(value)}: must be of type {kind.__name__}")
    return value
