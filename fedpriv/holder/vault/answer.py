"""A node's answer to a request: what is public first, then the charge, and only then the records.

Every byte that leaves is a function of public inputs and of what the node's ledger has paid for. So whatever can be
refused, is refused before the charge and without the records; from the charge on there is always an upload, which is
noise alone where the records could not be used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from fedpriv.config import RunConfig
from fedpriv.files import Journal, trace_without_message
from fedpriv.holder.vault import _charging, _records, _reply_times, _summed
from fedpriv.holder.vault._charging import AlreadyReleasedError, NodePolicy, RefusedError, refused, registered_data_set
from fedpriv.holder.vault._guard import (
    check_agreed,
    check_broadcast,
    check_evaluation,
    check_included,
    check_instruction,
    check_limits,
    check_unit,
)
from fedpriv.holder.vault._summed import Part
from fedpriv.holder.vault.holder import Holder, NodeHolder, RecordsToRead, bench_of, run_named, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import (
    ADVERTISE,
    AFFORD,
    CHECK,
    CONFIRM,
    EVALUATE,
    REGISTER,
    REVEAL,
    SHARE,
    TRAIN,
    Arrays,
    FrameError,
    Request,
    Response,
)
from fedpriv.holder.wire.kinds import Broadcast, EvaluationRelease, UploadRelease
from fedpriv.learning.adapters import Adapter, difference
from fedpriv.learning.aggregation import RULES
from fedpriv.learning.training import private_evaluation
from fedpriv.learning.training.local_update import COUNTS, ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.learning.training.private_evaluation import NoisedCounts
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.views import PlannedView, Release
from fedpriv.privacy.ledger.entries import NOT_READ, DataSet, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource, SeededSource

log = logging.getLogger(__name__)

_secure = SecureSource()


class _Decoded(NamedTuple):
    """The parts of a request for a release.

    Attributes:
        key: of its charge and of the stored reply.
        spec: of the update; that of an evaluation has the objective `counts`.
        broadcast: the model that it starts from.
        part: of an update in a sum; None where the server sees what is released.
    """

    key: Key
    spec: UpdateSpec
    broadcast: Broadcast
    part: Part | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A release that was checked and charged: all that its execution and its reply need.

    Attributes:
        task: to execute; without records where the charge may not touch them, or they are yet to be read.
        reading: the records that are yet to be read; None if there are none.
        decoded: from the request.
        request: as it came.
        holder: of the node.
        config: of the run, as the node carries it out.
        bench: model and records of the node.
        receipt: of the charge, as text; empty if the request did not ask for it.
        room: for all that is written after the charge, until it is closed.
    """

    task: UpdateTask
    reading: RecordsToRead | None
    decoded: _Decoded
    request: Request
    holder: Holder
    config: RunConfig
    bench: Workbench
    receipt: str
    room: ExitStack


def answer(request: Request, holder: Holder) -> Response:
    """The node's answer; this function raises nothing."""
    try:
        holder.room.check()
        kinds.check(request)
        return _ANSWERS[request.kind](request, holder)
    except Exception as error:  # its text must not leave the node
        return _refused(error, request, holder)


def _release(request: Request, holder: Holder) -> Response:
    """The release of one local update or evaluation."""
    prepared = _charged(request, holder) if holder.apart else prepare(request, holder)
    if isinstance(prepared, Response):
        return prepared
    if holder.apart and prepared.reading:
        return settle(prepared, holder.apart(prepared.bench, prepared.task, prepared.reading, prepared.room))
    return settle(prepared, execute_one_by_one(prepared.bench.model, [prepared.task])[0])


def prepare(request: Request, holder: Holder) -> Prepared | Response:
    """The release that a request asks for, checked and charged; or the response if there is nothing to execute.

    Whatever is refused was decided by public inputs: where records are the node's own, they are read after the charge,
    and a failure to read them is no failure of the release. A request that was answered before gets the stored answer.

    Args:
        request: for an update, of steps or class sums, or for an evaluation.
        holder: of the node.
    """
    charged = _charged(request, holder)
    if isinstance(charged, Response) or charged.reading is None:
        return charged
    try:
        data = _records.of_release(charged.reading, charged.bench, holder)
    except Exception as error:  # as for an update that fails
        return _refused(error, request, holder)
    return replace(charged, task=replace(charged.task, data=data), reading=None)


