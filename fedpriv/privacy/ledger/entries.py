"""The entries of a ledger: the tables that hold them, and queries over an open connection."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError, LedgerError
from fedpriv.privacy.accounting import events
from fedpriv.privacy.accounting.views import Release
from fedpriv.texts import printable

VERSION = 1
# The version with an `adopted` entry: a reader that does not know these would state its spending without reserve.
ADOPTED_VERSION = 2
# The version with an entry of a phase that came later: a reader that does not know it would state too little spending,
# or enforce another rule.
LATEST_VERSION = 3

_SCHEMA = (
    """CREATE TABLE entries (
    number INTEGER PRIMARY KEY, time TEXT NOT NULL, phase TEXT NOT NULL, data_set TEXT NOT NULL, client TEXT NOT NULL,
    run TEXT, round INTEGER, request TEXT, event TEXT, rho_bar REAL, aggregate_scale REAL, noise_source TEXT,
    reply TEXT, num_records INTEGER, delta REAL, note TEXT, digest TEXT NOT NULL)""",
    "CREATE UNIQUE INDEX one_per_key ON entries (run, client, round, request, phase) WHERE request IS NOT NULL",
    "CREATE INDEX by_data_set ON entries (data_set, phase)",
    """CREATE TABLE replies (run TEXT, client TEXT, round INTEGER, request TEXT, content BLOB NOT NULL,
    PRIMARY KEY (run, client, round, request))""",
    "CREATE TABLE secret (content_key BLOB NOT NULL)",
    "CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END",
    "CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END",
    f"PRAGMA user_version = {VERSION}",
)

REGISTERED, CHANGED, CHARGED, RELEASED = "registered", "changed", "charged", "released"
ADOPTED, RECOVERED = "adopted", "recovered"
# In place of the note on a data set's content, where a release read no records.
NOT_READ = "0" * 64
BOUNDED = "bounded"
LATER = "~"
"""Comes after every time that an entry can have."""
PERMITTED, WITHDRAWN = "permitted", "withdrawn"

_REGISTRATIONS = f"SELECT data_set, client, num_records, delta FROM entries WHERE phase = '{REGISTERED}'"
_WITH_CONTENT = f"WHERE phase IN ('{CHANGED}', '{RELEASED}') AND note IS NOT NULL AND note != '{NOT_READ}'"

# So small that a plan calibrated to the whole delta costs no more at what is left of it, to nine digits.
_CLOCK_SHARE = 1e-9

# A charge without an upload counts as it was charged: it may have been released. Of two scales the smaller counts, and
# none if either is missing: a node signs the first one, nobody what a coordinator says of the round's end.
_RELEASES = """
    charged.event, coalesce(released.rho_bar, charged.rho_bar),
        CASE WHEN released.number IS NULL THEN charged.aggregate_scale
            ELSE min(charged.aggregate_scale, released.aggregate_scale) END,
        coalesce(json_extract(charged.note, '$.num_readers'), 0),
        coalesce(json_extract(charged.note, '$.other_holders'), '[]')
    FROM entries AS charged LEFT JOIN entries AS released ON released.phase = 'released'
        AND released.run = charged.run AND released.client = charged.client
        AND released.round = charged.round AND released.request = charged.request
    WHERE charged.phase IN ('charged', 'recovered') AND charged.event IS NOT NULL
