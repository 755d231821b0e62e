"""Read-only access to a ledger, the verification of its chain of hashes, and the names of its data holders.

The ledger knows the holders of a deployment by number alone; their names are in other files of its folder. Such a name
is for display, may change, and is what a holder says of itself, so it has no place in a chain of entries that never
change. Anyone who reads it here is told that the chain does not cover it. A simulation's holders are named by its data.
Their ledgers stand beside that of its server, and each is found by whose account it keeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError, LedgerError
from fedpriv.files import read_text, replace_file
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.filters import CommittedPlans
from fedpriv.privacy.accounting.views import PlannedView
from fedpriv.privacy.ledger import head_file
from fedpriv.privacy.ledger.entries import LATER, LATEST_VERSION, VERSION, DataSet, Entry, LedgerConnection
from fedpriv.privacy.ledger.head_file import EMPTY_CHAIN, head_path, wal_path

# Written by a run into its folder, and by the operator of a node into its own.
REGISTRATIONS, CONFIG, NODE = "registrations.json", "config.toml", "vault.toml"
LEDGER, EVENTS, ERASURES, SUMMARY = "ledger.sqlite", "events.jsonl", "erasures", "summary.json"
_REFUSED, _MOST_REASONS = ("refused", "retired"), 20
_LONGEST_NAME = 100
# Of the hash that names a holder's ledger.
_DIGITS = 32


@contextmanager
def reading(path: Path) -> Iterator[LedgerConnection]:
    """A read-only connection to the ledger, which another process may be writing at the same time.

    Raises:
        LedgerError: the file does not exist, is damaged or has another version.
    """
    if not path.is_file():
        raise LedgerError(f"{path}: no such ledger")
    with as_ledger_errors(path):
        db = _connect_to_read(path)
        try:
            yield db
        finally:
            db.close()


def _connect_to_read(path: Path) -> LedgerConnection:
    """A connection that never changes the ledger; SQLite may write its own files next to it if permitted.

    Where it is not, as on a read-only medium, nobody writes, and the log's index is kept in memory.
    """
    alone = "mode=ro&vfs=unix-none" if head_file.has_log(path) else "mode=ro&immutable=1"
    for options in ("mode=rw", alone):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, timeout=10, factory=LedgerConnection)
        try:
            if options == alone:
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA query_only = ON")
            check_version(db, path)
            return db
        except sqlite3.OperationalError:
            db.close()
            if options == alone:
                raise
        except BaseException:
            db.close()
            raise
    raise AssertionError("unreachable")


def verify(db: LedgerConnection, path: Path) -> Entry | None:
    """The last entry of a ledger whose chain is intact from the first entry on; None if the ledger is empty.

    Raises:
        LedgerError: the chain is broken; names the first entry that was edited, moved or lost.
    """
    previous, last = EMPTY_CHAIN, None
    with as_ledger_errors(path):
        (quick_check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if quick_check != "ok":
            raise LedgerError(f"{path}: damaged: {' '.join(quick_check.split())}")
        for number, entry in enumerate(db.entries(), start=1):
            if entry.number != number:
                raise LedgerError(f"{path}: broken chain: entry {number} is missing")
            if entry.digest != entry.chained_digest(previous):
                raise LedgerError(f"{path}: broken chain: entry {number} was changed after it was written")
            previous, last = entry.digest, entry
    return last


def verify_with_head(db: LedgerConnection, path: Path) -> Entry | None:
    """Like `verify`, and checks that PATH.head is there and names an entry of the chain.

    Raises:
        LedgerError: as for `verify` and `head.check`.
    """
    last = verify(db, path)
    # Read after the entries: it may name one that was appended since, and the check looks that one up.
    head_file.check(head_file.read_beside(path), db, path, last.number if last else 0)
    return last


def verify_without_head(db: LedgerConnection, path: Path) -> Entry | None:
    """Like `verify`, for a ledger whose head is missing or unreadable.

    Raises:
        LedgerError: as for `verify`; or the ledger has a head.
    """
    last = verify(db, path)
    head_file.check_missing(head_file.read_beside(path), db, path, last.number if last else 0)
    return last


def write_copy(db: LedgerConnection, path: Path) -> Entry | None:
    """Write a copy of a ledger, also of one in use, with a head of its own, for its owner alone; return its last entry.

    Until it is complete, its head is that of an empty ledger, and it is refused.

    Raises:
        LedgerError: it cannot be written, or is broken.
    """
    with as_ledger_errors(path):
        head = head_file.opened(path)
        try:
            if head_file.parse(head_file.read(head)) is None:
                head_file.begin(head, path)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            with closing(sqlite3.connect(path, factory=LedgerConnection)) as target:
                db.backup(target)
                last = verify(target, path)
            head_file.write(head, *((last.number, last.digest) if last else head_file.START))
        finally:
            os.close(head)
    return last


def check_version(db: LedgerConnection, path: Path) -> int:
    """The version of the file.

    Raises:
        LedgerError: this fedpriv does not read that version.
    """
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if not version:  # a file without a table
        head_file.check_unused(head_file.read_beside(path), path)
    if not VERSION <= version <= LATEST_VERSION:
        raise LedgerError(f"{path}: ledger version {version}: this fedpriv reads {VERSION} to {LATEST_VERSION}")
    return version


@contextmanager
def as_ledger_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into one-line `LedgerError`s; the caller has then released nothing."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise LedgerError(f"{path}: charged or released before ({error})") from None
    except (sqlite3.Error, OSError) as error:
        text = str(error).lower()
        if "readonly" in text or "read-only" in text or "permission denied" in text or "unable to open" in text:
            reason = "cannot be written (read-only?)"
        elif "full" in text or "disk i/o" in text or "no space" in text or "too large" in text:
            reason = "the disk is full or fails"
        elif "locked" in text:
            reason = "another process is writing it"
        elif "malformed" in text or "not a database" in text or "no such table" in text or "no such column" in text:
            reason = "damaged: truncated, or no ledger at all"
        else:
            reason = "cannot be used"
        raise LedgerError(f"{path}: {reason} ({error}); nothing is released") from None


def holder_names(db: LedgerConnection, path: Path, run: Path | None) -> dict[str, str]:
    """{id of a data set: its holder's name} for a ledger.

    Args:
        path: of the ledger, in whose folder names are looked for without a run.
        run: the folder of a run on this ledger, which knows them.

    Raises:
        InputError: the run's folder knows no names.
    """
    if run is not None and not (run / REGISTRATIONS).is_file():
        raise InputError(f"run = {str(run)!r}: holds no {REGISTRATIONS}; give the folder that a run wrote")
    if run is not None:
        return names_in(run, db.data_sets())
    kept = {id_: name for id_, name in _values(_names_path(path)).items() if isinstance(name, str)}
    known = {each.id: kept[each.id][:_LONGEST_NAME] for each in db.data_sets() if kept.get(each.id)}
    return known | names_in(path.parent, db.data_sets())


def keep_names(path: Path, names: dict[str, str]) -> None:
    """Keep names beside a ledger that several runs share, whose folders `holder_names` does not know.

    Args:
        names: {id of a data set: its holder's name}; those of earlier runs stay.
    """
    file = _names_path(path)
    replace_file(file, json.dumps(_values(file) | names, indent=1).encode(), mode=None)


def _names_path(ledger: Path) -> Path:
    return Path(f"{ledger}.names.json")


def limit_of(db: LedgerConnection, path: Path) -> tuple[PlannedView, float | None]:
    """The view on which a ledger's budget or target is, and a node's budget; `local` and None where nothing says.

    Settings beside the ledger come first. A copy without them knows the last budget that it was charged under.

    Args:
        path: of the ledger; its folder is that of a node, or of a run.
    """
    folder = path.absolute().parent
    node = _values(folder / NODE)
    if path.name == LEDGER and node and not node.get("ledger_file"):
        view, budget = node.get("budget_view"), node.get("budget_epsilon")
        return _planned(view), float(budget) if isinstance(budget, (int, float)) else None
    notes = [(each.id, note) for each in db.data_sets() for note in db.bounds(each.id)]
    if notes and isinstance(rule := filters.rule_of(db.bounds(notes[-1][0])), CommittedPlans):
        fits = all(rule.covers(release.event) for release in db.releases(notes[-1][0]))
        return "local" if fits else "aggregate", rule.epsilon
    if noted := [budget for _, note in notes if (budget := json.loads(note).get("budget"))]:
        return _planned(noted[-1][1]), float(noted[-1][0])
    return _planned(_values(folder / CONFIG).get("privacy_view")), None


def _planned(view: object) -> PlannedView:
    return "aggregate" if view == "aggregate" else "local"


def names_in(folder: Path, data_sets: list[DataSet]) -> dict[str, str]:
    """{id of a data set: its holder's name}, as far as the folder knows; a file that cannot be read knows none.

    Args:
        folder: of a run, whose registrations name data sets; or of a node, whose ledger holds its own data alone.
    """
    found = dict(_registered(_values(folder / REGISTRATIONS)))
    node = _values(folder / NODE)
    for data_set in data_sets:
        if data_set.id not in found and str(node.get("partition_id")) == data_set.client:
            found[data_set.id] = node.get("name")
    ids = {data_set.id for data_set in data_sets}
    return {id_: name[:_LONGEST_NAME] for id_, name in found.items() if id_ in ids and isinstance(name, str) and name}


def studies_in(folder: Path) -> dict[str, str]:
    """{id of a run: what for, or else the name of its folder}, as far as a ledger's folder knows."""
    told = {str(each.get("run")): each["purpose"] for each in _events(folder) if each.get("purpose")}
    for summary in (*folder.glob(SUMMARY), *folder.glob(f"*/{SUMMARY}"), *folder.glob(f"*/*/{SUMMARY}")):
        purpose = _values(summary.with_name(CONFIG)).get("purpose")
        told[str(_values(summary).get("run_id"))] = purpose or summary.absolute().parent.name
    return {run: text[:_LONGEST_NAME] for run, text in told.items() if isinstance(text, str) and text}


def refusals_in(folder: Path, since: str = "", until: str = LATER) -> dict[str, int]:
    """{reason: how many requests a node refused for it from a time to before another}, as its journal has them."""
    refused = [each for each in _events(folder) if each.get("event") in _REFUSED]
    events = [each for each in refused if since <= str(each.get("time")) < until]
    return dict(Counter(str(each.get("reason")) for each in events).most_common(_MOST_REASONS))


def erasures_in(folder: Path, since: str = "", until: str = LATER) -> list[str]:
    """The dates from one to before another at which somebody's records were erased at a node, which alone may know."""
    file = folder / ERASURES
    return [day for day in read_text(file).split() if since <= day < until] if file.is_file() else []


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events in a node's journal, as far as it can be read."""
    with suppress(OSError), (folder / EVENTS).open("rb") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(line), dict):
                    yield event


def _registered(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for each in values.values():
        if isinstance(each, dict) and isinstance(each.get("data_set"), str):
            yield each["data_set"], each.get("name")


def _values(file: Path) -> dict[str, Any]:
    try:
        text = read_text(file)
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def path_of(ledger: Path, account: str) -> Path:
    """The ledger of a holder.

    Args:
        account: whose it is; see `fedpriv.learning.data.accounts`.
    """
    return _folder(ledger) / f"{hashlib.sha256(account.encode()).hexdigest()[:_DIGITS]}.sqlite"


def _folder(ledger: Path) -> Path:
    return Path(f"{ledger}.nodes")


def carry_on(ledger: Path) -> None:
    """Let ledgers that were found by number be found by name from now on.

    Earlier versions found them by the number that a holder had in a run. Numbers change when others join or leave, so
    such a ledger is carried on only where it is known whose it is.

    Raises:
        InputError: it is not known whose one of them is; says how to let it be known. Nothing was changed.
        LedgerError: one of them cannot be read.
    """
    by_number = [path for path in sorted(_folder(ledger).glob("*.sqlite")) if re.fullmatch(r"\d{1,9}", path.stem)]
    moves = [(path, path_of(ledger, _whose(path, ledger))) for path in by_number]
    for path, new in moves:
        # The ledger itself last: whatever a crash leaves behind is moved at the next start.
        for old in (head_path(path), wal_path(path), path.with_name(f"{path.name}-shm"), path):
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
