"""Splits of records: among clients, as the configuration's `partition` key selects, and within a client, by coins.

Splits among clients that are drawn are those of flwr-datasets. Within a client, each record that is set aside for
evaluation is so by a coin of its own.
"""

from __future__ import annotations

import hmac
import io
import json
import warnings
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from fedpriv.config import RunConfig
from fedpriv.data.tables import values_of
from fedpriv.data.text import TextData
from fedpriv.errors import InputError

if TYPE_CHECKING:
    import datasets


def partition(table: datasets.Dataset, config: RunConfig) -> tuple[list[datasets.Dataset], list[str]]:
    """The table split among the clients, and the clients' names.

    Args:
        table: the training records.
        config: whose partition rule is `natural`: by `client_column`, in sorted order; `iid`: evenly, at random;
            `dirichlet`: by label, with concentration `dirichlet_alpha`; or `sizes`: at random into `client_sizes`.

    Raises:
        InputError: flwr-datasets is not installed, the split is impossible, or a client would have no record.
    """
    if config.partition_rule == "natural":
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(values_of(table, config.client_column)):
            rows.setdefault(str(value), []).append(row)
        names = sorted(rows)
        return [table.select(rows[name]) for name in names], names
    shuffled = table.shuffle(seed=config.seed)
    if config.partition_rule == "sizes" and sum(config.client_sizes) > len(table):
        raise InputError(
            f"client_sizes = {list(config.client_sizes)}: sum to {sum(config.client_sizes)}, but there are "
            f"{len(table)} training records"
        )
    if config.partition_rule != "sizes" and config.num_clients > len(table):
        raise InputError(f"num_clients = {config.num_clients}: only {len(table)} training records to share")
    if config.partition_rule == "sizes":
        shuffled = shuffled.select(range(sum(config.client_sizes)))
    parts = _load(shuffled, config)
    for client, part in enumerate(parts):
        if not len(part):
            raise InputError(
                f"partition = {config.partition_rule}: client {client} has no records; use fewer clients, or a larger "
                "dirichlet_alpha"
            )
    return parts, [f"client {client}" for client in range(len(parts))]


def _load(table: datasets.Dataset, config: RunConfig) -> list[datasets.Dataset]:
    partitioner = _partitioner(config)
    try:
        # The partitioners' progress bars cannot be turned off, and every redraw of a Dirichlet split is a warning.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore", category=UserWarning):
            partitioner.dataset = table
            return [partitioner.load_partition(client) for client in range(partitioner.num_partitions)]
    except ValueError as error:
        raise InputError(f"partition = {config.partition_rule}: {str(error).splitlines()[0]}") from None


def _partitioner(config: RunConfig) -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError:
        raise InputError(
            f"partition = {config.partition_rule}: needs flwr-datasets; pip install 'fedpriv[partition]'"
        ) from None
    match config.partition_rule:
        case "iid":
            return partitioner.IidPartitioner(num_partitions=config.num_clients)
        case "sizes":
            return partitioner.SizePartitioner(partition_sizes=list(config.client_sizes))
        case _:
            return partitioner.DirichletPartitioner(
                num_partitions=config.num_clients,
                partition_by=config.label_column,
                alpha=config.dirichlet_alpha,
                min_partition_size=1,
                self_balancing=False,
                seed=config.seed,
            )


def held_out(data: TextData, *, fraction: float, key: bytes) -> tuple[TextData, TextData]:
    """The records to train on and those to evaluate on, both in their order.

    Guarantee: where a record goes depends on its own content, the key and the fraction alone, so adding or removing
    another record moves none. Equal records go to the same side. A record that is set aside stays so at any larger
    fraction.

    Args:
        data: of one holder.
        fraction: probability of being set aside, in (0, 1), over the keys.
        key: 1 to 64 bytes. To anyone who knows it, the number of records on either side tells who is there.
    """
    coins = [_is_set_aside(data, index, fraction, key) for index in range(len(data))]
    return (
        data.part([index for index, aside in enumerate(coins) if not aside]),
        data.part([index for index, aside in enumerate(coins) if aside]),
    )


def _is_set_aside(data: TextData, index: int, fraction: float, key: bytes) -> bool:
    record = data.part([index])
    content = json.dumps([record.texts, record.labels, record.pairs]).encode()
    coin = hmac.digest(key, content, "sha256")
    return int.from_bytes(coin[:8]) < fraction * 2.0**64