def _charged(request: Request, holder: Holder) -> Prepared | Response:
    """`prepare`, but that the records are yet to be read."""
    try:
        return _prepared(request, holder)
    except AlreadyReleasedError as released:
        _journal(request, holder, "sent_again")
        return Response(released.content)
    except Exception as error:  # its text must not leave the node
        return _refused(error, request, holder)


def settle(prepared: Prepared, update: ClientUpdate | Exception) -> Response:
    """The release, once its reply is stored; noise alone if it failed after it was charged.

    Args:
        prepared: by `prepare`.
        update: what became of its task.
    """
    request, holder = prepared.request, prepared.holder
    try:
        if isinstance(update, Exception):
            if holder.policy.allow_not_private:
                return _refused(update, request, holder)
            log.error("failed, so the release is noise alone: %s", trace_without_message(update))
            update = _noise_alone(prepared)
        response = _response(prepared, update)
        prepared.room.close()
        if holder.policy.ledger is not None:
            note = (prepared.bench.content_note or NOT_READ) if isinstance(holder, NodeHolder) else None
            key = prepared.decoded.key
            response = Response(_charging.store_reply(holder.policy, key, update.event, response.frame, note))
        _journal(request, holder, "released")
        return response
    except Exception as error:  # the release must not leave, and neither must the error's text
        _journal(request, holder, "withheld")  # of the length of `released`
        return refused(error, Journal(None))


def _afford(request: Request, holder: Holder) -> Response:
    """How many of the planned releases fit, one after the other, what the policy refuses, and when replies leave.

    It charges nothing, and is no promise.

    Raises:
        RefusedError: the plan is malformed, or the node's data are not registered with its ledger.
        LedgerError: the node's ledger cannot be used.
    """
    policy = holder.policy
    try:
        planned = kinds.unpack_plan(request.fields, policy.budget_view)
        specs = kinds.unpack_specs(request.fields, policy.budget_view)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    total = sum(number for _, number in planned)
    data_set = registered_data_set(policy, str(holder.client), None) if policy.ledger is not None else None
    # Where the holder starts the runs, the coordinator knows the budget.
    fitting = total if data_set is None or policy.fixed_schedule else _fitting(policy, data_set, planned)
    seconds, objection = 0.0, ""
    if specs and data_set is not None and isinstance(holder, NodeHolder):
        config = run_of(request.run_config, holder)
        bench = bench_of(config, holder)
        try:
            for spec, event in specs:
                evaluates = spec.objective == COUNTS
                _check_spec(spec, 1, config, bench, policy, data_set.num_records, evaluates=evaluates)
                if not evaluates:
                    check_limits(spec, event, 1, policy.limits)
        except RefusedError as error:  # noted as what it is: the run would have been refused
            _refused(error, request, holder)
            objection = str(error)[: kinds.MAX_TEXT_LENGTH]
        else:
            seconds = max(_reply_seconds(spec, config, bench, holder, data_set) for spec, _ in specs)
    holder.journal.write("asked", planned=total, affordable=fitting, reply_seconds=seconds)
    return Response.of(
        fields=kinds.pack(kinds.Affordable(releases=fitting, reply_seconds=seconds, objection=objection))
    )


def _reply_seconds(
    spec: UpdateSpec, config: RunConfig, bench: Workbench, holder: NodeHolder, data_set: DataSet
) -> float:
    """T of a planned release, from the tensors that the run starts with."""
    sampler = spec.sampler(data_set.num_records, _secure)
    return _reply_times.of_release(
        spec, Broadcast(adapter=bench.initial), sampler, config, bench, holder, data_set
    ).seconds


