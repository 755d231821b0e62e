"""A node's answer to a request: what is public first, then the charge, and only then the records.

Every byte that leaves is a function of public inputs and of what the node's ledger has paid for. So whatever can be
refused, is refused before the charge and without the records; from the charge on there is always an upload, which is
noise alone where the records could not be used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv import protocol
from fedpriv.accounting import views as accounting
from fedpriv.adapters.arithmetic import Adapter, difference
from fedpriv.aggregation import cmfl as relevance
from fedpriv.config import Fact, RunConfig
from fedpriv.errors import InputError, LedgerError
from fedpriv.files import trace_without_message
from fedpriv.ledger.entries import DataSet, Key
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.protocol import Broadcast, EvaluationRelease, UploadRelease
from fedpriv.training import private_evaluation
from fedpriv.training.local_update import ClientUpdate, UpdateSpec, UpdateTask, planned_event
from fedpriv.training.rehearsal import synthetic_records
from fedpriv.training.stacked import execute_one_by_one
from fedpriv.vault import _charging, _records, _reply_times, _summed
from fedpriv.vault._charging import AlreadyReleasedError, RefusedError, RetiredError
from fedpriv.vault._guard import check_broadcast, check_evaluation, check_instruction, check_limits
from fedpriv.vault._summed import Part
from fedpriv.vault.frames import (
    ADVERTISE,
    CHECK,
    CONFIRM,
    EVALUATE,
    FAILED,
    REFUSED,
    REGISTER,
    RETIRED,
    REVEAL,
    SHARE,
    TRAIN,
    Request,
    Response,
)
from fedpriv.vault.holder import Holder, NodeHolder, bench_of, run_of

log = logging.getLogger(__name__)

_secure = SecureSource()

# Characters of a refusal, which may quote what a coordinator sent.
_LONGEST_REASON = 300


def answer(request: Request, holder: Holder) -> Response:
    """The node's answer; this function raises nothing."""
    try:
        if request.kind not in _ANSWERS:
            raise RefusedError(f"kind = {request.kind!r}: must be one of {', '.join(_ANSWERS)}")
        return _ANSWERS[request.kind](request, holder)
    except Exception as error:  # its text must not leave the node
        return _refused(error, request, holder)


def _train(request: Request, holder: Holder) -> Response:
    """The upload of one local update.

    Raises:
        Exception: see `prepare`.
    """
    try:
        task = prepare(request, holder)
    except AlreadyReleasedError as released:
        return settle(request, holder, released)
    model = bench_of(run_of(request.run_config, holder), holder).model
    return settle(request, holder, execute_one_by_one(model, [task])[0])


def prepare(request: Request, holder: Holder) -> UpdateTask:
    """The task that a request asks for, after the guard has checked and charged it.

    Whatever raises here was decided by public inputs: where records are the node's own, they are read after the charge,
    and a failure to read them is no failure of the task.

    Raises:
        AlreadyReleasedError: the request was answered before; `settle` sends the stored answer again.
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        ValueError: the request is malformed.
    """
    config = run_of(request.run_config, holder)
    bench = bench_of(config, holder)
    client, policy = holder.partition(bench.num_clients), holder.policy
    key, spec, broadcast, part = _instruction(request, config, holder, client, bench.initial)
    data_set, num_registered = _records.registered(config, bench, holder)
    if part and part.num_records != num_registered:
        raise RefusedError(f"terms: num_records = {part.num_records}: this node registered {num_registered}")
    check_instruction(
        spec,
        policy,
        noise_source=config.noise_source,
        num_registered=num_registered,
        has_labels=bool(bench.label_names),
    )
    sampler = spec.sampler(num_registered, _source(config, client, key.round, "inclusion"))
    grid = part.grid if part else None
    event = planned_event(spec, sampler.sampling_probability, bench.initial, grid)
    # A node knows of no other noise than its own, but under the terms that its peers have signed.
    release = part.release(event) if part else accounting.Release(event=event, rho_bar=1.0)
    check_limits(spec, release.charged_on(policy.budget_view), key.round, policy.limits)
    check_broadcast(broadcast, policy.limits)
    bench.model.check({name: tensor.shape for name, tensor in broadcast.adapter.items()})
    bench.model.check_merged(broadcast.merged)
    reply = None
    if isinstance(holder, NodeHolder) and data_set is not None:
        reply = _reply_times.of_update(
            spec=spec,
            broadcast=broadcast,
            sampler=sampler,
            num_registered=num_registered,
            config=config,
            bench=bench,
            holder=holder,
            data_set=data_set,
        )
    may_read = _charged(request, config, holder, key, release, data_set, reply.seconds if reply else 0.0)
    if reply and may_read:
        _reply_times.charged(reply, bench)
    may_begin = reply is None or reply.is_first
    data = _records.of_client(config, bench, holder, data_set, may_begin=may_begin) if may_read else bench.no_records
    return UpdateTask(
        adapter=broadcast.adapter,
        merged=broadcast.merged,
        data=data,
        spec=spec,
        round=key.round,
        sampler=sampler,
        noise=_source(config, client, key.round, "noise"),
        grid=grid,
    )


