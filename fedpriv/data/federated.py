"""The data of a run: the clients' records, the server's test set, and the labels; and how records are split.

Splits among clients are as the configuration's `partition` key selects; those that are drawn are of flwr-datasets.
Within a client, each record that is set aside for evaluation is so by a coin of its own.
"""

from __future__ import annotations

import hmac
import io
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedpriv.config import EMBEDDED, ON_NODES, DataSection, Fact, RunConfig
from fedpriv.data import _own as own
from fedpriv.data import hospital
from fedpriv.data._mistakes import check_table
from fedpriv.data._tables import instructions, labels_of, load_table, read_table, require_columns, to_text, values_of
from fedpriv.data._text import DataSource, FederatedData, TextData, response_of
from fedpriv.errors import InputError

if TYPE_CHECKING:
    import datasets

    from fedpriv.data.tensors import TensorRecords

Held = TypeVar("Held", TextData, "TensorRecords")

log = logging.getLogger(__name__)

_NO_RECORDS = TextData((), ())


def holdings(config: RunConfig) -> tuple[object, ...]:
    """Equal for two configurations only if no record has another client, by its number, in one than in the other.

    One of the two may still set aside records that the other trains on.
    """
    is_natural = config.partition_rule == "natural" or (config.data == EMBEDDED and config.partition == "auto")
    # The seed shuffles records among clients; under a natural partition it only sets records aside.
    keys = [key for key in config.keys_with(Fact.RECORDS) if key != "seed" or not is_natural]
    return (config.has_test_set, *(getattr(config, key) for key in keys))


def loaded(config: RunConfig) -> tuple[object, ...]:
    """Equal for two configurations only if `load` gives both the same, or refuses both."""
    records = (getattr(config, key) for key in config.keys_with(Fact.RECORDS))
    return (config.has_test_set, config.batch_size, config.sampling_probability, config.table_checks, *records)


def load(config: RunConfig) -> FederatedData:
    """The configured data: the records, partitioned among the clients, and the server's test set.

    Without `config.has_test_set` the test set is empty, and every record of the table has a client: what is cut off
    and evaluated exactly is not private.

    Raises:
        InputError: a file, column or label cannot be used, a likely mistake in the table is refused, or the expected
            batch size exceeds a client's records.
    """
    if config.data == ON_NODES:
        test = to_text(_test_table(config, _columns(config)), config) if config.has_test_set else _NO_RECORDS
        return FederatedData((), (), test, _label_names((), test, config))
    data = _embedded(config) if config.data == EMBEDDED else _from_table(config)
    data = replace(
        data, clients=tuple(_at_most(records, client, config) for client, records in enumerate(data.clients))
    )
    check_sizes(config, dict(zip(data.client_names, map(len, data.clients), strict=True)))
    return data


