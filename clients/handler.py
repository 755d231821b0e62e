"""A data holder's side of a round: a message becomes a task, an update becomes a reply."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from clients.node import IDENTITY_KEY, NAME_KEY, bench_of, client_of, configuration, index_of, journal_of, policy_of
from fedpriv import protocol
from fedpriv.adapters.arithmetic import Adapter, difference
from fedpriv.aggregation import cmfl as relevance
from fedpriv.audit.run_canaries import audited
from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.deployment import keys
from fedpriv.errors import InputError, LedgerError
from fedpriv.journal import trace_without_message
from fedpriv.ledger.entries import Key
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.protocol import Broadcast, Release
from fedpriv.training.local_update import ClientUpdate, UpdateSpec, UpdateTask, planned_event
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.workbench import Workbench
from fedpriv.vault import guard

log = logging.getLogger(__name__)

_secure = SecureSource()

# Characters of a refusal, which may quote what a coordinator sent.
_LONGEST_REASON = 300


def prepare(message: Message, context: Context) -> UpdateTask:
    """The task that a train message asks for, after the guard has checked and charged it.

    Raises:
        AlreadyReleasedError: the message was answered before; `reply` sends the stored answer again.
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        ValueError: the message is malformed.
    """
    config = configuration(context)
    bench = bench_of(config, context)
    client = client_of(context, bench.num_clients)
    policy = policy_of(config, context, client)
    index = index_of(config, client)
    data, size = _records(config, bench, index), _size(config, bench, index)
    key, spec, broadcast = _request(message, client, bench.initial)
    data_set = guard.registered_data_set(policy, str(client), size)
    num_registered = data_set.num_records if data_set else size
    guard.check_instruction(spec, policy, noise_source=config.noise_source, num_registered=num_registered)
    sampler = PoissonSampler(
        num_registered=num_registered,
        expected_batch_size=spec.batch_size,
        source=_source(config, client, key.round, "inclusion"),
    )
    event = planned_event(spec, sampler.sampling_probability, bench.initial)
    guard.check_limits(spec, event, key.round, policy.limits)
    # Before the charge, since an update that cannot be trained must cost nothing.
    bench.model.check({name: tensor.shape for name, tensor in broadcast.adapter.items()})
    bench.model.check_merged(broadcast.merged)
    guard.charge(policy, key, event, data_set, noise_source=config.noise_source)
    journal_of(context).write("charged", run=key.run, round=key.round, recorded=data_set is not None)
    return UpdateTask(
        adapter=broadcast.adapter,
        merged=broadcast.merged,
        data=data,
        spec=spec,
        round=key.round,
        sampler=sampler,
        noise=_source(config, client, key.round, "noise"),
    )


def reply(message: Message, context: Context, update: ClientUpdate | Exception) -> Message:
    """The upload, once it is stored, or an error that says only that the guard refused or that training failed.

    An exception's text may contain a record, so it stays in this node's log.
    """
    journal = journal_of(context).with_fields(**_run_and_round(message))
    if isinstance(update, guard.AlreadyReleasedError):
        journal.write("sent_again")
        return _upload(message, update.content)
    if isinstance(update, ClientUpdate):
        try:
            content = _settled(message, context, update)
            journal.write("released")
            return _upload(message, content)
        except Exception as error:  # the upload must not leave, and neither must the error's text
            update = error
    code, reason = _refusal(update)
    journal.write({protocol.RETIRED: "retired", protocol.REFUSED: "refused"}.get(code, "failed"), reason=reason)
    return Message(Error(code, reason), reply_to=message)


def _refusal(error: Exception) -> tuple[int, str]:
    """The code and text of an error reply; the details go to this node's log."""
    if isinstance(error, guard.RetiredError):
        log.warning("retired: %s", error)
        return protocol.RETIRED, f"retired: {error}"
    if isinstance(error, guard.RefusedError):
        log.warning("refused: %s", error)
        return protocol.REFUSED, f"refused: {error}"[:_LONGEST_REASON]
    if isinstance(error, LedgerError):
        log.error("refused: %s", error)
        return protocol.REFUSED, "refused: this node's ledger cannot be used; its log says why"
    if isinstance(error, InputError):  # it may name the node's own keys, columns or labels
        log.error("failed: %s", error)
    else:
        log.error("failed: %s", trace_without_message(error))
    return protocol.FAILED, "failed; this node's log says why"