def settle(request: Request, holder: Holder, update: ClientUpdate | Exception) -> Response:
    """The upload, once it is stored; noise alone if the update failed after it was charged.

    Args:
        request: as given to `prepare`.
        holder: of the node.
        update: what became of the task, or what `prepare` raised.
    """
    if isinstance(update, AlreadyReleasedError):
        _journal(request, holder, "sent_again")
        return _upload(update.content)
    try:
        if isinstance(update, ClientUpdate):
            return _settled(request, holder, update)
        if isinstance(update, (RefusedError, LedgerError)) or holder.policy.allow_not_private:
            return _refused(update, request, holder)
        log.error("failed: %s", trace_without_message(update))
        return _noise_alone(request, holder)
    except Exception as error:  # the upload must not leave, and neither must the error's text
        return _refused(error, request, holder)


def refused(error: Exception) -> Response:
    """An error response, which says only that the guard refused, or that the request failed.

    An exception's text may contain a record, so it stays in this node's log.
    """
    if isinstance(error, RetiredError):
        log.warning("retired: %s", error)
        return Response(code=RETIRED, reason=f"retired: {error}")
    if isinstance(error, RefusedError):
        log.warning("refused: %s", error)
        return Response(code=REFUSED, reason=f"refused: {error}"[:_LONGEST_REASON])
    if isinstance(error, LedgerError):
        log.error("refused: %s", error)
        return Response(code=REFUSED, reason="refused: this node's ledger cannot be used; its log says why")
    # An InputError may name the node's own keys, columns or labels.
    log.error("failed: %s", error if isinstance(error, InputError) else trace_without_message(error))
    return Response(code=FAILED, reason="failed; this node's log says why")


def _register(request: Request, holder: Holder) -> Response:
    """The client's registration: partition id, registered number of records, display name and data set id.

    Raises:
        RefusedError: the node does not take part in such a run, or its data are not registered with its ledger.
        LedgerError: the node's ledger cannot be used.
        InputError: the run's configuration or, in a simulation, its data cannot be used.
    """
    config = run_of(request.run_config, holder)
    bench = None if isinstance(holder, NodeHolder) else bench_of(config, holder)
    client = holder.partition(bench.num_clients if bench else config.num_clients)
    data_set, num_registered = _records.registered(config, bench, holder)
    name = holder.name
    if bench is not None:
        name = name or bench.data.client_names[client]
        if data_set is not None:
            _charging.log_content(
                holder.policy, data_set, repr(bench.data.clients[client]).encode(), _records.size(bench, client)
            )
    signs = holder.identity_key is not None or config.secure_aggregation
    identity = _summed.identity_of(holder, client) if signs else None
    registration = protocol.Registration(
        client=client,
        num_records=num_registered,
        name=name or f"client-{client}",
        # A node without a ledger remembers nothing, so its spending attaches to this run alone.
        data_set=data_set.id if data_set else secrets.token_hex(16),
        keeps_replies=data_set is not None,
        software=protocol.SOFTWARE,
        identity=identity.public_line if identity else "",
        receipt=_receipt(request, holder, data_set),
    )
    if identity:
        registration = replace(registration, signature=identity.sign(protocol.statement_of(registration)))
    holder.journal.write("registered", num_records=registration.num_records, data_set=registration.data_set)
    return Response(record=protocol.REGISTRATION, fields=protocol.pack_registration(registration))


