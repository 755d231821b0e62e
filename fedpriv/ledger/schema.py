"""The tables of a ledger's file."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator

from fedpriv.ledger.reader import VERSION

_SCHEMA = f"""
CREATE TABLE entries (
    number INTEGER PRIMARY KEY, time TEXT NOT NULL, phase TEXT NOT NULL, data_set TEXT NOT NULL, client TEXT NOT NULL,
    run TEXT, round INTEGER, request TEXT, event TEXT, rho_bar REAL, aggregate_scale REAL, noise_source TEXT,
    reply TEXT, num_records INTEGER, delta REAL, note TEXT, digest TEXT NOT NULL
);
CREATE UNIQUE INDEX one_per_key ON entries (run, client, round, request, phase) WHERE request IS NOT NULL;
CREATE INDEX by_data_set ON entries (data_set, phase);
CREATE TABLE replies (run TEXT, client TEXT, round INTEGER, request TEXT, content BLOB NOT NULL,
    PRIMARY KEY (run, client, round, request));
CREATE TABLE secret (content_key BLOB NOT NULL);
CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
PRAGMA user_version = {VERSION};
"""


def create(db: sqlite3.Connection) -> None:
    """Make the tables, and the secret that keys hashes of content, within the caller's transaction."""
    for statement in _statements(_SCHEMA):
        db.execute(statement)
    db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: sqlite3's own executescript would commit before it starts."""
    statement = ""
    for line in script.strip().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
