"""A data holder's side of a round: a message becomes a task, an update becomes a reply."""

from __future__ import annotations

import logging
import os

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedpriv import guard, protocol
from fedpriv.config import EMBEDDED, RunConfig, parse
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.training.local_update import ClientUpdate, UpdateTask
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.workbench import workbench

log = logging.getLogger(__name__)

REFUSED = 100
FAILED = 101

# A node whose operator also starts the runs, as in a simulation, may take data and rules from the run's configuration.
TRUST_KEY = "trust-run-config"
TRUST_VARIABLE = "FEDPRIV_TRUST_RUN_CONFIG"

_secure = SecureSource()


def prepare(message: Message, context: Context) -> UpdateTask:
    """The task that a train message asks for, once the guard has let it pass.

    Raises:
        RefusedError: the guard does not allow it.
        ValueError: the message is malformed.
    """
    config = _configuration(context)
    bench = workbench(config)
    client = _client(context, len(bench.data.clients))
    data = bench.client(client)
    round_, spec = protocol.unpack_instruction(message.content.config_records[protocol.INSTRUCTION])
    guard.check(spec, _policy(config, context), noise_source=config.noise_source, num_registered=len(data))
    sampler = PoissonSampler(
        num_registered=len(data),
        expected_batch_size=spec.batch_size,
        source=_source(config, client, round_, "inclusion"),
    )
    return UpdateTask(
        adapter=dict(message.content.array_records[protocol.ADAPTER].to_torch_state_dict()),
        data=data,
        spec=spec,
        round=round_,
        sampler=sampler,
        noise=_source(config, client, round_, "noise"),
    )


def reply(message: Message, update: ClientUpdate | Exception) -> Message:
    """The upload, or an error that tells no more than that the guard refused or that training failed.

    An exception's text can hold a record, so it stays in this node's log.
    """
    if isinstance(update, guard.RefusedError):
        log.warning("refused: %s", update)
        return Message(Error(REFUSED, f"refused: {update}"), reply_to=message)
    if isinstance(update, Exception):
        log.error("training failed", exc_info=update)
        return Message(Error(FAILED, "training failed; this node's log says why"), reply_to=message)
    round_, _ = protocol.unpack_instruction(message.content.config_records[protocol.INSTRUCTION])
    release = protocol.pack_release(round_, update.event)
    content = {protocol.ADAPTER: ArrayRecord(update.adapter), protocol.RELEASE: ConfigRecord(release)}
    return Message(RecordDict(content), reply_to=message)


def register(message: Message, context: Context) -> Message:
    """The client's registration: partition id, number of records, name for display."""
    bench = workbench(_configuration(context))
    try:
        client = _client(context, len(bench.data.clients))
    except ValueError as error:
        return Message(Error(REFUSED, str(error)), reply_to=message)
    registration = protocol.Registration(
        client=client, num_records=len(bench.data.clients[client]), name=bench.data.client_names[client]
    )
    content = ConfigRecord(protocol.pack_registration(registration))
    return Message(RecordDict({protocol.REGISTRATION: content}), reply_to=message)


def _configuration(context: Context) -> RunConfig:
    config = parse(context.run_config)
    if config.data != EMBEDDED and not _trusts_run_config(context):
        raise guard.RefusedError(
            f"data = {config.data!r}: this node takes no data from a run's configuration; in a simulation set "
            f"{TRUST_VARIABLE}=1"
        )
    return config


def _trusts_run_config(context: Context) -> bool:
    return bool(context.node_config.get(TRUST_KEY)) or os.environ.get(TRUST_VARIABLE) == "1"


def _policy(config: RunConfig, context: Context) -> guard.NodePolicy:
    """What the node allows: on the synthetic corpus anything, on a holder's data only what it agreed to."""
    trusted = _trusts_run_config(context) and (config.simulate or config.public_data)
    return guard.NodePolicy(allow_not_private=config.data == EMBEDDED or trusted)


def _client(context: Context, num_clients: int) -> int:
    client = context.node_config.get("partition-id")
    if not isinstance(client, int) or not 0 <= client < num_clients:
        raise ValueError(f"partition-id = {client!r}: must lie in 0..{num_clients - 1}, the clients of this run")
    return client


def _source(config: RunConfig, client: int, round_: int, purpose: str) -> RandomSource:
    return SeededSource(config.seed, client, round_, purpose) if config.simulate else _secure