def _evaluate(request: Request, holder: Holder) -> Response:
    """Noised counts of the records that are set aside on which a model is right and wrong.

    Whatever raises here was decided by public inputs, as in `prepare`. After the charge the answer is noise alone where
    records cannot be read, or where an earlier attempt ended before its answer was stored.

    Raises:
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        ValueError: the request is malformed.
    """
    config = run_of(request.run_config, holder)
    bench = bench_of(config, holder)
    client, policy = holder.partition(bench.num_clients), holder.policy
    run, round_, spec = protocol.unpack_evaluation(request.fields)
    broadcast = protocol.unpack_model({record: _tensors(named) for record, named in request.arrays.items()})
    key = _key(config, client, run, round_, protocol.request_digest(broadcast, spec))
    data_set, _ = _records.registered(config, bench, holder)
    check_evaluation(spec, round_, policy, noise_source=config.noise_source)
    check_broadcast(broadcast, policy.limits)
    private_evaluation.check_fits(bench.model, broadcast.adapter, broadcast.merged)
    reply_seconds = 0.0
    if isinstance(holder, NodeHolder) and data_set is not None:
        classes = len(bench.label_names)
        synthetic = synthetic_records(
            bench.model, max_length=config.max_length, num_labels=classes, features=bench.features
        )
        reply_seconds = _reply_times.of_evaluation(
            private_evaluation.rehearse(bench.model, broadcast.adapter, broadcast.merged, synthetic),
            adapter=broadcast.adapter,
            config=config,
            bench=bench,
            holder=holder,
            data_set=data_set,
        )
    event = private_evaluation.planned_event(spec)
    # Counts go to the server one by one, so they cost the same on every view.
    cost = accounting.Release(event=event, rho_bar=1.0, aggregate_scale=1.0 if config.secure_aggregation else None)
    try:
        may_read = _charged(request, config, holder, key, cost, data_set, reply_seconds)
    except AlreadyReleasedError as released:
        _journal(request, holder, "sent_again")
        return _counts(released.content)
    exact = _records.counts(bench, holder, broadcast, data_set) if may_read else private_evaluation.NO_COUNTS
    counts, event = private_evaluation.noised(exact, spec, _source(config, client, round_, "evaluation"))
    release = EvaluationRelease(round=round_, event=event, counts=counts, receipt=_receipt(request, holder, data_set))
    content = _charging.store_reply(policy, key, event, protocol.pack_evaluation_reply(release))
    _journal(request, holder, "released")
    return _counts(content)


_ANSWERS: Mapping[str, Callable[[Request, Holder], Response]] = {
    REGISTER: _register,
    TRAIN: _train,
    EVALUATE: _evaluate,
    ADVERTISE: _summed.advertise,
    SHARE: _summed.share,
    CHECK: _summed.check,
    CONFIRM: _summed.confirm,
    REVEAL: _summed.reveal,
}


def _charged(
    request: Request,
    config: RunConfig,
    holder: Holder,
    key: Key,
    release: accounting.Release,
    data_set: DataSet | None,
    reply_seconds: float,
) -> bool:
    """Charge a release, the last step before any record is touched; whether the records may be touched for it.

    From here on until `reply_seconds` have passed, nothing may leave.

    Raises:
        Exception: see `charging.charge`.
    """
    shown = str(request.fields.get(protocol.RECEIPT, ""))
    is_new, receipt = _charging.charge(
        holder.policy, key, release, data_set, noise_source=config.noise_source, shown=shown
    )
    holder.before_records(reply_seconds)
    paid = {protocol.RECEIPT: receipt} if is_new else {}
    holder.journal.write("charged", run=key.run, round=key.round, recorded=data_set is not None, **paid)
    # In a simulation, which protects nobody, a resumed run computes again, so that it stays equal to the bit.
    return is_new or config.simulate


def _receipt(request: Request, holder: Holder, data_set: DataSet | None) -> str:
    """The node's newest receipt, for a coordinator that asks for it; older ones do not know the field."""
    return _charging.signed_receipt(holder.policy, data_set) if protocol.RECEIPT in request.fields else ""


def _refused(error: Exception, request: Request, holder: Holder) -> Response:
    """`refused`, noted in the node's journal."""
    response = refused(error)
    event = {RETIRED: "retired", REFUSED: "refused"}.get(response.code, "failed")
    _journal(request, holder, event, reason=response.reason)
    return response


def _journal(request: Request, holder: Holder, event: str, **fields: str) -> None:
    """Note an event with the run and the round, where the request names them."""
    named = {name: value for name in ("run", "round") if isinstance(value := request.fields.get(name), (str, int))}
    holder.journal.write(event, **named, **fields)


