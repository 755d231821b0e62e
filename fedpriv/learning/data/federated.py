"""The data of a run: the clients' records, the server's test set, and the labels; and how records are split.

Splits among clients are as the configuration's `partition` key selects; `dirichlet` is that of flwr-datasets.
Within a client, each record that is set aside for evaluation is so by a coin of its own. Where persons are the unit,
these are split, dealt out and set aside with all their records.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from fedpriv.config import EMBEDDED, IN_MEMORY, ON_NODES, DataSection, Fact, RunConfig
from fedpriv.errors import InputError, first_line
from fedpriv.learning.data import hospital
from fedpriv.learning.data._mistakes import Roles, check_table
from fedpriv.learning.data._tables import OwnRecord, Table, instructions, read_own, read_table, release_memory, to_text
from fedpriv.learning.data.apart import check_texts
from fedpriv.learning.data.text import DataSource, FederatedData, TextData, by_person, response_of
from fedpriv.texts import counted

if TYPE_CHECKING:
    from fedpriv.learning.data.tensors import TensorRecords

log = logging.getLogger(__name__)

Held = TypeVar("Held", TextData, "TensorRecords")

_NO_RECORDS = TextData((), ())

# Both a run's first checks and the run itself read it.
_corpus = cache(hospital.generate)

# A column that numbers the units while these are dealt out.
_UNIT = "fedpriv: number of the unit"


def holdings(config: RunConfig) -> tuple[object, ...]:
    """Equal for two configurations only if no record has another client, by its number, in one than in the other.

    One of the two may still set aside records that the other trains on.
    """
    return (config.has_test_set, *dealing(config).items())


def dealing(config: RunConfig) -> dict[str, Any]:
    """{key: value} of what decides who holds a record, where that is not the default: further keys change nothing."""
    # The seed shuffles records among clients; under a natural partition it only sets records aside.
    values = {key: getattr(config, key) for key in config.keys_with(Fact.RECORDS) if key != "data_seed"}
    values["seed"] = RunConfig.seed if is_natural(config) else config.seed_of_data
    return {key: value for key, value in values.items() if value != getattr(RunConfig, key)}


def is_natural(config: RunConfig) -> bool:
    """Whether the data say who holds a record."""
    is_embedded = config.data == EMBEDDED and config.partition == "auto"
    return config.partition_rule == "natural" or is_embedded or config.data == IN_MEMORY


def loaded(config: RunConfig) -> tuple[object, ...]:
    """Equal for two configurations only if `load` gives both the same, or refuses both."""
    records = (getattr(config, key) for key in config.keys_with(Fact.RECORDS))
    keys = ("batch_size", "sampling_probability", "table_checks", "holders_per_person", "max_choices")
    return (config.has_test_set, *(getattr(config, key) for key in keys), *records)


def load(config: RunConfig) -> FederatedData:
    """The configured data: the records, partitioned among the clients, and the server's test set.

    Without `config.has_test_set` the test set is empty, and every record of the table has a client: what is cut off
    and evaluated exactly is not private.

    Raises:
        InputError: a file, column or label cannot be used, a likely mistake in the table is refused, or the expected
            batch size exceeds a client's records.
    """
    if config.data == ON_NODES:
        test, warned = _NO_RECORDS, list[str]()
        if config.has_test_set:
            table, rows, warned = _test_table(config, _columns(config))
            test = to_text(table, config).part(rows)
        return FederatedData((), (), test, _label_names((), test, config), warnings=tuple(warned))
    data = _embedded(config) if config.data == EMBEDDED else _from_table(config)
    release_memory()
    data = replace(
        data, clients=tuple(_at_most(records, client, config) for client, records in enumerate(data.clients))
    )
    sizes = {name: each.num_units for name, each in zip(data.client_names, data.clients, strict=True)}
    if config.client_sizes and config.partition != "sizes":
        raise InputError(f"client_sizes = {list(config.client_sizes)}: needs partition = sizes, not {config.partition}")
    if config.num_clients not in (RunConfig.num_clients, len(sizes)):
        why = f"partition = {config.partition} makes {len(sizes)} clients of these data"
        raise InputError(f"num_clients = {config.num_clients}: {why}; leave it out, or use partition = iid")
    check_sizes(config, sizes)
    return data


def check_sizes(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Refuse, by name, clients without records or with fewer than a batch is expected to have, in partition order."""
    for client, (name, size) in enumerate(sizes.items()):
        if not size:
            raise InputError(f"client {client} ({name}): has no records; leave it out")
        if config.sampling_probability is None and config.batch_size > size:
            raise InputError(
                f"batch_size = {config.batch_size}: client {client} ({name}) has only {size} {config.unit}s; use at "
                f"most {min(sizes.values())}"
            )


