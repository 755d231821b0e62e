"""The kinds of requests: what each asks, which arrays it may bring, what one node alone is told, and what answers it.

A dataclass has the fields of a request or an answer; here they become the scalars and the arrays of a frame, and back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpriv.files import software
from fedpriv.holder.wire import frame
from fedpriv.holder.wire.frame import OWN, VERSION, Arrays, FrameError, Request, Response, Scalar, Scalars
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

# Records of a frame: what a model is made of, and an update or its part in a sum.
ADAPTER = "adapter"
MERGED = "merged"
SIGNS = "signs"
SUM = "sum"

# What one node alone is told: the newest receipt that is known of its charges, what became of its earlier uploads, and
# in a sum its terms and the shares that its peers have sealed for it. An answer has the node's own newest receipt.
RECEIPT = FIELD
INCLUDED = "included"
TERMS = "terms"
SEALED = "sealed"

# What a node is asked whether its budget allows it, and how long such a plan may be.
_MOST_PLANNED = 64
_MOST_ROUNDS = 10**6

MAX_TEXT_LENGTH = 300
"""The most characters of a text in a registration or an objection."""

# What a coordinator can do about replies that would come too late to count.
LATE_CURES = (
    "ask for a larger round_seconds, fewer local_steps or a smaller batch_size, or let the node's operator set "
    "reply_seconds in vault.toml"
)

# What a node runs; all nodes of a run must run the same. It is that of the code that was loaded, not of a later update.
SOFTWARE = f"fedpriv {software()}"


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


@dataclass(frozen=True, kw_only=True)
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
        return json.dumps({"version": VERSION, **pack(replace(self, signature=""))}, sort_keys=True).encode()

    def check(self) -> None:
        """See `_Statement`."""
        for name in ("name", "data_set", "software", "identity", "signature"):
            if (length := len(getattr(self, name))) > MAX_TEXT_LENGTH:
                raise ValueError(f"{name}: has {length} characters; at most {MAX_TEXT_LENGTH} are allowed")
        if self.client < 0 or self.num_records < 1 or not self.data_set:
            raise ValueError(f"registration: {self}: needs client >= 0, num_records >= 1 and a data set id")


@dataclass(frozen=True, kw_only=True)
class PlannedReleases(_Statement):
    """A planned run, as JSON of `pack_plan`; the node is asked what of it its policy, its budget and its time allow."""

    label = "plan"

    plan: str
    specs: str = "[]"


@dataclass(frozen=True, kw_only=True)
class Affordable(_Statement):
    """A node's answer to a planned run, before any of it is charged.

    Attributes:
        releases: how many of them its budget allows, one after the other.
        reply_seconds: the longest T of any of them, after which its reply leaves; 0 for at once.
        objection: what its policy refuses in one of them; empty if nothing.
    """

    label = "affordable"

    releases: int
    reply_seconds: float = 0.0
    objection: str = ""

    def check(self) -> None:
        """See `_Statement`."""
        if not 0 <= self.reply_seconds < math.inf or len(self.objection) > MAX_TEXT_LENGTH:
            raise ValueError(f"affordable: reply_seconds = {self.reply_seconds}: must be finite, its objection short")


@dataclass(frozen=True, kw_only=True)
class Step(_Statement):
    """A message of secure aggregation, for the node's session of this attempt."""

    label = "step"

    run: str
    attempt: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Words(_Statement):
    """A node's answer in a session of secure aggregation."""

    label = "words"

    message: str


Statement = TypeVar("Statement", bound=_Statement)
Spec = TypeVar("Spec", UpdateSpec, EvaluationSpec)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of requests.

    Attributes:
        asks: has the fields of the request; None if it has none.
        arrays: the records that it may hold.
        own: what one node may be told beside it.
        answers: has the fields of the answer.
        brings: the records that an answer may hold.
    """

    asks: type[UpdateSpec | EvaluationSpec | _Statement] | None = None
    arrays: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    answers: type[_Statement]
    brings: tuple[str, ...] = ()


_STEP = Kind(asks=Step, answers=Words)

KINDS: Mapping[str, Kind] = {
    # The node's registration, before the first round.
    frame.REGISTER: Kind(answers=Registration),
    # How much of the planned run the node's budget allows, before the first round.
    frame.AFFORD: Kind(asks=PlannedReleases, answers=Affordable),
    frame.TRAIN: Kind(
        asks=UpdateSpec,
        arrays=(ADAPTER, MERGED, SIGNS),
        own=(RECEIPT, INCLUDED, TERMS, SEALED),
        answers=UploadRelease,
        brings=(ADAPTER,),
    ),
    # Noised counts of hits and misses, after the last round.
    frame.EVALUATE: Kind(
        asks=EvaluationSpec, arrays=(ADAPTER, MERGED), own=(RECEIPT, INCLUDED), answers=EvaluationRelease
    ),
    # Secure aggregation, in each round; `train` comes before the last two.
    frame.ADVERTISE: Kind(own=(TERMS,), answers=Words),  # fresh keys for an attempt at a sum
    frame.SHARE: _STEP,  # sealed shares of the node's seeds for its peers
    frame.CHECK: _STEP,  # whose shares the node cannot use
    frame.CONFIRM: _STEP,  # the node's signature of the list of survivors
    frame.REVEAL: _STEP,  # shares of what the sum is still masked by
}
"""{what a request asks for: what it may hold, and what answers it}"""


def check(request: Request) -> None:
    """Refuse a request of an unknown kind, or with what belongs to another kind.

    Raises:
        FrameError: one line that names it.
    """
    if (kind := KINDS.get(request.kind)) is None:
        raise FrameError(f"kind = {short(request.kind)}: must be one of {', '.join(KINDS)}")
    unknown = {
        "records": request.arrays.keys() - set(kind.arrays),
        OWN: request.own.keys() - set(kind.own),
        "fields": set() if kind.asks else request.fields.keys(),
    }
    for name, found in unknown.items():
        if found:
            raise FrameError(f"{name}: {request.kind} holds no {', '.join(map(short, sorted(found)))}")


_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


def pack_instruction(run: str, round_: int, spec: UpdateSpec | EvaluationSpec) -> Scalars:
    """The server's instruction to a client as scalars."""
    return {"run": run, "round": round_, **asdict(spec)}


