"""Messages between server and clients: plain scalars, and tensors as named arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import safetensors.torch
from torch import Tensor

from fedpriv import texts
from fedpriv.learning.adapters import Adapter, Merged, codecs, merged_from_tensors, merged_to_tensors
from fedpriv.learning.aggregation import pack_signs, unpack_signs
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.private_evaluation import EvaluationSpec, NoisedCounts
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.law import short
from fedpriv.privacy.accounting.views import PlannedView, Release
from fedpriv.privacy.ledger.receipts import FIELD, from_text
from fedpriv.privacy.mechanisms.sources import RandomSource

# Names of a message's records. The server sends the arrays adapter, merged and signs; a client sends adapter alone.
ADAPTER = "adapter"
MERGED = "merged"
SIGNS = "signs"
INSTRUCTION = "instruction"
RELEASE = "release"
REGISTRATION = "registration"
AFFORDABLE = "affordable"

REGISTER = "query.register"
EVALUATE = "query.evaluate"
AFFORD = "query.afford"

# In a request, the newest receipt that is known of the node's charges; in an answer, the node's own newest one.
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

VERSION = 1

# What a node is asked whether its budget allows it, and how long such a plan may be.
_PLAN = "plan"
_MOST_PLANNED = 64
_MOST_ROUNDS = 10**6

# The longest text, in characters, that a registration may hold.
_MAX_TEXT_LENGTH = 300

# What a node runs; all nodes of a run must run the same version.
SOFTWARE = f"fedpriv {texts.VERSION}"

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
        return {ADAPTER: self.adapter, MERGED: merged_to_tensors(self.merged), SIGNS: self.signs}


def request_digest(broadcast: Broadcast, spec: UpdateSpec | EvaluationSpec) -> str:
    """SHA-256, in hex, of all that a release depends on, except the data, the noise and the key's other parts."""
    digest = hashlib.sha256(repr(sorted(asdict(spec).items())).encode())
    for part, tensors in broadcast.tensors().items():
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{part} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class _Statement:
    """A client's words to the server, whose fields are scalars on the wire; `label` names it in errors."""

    label: ClassVar[str]

    def check(self) -> None:
        """Refuse values that no client states.

        Raises:
            ValueError: one of them is out of range.
        """


@dataclass(frozen=True, kw_only=True)
class UploadRelease(_Statement):
    """A client's statement about its upload.

    Attributes:
        round: the run's round, from 1.
        event: the privacy event that was charged for it.
        num_records: N_k as registered; the server compares it with its own N_k, which sets the weight.
        silent: the client was charged, but withholds its update as irrelevant.
        receipt: of the node's last charge, as text; empty if nothing signs any.
    """

    label = "release"

    round: int
    event: Event
    num_records: int
    silent: bool = False
    receipt: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluationRelease(_Statement):
    """A client's answer to an evaluation.

    Attributes:
        round: the round that the request named.
        event: the privacy event that was charged for the counts.
        counts: on the client's records, with noise; finite.
        receipt: as in `UploadRelease`.
    """

    label = "evaluation"

    round: int
    event: Event
    counts: NoisedCounts
    receipt: str = ""

    def check(self) -> None:
        """See `_Statement`."""
        if not (math.isfinite(self.counts.hits) and math.isfinite(self.counts.misses)):
            raise ValueError(f"evaluation: {self.counts}: must be finite")


@dataclass(frozen=True, kw_only=True)
class Registration(_Statement):
    """A client's statement before training, made once; all of it is public.

    Attributes:
        client: the partition id, by which the server samples clients.
        num_records: N_k, registered, >= 1.
        name: for display.
        data_set: random id of the data set, to which spending is charged.
        keeps_replies: whether the node stores its replies, so that the same request gets the same bytes again.
        software: name and version of what the node runs.
        identity: public line of the vault's key; empty if it has none.
        signature: by that key, of `signed`, in base64; empty if it has none.
        receipt: as in `UploadRelease`.
    """

    label = "registration"

    client: int
    num_records: int
    name: str
    data_set: str
    keeps_replies: bool = False
    software: str = SOFTWARE
    identity: str = ""
    signature: str = ""
    receipt: str = ""

    @property
    def signed(self) -> bytes:
        """The bytes that a node signs: everything that it registers."""
        return json.dumps(pack(replace(self, signature="")), sort_keys=True).encode()

    def check(self) -> None:
        """See `_Statement`."""
        for name in ("name", "data_set", "software", "identity", "signature"):
            if (length := len(getattr(self, name))) > _MAX_TEXT_LENGTH:
                raise ValueError(f"{name}: has {length} characters; at most {_MAX_TEXT_LENGTH} are allowed")
        if self.client < 0 or self.num_records < 1 or not self.data_set:
            raise ValueError(f"registration: {self}: needs client >= 0, num_records >= 1 and a data set id")


Statement = TypeVar("Statement", UploadRelease, EvaluationRelease, Registration)
Spec = TypeVar("Spec", UpdateSpec, EvaluationSpec)

_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