def _at_most(records: TextData, client: int, config: RunConfig) -> TextData:
    """The client's records, or those of `max_records` units, drawn with the seed, in their order."""
    number = records.num_units
    if not config.max_records or number <= config.max_records:
        return records
    chosen = np.random.default_rng([config.seed_of_data, client]).choice(number, config.max_records, replace=False)
    return records.part(_of_units(_units(records.persons, len(records)), chosen.tolist()))


def _units(persons: Sequence[str | None] | None, num_records: int) -> list[list[int]]:
    """The records of each unit, by their places: of each person, or each record by itself.

    Records about nobody, whose person is None, are in no unit.
    """
    if persons is None:
        return [[place] for place in range(num_records)]
    named = [(place, name) for place, name in enumerate(persons) if name]
    places = by_person([name for _, name in named])
    return [[named[index][0] for index in indices] for indices in places.values()]


def _of_units(units: Sequence[Sequence[int]], chosen: Iterable[int]) -> list[int]:
    """The records of the chosen units, ascending."""
    return sorted(place for unit in chosen for place in units[unit])


def load_own(config: RunConfig, source: DataSource) -> FederatedData:
    """A node's own records, without those that cannot be read or have another label than the classes; maybe none.

    Guarantee: a line of the file, or a row of a Parquet file, decides one record and changes no other. One that is left
    out would have had no gradient, and every record's inclusion in a sample is a coin of its own, so leaving it out
    changes nothing for the others. Where persons are the unit, it changes nothing for other persons, and a record that
    names nobody is left out: it could be about anyone. InputError if the file or a column cannot be used.
    """
    places = read_own(source if config.labels else replace(source, label_column=""))
    read = [record for record in places if isinstance(record, OwnRecord)]
    if len(read) < len(places):
        log.warning("%d of %d records cannot be read; nothing trains on them", len(places) - len(read), len(places))
    nameless = sum(not record.person.strip() for record in read) if source.person_column else 0
    if nameless:
        log.warning("%d of %d records name no person; nothing trains on them", nameless, len(read))
    label_names = config.labels if config.task == "SEQ_CLS" else ()
    return FederatedData((of_own(read, source, config.labels),), ("",), _NO_RECORDS, label_names)


def of_own(records: Sequence[OwnRecord], source: DataSource, labels: Sequence[str]) -> TextData:
    """The records of a node's file that count, as the file has them: nothing that a run can set has changed them.

    Args:
        source: of the records; where it names a column of persons, one that names nobody does not count.
        labels: that the node's operator agreed to; records with others do not count. Empty lets all count.
    """
    counted = [
        record
        for record in records
        if (not source.person_column or record.person.strip()) and (not labels or record.label in labels)
    ]
    return TextData(
        texts=tuple(record.text for record in counted),
        labels=tuple(str(record.label) for record in counted) if labels and not source.instructs else (),
        pairs=tuple(record.pair for record in counted) if source.instructs or source.text_pair_column else None,
        persons=tuple(record.person for record in counted) if source.person_column else None,
    )


def answered(data: TextData, config: DataSection) -> TextData:
    """A node's prompts with the run's `answers` as responses, without records whose response is none of these.

    A run chooses its answers, so whatever a secret of the node decides about a record is decided before.
    """
    if not config.answers or data.pairs is None:
        return data
    found = [response_of(pair, labels=config.labels, answers=config.answers) for pair in data.pairs]
    kept = data.part([index for index, response in enumerate(found) if response is not None])
    return replace(kept, pairs=tuple(response for response in found if response is not None))