def unpack_instruction(kind: type[Spec], scalars: Scalars) -> tuple[str, int, Spec]:
    """Run, round and specification of an update or an evaluation.

    Raises:
        ValueError: a missing, unknown or mistyped field.
    """
    rest = dict(scalars)
    run, round_ = _typed(rest, "run", str), _typed(rest, "round", int)
    return run, round_, _spec(kind, rest)


def _spec(kind: type[Spec], scalars: Scalars) -> Spec:
    """The specification that these scalars are, and nothing else."""
    rest = dict(scalars)
    spec = kind(**{each.name: _typed(rest, each.name, _TYPES[str(each.type)]) for each in fields(kind)})
    _refuse_unknown("instruction", rest)
    return spec


def pack_plan(planned: Sequence[tuple[Release, int]], specs: Sequence[tuple[UpdateSpec, Release]] = ()) -> Scalars:
    """The fields of the question whether a node's policy and budget allow a run.

    Args:
        planned: (one of the client's releases, how many of them), in the order in which they would be charged.
        specs: (what is asked in some of the rounds, the release of one of them), each once.
    """

    def row(release: Release, rest: int | dict[str, Any]) -> list[Any]:
        views: tuple[PlannedView, ...] = ("local", "aggregate")
        return [*(events.to_json(release.charged_on(view)) for view in views), rest]

    rows, asked = [row(*each) for each in planned], [row(release, asdict(spec)) for spec, release in specs]
    return pack(PlannedReleases(plan=json.dumps(rows), specs=json.dumps(asked[:_MOST_PLANNED])))


