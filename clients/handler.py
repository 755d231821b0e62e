"""A data holder's side of a round: a message becomes a task, an update becomes a reply."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedpriv import guard, protocol
from fedpriv.accounting.entries import Key
from fedpriv.adapters.arithmetic import Adapter, difference
from fedpriv.aggregation import relevance
from fedpriv.config import EMBEDDED, RunConfig, Scalar, parse
from fedpriv.errors import LedgerError
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.policy import Limits
from fedpriv.protocol import Broadcast, Release
from fedpriv.training.local_update import ClientUpdate, UpdateSpec, UpdateTask, planned_event
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.workbench import workbench

log = logging.getLogger(__name__)

# A node whose operator also starts the runs, as in a simulation, may take data and rules from the run's configuration.
TRUST_KEY = "trust-run-config"
TRUST_VARIABLE = "FEDPRIV_TRUST_RUN_CONFIG"

# What a data holder states in its node configuration.
LEDGER_KEY = "ledger"
BUDGET_KEY = "budget-epsilon"
DELTA_KEY = "delta"
POLICY_KEY = "policy"

_secure = SecureSource()


def prepare(message: Message, context: Context) -> UpdateTask:
    """The task that a train message asks for, once the guard has let it pass and has charged it.

    Raises:
        AlreadyReleasedError: the message was answered before; `reply` sends the stored answer again.
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        ValueError: the message is malformed.
    """
    config = _configuration(context)
    bench = workbench(config)
    client = _client(context, len(bench.data.clients))
    data, policy = bench.client(client), _policy(config, context, client)
    key, spec, broadcast = _request(message, client, bench.initial)
    data_set = guard.registered(policy, str(client), len(data))
    num_registered = data_set.num_records if data_set else len(data)
    guard.check(spec, policy, noise_source=config.noise_source, num_registered=num_registered)
    sampler = PoissonSampler(
        num_registered=num_registered,
        expected_batch_size=spec.batch_size,
        source=_source(config, client, key.round, "inclusion"),
    )
    event = planned_event(spec, sampler.sampling_probability, bench.initial)
    guard.check_limits(spec, event, key.round, policy.limits)
    # What could not be trained would be charged for nothing.
    bench.model.check({name: tensor.shape for name, tensor in broadcast.adapter.items()})
    bench.model.check_merged(broadcast.merged)
    guard.charge(policy, key, event, data_set, noise_source=config.noise_source)
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
    """The upload, once it is stored, or an error that tells no more than that the guard refused or training failed.

    An exception's text can hold a record, so it stays in this node's log.
    """
    if isinstance(update, guard.AlreadyReleasedError):
        return _upload(message, update.content)
    if isinstance(update, ClientUpdate):
        try:
            return _upload(message, _settled(message, context, update))
        except Exception as error:  # the upload must not leave, and neither must the error's text
            update = error
    if isinstance(update, guard.RetiredError):
        log.warning("retired: %s", update)
        return Message(Error(protocol.RETIRED, f"retired: {update}"), reply_to=message)
    if isinstance(update, guard.RefusedError):
        log.warning("refused: %s", update)
        return Message(Error(protocol.REFUSED, f"refused: {update}"), reply_to=message)
    if isinstance(update, LedgerError):
        log.error("refused: %s", update)
        reason = "refused: this node's ledger cannot be used; its log says why"
        return Message(Error(protocol.REFUSED, reason), reply_to=message)
    log.error("training failed", exc_info=update)
    return Message(Error(protocol.FAILED, "training failed; this node's log says why"), reply_to=message)


def register(message: Message, context: Context) -> Message:
    """The client's registration: partition id, registered number of records, name for display, data set id."""
    config = _configuration(context)
    bench = workbench(config)
    try:
        client = _client(context, len(bench.data.clients))
    except ValueError as error:
        return Message(Error(protocol.REFUSED, str(error)), reply_to=message)
    records, policy = bench.data.clients[client], _policy(config, context, client)
    data_set = guard.registered(policy, str(client), len(records))
    if data_set is not None:
        guard.log_content(policy, data_set, repr(records).encode(), len(records))
    registration = protocol.Registration(
        client=client,
        num_records=data_set.num_records if data_set else len(records),
        name=bench.data.client_names[client],
        # Without a ledger of its own a node remembers nothing: its spending attaches to this run alone.
        data_set=data_set.id if data_set else secrets.token_hex(16),
        keeps_replies=data_set is not None,
    )
    content = ConfigRecord(protocol.pack_registration(registration))
    return Message(RecordDict({protocol.REGISTRATION: content}), reply_to=message)


