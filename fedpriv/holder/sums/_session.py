"""One node's part in one attempt, each step once and in order, and the sessions that a node has at a time.

The steps take and return the texts of `fedpriv.holder.sums._messages`. Whatever is refused ends the session: its
secrets are forgotten, and the node has dropped out of the attempt. They live in memory only. (Python cannot overwrite
them: they are gone for this program, and for anyone who reads its memory as soon as it is used again.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpriv.holder.sums import _client as node
from fedpriv.holder.sums import _messages
from fedpriv.holder.sums._masks import Sign, Verify, Words
from fedpriv.holder.sums._terms import ProtocolError, Terms
from fedpriv.privacy.ledger import keys

State = node.Advertised | node.Shared | node.Masked | node.Confirmed

S = TypeVar("S", node.Advertised, node.Shared, node.Masked, node.Confirmed)
R = TypeVar("R")
T = TypeVar("T")

MAX_RUNS = 16
"""Runs of which a node has sessions at a time."""

_NEXT = {node.Advertised: "share", node.Shared: "mask", node.Masked: "confirm", node.Confirmed: "reveal"}


class Session:
    """Protects the order of one attempt: share, mask, confirm, reveal; nothing is done twice, nothing goes back.

    Args:
        terms: of the attempt.
        client: this node's number.
        sign: signs with the node's registered key.
        approved: {client: public line} of the peers that the node's operator approved; None accepts everyone, for a
            simulation.
        verify: checks signatures.
        receipts: texts for the peers.

    Attributes:
        terms: of the attempt.
        client: this node's number.
        advertisement: the text with which the attempt begins.

    Raises:
        ProtocolError: a participant is not approved, or this node's entry holds another identity.
    """

    def __init__(
        self,
        terms: Terms,
        client: int,
        *,
        sign: Sign,
        approved: Mapping[int, str] | None,
        verify: Verify = keys.verify,
        receipts: Sequence[str] = (),
    ) -> None:
        self._state: State | None
        self._state, advertisement = node.advertise(
            terms, client, sign=sign, verify=verify, approved=approved, receipts=receipts
        )
        self.terms, self.client = terms, client
        self.advertisement = _messages.advertisement_text(advertisement)

    @property
    def receipts(self) -> tuple[str, ...]:
        """The receipts in the peers' advertisements, once `share` has checked that they have signed it."""
        state = self._state
        shown = state.advertisements if isinstance(state, node.Shared) else {}
        return tuple(text for peer, each in shown.items() if peer != self.client for text in each.receipts)

    @property
    def expects(self) -> str | None:
        """The step that comes next: `share`, `mask`, `confirm` or `reveal`; None when the session is over."""
        return None if self._state is None else _NEXT[type(self._state)]

    def share(self, advertisements: str) -> str:
        """Sealed shares for every peer in U1.

        Args:
            advertisements: {client: keys} of U1.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.share`; the session is over.
        """
        return self._step(
            node.Advertised,
            lambda state: node.share(state, _messages.advertisements_from_text(advertisements)),
            _messages.sealed_text,
        )

    def check(self, sealed: str) -> str:
        """The clients whose shares this node cannot use; if there are any, the session is over.

        Args:
            sealed: as for `mask`.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.check`; the session is over.
        """
        state = self._state
        if not isinstance(state, node.Shared):
            self.end()
            raise ProtocolError("check: out of order, this session does not stand before `mask`")
        self.end()
        complaint = node.check(state, _messages.sealed_from_text(sealed))
        self._state = None if complaint.dealers else state
        return _messages.complaint_text(complaint)

    def check_sealed(self, sealed: str) -> None:
        """Refuse shares that `mask` would refuse, before what it masks is paid for; the session stays where it is.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.received`; or `mask` is not the step that comes next.
        """
        if not isinstance(self._state, node.Shared):
            raise ProtocolError(f"mask: out of order, this session expects {self.expects or 'nothing, it is over'}")
        node.received(self._state, _messages.sealed_from_text(sealed))

    def mask(self, sealed: str, values: NDArray[np.int64]) -> Words:
        """The masked vector, uint32 or uint64 [d].

        Args:
            sealed: {sender: shares} for this node, of U2.
            values: noised, int64 [d], grid steps.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.mask`; the session is over.
        """
        return self._step(
            node.Shared,
            lambda state: node.mask(state, _messages.sealed_from_text(sealed), values),
            lambda masked: masked,
        )

    def confirm(self, survivors: str) -> str:
        """This node's signature of the survivors U3.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.confirm`; the session is over.
        """
        return self._step(
            node.Masked,
            lambda state: node.confirm(state, _messages.survivors_from_text(survivors)),
            _messages.signature_text,
        )

    def reveal(self, signatures: str) -> str:
        """The shares of the peers' seeds that this node reveals; the session is over.

        Args:
            signatures: {client: signature of the survivors}, at least t.

        Raises:
            ProtocolError: see `fedpriv.holder.sums._client.reveal`.
        """
        return self._step(
            node.Confirmed,
            lambda state: (None, node.reveal(state, _messages.signatures_from_text(signatures))),
            _messages.reveal_text,
        )

    def end(self) -> None:
        """Forget the secrets; every later step is refused."""
        self._state = None

    def _step(self, kind: type[S], run: Callable[[S], tuple[State | None, R]], write: Callable[[R], T]) -> T:
        """One transition; the session ends unless all of it succeeds."""
        state, expected = self._state, self.expects
        self.end()
        if not isinstance(state, kind):
            raise ProtocolError(
                f"{_NEXT[kind]}: out of order, this session {f'expected {expected}' if expected else 'is over'}"
            )
        reached, message = run(state)
        written = write(message)
        self._state = reached
        return written


class Sessions:
    """A node's sessions by run: at most one a run, and of at most `MAX_RUNS` runs, of which the oldest is ended.

    For one thread. Others would have to take turns.
    """

    def __init__(self) -> None:
        self._live: dict[str, Session] = {}

    def begin(
        self,
        terms: Terms,
        client: int,
        *,
        sign: Sign,
        approved: Mapping[int, str] | None,
        verify: Verify = keys.verify,
        receipts: Sequence[str] = (),
    ) -> Session:
        """A session for a new attempt; the run's earlier one ends, even if the new terms are refused.

        Raises:
            ProtocolError: see `Session`.
        """
        self.end(terms.run)
        session = Session(terms, client, sign=sign, approved=approved, verify=verify, receipts=receipts)
        while len(self._live) >= MAX_RUNS:
            self.end(next(iter(self._live)))
        self._live[terms.run] = session
        return session

    def of(self, run: str, attempt: str) -> Session:
        """The live session of a run.

        Raises:
            ProtocolError: the run has none, or it is of another attempt.
        """
        session = self._live.get(run)
        if session is None or session.terms.attempt != attempt:
            raise ProtocolError(f"attempt {attempt} of run {run}: this node takes no part in it")
        return session

    def end(self, run: str) -> None:
        """End a run's session, if it has one."""
        session = self._live.pop(run, None)
        if session is not None:
            session.end()
