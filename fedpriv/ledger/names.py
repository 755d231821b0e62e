"""The names of a ledger's data holders, from the files beside it: the ledger itself knows them by number alone.

A name is for display, may change, and is what a holder says of itself, so it has no place in a chain of entries that
never change: whoever reads it here is told that the chain does not cover it.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.ledger import entries
from fedpriv.ledger.entries import DataSet

# Written by a run into its folder, and by the operator of a node into its own.
REGISTRATIONS, NODE = "registrations.json", "vault.toml"
_LONGEST_NAME = 100


def known(db: sqlite3.Connection, path: Path, run: Path | None) -> dict[str, str]:
    """{id of a data set: its holder's name} for a ledger.

    Args:
        db: the ledger, open for reading.
        path: of the ledger, in whose folder names are looked for without a run.
        run: the folder of a run on this ledger, which knows them.

    Raises:
        InputError: the run's folder knows no names.
    """
    if run is not None and not (run / REGISTRATIONS).is_file():
        raise InputError(f"run = {str(run)!r}: holds no {REGISTRATIONS}; give the folder that a run wrote")
    return names_in(path.parent if run is None else run, entries.data_sets(db))


def names_in(folder: Path, data_sets: list[DataSet]) -> dict[str, str]:
    """{id of a data set: its holder's name}, as far as the folder knows; a file that cannot be read knows none.

    Args:
        folder: of a run, whose registrations name data sets; or of a node, whose ledger holds its own data alone.
        data_sets: of the ledger.
    """
    found = dict(_registered(_values(folder / REGISTRATIONS)))
    node = _values(folder / NODE)
    for data_set in data_sets:
        if data_set.id not in found and str(node.get("partition_id")) == data_set.client:
            found[data_set.id] = node.get("name")
    ids = {data_set.id for data_set in data_sets}
    return {id_: name[:_LONGEST_NAME] for id_, name in found.items() if id_ in ids and isinstance(name, str) and name}


def _registered(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for each in values.values():
        if isinstance(each, dict) and isinstance(each.get("data_set"), str):
            yield each["data_set"], each.get("name")


def _values(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