def _run_and_round(message: Message) -> dict[str, str | int]:
    """The run and the round for the journal, where the message names them."""
    fields: Mapping[str, object] = {}
    if message.has_content():
        fields = message.content.config_records.get(protocol.INSTRUCTION, fields)
    return {name: value for name in ("run", "round") if isinstance(value := fields.get(name), (str, int))}


def register(message: Message, context: Context) -> Message:
    """The client's registration: partition id, registered number of records, display name and data set id."""
    config = configuration(context)
    bench = bench_of(config, context)
    try:
        client = client_of(context, bench.num_clients)
    except ValueError as error:
        return Message(Error(protocol.REFUSED, str(error)), reply_to=message)
    index, policy, node = index_of(config, client), policy_of(config, context, client), context.node_config
    records, size = bench.data.clients[index], _size(config, bench, index)
    data_set = guard.registered_data_set(policy, str(client), size)
    if data_set is not None:
        guard.log_content(policy, data_set, repr(records).encode(), size)
    registration = protocol.Registration(
        client=client,
        num_records=data_set.num_records if data_set else size,
        name=str(node.get(NAME_KEY) or bench.data.client_names[index] or f"client-{client}"),
        # A node without a ledger remembers nothing, so its spending attaches to this run alone.
        data_set=data_set.id if data_set else secrets.token_hex(16),
        keeps_replies=data_set is not None,
        software=protocol.SOFTWARE,
    )
    if IDENTITY_KEY in node:
        statement = protocol.statement_of(registration)
        registration = replace(registration, signature=keys.sign(Path(str(node[IDENTITY_KEY])), statement))
    journal_of(context).write("registered", num_records=registration.num_records, data_set=registration.data_set)
    content = ConfigRecord(protocol.pack_registration(registration))
    return Message(RecordDict({protocol.REGISTRATION: content}), reply_to=message)


def _records(config: RunConfig, bench: Workbench, index: int) -> Records:
    """What the client trains on; in an audited run, with the canaries that are included."""
    client = audited(config, bench, index)
    return client.records if client else bench.client(index)


def _size(config: RunConfig, bench: Workbench, index: int) -> int:
    """How many records the client registers; in an audited run, with all canaries, included or not."""
    client = audited(config, bench, index)
    return client.num_registered if client else len(bench.data.clients[index])


def _request(message: Message, client: int, initial: Adapter) -> tuple[Key, UpdateSpec, Broadcast]:
    """What a train message asks for, and the key under which it counts as one release."""
    run, round_, spec = protocol.unpack_instruction(message.content.config_records[protocol.INSTRUCTION])
    records = message.content.array_records
    for record in records.values():
        protocol.check_arrays({name: array.data for name, array in record.items()})
    arrays = {name: record.to_torch_state_dict() for name, record in records.items()}
    broadcast = protocol.unpack_broadcast(arrays, spec, initial)
    key = Key(run=run, client=str(client), round=round_, request=guard.request_digest(broadcast, spec))
    return key, spec, broadcast


def _settled(message: Message, context: Context, update: ClientUpdate) -> bytes:
    """The content of the reply; it is stored first if the node keeps a ledger."""
    config = configuration(context)
    bench = bench_of(config, context)
    client = client_of(context, bench.num_clients)
    key, spec, broadcast = _request(message, client, bench.initial)
    silent = _is_irrelevant(update.adapter, broadcast, spec, key.round)
    rounding = _source(config, client, key.round, "rounding")
    arrays = {} if silent else protocol.pack_upload(update.adapter, broadcast, spec, bench.initial, rounding)
    release = Release(round=key.round, event=update.event, num_records=update.num_records, silent=silent)
    content = protocol.pack_reply(release, arrays)
    policy = policy_of(config, context, client)
    return content if policy.ledger is None else guard.store_reply(policy, key, update.event, content)


def _is_irrelevant(adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, round_: int) -> bool:
    """Whether the update points away from the federation's last step; before the first step no update does."""
    if not broadcast.signs or not spec.relevance_threshold:
        return False
    share = relevance.relevance(difference(adapter, broadcast.adapter), broadcast.signs)
    return share < relevance.threshold(spec.relevance_threshold, round_)


def _upload(message: Message, content: bytes) -> Message:
    release, arrays = protocol.unpack_reply(content)
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        protocol.RELEASE: ConfigRecord(protocol.pack_release(release))
    }
    if arrays:
        records[protocol.ADAPTER] = ArrayRecord(arrays)
    return Message(RecordDict(records), reply_to=message)


def _source(config: RunConfig, client: int, round_: int, purpose: str) -> RandomSource:
    return SeededSource(config.seed, client, round_, purpose) if config.simulate else _secure
