"""Partitioning of records among clients, as the configuration's `partition` key selects; by flwr-datasets, if drawn."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from fedpriv.config import RunConfig
from fedpriv.data.tables import values_of
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
