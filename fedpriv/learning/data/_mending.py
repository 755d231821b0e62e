"""A cleaned copy of a table: names in one spelling each, and no record that is empty or there twice."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.files import write_new
from fedpriv.learning.data._mistakes import (
    CheckedColumns,
    Finding,
    Roles,
    Values,
    by_folded,
    folded,
    is_empty,
    misspelt_clients,
    mistakes,
    spelling_meant,
    spellings_of,
)
from fedpriv.learning.data._tables import Table


@dataclass(frozen=True)
class Mended:
    """A cleaned copy.

    Attributes:
        num_records: that it holds.
        changes: one line for each thing that was changed, with the number and the first places of its records.
        left: the findings that it still has.
    """

    num_records: int
    changes: list[str]
    left: list[Finding]


def write_mended(table: Table, roles: Roles, out: Path, *, keep: Collection[str] = ()) -> Mended:
    """Write a copy of a table in which names have one spelling, and every record has what a run needs, once.

    Names of clients, persons and labels lose blanks around them and take the most frequent spelling, or the label
    agreed on; a likely misspelt client takes the name that is meant. Records without client, person, label or text go,
    and so do those that repeat an earlier one in every column. All else is as it was.

    Args:
        table: that is left alone.
        roles: of its columns.
        out: a new .csv or .jsonl file, which its user alone may read.
        keep: names that stay as they are.

    Raises:
        InputError: the file has another ending or is taken, or a CSV file cannot hold a value.
    """
    if out.suffix.lower() not in (".csv", ".jsonl"):
        raise InputError(f"--fix {out}: must end in .csv or .jsonl")
    before = CheckedColumns.of(table, roles)
    values = {name: list(column) for name, column in table.columns.items()}
    changes = []
    for role, column in (("client", roles.client), ("label", roles.label), ("person", roles.person)):
        if column:
            meant = _meant(before, role, roles.classes if role == "label" else (), keep)
            changes += _renames(before, role, meant)
            values[column] = [meant.get(str(value), value) for value in values[column]]
    rows, dropped = _kept(before, values, roles)
    changes += dropped
    kept = {name: [column[row] for row in rows] for name, column in values.items()}
    _write(out, kept)
    after = replace(
        before,
        texts={name: _texts(kept[name]) for name in roles.texts},
        labels=_texts(kept[roles.label]) if roles.label else (),
        clients=_texts(kept[roles.client]) if roles.client else (),
        persons=_texts(kept[roles.person]) if roles.person else (),
        others={name: _texts(kept[name]) for name in before.others},
        places=(),
        unit="record",
    )
    return Mended(len(rows), changes, mistakes(after))


def _texts(values: Iterable[object]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


def _of_role(columns: CheckedColumns, role: str) -> Values:
    """The names of clients, labels or persons."""
    return {"client": columns.clients, "label": columns.labels, "person": columns.persons}[role]


def _meant(columns: CheckedColumns, role: str, agreed: Sequence[str], keep: Collection[str]) -> dict[str, str]:
    """{spelling: the one that is meant} of the names that change."""
    spellings = spellings_of(_of_role(columns, role))
    meant: dict[str, str] = {}
    for group in by_folded(spellings).values():
        target = spelling_meant({name: len(spellings[name]) for name in group}, agreed)
        meant |= dict.fromkeys(group, target)
    if role == "client":
        for finding in misspelt_clients(columns, spellings):
            meant |= finding.renamed
    stay = {*keep, *agreed}
    return {name: target for name, target in meant.items() if name != target and name not in stay}


def _renames(columns: CheckedColumns, role: str, meant: Mapping[str, str]) -> list[str]:
    """A line for each name that changes."""
    spellings = spellings_of(_of_role(columns, role))
    return [
        f"renamed {role} {name!r} to {target!r}"
        + ("" if folded(name) == folded(target) else f", likely misspelt; --keep {name!r} leaves it")
        + f" ({columns.where(spellings[name])})"
        for name, target in meant.items()
    ]


def _kept(columns: CheckedColumns, values: Mapping[str, Sequence[Any]], roles: Roles) -> tuple[list[int], list[str]]:
    """The rows that stay, and a line for each reason why others do not."""
    needed = {
        roles.client: "client",
        roles.person: "person",
        roles.label: "label",
        **dict.fromkeys(roles.texts, "text"),
    }
    needed.pop("", None)
    dropped: dict[str, list[int]] = defaultdict(list)
    seen: Counter[str] = Counter()
    kept = []
    for row, record in enumerate(zip(*values.values(), strict=True)):
        named = dict(zip(values, record, strict=True))
        lacking = next((what for name, what in needed.items() if is_empty(_texts([named[name]])[0])), None)
        seen[repr(record)] += 1
        if lacking is not None:
            dropped[f"without a {lacking}"].append(row)
        elif seen[repr(record)] > 1:
            dropped["that repeat an earlier one in every column"].append(row)
        else:
            kept.append(row)
    return kept, [f"dropped records {reason} ({columns.where(rows)})" for reason, rows in dropped.items()]


def _write(out: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the columns to a new file."""
    records = zip(*columns.values(), strict=True)
    values = (value for column in columns.values() for value in column)
    if out.suffix.lower() == ".csv" and any(isinstance(v, (list, dict)) or "\n" in str(v) for v in values):
        raise InputError(f"--fix {out}: a column holds lists or line breaks; name a .jsonl file")
    text = io.StringIO(newline="")
    if out.suffix.lower() == ".jsonl":
        for record in records:
            text.write(json.dumps(dict(zip(columns, record, strict=True)), default=str) + "\n")
    else:
        # Quotes around names keep another separator in one of them from being taken for the table's.
        csv.writer(text, quoting=csv.QUOTE_ALL).writerow(columns)
        csv.writer(text).writerows(records)
    write_new(out, text.getvalue().encode(), mode=0o600)