def _embedded(config: RunConfig) -> FederatedData:
    train, test = _corpus()
    if config.task != "SEQ_CLS":
        raise InputError(f"task = {config.task}: the embedded corpus is for SEQ_CLS; name a data file")
    names = tuple(dict.fromkeys(message.hospital for message in train))
    holders = [[m for m in train if m.hospital == name] for name in names]
    if config.partition not in ("auto", "natural"):
        # Partitioned again among any number of clients, so that every message stays whole.
        departments = [message.department for message in train]
        table = Table(EMBEDDED, {"patient": [m.patient for m in train], config.label_column: departments})
        named = replace(config, person_column="patient") if config.most_of_a_person else config
        parts, labels = _partition(table, range(len(train)), named)
        holders, names = [[train[row] for row in part] for part in parts], tuple(labels)

    def text_of(messages: list[hospital.Message]) -> TextData:
        return TextData(tuple(m.text for m in messages), tuple(m.department for m in messages))

    def with_patients(messages: list[hospital.Message]) -> TextData:
        return replace(text_of(messages), persons=tuple(m.patient for m in messages))

    return FederatedData(
        clients=tuple(map(with_patients if config.most_of_a_person else text_of, holders)),
        client_names=names,
        test=text_of(test) if config.has_test_set else _NO_RECORDS,
        label_names=hospital.DEPARTMENTS,
    )


def _numbers(holders: Iterable[object], names: Sequence[str]) -> tuple[int, ...]:
    """The client that each name is, by partition id; -1 for one that has no training records."""
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(numbers.get(str(holder), -1) for holder in holders)


def _from_table(config: RunConfig) -> FederatedData:
    table = read_table(config.data, separator=config.separator, encoding=config.encoding)
    columns = _columns(config)
    others = [("client_column", config.client_column if config.partition_rule == "natural" else "")]
    others += [("person_column", config.person_column)]
    table.require(columns + others)
    warned = check_table(table, config, Roles.of(config))
    holders = _holders(table, config) if config.partition_rule == "natural" else set()
    # Rows are chosen by their numbers: to select them from a table and read them there takes far longer.
    records = replace(to_text(table, config), persons=_persons_of(table, config))
    rows = _usable(table, config, config.data, among=_about_persons(records))
    warned += _left_out(table, config)
    test_table, tested, train, test_rows = table, records, rows, cast("Sequence[int]", ())
    if config.test_data:
        test_table, test_rows, more = _test_table(config, columns)
        warned += more
        tested = replace(to_text(test_table, config), persons=_persons_of(test_table, config))
    elif config.has_test_set:
        train, test_rows = _split(rows, records.persons, config)
    test = tested.part(test_rows)
    if config.test_data and not config.protects_nobody:
        warned += check_texts(config, test, records, test_rows)
    column = table.columns[config.client_column] if config.partition_rule == "natural" else ()
    if empty := sorted(map(str, holders - {column[row] for row in train})) if holders else []:
        raise InputError(
            f"client_column = {config.client_column!r}: client {empty[0]!r} has no training records: all of "
            "them lack a label, have one that is not in labels, or fell into the test split; drop the client, or set "
            "test_data"
        )
    parts, names = _partition(table, train, config)
    clients = tuple(records.part(part) for part in parts)
    own = config.partition_rule == "natural" and config.client_column in test_table.columns
    test_column = test_table.columns[config.client_column] if own else ()
    test_holders = _numbers((test_column[row] for row in test_rows), names) if own else ()
    label_names = _label_names(clients, test, config)
    return FederatedData(clients, tuple(names), replace(test, persons=None), label_names, test_holders, tuple(warned))


def _persons_of(table: Table, config: DataSection) -> tuple[str, ...] | None:
    """The person that each record names; None where the unit is the record, or a test set names none."""
    if not config.most_of_a_person or config.person_column not in table.columns:
        return None
    return tuple(name or "" for name in table.names_of(config.person_column))


def _about_persons(records: TextData) -> Sequence[int]:
    """The records that name a person, if that is the unit: any other could be about anyone."""
    if records.persons is None:
        return range(len(records))
    return [row for row, name in enumerate(records.persons) if name.strip()]


def _columns(config: RunConfig) -> list[tuple[str, str]]:
    """(configuration key, name) of the columns that a table of records must have."""
    if config.instructs:
        keys = ("prompt_column", "response_column", "messages_column")
        columns = [(key, getattr(config, key)) for key in keys if getattr(config, key)]
        return columns + [("choice_columns", name) for name in config.choice_columns]
    columns = [("text_column", config.text_column), ("text_pair_column", config.text_pair_column)]
    return [*columns, ("label_column", config.label_column)] if config.task == "SEQ_CLS" else columns