def _fitting(policy: NodePolicy, data_set: DataSet, planned: Sequence[tuple[Event, int]]) -> int:
    """The number of releases, in this order, that the budget and the number of releases allow.

    Args:
        policy: with a ledger.
        data_set: that pays.
        planned: (what one release costs on the budget's view, how many of them).
    """
    assert policy.ledger is not None
    with Ledger(policy.ledger) as ledger:
        notes = ledger.bounds(data_set.id)
        history = [release.charged_on(policy.budget_view) for release in ledger.releases_in_order(data_set.id)]
        num_before = ledger.chain(data_set.id).newest.counter
        is_known = ledger.is_known_in_full(data_set.id)
    units = {event.unit for event in history} | {event.unit for event, _ in planned}
    if not is_known or len(units) > 1:
        return 0
    left = policy.limits.max_releases - num_before if policy.limits is not None else None
    epsilon, delta = policy.budget_epsilon, data_set.delta_for_releases
    rule = None if epsilon is None else filters.rule_in_force(notes, epsilon, delta)
    fitting = 0
    for event, number in planned:
        here = float(number)
        if epsilon is not None and rule is not None:
            here = min(here, rule.remaining(history, event, epsilon=epsilon, delta=delta))
        if left is not None:
            here = min(here, left - fitting)
        fitting += max(0, int(here))
        if here < number:
            break
        history.append(event.with_count(number * event.count))
    return fitting


_ANSWERS: Mapping[str, Callable[[Request, Holder], Response]] = {
    REGISTER: _records.register,
    TRAIN: _release,
    EVALUATE: _release,
    AFFORD: _afford,
    ADVERTISE: _summed.advertise,
    SHARE: _summed.share,
    CHECK: _summed.check,
    CONFIRM: _summed.confirm,
    REVEAL: _summed.reveal,
}


def _prepared(request: Request, holder: Holder) -> Prepared:
    """See `_charged`.

    Raises:
        AlreadyReleasedError: the request was answered before.
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        Exception: the request is malformed, or its rehearsal fails.
    """
    config = run_of(request.run_config, holder)
    bench = bench_of(config, holder)
    client, evaluates = holder.partition(bench.num_clients), request.kind == EVALUATE
    decoded = (_evaluation if evaluates else _instruction)(request, config, holder, client, bench.initial)
    key, spec, broadcast, _ = decoded
    agreed = _agreed(decoded, config, holder) if isinstance(holder, NodeHolder) else None
    data_set, num_registered = _records.registered(config, bench, holder)
    task, release = _checked(decoded, request.kind, config, bench, holder.policy, num_registered)
    if isinstance(holder, NodeHolder):
        check_included(str(request.own.get(kinds.INCLUDED, "")), key, num_registered, config, holder)
    reply = None  # which leaves at once, unless the records are the node's own
    if isinstance(holder, NodeHolder) and data_set is not None:
        reply = _reply_times.of_release(spec, broadcast, task.sampler, config, bench, holder, data_set)
        if reply.seconds > config.round_seconds:  # both are public, and nothing would count that is paid for now
            raise RefusedError(
                f"round_seconds = {config.round_seconds:g}: this node's reply would leave after {reply.seconds:.0f} s, "
                f"when the round is over; {kinds.LATE_CURES}"
            )
    room = holder.room.reserve_reply(sum(tensor.nbytes for tensor in broadcast.adapter.values()))
    is_new, receipt = _charging.charge(
        holder.policy,
        key,
        release,
        data_set,
        noise_source=config.noise_source,
        shown=str(request.own.get(kinds.RECEIPT, "")),
        agreed=agreed,
    )
    if is_new and data_set is not None and isinstance(holder, NodeHolder):
        _tell_charged(decoded, release, config, holder, data_set)
    # The last step before any record is touched. From here on until T has passed, nothing may leave.
    holder.before_records(reply.seconds if reply else 0.0)
    if is_new:
        recorded = data_set is not None
        holder.journal.write("charged", run=key.run, round=key.round, recorded=recorded, receipt=receipt)
    # In a simulation, which protects nobody, a resumed run computes again, so that it stays equal to the bit.
    may_read = is_new or config.simulate
    if reply and may_read:
        _reply_times.charged(reply, bench)
    reading = RecordsToRead(
        config=config, data_set=data_set, aside=evaluates, may_begin=reply is None or reply.is_first
    )
    return Prepared(
        task=task,
        reading=reading if may_read else None,
        decoded=decoded,
        request=request,
        holder=holder,
        config=config,
        bench=bench,
        receipt=receipt,
        room=room,
    )