def _request(message: Message, client: int, initial: Adapter) -> tuple[Key, UpdateSpec, Broadcast]:
    """What a train message asks for, and the key by which it is one release."""
    run, round_, spec = protocol.unpack_instruction(message.content.config_records[protocol.INSTRUCTION])
    arrays = {name: record.to_torch_state_dict() for name, record in message.content.array_records.items()}
    broadcast = protocol.unpack_broadcast(arrays, spec, initial)
    key = Key(run=run, client=str(client), round=round_, request=guard.request_digest(broadcast, spec))
    return key, spec, broadcast


def _settled(message: Message, context: Context, update: ClientUpdate) -> bytes:
    """The reply as it may be sent: stored, where the node keeps a ledger."""
    config = _configuration(context)
    bench = workbench(config)
    client = _client(context, len(bench.data.clients))
    key, spec, broadcast = _request(message, client, bench.initial)
    silent = _is_irrelevant(update.adapter, broadcast, spec, key.round)
    rounding = _source(config, client, key.round, "rounding")
    arrays = {} if silent else protocol.pack_upload(update.adapter, broadcast, spec, bench.initial, rounding)
    release = Release(round=key.round, event=update.event, num_records=update.num_records, silent=silent)
    content = protocol.pack_reply(release, arrays)
    policy = _policy(config, context, client)
    return content if policy.ledger is None else guard.settle(policy, key, update.event, content)


def _is_irrelevant(adapter: Adapter, broadcast: Broadcast, spec: UpdateSpec, round_: int) -> bool:
    """Whether the update points elsewhere than the federation last went; before its first update nothing does."""
    if not broadcast.signs or not spec.relevance_threshold:
        return False
    share = relevance.relevance(difference(adapter, broadcast.adapter), broadcast.signs)
    return share < relevance.threshold(spec.relevance_threshold, round_)


def _upload(message: Message, content: bytes) -> Message:
    release, arrays = protocol.unpack_reply(content)
    records: dict[str, ArrayRecord | ConfigRecord] = {protocol.RELEASE: ConfigRecord(protocol.pack_release(release))}
    if arrays:
        records[protocol.ADAPTER] = ArrayRecord(arrays)
    return Message(RecordDict(records), reply_to=message)


@lru_cache(maxsize=4)
def _parsed(items: tuple[tuple[str, Scalar], ...]) -> RunConfig:
    """A node sees one configuration in every message of a run; checking it takes longer than an empty round."""
    return parse(dict(items))


def _configuration(context: Context) -> RunConfig:
    config = _parsed(tuple(context.run_config.items()))
    if config.data != EMBEDDED and not _trusts_run_config(context):
        raise guard.RefusedError(
            f"data = {config.data!r}: this node takes no data from a run's configuration; in a simulation set "
            f"{TRUST_VARIABLE}=1"
        )
    return config


def _trusts_run_config(context: Context) -> bool:
    return bool(context.node_config.get(TRUST_KEY)) or os.environ.get(TRUST_VARIABLE) == "1"


def _policy(config: RunConfig, context: Context, client: int) -> guard.NodePolicy:
    """What the node allows: on the synthetic corpus anything, on a holder's data only what it agreed to.

    Ledger, budget, delta and policy file are the holder's own; a node that trusts the run takes what the holder left
    open from it.
    """
    trusted = _trusts_run_config(context)
    node = context.node_config
    ledger = Path(str(node[LEDGER_KEY])) if LEDGER_KEY in node else None
    open_ = config.data == EMBEDDED or trusted
    limits = Limits.read(Path(str(node[POLICY_KEY]))) if POLICY_KEY in node else None if open_ else Limits()
    policy = guard.NodePolicy(
        allow_not_private=config.data == EMBEDDED or (trusted and (config.simulate or config.public_data)),
        allow_unrecorded=open_,
        limits=limits,
        ledger=ledger,
        budget_epsilon=float(node[BUDGET_KEY]) if BUDGET_KEY in node else None,
        delta=float(node[DELTA_KEY]) if DELTA_KEY in node else None,
    )
    if not trusted:
        return policy
    if ledger is None and config.ledger:
        policy = replace(policy, ledger=Path(f"{config.ledger}.nodes") / f"{client}.sqlite")
    # A node sees its own uploads alone: it holds its budget on the `local` view, which is too strict for `aggregate`.
    budget = config.budget_of(client) if config.privacy_view != "aggregate" else None
    return replace(
        policy,
        budget_epsilon=policy.budget_epsilon if policy.budget_epsilon is not None else budget,
        delta=policy.delta if policy.delta is not None else config.delta,
    )


def _client(context: Context, num_clients: int) -> int:
    client = context.node_config.get("partition-id")
    if not isinstance(client, int) or not 0 <= client < num_clients:
        raise ValueError(f"partition-id = {client!r}: must lie in 0..{num_clients - 1}, the clients of this run")
    return client


def _source(config: RunConfig, client: int, round_: int, purpose: str) -> RandomSource:
    return SeededSource(config.seed, client, round_, purpose) if config.simulate else _secure
