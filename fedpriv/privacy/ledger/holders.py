"""The ledgers of a simulation's holders, beside that of its server: each is found by whose account it keeps.

Earlier versions found them by the number that a holder had in a run. Numbers change when others join or leave, so such
a ledger is carried on only where it is known whose it is.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.privacy.ledger.head_file import head_path
from fedpriv.privacy.ledger.reader import REGISTRATIONS, names_in, reading

_DIGITS = 32


def path_of(ledger: Path, account: str) -> Path:
    """The ledger of a holder.

    Args:
        ledger: of the server.
        account: whose it is; see `fedpriv.learning.data.identity`.
    """
    return _folder(ledger) / f"{hashlib.sha256(account.encode()).hexdigest()[:_DIGITS]}.sqlite"


def _folder(ledger: Path) -> Path:
    return Path(f"{ledger}.nodes")


def carry_on(ledger: Path) -> None:
    """Let ledgers that were found by number be found by name from now on.

    Raises:
        InputError: it is not known whose one of them is; says how to let it be known. Nothing was changed.
        LedgerError: one of them cannot be read.
    """
    by_number = [path for path in sorted(_folder(ledger).glob("*.sqlite")) if re.fullmatch(r"\d{1,9}", path.stem)]
    moves = [(path, path_of(ledger, _whose(path, ledger))) for path in by_number]
    for path, new in moves:
        # The ledger itself last: whatever a crash leaves behind is moved at the next start.
        for old in (head_path(path), path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"), path):
            if old.exists():
                old.rename(new.with_name(old.name.replace(path.name, new.name, 1)))


def _whose(path: Path, ledger: Path) -> str:
    """The name of the only holder whose releases a ledger that was found by number can hold."""
    with reading(path) as db:
        data_set = db.data_set(None)
        has_changed = data_set is not None and len(db.content_changes(data_set.id)) > 1
    name = names_in(ledger.parent, [data_set]).get(data_set.id, "") if data_set else ""
    if has_changed:
        why = "its records changed, so more than one holder may have had this number"
    elif not name or re.fullmatch(r"client[ -]\d+", name):
        why = f"no {REGISTRATIONS} beside {ledger.name} names its holder; copy that of a run on this ledger there"
    elif path_of(ledger, name).exists():
        why = f"{name} has another account already"
    else:
        return name
    raise InputError(
        f"ledger {ledger}: {path} is of an earlier version, which found holders by number, and {why}; or begin a new "
        "ledger, whose budgets leave out what was spent before"
    )