def check_sizes(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Refuse clients without records, or with fewer than a batch is expected to have.

    Args:
        config: of the run.
        sizes: {name of a client: its number of records}, by partition id.

    Raises:
        InputError: names the client and what would be right.
    """
    for client, (name, size) in enumerate(sizes.items()):
        if not size:
            raise InputError(f"client {client} ({name}): has no records; leave it out")
        if config.sampling_probability is None and config.batch_size > size:
            raise InputError(
                f"batch_size = {config.batch_size}: client {client} ({name}) has only {size} records; use at most "
                f"{min(sizes.values())}"
            )


def _at_most(records: TextData, client: int, config: RunConfig) -> TextData:
    """The client's records, or `max_records` of them, drawn with the seed, in their order."""
    if not config.max_records or len(records) <= config.max_records:
        return records
    chosen = np.random.default_rng([config.seed, client]).choice(len(records), config.max_records, replace=False)
    return records.part(np.sort(chosen).tolist())


def load_own(config: RunConfig, source: DataSource) -> FederatedData:
    """A node's own records, without those that cannot be read or have another label than the classes; maybe none.

    Guarantee: a line of the file, or a row of a Parquet file, decides one record and changes no other. One that is left
    out would have had no gradient, and every record's inclusion in a sample is a coin of its own, so leaving it out
    changes nothing for the others.

    Raises:
        InputError: the file or a column cannot be used; no record decides that.
    """
    label_names = config.labels if config.task == "SEQ_CLS" else ()
    places = own.read(source if label_names else replace(source, label_column=""))
    read = [record for record in places if isinstance(record, own.OwnRecord)]
    if len(read) < len(places):
        log.warning("%d of %d records cannot be read; nothing trains on them", len(places) - len(read), len(places))
    if source.instructs:
        return FederatedData((_instructions(read, config),), ("",), _NO_RECORDS, ())
    usable = [record for record in read if not label_names or record.label in label_names]
    records = TextData(
        texts=tuple(record.text for record in usable),
        labels=tuple(str(record.label) for record in usable) if label_names else (),
        pairs=tuple(record.pair for record in usable) if source.text_pair_column else None,
    )
    return FederatedData((records,), ("",), _NO_RECORDS, label_names)


def _instructions(records: list[own.OwnRecord], config: DataSection) -> TextData:
    """The prompts and responses of a node's records, without those whose response is not allowed."""
    responses = [response_of(record.pair, labels=config.labels, answers=config.answers) for record in records]
    found = [(record.text, text) for record, text in zip(records, responses, strict=True) if text is not None]
    return TextData(tuple(said for said, _ in found), (), tuple(text for _, text in found))


def _embedded(config: RunConfig) -> FederatedData:
    train, test = hospital.generate()
    if config.task != "SEQ_CLS":
        raise InputError(f"task = {config.task}: the embedded corpus is for SEQ_CLS; name a data file")
    names = tuple(dict.fromkeys(message.hospital for message in train))
    holders = [[m for m in train if m.hospital == name] for name in names]
    test_holders = _numbers((message.hospital for message in test), names)
    if config.partition not in ("auto", "natural"):
        from datasets import Dataset

        # Partitioned again among any number of clients, by index, so that every message stays whole.
        table = Dataset.from_dict(
            {"index": list(range(len(train))), config.label_column: [message.department for message in train]}
        )
        parts, labels = _partition(table, config)
        holders, names = [[train[index] for index in values_of(part, "index")] for part in parts], tuple(labels)
        test_holders = ()

    def text_of(messages: list[hospital.Message]) -> TextData:
        return TextData(tuple(m.text for m in messages), tuple(m.department for m in messages))

    return FederatedData(
        clients=tuple(map(text_of, holders)),
        client_names=names,
        test=text_of(test) if config.has_test_set else _NO_RECORDS,
        label_names=hospital.DEPARTMENTS,
        test_holders=test_holders if config.has_test_set else (),
    )


def _numbers(holders: Iterable[object], names: Sequence[str]) -> tuple[int, ...]:
    """The client that each name is, by partition id; -1 for one that has no training records."""
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(numbers.get(str(holder), -1) for holder in holders)


def _from_table(config: RunConfig) -> FederatedData:
    read = read_table(config.data, separator=config.separator, encoding=config.encoding)
    table = read.records
    columns = _columns(config)
    client_columns = [("client_column", config.client_column if config.partition_rule == "natural" else "")]
    require_columns(table, columns + client_columns, config.data)
    warned = check_table(read, config)
    holders = _holders(table, config) if config.partition_rule == "natural" else set()
    table = _usable(table, config, config.data)
    if config.test_data:
        train, test_table = table, _test_table(config, columns)
    elif not config.has_test_set:
        train, test_table = table, table.select([])
    else:
        train, test_table = _split(table, config)
    test = to_text(test_table, config)
    empty = sorted(map(str, holders - set(values_of(train, config.client_column)))) if holders else []
    if empty:
        raise InputError(
            f"client_column = {config.client_column!r}: client {empty[0]!r} has no training records: all of "
            "them lack a label, have one that is not in labels, or fell into the test split; drop the client, or set "
            "test_data"
        )
    parts, names = _partition(train, config)
    clients = tuple(to_text(part, config) for part in parts)
    own = config.partition_rule == "natural" and config.client_column in test_table.column_names
    test_holders = _numbers(values_of(test_table, config.client_column), names) if own else ()
    label_names = _label_names(clients, test, config)
    return FederatedData(clients, tuple(names), test, label_names, test_holders, tuple(warned))


def _columns(config: RunConfig) -> list[tuple[str, str]]:
    """(configuration key, name) of the columns that a table of records must have."""
    if config.instructs:
        keys = ("prompt_column", "response_column", "messages_column")
        return [(key, getattr(config, key)) for key in keys if getattr(config, key)]
    columns = [("text_column", config.text_column), ("text_pair_column", config.text_pair_column)]
    return [*columns, ("label_column", config.label_column)] if config.task == "SEQ_CLS" else columns


def _test_table(config: RunConfig, columns: list[tuple[str, str]]) -> datasets.Dataset:
    table = load_table(config.test_data, key="test_data", separator=config.separator, encoding=config.encoding)
    require_columns(table, columns, config.test_data)
    return _usable(table, config, config.test_data)


def _holders(table: datasets.Dataset, config: DataSection) -> set[object]:
    """The holders named in the client column.

    Raises:
        InputError: a record has no holder, or one that is neither a string nor an integer.
    """
    column = values_of(table, config.client_column)
    for index, holder in enumerate(column):
        if not isinstance(holder, (str, int)):
            raise InputError(
                f"client_column = {config.client_column!r}: record {index} has {holder!r}; every record needs the name "
                "or number of its holder"
            )
    return set(column)


def _usable(table: datasets.Dataset, config: RunConfig, source: str) -> datasets.Dataset:
    """The records that have a label, or answer, and one of the configured if there are any; there must be some.

    Raises:
        InputError: there are none.
    """
    if config.answers:
        return _answered(table, config, source)
    if config.task != "SEQ_CLS":
        return table
    labels = labels_of(table, config.label_column)
    classes = set(config.labels or labels) - {None}
    usable = table.select([row for row, label in enumerate(labels) if label in classes])
    if not len(usable):
        expected = f"none of labels = {','.join(config.labels)}" if config.labels else "no label at all"
        raise InputError(f"label_column = {config.label_column!r}: {source} has {expected}")
    return usable


def _answered(table: datasets.Dataset, config: DataSection, source: str) -> datasets.Dataset:
    """The records with one of the allowed answers; there must be some."""
    responses = [response for _, response in instructions(table, config)]
    usable = table.select([row for row, response in enumerate(responses) if response])
    if not len(usable):
        expected = ",".join(config.labels or config.answers)
        column = config.response_column or config.messages_column
        raise InputError(f"answers = {','.join(config.answers)}: {column!r} of {source} has none of {expected}")
    return usable


def _split(table: datasets.Dataset, config: RunConfig) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The training records, and a random test set of `test_fraction` that the seed determines."""
    order = np.random.default_rng(config.seed).permutation(len(table))
    num_test = max(1, round(config.test_fraction * len(table)))
    if num_test >= len(table):
        raise InputError(f"test_fraction = {config.test_fraction}: leaves no training records of {len(table)}")
    return table.select(np.sort(order[num_test:])), table.select(np.sort(order[:num_test]))


def _label_names(clients: tuple[TextData, ...], test: TextData, config: RunConfig) -> tuple[str, ...]:
    """The classes: as configured, or else those of the training records, sorted."""
    if config.task != "SEQ_CLS":
        return ()
    names = config.labels or tuple(sorted({label for client in clients for label in client.labels}))
    for label in dict.fromkeys(test.labels):
        if label not in names:
            where = config.test_data or f"the test split of {config.data}"
            raise InputError(
                f"label_column = {config.label_column!r}: {label!r} occurs only in {where}, never in training; "
                "drop those records, or list the classes to keep in labels"
            )
    if len(names) < 2:
        raise InputError(f"label_column = {config.label_column!r}: holds one class, {names[0]!r}; needs two")
    return names


def _partition(table: datasets.Dataset, config: RunConfig) -> tuple[list[datasets.Dataset], list[str]]:
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
    parts = _parts(shuffled, config)
    for client, part in enumerate(parts):
        if not len(part):
            raise InputError(
                f"partition = {config.partition_rule}: client {client} has no records; use fewer clients, or a larger "
                "dirichlet_alpha"
            )
    return parts, [f"client {client}" for client in range(len(parts))]


def _parts(table: datasets.Dataset, config: RunConfig) -> list[datasets.Dataset]:
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


def held_out(data: Held, *, fraction: float, key: bytes) -> tuple[Held, Held]:
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


def _is_set_aside(data: TextData | TensorRecords, index: int, fraction: float, key: bytes) -> bool:
    coin = hmac.digest(key, data.part([index]).content, "sha256")
    return int.from_bytes(coin[:8]) < fraction * 2.0**64
