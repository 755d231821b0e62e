"""What validating variants has cost private records so far, kept in their store, whatever became of each attempt.

A validation that was interrupted has been paid for, and whoever starts another one may have seen how the first went.
So a variant's epsilon counts all attempts at it, also those of before it was removed from the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fedpriv.accounting import events
from fedpriv.accounting.events import Event
from fedpriv.dedup.folder import Folder, sync
from fedpriv.errors import StoreError
from fedpriv.files import replace_file

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One event that private records were charged for one variant.

    Attributes:
        name: of the variant.
        data_set: id of the records' data set.
        delta: at which the epsilon of this data set is stated.
        event: what was charged.
    """

    name: str
    data_set: str
    delta: float
    event: Event


def read_charges(store: Path) -> list[Charge]:
    """All charges for variants of the store, in the order in which they were made.

    Args:
        store: its folder.

    Raises:
        StoreError: their file is damaged.
    """
    path = Folder(store).charges
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}: this fedpriv reads version {VERSION}")
        return [Charge(**{**values, "event": events.from_json(values["event"])}) for values in content["charges"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a list of charges ({error}); use another store") from None


def add_charges(store: Path, charges: Iterable[Charge]) -> None:
    """Add charges, durably when this returns.

    Args:
        store: its folder, open for writing.
        charges: made after those that are known.

    Raises:
        StoreError: their file is damaged.
    """
    known = [*read_charges(store), *charges]
    rows = [{**asdict(charge), "event": events.to_json(charge.event)} for charge in known]
    replace_file(Folder(store).charges, json.dumps({"version": VERSION, "charges": rows}).encode())
    sync(store)