def _tell_charged(decoded: _Decoded, release: Release, config: RunConfig, holder: Holder, data_set: DataSet) -> None:
    """Log a line on a new charge, of public numbers; nothing that goes wrong stops what is paid for."""
    noise = release.charged_on(holder.policy.budget_view).effective_noise_multiplier
    part = "in a sum" if decoded.part else "alone"
    where = f"{run_named(config)}, round {decoded.key.round} of {config.rounds}, {part}, effective noise {noise:.3g}"
    try:
        log.info("charged: %s; now %s", where, _charging.spent_so_far(holder.policy, data_set))
    except Exception as error:
        log.warning("charged: %s; what is spent by now is not known (%s)", where, error)


def _agreed(decoded: _Decoded, config: RunConfig, holder: NodeHolder) -> tuple[float, PlannedView] | None:
    """The epsilon that the operator agreed to for the run, and its view; None where no target was agreed.

    Raises:
        RefusedError: the request is not part of the run that was agreed.
    """
    is_alone = decoded.part is None and decoded.spec.objective != COUNTS
    has_agreed = holder.keeps_agreement
    if config.secure_aggregation and is_alone and (has_agreed or holder.settings.require_secure_sums):
        raise RefusedError("secure_aggregation: was agreed, and this request has no terms of a sum under masks")
    if not has_agreed:
        return None
    check_agreed(decoded.spec, decoded.key.round, config)
    # What `rho` costs a node cannot know; it is no less than `local`.
    view: PlannedView = "aggregate" if config.privacy_view == "aggregate" else "local"
    return (config.target_epsilon, view) if config.target_epsilon else None


def _checked(
    decoded: _Decoded, kind: str, config: RunConfig, bench: Workbench, policy: NodePolicy, num_registered: int
) -> tuple[UpdateTask, Release]:
    """Check with public inputs alone what is asked; its task, without records, and the release that is charged.

    Raises:
        RefusedError: the guard does not allow it.
        ValueError: the model that was sent does not fit.
    """
    key, spec, broadcast, part = decoded
    if part and part.num_records != num_registered:
        raise RefusedError(f"terms: num_records = {part.num_records}: this node registered {num_registered}")
    _check_spec(spec, key.round, config, bench, policy, num_registered, evaluates=kind == EVALUATE)
    coins, choices, noise = (
        _source(config, int(key.client), key.round, purpose)
        for purpose in ("inclusion", "choices", "evaluation" if kind == EVALUATE else "noise")
    )
    task = UpdateTask(
        adapter=broadcast.adapter,
        merged=broadcast.merged,
        data=bench.no_records,
        spec=spec,
        round=key.round,
        sampler=spec.sampler(num_registered, coins, choices),
        noise=noise,
        grid=part.grid if part else None,
    )
    if kind != EVALUATE:  # what a release costs can depend on how many values it has
        check_broadcast(broadcast, policy.limits)
        bench.model.check({name: tensor.shape for name, tensor in broadcast.adapter.items()})
        bench.model.check_merged(broadcast.merged)
    # A node knows of no other noise than its own, but under the terms that its peers have signed.
    release = part.release(task.event) if part else Release(event=task.event, rho_bar=1.0)
    if kind == EVALUATE:
        if config.secure_aggregation:  # counts go to the server one by one, so they cost the same on every view
            release = replace(release, aggregate_scale=1.0)
        check_broadcast(broadcast, policy.limits)
        private_evaluation.check_fits(bench.model, broadcast.adapter, broadcast.merged)
    else:
        check_limits(spec, release.charged_on(policy.budget_view), key.round, policy.limits)
    return task, release


def _check_spec(
    spec: UpdateSpec,
    round_: int,
    config: RunConfig,
    bench: Workbench,
    policy: NodePolicy,
    num_registered: int,
    *,
    evaluates: bool,
) -> None:
    """Refuse an update or evaluation that would not protect the holder's records, whatever it costs.

    Which of both it is the kind of the question says, and not the specification, which an update could have from there.
    """
    check_unit(spec, most=config.most_of_a_person)
    if evaluates:
        check_evaluation(spec, round_, policy, noise_source=config.noise_source)
    else:
        check_instruction(
            spec,
            policy,
            noise_source=config.noise_source,
            num_registered=num_registered,
            has_labels=bool(bench.label_names),
        )