def _test_table(config: RunConfig, columns: list[tuple[str, str]]) -> tuple[Table, Sequence[int], list[str]]:
    """The table of `test_data`, its usable rows, and the warnings about it."""
    table = read_table(config.test_data, key="test_data", separator=config.separator, encoding=config.encoding)
    table.require(columns)
    # Nothing is learned from its records, so it does not matter whom they are about.
    read = replace(table, columns={name: table.columns[name] for _, name in columns if name})
    warned = check_table(read, config, replace(Roles.of(config), client="", person=""), key="test_data")
    return table, _usable(table, config, config.test_data), warned + _left_out(table, config, "test_data")


def _left_out(table: Table, config: RunConfig, key: str = "data") -> list[str]:
    """A line on the records that are left out for their label, if there are any."""
    roles = Roles.of(config)
    names = table.names_of(roles.label) if roles.label and roles.classes else []
    if num := sum(name is not None and name not in roles.classes for name in names):
        return [f"{key} = {table.source!r}: {num:,} of {counted(len(table), 'record')} have another label than labels"]
    return []


def _holders(table: Table, config: DataSection) -> set[object]:
    """The holders named in the client column, each a string or an integer."""
    column = table.columns[config.client_column]
    for index, holder in enumerate(column):
        if not isinstance(holder, (str, int)):
            raise InputError(
                f"client_column = {config.client_column!r}: record {index} has {holder!r}; every record needs the name "
                "or number of its holder"
            )
    return set(column)


def _usable(table: Table, config: RunConfig, source: str, *, among: Sequence[int] | None = None) -> Sequence[int]:
    """The records that have a label, or answer, and one of the configured if there are any; there must be some."""
    rows = range(len(table)) if among is None else among
    if config.answers:
        responses = [response for _, response in instructions(table, config)]
        usable = [row for row in rows if responses[row]]
        if not usable:
            expected = ",".join(config.labels or config.answers)
            column = config.response_column or config.messages_column
            raise InputError(f"answers = {','.join(config.answers)}: {column!r} of {source} has none of {expected}")
        return usable
    if config.task != "SEQ_CLS":
        return rows
    labels = table.names_of(config.label_column)
    classes = set(config.labels or labels) - {None}
    usable = [row for row in rows if labels[row] in classes]
    if not usable:
        expected = f"none of labels = {','.join(config.labels)}" if config.labels else "no label at all"
        raise InputError(f"label_column = {config.label_column!r}: {source} has {expected}")
    return usable


def _split(rows: Sequence[int], persons: Sequence[str | None] | None, config: RunConfig) -> tuple[list[int], list[int]]:
    """The training records, and a random test set, a `test_fraction` of the units, that the seed determines.

    With persons, None or the name of each record of the table, these are the units.
    """
    units = _units(None if persons is None else [persons[row] for row in rows], len(rows))
    order = np.random.default_rng(config.seed_of_data).permutation(len(units)).tolist()
    num_test = max(1, round(config.test_fraction * len(units)))
    if num_test >= len(units):
        raise InputError(f"test_fraction = {config.test_fraction}: leaves no training {config.unit}s of {len(units)}")
    train, test = ([rows[at] for at in _of_units(units, part)] for part in (order[num_test:], order[:num_test]))
    return train, test


def _label_names(clients: tuple[TextData, ...], test: TextData, config: RunConfig) -> tuple[str, ...]:
    """The classes: as configured, or else those of the table that is trained on, sorted.

    These are of all its records: which of them a seed puts into a test split decides no class.
    """
    if config.task != "SEQ_CLS":
        return ()
    whole = clients if config.test_data else (*clients, test)
    names = config.labels or tuple(sorted({label for part in whole for label in part.labels}))
    for label in dict.fromkeys(test.labels):
        if label not in names:
            raise InputError(
                f"label_column = {config.label_column!r}: {label!r} occurs only in {config.test_data}, never in "
                "training; drop those records, or list the classes to keep in labels"
            )
    if len(names) < 2:
        raise InputError(f"label_column = {config.label_column!r}: holds one class, {names[0]!r}; needs two")
    return names