"""
_ON_DATA_SET = " AND charged.data_set = ?"


@dataclass(frozen=True, kw_only=True)
class Key:
    """Identifies one release: a request with the same key asks for the same release, any other for a new one.

    Attributes:
        run: id of the run.
        request: SHA-256 of the requested adapter and specification, in hex.
    """

    run: str
    client: str
    round: int
    request: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the ledger; fields that its phase does not need are None.

    Attributes:
        number: 1, 2, 3, ...
        time: UTC, ISO 8601.
        phase: `registered` or `changed` for a data set, `charged` or `released` for an upload, `adopted` for the
            whole ledger: its head was missing, so that its operator alone vouches for the entries before this one;
            `recovered` for an upload that an earlier state of this ledger had charged, and that was restored away;
            `permitted` or `withdrawn` for the publication of the holder's own uploads of a run; `bounded` for how a
            data set's budget is enforced.
        data_set: the random id that spending attaches to; empty in an `adopted` entry.
        client: the holder of the data, by its number in a federation, or in a simulation by its name; of an upload, its
            number in the run; empty in an `adopted` entry.
        run, round, request: the key of the upload.
        event: the privacy event, as JSON.
        rho_bar: for a charge the smallest that the round can have, for a release the one that it had.
        aggregate_scale: likewise, if the `aggregate` view holds; the smaller of the two counts.
        noise_source: `secure` or `seeded`.
        reply: SHA-256 of the upload, in hex.
        num_records: N_k, for a registration.
        delta: for a registration.
        note: the holder's statement, a keyed hash of the content, the operator's reason to adopt, who permitted what,
            or a plan, or a filter with its budget, as JSON; of a charge with noise of others, as JSON, the
            `num_readers` against whom its aggregate_scale holds, and the `other_holders` in the sum where a person may
            be at several; of a node's own release, a keyed hash of the content that it read; of a `recovered` entry, as
            JSON, the `request`, the digest that it `replaces` in the chain of charges, and the `reason`.
        digest: SHA-256 of the previous entry's digest and everything above, in hex.
    """

    number: int
    time: str
    phase: str
    data_set: str
    client: str
    run: str | None = None
    round: int | None = None
    request: str | None = None
    event: str | None = None
    rho_bar: float | None = None
    aggregate_scale: float | None = None
    noise_source: str | None = None
    reply: str | None = None
    num_records: int | None = None
    delta: float | None = None
    note: str | None = None
    digest: str = ""

    def chained_digest(self, previous: str) -> str:
        """The digest that this entry must have, given that of the previous one."""
        return chained_digest(previous, {name: getattr(self, name) for name in COLUMNS if name != "digest"})