def pack_instruction(run: str, round_: int, spec: UpdateSpec | EvaluationSpec) -> dict[str, Any]:
    """The server's instruction to a client as scalars."""
    return {"version": VERSION, "run": run, "round": round_, **asdict(spec)}


def unpack_instruction(kind: type[Spec], scalars: Mapping[str, Any]) -> tuple[str, int, Spec]:
    """Run, round and specification of an update or an evaluation.

    Raises:
        ValueError: another version, or a missing, unknown or mistyped field.
    """
    # What secure aggregation adds to an instruction has readers of its own.
    others = (TERMS, SEALED, RECEIPT) if kind is UpdateSpec else (RECEIPT,)
    rest = _without_version({name: value for name, value in scalars.items() if name not in others})
    run, round_ = _typed(rest, "run", str), _typed(rest, "round", int)
    spec = kind(**{each.name: _typed(rest, each.name, _TYPES[str(each.type)]) for each in fields(kind)})
    _refuse_unknown("instruction", rest)
    return run, round_, spec


def pack_plan(planned: Sequence[tuple[Release, int]]) -> dict[str, Any]:
    """The fields of the question whether a node's budget allows a run.

    Args:
        planned: (one of the client's releases, how many of them), in the order in which they would be charged.
    """
    views: tuple[PlannedView, ...] = ("local", "aggregate")
    return {_PLAN: json.dumps([[*(events.to_json(release.charged_on(v)) for v in views), n] for release, n in planned])}


def unpack_plan(fields: Mapping[str, Any], view: PlannedView) -> list[tuple[Event, int]]:
    """(what one release costs on the view, how many of them), as `pack_plan` had them.

    Raises:
        ValueError: the fields are no plan, or its releases are too many.
    """
    try:
        rows = [(row[view == "aggregate"], row[2]) for row in json.loads(str(fields[_PLAN]))[: _MOST_PLANNED + 1]]
        numbers = [number for _, number in rows if type(number) is int and 0 < number <= _MOST_ROUNDS]
        if not len(numbers) == len(rows) <= _MOST_PLANNED:
            raise ValueError
        return [(events.from_json(event), number) for event, number in rows]
    except (KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise ValueError(
            f"plan: must be at most {_MOST_PLANNED} rows of a release on two views and a number, 1 to {_MOST_ROUNDS}"
        ) from None


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
    return Broadcast(adapter=dict(arrays[ADAPTER]), merged=merged_from_tensors(arrays.get(MERGED, {})))


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
        arrays[MERGED] = merged_to_tensors(broadcast.merged)
    if broadcast.signs:
        arrays[SIGNS] = {SIGNS: pack_signs(broadcast.signs)}
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
        signs = unpack_signs(arrays[SIGNS][SIGNS], adapter)
    return Broadcast(adapter=adapter, merged=merged_from_tensors(arrays.get(MERGED, {})), signs=signs)


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


def pack(statement: UploadRelease | EvaluationRelease | Registration) -> dict[str, Any]:
    """A client's statement as scalars; an empty receipt is left out."""
    scalars: dict[str, Any] = {"version": VERSION}
    for each in fields(statement):
        value = getattr(statement, each.name)
        if isinstance(value, NoisedCounts):
            scalars |= asdict(value)
        elif each.name != RECEIPT or value:
            scalars[each.name] = events.to_json(value) if each.name == "event" else value
    return scalars


def unpack(kind: type[Statement], scalars: Mapping[str, Any]) -> Statement:
    """The statement of this kind that `pack` wrote.

    Raises:
        ValueError: another version, a missing, unknown or mistyped field, or a value that `check` refuses.
    """
    rest = _without_version(scalars)
    statement = kind(**{each.name: _value(rest, each.name, str(each.type)) for each in fields(kind)})
    _refuse_unknown(kind.label, rest)
    statement.check()
    return statement


def _value(rest: dict[str, Any], name: str, kind: str) -> Any:
    """Take out a statement's field, which is no scalar in two cases, and may be missing in one."""
    if name == RECEIPT:
        return _receipt(rest)
    if kind == "Event":
        return events.from_json(_typed(rest, name, str))
    if kind == "NoisedCounts":
        return NoisedCounts(**{each.name: _typed(rest, each.name, float) for each in fields(NoisedCounts)})
    return _typed(rest, name, _TYPES[kind])


def pack_reply(release: UploadRelease | EvaluationRelease, arrays: Mapping[str, Tensor] | None = None) -> bytes:
    """A reply as bytes, to be stored before it is sent: its scalars as JSON and, of an upload, the arrays.

    A newline stands before the arrays, which are written as safetensors.
    """
    scalars = json.dumps(pack(release), sort_keys=True).encode()
    return scalars if arrays is None else scalars + b"\n" + safetensors.torch.save(dict(arrays))


def unpack_reply(kind: type[Statement], content: bytes) -> tuple[Statement, dict[str, Tensor]]:
    """The scalars and arrays of a stored reply; no arrays in the answer to an evaluation."""
    scalars, newline, arrays = content.partition(b"\n")
    return unpack(kind, json.loads(scalars)), safetensors.torch.load(arrays) if newline else {}


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