def _instruction(
    request: Request, config: RunConfig, holder: Holder, client: int, initial: Adapter
) -> tuple[Key, UpdateSpec, Broadcast, Part | None]:
    """The update that a train request asks for, its key as one release, and the node's part in a sum."""
    run, round_, spec = protocol.unpack_instruction(request.fields)
    arrays = {record: _tensors(named) for record, named in request.arrays.items()}
    broadcast = protocol.unpack_broadcast(arrays, spec, initial)
    digest = protocol.request_digest(broadcast, spec)
    part = None
    # Without terms the server is to see the upload itself, as it may ask for in any run: that is charged in full.
    if config.secure_aggregation and protocol.TERMS in request.fields:
        part = _summed.part_of(request, config, holder, client, spec=spec, digest=digest, initial=initial)
    if part and (part.terms.run, part.terms.round) != (run, round_):
        raise RefusedError(f"terms: run, round = {part.terms.run}, {part.terms.round}: are not those of the request")
    return _key(config, client, run, round_, f"{digest} {part.digest}" if part else digest), spec, broadcast, part


def _key(config: RunConfig, client: int, run: str, round_: int, digest: str) -> Key:
    """The key of a release, which depends on all that the release does, except the data and the noise."""
    model = json.dumps({name: getattr(config, name) for name in config.keys_with(Fact.RELEASE)}, sort_keys=True)
    request = hashlib.sha256(f"{digest} {model}".encode()).hexdigest()
    return Key(run=run, client=str(client), round=round_, request=request)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(a if a.flags.writeable else a.copy()) for name, a in arrays.items()}


def _settled(request: Request, holder: Holder, update: ClientUpdate) -> Response:
    """The reply to a trained update; it is stored first if the node keeps a ledger."""
    config = run_of(request.run_config, holder)
    bench = bench_of(config, holder)
    client = holder.partition(bench.num_clients)
    key, spec, broadcast, part = _instruction(request, config, holder, client, bench.initial)
    silent = part is None and _is_irrelevant(update.adapter, broadcast, spec, key.round)
    if part is not None:
        arrays = {protocol.SUM: part.vector(update)}
    elif silent:
        arrays = {}
    else:
        rounding = _source(config, client, key.round, "rounding")
        arrays = protocol.pack_upload(update.adapter, broadcast, spec, bench.initial, rounding)
    data_set, _ = _records.registered(config, bench, holder)
    release = UploadRelease(
        round=key.round,
        event=update.event,
        num_records=update.num_records,
        silent=silent,
        receipt=_receipt(request, holder, data_set),
    )
    content = protocol.pack_reply(release, arrays)
    if holder.policy.ledger is not None:
        content = _charging.store_reply(holder.policy, key, update.event, content)
    _journal(request, holder, "released")
    return _upload(content)


def _noise_alone(request: Request, holder: Holder) -> Response:
    """The upload for a charge whose update failed: what an empty set of records would have given."""
    bench = bench_of(run_of(request.run_config, holder), holder)
    bench.forget_records()  # the next reply's time does not tell what this update has left undone
    try:
        task = replace(prepare(request, holder), data=bench.no_records)
    except AlreadyReleasedError as released:
        return _upload(released.content)
    _journal(request, holder, "noise_alone")
    (update,) = execute_one_by_one(bench.model, [task])
    if isinstance(update, Exception):
        raise update
    return _settled(request, holder, update)


def _is_irrelevant(adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, round_: int) -> bool:
    """Whether the update points away from the federation's last step; before the first step no update does."""
    if not broadcast.signs or not spec.relevance_threshold:
        return False
    share = relevance.relevance(difference(adapter, broadcast.adapter), broadcast.signs)
    return share < relevance.threshold(spec.relevance_threshold, round_)


def _upload(content: bytes) -> Response:
    """The response that a stored reply holds."""
    release, arrays = protocol.unpack_reply(content)
    return Response(
        record=protocol.RELEASE,
        fields=protocol.pack_release(release),
        # In an order of their own: safetensors returns them in a random one.
        arrays={name: arrays[name].numpy() for name in sorted(arrays)},
    )


def _counts(content: bytes) -> Response:
    """The response that a stored reply to an evaluation holds."""
    release = protocol.unpack_evaluation_reply(content)
    return Response(record=protocol.RELEASE, fields=protocol.pack_evaluation_release(release))


def _source(config: RunConfig, client: int, round_: int, purpose: str) -> RandomSource:
    return SeededSource(config.seed, client, round_, purpose) if config.simulate else _secure