def chained_digest(previous: str, content: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of a digest and the content that follows it in a chain."""
    return hashlib.sha256(json.dumps([previous, content], sort_keys=True).encode()).hexdigest()


COLUMNS = tuple(field.name for field in fields(Entry))

MOST = 10**15 - 1
"""The largest whole number in an entry: receipts and evidence write out no larger one."""


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)


def _real(value: Any) -> float:
    return float(1.0 * value)


def _text(value: Any) -> str:
    text = str(value if isinstance(value, str) else operator.index(value))
    text.encode()  # which half of a surrogate pair has no bytes for
    return text


# The type of each column, the values that it may hold, and how a refusal names them.
_TEXT: tuple[Callable[[Any], Any], Callable[[Any], bool], str] = (_text, lambda _: True, "a text, or a whole number")
_TYPES = {
    "round": (_whole, lambda value: 0 <= value <= MOST, f"a whole number from 0 to {MOST}"),
    "num_records": (_whole, lambda value: 1 <= value <= MOST, f"a whole number from 1 to {MOST}"),
    "rho_bar": (_real, lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "aggregate_scale": (_real, lambda value: 1 <= value < math.inf, "a finite number >= 1"),
    "delta": (_real, lambda value: 0 < value < 1, "a number in (0, 1), such as 1e-5"),
}


def as_stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a new entry, or of a key, as SQLite keeps them, so that what is hashed is what is stored.

    Where a column holds text, a whole number stands for its digits, as Flower's ids of runs and partitions do; and
    where it holds a whole number, so does a float without a fraction.

    Raises:
        LedgerError: a column cannot hold a value; one line with both, and what it may hold.
    """
    stored = dict(fields)
    for name, value in fields.items():
        to_type, may_be, must = _TYPES.get(name, _TEXT)
        if value is None:
            continue
        try:
            stored[name] = None if isinstance(value, bool) else to_type(value)
        except (TypeError, ValueError, OverflowError):
            stored[name] = None
        if stored[name] is None or not may_be(stored[name]):
            raise LedgerError(f"{name} = {value!r:.60}: must be {must}; nothing is written")
    return stored


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A registered data set.

    Attributes:
        id: random.
        client: its holder, as in an `Entry`.
        num_records: N_k, constant from registration on, whatever the file holds later.
        delta: in (0, 1).
    """

    id: str
    client: str
    num_records: int
    delta: float

    def check_fixed(self, ledger: Path, **settings: Any) -> None:
        """Refuse settings that are not what was fixed at registration; None leaves a field to that.

        Raises:
            InputError: names the first one, both values and what to do.
        """
        for name, value in as_stored(settings).items():
            if value is not None and value != (fixed := getattr(self, name)):
                raise InputError(
                    f"{name} = {value!r}: {ledger} has registered data set {self.id[:8]} of client "
                    f"{printable(self.client)} with {fixed!r}, which stays; set that, or name these records' own ledger"
                )

    @property
    def delta_of_clocks(self) -> float:
        """The part of delta that pays for draws so large that their reply leaves later than others."""
        return self.delta * _CLOCK_SHARE

    @property
    def delta_for_releases(self) -> float:
        """The rest of delta, which releases may use up; a node's budget is enforced at this one."""
        return self.delta * (1 - _CLOCK_SHARE)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run's charges on a data set: the run's id, number of rounds, first and last time, and noise."""

    run: str
    rounds: int
    first: str
    last: str
    noise_source: str


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The charge for one upload, which is made before the upload is computed."""

    key: Key
    data_set: str
    release: Release
    noise_source: str

    @property
    def line(self) -> dict[str, Any]:
        """The fields of its entry of phase `charged`; the note counts the readers against whom others' noise counts."""
        note: dict[str, Any] = {}
        if self.release.counts_on_others and self.release.num_readers:
            note["num_readers"] = self.release.num_readers
        if self.release.other_holders:
            note["other_holders"] = self.release.other_holders
        return self._common | {
            "phase": CHARGED,
            "event": events.to_json(self.release.event),
            "noise_source": self.noise_source,
            "note": json.dumps(note) if note else None,
        }

    def line_of_release(self, reply: str | None, note: str | None = None) -> dict[str, Any]:
        """The fields of the entry of phase `released`, with the digest of the reply, if one arrived, and a note."""
        return self._common | {"phase": RELEASED, "reply": reply, "note": note}

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "data_set": self.data_set,
            **asdict(self.key),
            "rho_bar": self.release.rho_bar,
            "aggregate_scale": self.release.aggregate_scale,
        }


def _data_set(row: tuple[str, str, int, float]) -> DataSet:
    return DataSet(id=row[0], client=row[1], num_records=row[2], delta=row[3])


def _release(event: str, rho_bar: float, scale: float | None, readers: int, holders: str) -> Release:
    """The release in a row of `_RELEASES`."""
    return Release(
        event=events.from_json(event),
        rho_bar=rho_bar,
        aggregate_scale=scale,
        num_readers=readers,
        other_holders=tuple((sensitivity, q) for sensitivity, q in json.loads(holders)),
    )