def _refused(error: Exception, request: Request, holder: Holder) -> Response:
    """`refused`, noted in the node's journal."""
    return refused(error, holder.journal, **_named(request))


def _journal(request: Request, holder: Holder, event: str) -> None:
    """Note an event with the run and the round, where the request names them."""
    holder.journal.write(event, **_named(request))


def _named(request: Request) -> dict[str, str | int]:
    """Run and round, where the request has a header that can be read, and names them."""
    try:
        fields = request.fields
    except FrameError:
        return {}
    return {name: value for name in ("run", "round") if isinstance(value := fields.get(name), (str, int))}


def _instruction(request: Request, config: RunConfig, holder: Holder, client: int, initial: Adapter) -> _Decoded:
    """The update that a train request asks for."""
    run, round_, spec = kinds.unpack_instruction(UpdateSpec, request.fields)
    broadcast, digest = kinds.unpack_broadcast(request.arrays, spec, initial), request.digest
    part = None
    # Without terms the server is to see the upload itself, as it may ask for in any run: that is charged in full.
    if config.secure_aggregation and kinds.TERMS in request.own:
        part = _summed.part_of(request, config, holder, client, spec=spec, digest=digest, adapter=broadcast.adapter)
    if part and (part.terms.run, part.terms.round) != (run, round_):
        raise RefusedError(f"terms: run, round = {part.terms.run}, {part.terms.round}: are not those of the request")
    key = _key(config, client, run, round_, f"{digest} {part.digest}" if part else digest)
    return _Decoded(key, spec, broadcast, part)


def _evaluation(request: Request, config: RunConfig, _holder: Holder, client: int, _initial: Adapter) -> _Decoded:
    """The evaluation that a request asks for, whose counts are part of no sum."""
    run, round_, spec = kinds.unpack_instruction(private_evaluation.EvaluationSpec, request.fields)
    key = _key(config, client, run, round_, request.digest)
    return _Decoded(key, spec.update, kinds.unpack_model(request.arrays), None)


def _key(config: RunConfig, client: int, run: str, round_: int, digest: str) -> Key:
    """The key of a release, which depends on all that the release does, except the data and the noise."""
    model = json.dumps(config.values_of_release, sort_keys=True)
    request = hashlib.sha256(f"{digest} {model}".encode()).hexdigest()
    return Key(run=run, client=str(client), round=round_, request=request)


def _noise_alone(prepared: Prepared) -> ClientUpdate:
    """The result for a charge whose task failed: what an empty set of records would have given."""
    bench = prepared.bench
    if prepared.request.kind != EVALUATE:
        bench.forget_records()  # the next reply's time does not tell what this update has left undone
    (update,) = execute_one_by_one(bench.model, [replace(prepared.task, data=bench.no_records)])
    if isinstance(update, Exception):
        raise update
    return update


def _response(prepared: Prepared, update: ClientUpdate) -> Response:
    """The reply to a release that was executed."""
    (key, spec, broadcast, part), round_ = prepared.decoded, prepared.task.round
    if prepared.request.kind == EVALUATE:
        assert update.noised is not None, "counts are what was noised"
        counts = NoisedCounts.of(update.noised)
        answer = EvaluationRelease(round=round_, event=update.event, counts=counts, receipt=prepared.receipt)
        return Response.of(fields=kinds.pack(answer))
    withholds = RULES[prepared.config.aggregation].withholds
    silent = (
        part is None
        and withholds is not None
        and withholds(difference(update.adapter, broadcast.adapter), broadcast.signs, spec.relevance_threshold, round_)
    )
    arrays: Arrays = {}
    if part is not None:
        arrays = {kinds.ADAPTER: {kinds.SUM: part.vector(update)}}
    elif not silent:
        rounding = _source(prepared.config, int(key.client), round_, "rounding")
        arrays = kinds.pack_upload(update.adapter, broadcast, spec, prepared.bench.initial, rounding)
    release = UploadRelease(
        round=round_,
        event=update.event,
        num_records=update.num_records,
        silent=silent,
        receipt=prepared.receipt,
    )
    return Response.of(fields=kinds.pack(release), arrays=arrays)


def _source(config: RunConfig, client: int, round_: int, purpose: str) -> RandomSource:
    return SeededSource(config.seed, client, round_, purpose) if config.simulate else _secure