def unpack_plan(scalars: Scalars, view: PlannedView) -> list[tuple[Event, int]]:
    """(what one release costs on the view, how many of them), as `pack_plan` had them.

    Raises:
        ValueError: the fields are no plan, or its releases are too many.
    """
    try:
        plan = json.loads(unpack(PlannedReleases, scalars).plan)
        rows = [(row[view == "aggregate"], row[2]) for row in plan[: _MOST_PLANNED + 1]]
        numbers = [number for _, number in rows if type(number) is int and 0 < number <= _MOST_ROUNDS]
        if not len(numbers) == len(rows) <= _MOST_PLANNED:
            raise ValueError
        return [(events.from_json(event), number) for event, number in rows]
    except (KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise ValueError(
            f"plan: must be at most {_MOST_PLANNED} rows of a release on two views and a number, 1 to {_MOST_ROUNDS}"
        ) from None


def unpack_specs(scalars: Scalars, view: PlannedView) -> list[tuple[UpdateSpec, Event]]:
    """(what is asked in some of the rounds, what it costs on the view), as `pack_plan` had them; raises as that."""
    try:
        rows = json.loads(unpack(PlannedReleases, scalars).specs)[: _MOST_PLANNED + 1]
        if len(rows) > _MOST_PLANNED:
            raise ValueError
        return [(_spec(UpdateSpec, row[2]), events.from_json(row[view == "aggregate"])) for row in rows]
    except (KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise ValueError(
            f"specs: must be at most {_MOST_PLANNED} rows of a release on two views and an update"
        ) from None


def pack_model(broadcast: Broadcast) -> Arrays:
    """A model to evaluate, as float32 arrays; empty records are left out."""
    return {name: _arrays(tensors) for name, tensors in broadcast.tensors().items() if tensors}


def unpack_model(arrays: Arrays) -> Broadcast:
    """The model that `pack_model` wrote.

    Raises:
        ValueError: the adapter is missing.
    """
    return Broadcast(adapter=_adapter(arrays), merged=merged_from_tensors(_tensors(arrays.get(MERGED, {}))))


def pack_broadcast(
    broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource
) -> tuple[Arrays, Broadcast]:
    """A broadcast as arrays, of which empty records are left out, and as its readers have it, to the codec's precision.

    Args:
        broadcast: what to send.
        spec: says how the adapter is encoded.
        initial: the tensors at the start of the run, to which ternary codes refer.
        source: of the randomness in a codec's rounding.
    """
    is_exact = spec.broadcast_codec == "float32"
    adapter = broadcast.adapter if is_exact else codecs.encode(broadcast.adapter, initial, spec.broadcast_codec, source)
    arrays: dict[str, Mapping[str, np.ndarray]] = {ADAPTER: _arrays(adapter)}
    if broadcast.merged:
        arrays[MERGED] = _arrays(merged_to_tensors(broadcast.merged))
    if broadcast.signs:
        arrays[SIGNS] = {SIGNS: pack_signs(broadcast.signs).numpy()}
    return arrays, broadcast if is_exact else unpack_broadcast(arrays, spec, initial)


def unpack_broadcast(arrays: Arrays, spec: UpdateSpec, initial: Adapter) -> Broadcast:
    """The broadcast that `pack_broadcast` wrote, to the codec's precision.

    Raises:
        ValueError: a record or array is missing, unknown or malformed.
    """
    adapter = _adapter(arrays)
    if spec.broadcast_codec != "float32":
        adapter = codecs.decode(adapter, initial, spec.broadcast_codec)
    signs = {}
    if SIGNS in arrays:
        if arrays[SIGNS].keys() != {SIGNS}:
            raise ValueError(f"{SIGNS}: must hold exactly one array, of this name")
        signs = unpack_signs(_tensors(arrays[SIGNS])[SIGNS], adapter)
    return Broadcast(adapter=adapter, merged=merged_from_tensors(_tensors(arrays.get(MERGED, {}))), signs=signs)


def pack_upload(
    adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, initial: Adapter, source: RandomSource
) -> Arrays:
    """A trained adapter, encoded by the specification's codec."""
    return {ADAPTER: _arrays(codecs.encode(adapter, _reference(broadcast, spec, initial), spec.codec, source))}


def unpack_upload(arrays: Arrays, broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """The adapter that an upload carries.

    Raises:
        ValueError: an array is missing, unexpected, or of the wrong type or shape.
    """
    return codecs.decode(_adapter(arrays), _reference(broadcast, spec, initial), spec.codec)


def _reference(broadcast: Broadcast, spec: UpdateSpec, initial: Adapter) -> Adapter:
    """The tensors that an upload is encoded against: the run's initial ones in ternary training, else the broadcast."""
    return initial if spec.quantization == "ternary" else broadcast.adapter


def _adapter(arrays: Arrays) -> Adapter:
    if ADAPTER not in arrays:
        raise ValueError(f"{ADAPTER}: missing")
    return _tensors(arrays[ADAPTER])


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def pack(statement: Statement) -> Scalars:
    """A statement as scalars; an empty receipt is left out."""
    scalars: dict[str, Scalar] = {}
    for each in fields(statement):
        value = getattr(statement, each.name)
        if isinstance(value, NoisedCounts):
            scalars |= asdict(value)
        elif each.name != RECEIPT or value:
            scalars[each.name] = events.to_json(value) if each.name == "event" else value
    return scalars


def unpack(kind: type[Statement], scalars: Scalars) -> Statement:
    """The statement of this kind that `pack` wrote.

    Raises:
        ValueError: a missing, unknown or mistyped field, or a value that `check` refuses.
    """
    rest = dict(scalars)
    statement = kind(**{each.name: _value(rest, each.name, str(each.type)) for each in fields(kind)})
    _refuse_unknown(kind.label, rest)
    statement.check()
    return statement


def answer_of(kind: str, response: Response) -> Any:
    """The answer to a request of this kind, whose class `KINDS` names.

    Raises:
        ValueError: it is malformed, or of another kind; one line that says why.
    """
    if unknown := response.arrays.keys() - set(KINDS[kind].brings):
        raise ValueError(f"records {', '.join(sorted(unknown))}: are no part of an answer to {kind}")
    return unpack(KINDS[kind].answers, response.fields)


def _value(rest: dict[str, Any], name: str, kind: str) -> Any:
    """Take out a statement's field, which is no scalar in two cases, and may be missing in one."""
    if name == RECEIPT:
        return _receipt(rest)
    if kind == "Event":
        return events.from_json(_typed(rest, name, str))
    if kind == "NoisedCounts":
        return NoisedCounts(**{each.name: _typed(rest, each.name, float) for each in fields(NoisedCounts)})
    return _typed(rest, name, _TYPES[kind])


def _receipt(fields: dict[str, Any]) -> str:
    """Take out the receipt, as text; empty if there is none.

    Raises:
        ValueError: it is malformed.
    """
    text = fields.pop(RECEIPT, "")
    if text != "":
        from_text(text)
    return str(text)


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