class Queries:
    """The queries for a ledger's entries: those of its writer, and of whoever reads its file."""

    def _execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        raise NotImplementedError

    def entries(self) -> Iterator[Entry]:
        """All entries in order."""
        return self._entries("")

    def _entries(self, condition: str, values: tuple[str | int, ...] = ()) -> Iterator[Entry]:
        for row in self._execute(f"SELECT {', '.join(COLUMNS)} FROM entries {condition} ORDER BY number", values):
            yield Entry(**dict(zip(COLUMNS, row, strict=True)))

    def rows_from(self, number: int) -> list[tuple[Any, ...]]:
        """The entries from this number on, as SQLite keeps them, by column."""
        return self._execute(
            f"SELECT {', '.join(COLUMNS)} FROM entries WHERE number >= ? ORDER BY number", (number,)
        ).fetchall()

    def adoptions(self) -> list[Entry]:
        """The entries of phase `adopted`, in order; an empty list for a ledger that always had its head."""
        return list(self._entries(f"WHERE phase = '{ADOPTED}'"))

    def charges(self, data_set: str) -> list[Entry]:
        """The entries that count as spent on a data set, in order: phases `charged` and `recovered`."""
        return list(self._entries(f"WHERE phase IN ('{CHARGED}', '{RECOVERED}') AND data_set = ?", (data_set,)))

    def content_changes(self, data_set: str) -> list[Entry]:
        """The entries with another content of a data set than the one before, in order; the first notes its content."""
        found: list[Entry] = []
        for entry in self._entries(f"{_WITH_CONTENT} AND data_set = ?", (data_set,)):
            if not found or found[-1].note != entry.note:
                found.append(entry)
        return found

    def data_set_noted(self, note: str) -> str | None:
        """Id of the last data set of which an entry has this note on its content; None if none has."""
        row = self._execute(f"SELECT data_set FROM entries {_WITH_CONTENT} AND note = ? ORDER BY number DESC", (note,))
        return next((data_set for (data_set,) in row), None)

    def replies_of(self, run: str) -> dict[int, set[str]]:
        """{round that a run was charged for: SHA-256, in hex, of each reply that was released for it}."""
        found: dict[int, set[str]] = {}
        asked = f"SELECT round, reply FROM entries WHERE run = ? AND phase IN ('{CHARGED}', '{RELEASED}')"
        for round_, reply in self._execute(asked, (run,)):
            found.setdefault(round_, set()).update({reply} - {None})
        return found

    def recoveries(self) -> list[Entry]:
        """The entries of phase `recovered`, in order."""
        return list(self._entries(f"WHERE phase = '{RECOVERED}'"))

    def is_known_in_full(self, data_set: str) -> bool:
        """Whether every release on a data set is known in detail; a recovery may find that there were more."""
        return all(entry.event is not None for entry in self.charges(data_set))

    def permission(self, data_set: str, run: str) -> Entry | None:
        """The entry that permits publishing a holder's own uploads of a run; None if none does."""
        condition = "WHERE phase IN (?, ?) AND data_set = ? AND run = ?"
        found = list(self._entries(condition, (PERMITTED, WITHDRAWN, data_set, run)))
        return found[-1] if found and found[-1].phase == PERMITTED else None

    def charged_as(self, number: str) -> list[DataSet]:
        """The data sets that any run has charged under this number of a client."""
        rows = self._execute(
            f"SELECT DISTINCT data_set FROM entries WHERE phase = '{CHARGED}' AND client = ?", (number,)
        )
        ids = {id_ for (id_,) in rows}
        return [data_set for data_set in self.data_sets() if data_set.id in ids]

    def charged_last(self, data_sets: Sequence[DataSet]) -> list[tuple[DataSet, str]]:
        """The data sets with each run that was charged on them, in the order of the runs' last charges."""
        known = {data_set.id: data_set for data_set in data_sets}
        rows = self._execute(
            f"SELECT data_set, run FROM entries WHERE phase = '{CHARGED}' GROUP BY data_set, run ORDER BY max(number)"
        )
        return [(known[data_set], run) for data_set, run in rows if data_set in known]

    def bounds(self, data_set: str) -> list[str]:
        """The notes of the `bounded` entries of a data set, in order; see `accounting.filters.rule_of`."""
        return [str(entry.note) for entry in self._entries("WHERE phase = ? AND data_set = ?", (BOUNDED, data_set))]

    def number_of(self, digest: str) -> int | None:
        """The number of the entry with this digest; None if there is none."""
        row = self._execute("SELECT number FROM entries WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else row[0]

    def charged_data_sets(self) -> set[str]:
        """The ids of the data sets on which anything was charged."""
        rows = self._execute(f"SELECT DISTINCT data_set FROM entries WHERE phase IN ('{CHARGED}', '{RECOVERED}')")
        return {id_ for (id_,) in rows}

    def data_sets(self) -> list[DataSet]:
        """All registered data sets, in the order of their registration."""
        return [_data_set(row) for row in self._execute(f"{_REGISTRATIONS} ORDER BY number")]

    def data_set(self, id_: str | None = None) -> DataSet | None:
        """The data set with the given id, or the last one registered; None if there is none."""
        condition, values = ("", ()) if id_ is None else ("AND data_set = ?", (id_,))
        row = self._execute(f"{_REGISTRATIONS} {condition} ORDER BY number DESC LIMIT 1", values).fetchone()
        return None if row is None else _data_set(row)

    def releases(self, data_set: str, *, excluding_run: str = "", since: str = "", until: str = LATER) -> list[Release]:
        """Everything charged on a data set in all runs but one, from a time to before another; equals are merged."""
        counted = _RELEASES.replace("FROM", ", count(*) FROM", 1)
        values = [data_set, since, until, *([excluding_run] if excluding_run else [])]
        within = " AND charged.time >= ? AND charged.time < ?"
        condition = f"{_ON_DATA_SET}{within}{' AND charged.run IS NOT ?' if excluding_run else ''}"
        rows = self._execute(f"SELECT {counted}{condition} GROUP BY 1, 2, 3, 4, 5", values)
        merged = []
        for *columns, num in rows:
            release = _release(*columns)
            merged.append(replace(release, event=release.event.with_count(num * release.event.count)))
        return merged

    def releases_in_order(self, data_set: str) -> list[Release]:
        """Everything charged on a data set, one by one, in the order of the charges."""
        rows = self._execute(f"SELECT {_RELEASES}{_ON_DATA_SET} ORDER BY charged.number", (data_set,))
        known = lru_cache(_release)
        return [known(*columns) for columns in rows]

    def releases_of(self, data_set: str | None, run: str) -> list[tuple[Key, Release]]:
        """The releases that one run was charged on a data set, or on all, each with its key, in order."""
        condition, values = ("", (run,)) if data_set is None else (_ON_DATA_SET, (data_set, run))
        rows = self._execute(
            f"SELECT charged.client, charged.round, charged.request, {_RELEASES}{condition} AND charged.run = ? "
            "ORDER BY charged.number",
            values,
        )
        known = lru_cache(_release)
        return [
            (Key(run=run, client=client, round=round_, request=request), known(*columns))
            for client, round_, request, *columns in rows
        ]

    def runs(self, data_set: str, since: str = "", until: str = LATER) -> list[RunRecord]:
        """The runs charged on a data set from a time to before another, in the order of their first charge."""
        rows = self._execute(
            "SELECT run, count(*), min(time), max(time), group_concat(DISTINCT noise_source) FROM entries "
            "WHERE phase IN ('charged', 'recovered') AND run IS NOT NULL AND data_set = ? AND time >= ? AND time < ? "
            "GROUP BY run ORDER BY min(number)",
            (data_set, since, until),
        )
        return [RunRecord(run=r[0], rounds=r[1], first=r[2], last=r[3], noise_source=r[4]) for r in rows]


class LedgerConnection(Queries, sqlite3.Connection):
    """A connection to a ledger's file."""

    def _execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self.execute(sql, values)

    def create_tables(self) -> None:
        """Make the tables, and the secret that keys hashes of content, within the caller's transaction."""
        for statement in _SCHEMA:  # one by one: sqlite3's own executescript would commit before it starts
            self.execute(statement)
        self.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
