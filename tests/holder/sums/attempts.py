"""Whole attempts among nodes of one process, stopped where a test wants to interfere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from fedpriv.holder.sums import server
from fedpriv.holder.sums._masks import Identity, Words, make_identity, verify_once
from fedpriv.holder.sums._session import Session
from fedpriv.holder.sums._terms import Participant, Terms, smallest_threshold


@cache
def node(client: int) -> Identity:
    """A client's registered key, the same in all tests of a process."""
    return make_identity()


def make_terms(num_clients: int = 4, *, colluding: int = 0, threshold: int = 0, **changes: Any) -> Terms:
    """Terms of clients 0, 1, ..., with the smallest threshold unless one is given."""
    facts = {"num_records": 100, "sampling_probability": 0.5, "scale": 1.0}
    entries = (Participant(client=k, identity=node(k).public_line, **facts) for k in range(num_clients))
    fields: dict[str, Any] = {
        **{"run": "trial", "round": 3, "attempt": "ab" * 16, "colluding": colluding, "request": "cd" * 32},
        **{"modulus_bits": 32, "grid_exponent": 12, "dimension": 8, "clip_norm": 1.0, "noise_multiplier": 1.0},
        "threshold": threshold or smallest_threshold(num_clients, colluding),
        "participants": tuple(entries),
    }
    return Terms(**fields | changes)


def with_participant(terms: Terms, of: int, **changes: Any) -> Terms:
    """The terms with one participant's entry changed."""
    entries = tuple(replace(entry, **changes) if entry.client == of else entry for entry in terms.participants)
    return replace(terms, participants=entries)


def begin(terms: Terms, client: int, approved: Mapping[int, str] | None = None) -> Session:
    """A client's session."""
    return Session(terms, client, sign=node(client).sign, approved=approved, verify=verify_once)


def make_values(terms: Terms, seed: int = 0) -> dict[int, np.ndarray]:
    """{client: int64 [d]}, of both signs and far below the modulus."""
    generator = np.random.default_rng(seed)
    return {client: generator.integers(-(10**6), 10**6, terms.dimension) for client in terms.by_client}


@dataclass(kw_only=True)
class Attempt:
    """Nodes and an honest server; each method is one exchange among those named, by default all who are left."""

    terms: Terms
    sessions: dict[int, Session] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)
    vectors: dict[int, Words] = field(default_factory=dict)
    signatures: dict[int, str] = field(default_factory=dict)
    u1: server.Advertisements = field(init=False)
    u2: server.Dealt = field(init=False)
    u3: server.MaskedSum = field(init=False)
    u4: server.Signed = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = self.sessions or {client: begin(self.terms, client) for client in self.terms.by_client}
        self.values = self.values or make_values(self.terms)

    def advertise(self, clients: Iterable[int] | None = None) -> Attempt:
        texts = {client: self.sessions[client].advertisement for client in some(clients, self.sessions)}
        self.u1 = server.collect_advertisements(self.terms, texts, verify=verify_once)
        return self

    def share(self, clients: Iterable[int] | None = None) -> Attempt:
        message = self.u1.message()
        texts = {client: self.sessions[client].share(message) for client in some(clients, self.u1.shown)}
        self.u2 = server.collect_shares(self.u1, texts)
        return self

    def mask(self, clients: Iterable[int] | None = None) -> Attempt:
        for client in some(clients, self.u2.dealt):
            self.vectors[client] = self.sessions[client].mask(self.u2.message(client), self.values[client])
        self.u3 = server.collect_masked(self.u2, self.vectors)
        return self

    def confirm(self, clients: Iterable[int] | None = None) -> Attempt:
        message = self.u3.message()
        for client in some(clients, self.u3.survivors):
            self.signatures[client] = self.sessions[client].confirm(message)
        self.u4 = server.collect_signatures(self.u3, self.signatures, verify=verify_once)
        return self

    def reveal(self, clients: Iterable[int] | None = None) -> server.Recovered:
        message = self.u4.message()
        texts = {client: self.sessions[client].reveal(message) for client in some(clients, self.u4.signatures)}
        return server.recover(self.u4, texts)


def some(clients: Iterable[int] | None, everyone: Iterable[int]) -> list[int]:
    """The clients named, or everyone."""
    return sorted(everyone if clients is None else clients)


def attempted(terms: Terms, until: str) -> Attempt:
    """An attempt after its exchange `until`, all clients taking part."""
    attempt = Attempt(terms=terms)
    for step in ("advertise", "share", "mask", "confirm"):
        getattr(attempt, step)()
        if step == until:
            return attempt
    raise ValueError(until)
