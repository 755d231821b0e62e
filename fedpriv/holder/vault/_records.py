"""A client's records in a run: their registration, and, after a charge, the records themselves."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from pathlib import Path

from fedpriv.config import RunConfig
from fedpriv.errors import is_memory_failure
from fedpriv.files import trace_without_message
from fedpriv.holder.vault import _charging, _summed
from fedpriv.holder.vault._charging import RefusedError
from fedpriv.holder.vault._tokens import TokenFile
from fedpriv.holder.vault.holder import Holder, NodeHolder, RecordsToRead, bench_of, run_of
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request, Response
from fedpriv.learning.data.records import Encode, RecordSet
from fedpriv.learning.training.canaries import audited
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.ledger.entries import DataSet

log = logging.getLogger(__name__)


def register(request: Request, holder: Holder) -> Response:
    """The client's registration: partition id, registered number of records, display name and data set id.

    Raises:
        RefusedError: the node does not take part in such a run, or its data are not registered with its ledger.
        LedgerError: the node's ledger cannot be used.
        InputError: the run's configuration or, in a simulation, its data cannot be used.
    """
    config = run_of(request.run_config, holder)
    bench = None if isinstance(holder, NodeHolder) else bench_of(config, holder)
    client = holder.partition(bench.num_clients if bench else config.num_clients)
    data_set, num_registered = registered(config, bench, holder)
    name = holder.name
    if bench is not None:
        name = name or bench.data.client_names[client]
        if data_set is not None:
            _charging.log_content(holder.policy, data_set, bench.content(client), _size(bench, client))
    signs = holder.identity_key is not None or config.secure_aggregation
    identity = _summed.identity_of(holder, client) if signs else None
    registration = kinds.Registration(
        client=client,
        num_records=num_registered,
        name=name or f"client-{client}",
        # A node without a ledger remembers nothing, so its spending attaches to this run alone.
        data_set=data_set.id if data_set else secrets.token_hex(16),
        keeps_replies=data_set is not None,
        software=kinds.SOFTWARE,
        identity=identity.public_line if identity else "",
        receipt=_charging.signed_receipt(holder.policy, data_set),
    )
    if identity:
        registration = replace(registration, signature=identity.sign(registration.signed))
    holder.journal.write("registered", num_records=registration.num_records, data_set=registration.data_set)
    return Response.of(fields=kinds.pack(registration))


def registered(config: RunConfig, bench: Workbench | None, holder: Holder) -> tuple[DataSet | None, int]:
    """The data set in the node's ledger, if it keeps one, and N_k.

    Raises:
        RefusedError: a node's own records are not registered yet, or there is no ledger.
        LedgerError: the ledger cannot be used.
    """
    if bench is None or isinstance(holder, NodeHolder):
        data_set = _charging.registered_data_set(holder.policy, str(holder.client), None)
        if data_set is None:
            raise RefusedError("ledger: this node has none, and releases nothing that it cannot record")
        return data_set, data_set.num_records
    client = holder.partition(bench.num_clients)
    canaries = audited(config, bench, client) if config.audit else None
    num_records = canaries.num_registered if canaries else _size(bench, client)
    data_set = _charging.registered_data_set(holder.policy, bench.accounts[client], num_records)
    return data_set, data_set.num_records if data_set else num_records


def _size(bench: Workbench, client: int) -> int:
    """The number of records, or persons, that a client has, by its index in the bench's data."""
    return bench.data.clients[client].num_units


def of_release(reading: RecordsToRead, bench: Workbench, holder: Holder) -> RecordSet:
    """The records that a release reads; in an audited run, with the canaries that are included.

    The charge is made, so records that cannot be read are none, and the release is noise alone.

    Args:
        reading: which they are.
        bench, holder: of the client.

    Raises:
        Exception: they cannot be read, on a holder that allows releases without privacy; or memory ran out.
    """
    config, data_set = reading.config, reading.data_set
    own = holder if isinstance(holder, NodeHolder) else None
    client = 0 if own else holder.partition(bench.num_clients)
    try:
        if own and not reading.may_begin and not bench.has_tokens(client):
            raise RefusedError("an earlier update failed on them, and only the first on a model has the time to read")
        if own:
            _read_own(bench, own, data_set)
        if reading.aside:
            return bench.tokenize(bench.set_aside(client))
        if own:
            return bench.client(client, _encode(config, bench, own.settings, data_set))
        return audited(config, bench, client).records if config.audit else bench.client(client)
    except Exception as error:  # whatever the file holds must not decide whether there is a release
        if holder.policy.allow_not_private or is_memory_failure(error):
            raise
        if not reading.aside:  # whose replies have time for all that an earlier one has left undone
            bench.forget_records()
        # Our own words, or where the error arose, since its text may hold a record.
        reason = str(error) if isinstance(error, RefusedError) else trace_without_message(error)
        log.error("the records cannot be used, so the release is noise alone: %s", reason)
        return bench.no_records


def _read_own(bench: Workbench, holder: Holder, data_set: DataSet | None) -> None:
    """Read a node's own records, once for each data set: what an earlier one holds is not this one's to pay for."""
    if data_set is None or bench.read_for == data_set.id:
        return
    bench.forget_records()
    bench.coin_key, bench.content_note = _charging.opened_records(
        holder.policy, data_set, bench.content(0), _size(bench, 0)
    )
    bench.read_for = data_set.id


def _encode(config: RunConfig, bench: Workbench, settings: VaultSettings, data_set: DataSet | None) -> Encode:
    """The function that tokenises a node's own records, and keeps their tokens if the operator lets it."""
    if not settings.keep_tokens or data_set is None:
        return bench.encoder.encode
    return TokenFile(
        path=settings.tokens,
        num_records=data_set.num_records * (settings.max_records_per_person if settings.person_column else 1),
        model=Path(config.model),
        most_bytes=settings.memory_limit_mb * 2**20,
        encoder=bench.encoder,
    ).encode