def _partition(table: Table, rows: Sequence[int], config: RunConfig) -> tuple[list[list[int]], list[str]]:
    """The training rows of each client, and the clients' names, by the configuration's partition rule.

    `natural`: by `client_column`, in sorted order; `iid`: evenly, at random; `dirichlet`: by label, with concentration
    `dirichlet_alpha`; `sizes`: at random into `client_sizes`. Where the unit is the person, persons are dealt out, each
    with all records, as its first record would be.
    """
    if config.partition_rule == "natural":
        column, held = table.columns[config.client_column], dict[str, list[int]]()
        for row in rows:
            held.setdefault(str(column[row]), []).append(row)
        names = sorted(held)
        return [held[name] for name in names], names
    persons = _persons_of(table, config)
    units = _units(None if persons is None else [persons[row] for row in rows], len(rows))
    labels = table.columns[config.label_column] if config.partition_rule == "dirichlet" else None
    dealt = _dealt(len(units), labels and [labels[rows[unit[0]]] for unit in units], config)
    parts = [[rows[at] for at in _of_units(units, part)] if persons else [rows[at] for at in part] for part in dealt]
    return parts, [f"client {client}" for client in range(len(parts))]


def _dealt(num_units: int, labels: Sequence[Any] | None, config: RunConfig) -> list[list[int]]:
    """The units that a rule which draws gives each client; by the labels of their first records, if it asks for any."""
    if config.partition_rule == "sizes" and sum(config.client_sizes) > num_units:
        raise InputError(
            f"client_sizes = {list(config.client_sizes)}: sum to {sum(config.client_sizes)}, but there are "
            f"{num_units} training {config.unit}s"
        )
    if config.partition_rule != "sizes" and config.num_clients > num_units:
        raise InputError(f"num_clients = {config.num_clients}: only {num_units} training {config.unit}s to share")
    order = np.random.default_rng(config.seed_of_data).permutation(num_units)
    if labels is not None:
        parts = _by_label(order.tolist(), labels, config)
    elif config.partition_rule == "iid":
        parts = [part.tolist() for part in np.array_split(order, config.num_clients)]
    else:
        parts = [part.tolist() for part in np.split(order, np.cumsum(config.client_sizes))][:-1]  # the rest is nobody's
    for client, part in enumerate(parts):
        if not part:
            raise InputError(
                f"partition = {config.partition_rule}: client {client} has no records; use fewer clients, or a larger "
                "dirichlet_alpha"
            )
    return parts


def _by_label(order: Sequence[int], labels: Sequence[Any], config: RunConfig) -> list[list[int]]:
    """The units of each client by the rule `dirichlet`, which takes them in this order."""
    import datasets  # deferred: no other rule needs it

    try:
        from flwr_datasets.partitioner import DirichletPartitioner
    except ImportError:
        raise InputError("partition = dirichlet: needs flwr-datasets; pip install 'fedpriv[partition]'") from None
    table = datasets.Dataset.from_dict({_UNIT: order, config.label_column: [labels[unit] for unit in order]})
    partitioner = DirichletPartitioner(
        num_partitions=config.num_clients,
        partition_by=config.label_column,
        alpha=config.dirichlet_alpha,
        min_partition_size=1,
        self_balancing=False,
        seed=config.seed_of_data,
    )
    try:
        # The partitioners' progress bars cannot be turned off, and every redraw of a Dirichlet split is a warning.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore", category=UserWarning):
            partitioner.dataset = table
            parts = [partitioner.load_partition(client) for client in range(config.num_clients)]
    except ValueError as error:
        raise InputError(f"partition = dirichlet: {first_line(error)}") from None
    return [list(part[_UNIT][:]) for part in parts]


def held_out(data: Held, *, fraction: float, key: bytes) -> tuple[Held, Held]:
    """The records to train on and those to evaluate on, both in their order.

    Guarantee: where a record goes depends on its own content, the key and the fraction alone, so adding or removing
    another record moves none. Equal records go to the same side. A record that is set aside stays so at any larger
    fraction. Where persons are the unit, the name takes the place of the content, so all of a person's records go to
    the same side, whichever these are.

    Args:
        fraction: probability of being set aside, in (0, 1), over the keys.
        key: 1 to 64 bytes. To anyone who knows it, the number of records on either side tells who is there.
    """
    coins = [_is_set_aside(data, index, fraction, key) for index in range(len(data))]
    return (
        data.part([index for index, aside in enumerate(coins) if not aside]),
        data.part([index for index, aside in enumerate(coins) if aside]),
    )


def _is_set_aside(data: TextData | TensorRecords, index: int, fraction: float, key: bytes) -> bool:
    record = data.part([index])
    content = record.content if record.persons is None else json.dumps([record.persons]).encode()
    coin = hmac.digest(key, content, "sha256")
    return int.from_bytes(coin[:8]) < fraction * 2.0**64
