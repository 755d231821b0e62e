"""A client's records in a run: how many are registered, and, after the charge, the records themselves."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from fedpriv.audit.black_box import audited
from fedpriv.config import RunConfig
from fedpriv.data.records import Encode, Records
from fedpriv.files import trace_without_message
from fedpriv.ledger.entries import DataSet
from fedpriv.protocol import Broadcast
from fedpriv.training import private_evaluation
from fedpriv.training.workbench import Workbench
from fedpriv.vault import _charging
from fedpriv.vault._charging import RefusedError
from fedpriv.vault._tokens import TokenFile
from fedpriv.vault.holder import Holder, NodeHolder
from fedpriv.vault.settings import VaultSettings

log = logging.getLogger(__name__)


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
    canaries = audited(config, bench, client)
    num_records = canaries.num_registered if canaries else size(bench, client)
    data_set = _charging.registered_data_set(holder.policy, str(client), num_records)
    return data_set, data_set.num_records if data_set else num_records


def size(bench: Workbench, client: int) -> int:
    """The number of records that a client has, by its index in the bench's data."""
    return len(bench.data.clients[client])


def of_client(
    config: RunConfig, bench: Workbench, holder: Holder, data_set: DataSet | None, *, may_begin: bool = True
) -> Records:
    """The records on which the client trains; in an audited run, with the canaries that are included.

    A node's own records that cannot be read are none: the charge is made, so the upload is noise alone.

    Args:
        config, bench, holder, data_set: of the client.
        may_begin: whether the reply's time suffices to read a node's own records; else they are those in memory.
    """
    if not isinstance(holder, NodeHolder):
        client = holder.partition(bench.num_clients)
        canaries = audited(config, bench, client)
        return canaries.records if canaries else bench.client(client)
    try:
        if not may_begin and not bench.has_tokens(0):
            raise RefusedError("an earlier update failed on them, and only the first on a model has the time to read")
        _read_own(bench, holder, data_set)
        return bench.client(0, _encode(config, bench, holder.settings, data_set))
    except Exception as error:  # whatever the file holds must not decide whether there is an upload
        bench.forget_records()
        log.error("the records cannot be used, so the upload is noise alone: %s", _reason(error))
        holder.journal.write("records_unreadable")
        return bench.no_records


def _read_own(bench: Workbench, holder: Holder, data_set: DataSet | None) -> None:
    """Read a node's own records, once for each data set: what an earlier one holds is not this one's to pay for."""
    if data_set is None or bench.read_for == data_set.id:
        return
    bench.forget_records()
    bench.coin_key = _charging.coin_key(
        holder.policy, data_set
    )  # before what is noted of the records may fill the disk
    _charging.log_content(holder.policy, data_set, repr(bench.data.clients[0]).encode(), size(bench, 0))
    bench.read_for = data_set.id


def _encode(config: RunConfig, bench: Workbench, settings: VaultSettings, data_set: DataSet | None) -> Encode:
    """The function that tokenises a node's own records, and keeps their tokens if the operator lets it."""
    if not settings.keep_tokens or data_set is None:
        return bench.encoder.encode
    return TokenFile(
        path=settings.tokens,
        num_records=data_set.num_records,
        model=Path(config.model),
        most_bytes=settings.memory_limit_mb * 2**20,
        encoder=bench.encoder,
    ).encode


def counts(bench: Workbench, holder: Holder, broadcast: Broadcast, data_set: DataSet | None) -> Tensor:
    """The exact counts on the records that the client sets aside; zeros on a node whose own cannot be used."""
    try:
        if isinstance(holder, NodeHolder):
            _read_own(bench, holder, data_set)
        data = bench.set_aside(0 if isinstance(holder, NodeHolder) else holder.partition(bench.num_clients))
        return private_evaluation.count(bench.model, broadcast.adapter, broadcast.merged, data, bench.tokenize)
    except Exception as error:  # as in `of_client`
        if not isinstance(holder, NodeHolder):
            raise
        log.error("the records cannot be used, so the counts are noise alone: %s", _reason(error))
        holder.journal.write("noise_alone")
        return private_evaluation.NO_COUNTS


def _reason(error: Exception) -> str:
    """The reason for a node's log: our own words, or where the error arose, since its text may hold a record."""
    return str(error) if isinstance(error, RefusedError) else trace_without_message(error)
