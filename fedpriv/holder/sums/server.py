"""The server's side: it collects each exchange, leaves out by name who does not fit, and recovers the sum.

    collect_advertisements (U1) -> collect_shares, collect_checks (U2) -> collect_masked (U3) -> collect_signatures (U4)
    -> recover (U5)

A client that is missing or sends something malformed is a dropout from there on. Below the threshold every stage raises
TooFewError. The states hold nothing secret until `recover`; an honest server forgets the seeds after it.

Source: Bonawitz et al. 2017, Figure 4, the server's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpriv.holder.sums import _messages
from fedpriv.holder.sums._masks import (
    DIGEST_BYTES,
    KEY_BYTES,
    Route,
    Verify,
    Words,
    agreements,
    combine,
    pairwise_masks,
    public_half,
    self_mask,
    share_hash,
    to_centred,
    unseal,
    word_dtype,
)
from fedpriv.holder.sums._messages import (
    Advertisement,
    Complaint,
    Reveal,
    check_advertisement,
    confirmed,
    mask_private_key,
    self_commitment,
    transcript_of,
)
from fedpriv.holder.sums._terms import DealerError, ProtocolError, Terms, TooFewError
from fedpriv.privacy.ledger import keys

# The public keys that agree on zero do so with every private key, and so with this one.
_ANY_PRIVATE_KEY = bytes(KEY_BYTES)

M = TypeVar("M")
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Advertisements:
    """After the first exchange.

    Attributes:
        terms: of the attempt.
        shown: {client: keys} of U1.
        refused: {client: why its contribution was left out}; in every state, of this exchange alone.
    """

    terms: Terms
    shown: Mapping[int, Advertisement]
    refused: Mapping[int, str]

    @property
    def transcript(self) -> bytes:
        """Digest of terms and keys, 32 bytes."""
        return transcript_of(self.terms, self.shown)

    def message(self) -> str:
        """The text that every client in U1 is sent."""
        return _messages.advertisements_text(self.shown)


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """After the second exchange, and again after its holders have checked the shares.

    Attributes:
        before: the state before.
        dealt: {dealer in U2: {holder in U1: sealed shares}}.
        refused: see `Advertisements`.
        dishonest: {client: what it did}, of those that dealt shares of no use, or complained of shares that are; if
            there are any, the attempt is over, and another one is to be made without them.
    """

    before: Advertisements
    dealt: Mapping[int, Mapping[int, bytes]]
    refused: Mapping[int, str]
    dishonest: Mapping[int, str] = field(default_factory=dict)

    def message(self, client: int) -> str:
        """The text that a client in U2 is sent: the shares that all others in U2 sealed for it."""
        return _messages.sealed_text(
            {dealer: parts[client] for dealer, parts in self.dealt.items() if dealer != client}
        )


@dataclass(frozen=True, kw_only=True)
class MaskedSum:
    """After the fourth exchange: who sent a vector, and the vectors' sum modulo 2^m; none is kept by itself.

    Attributes:
        before: the state before.
        survivors: U3, ascending.
        total: words [d].
        refused: see `Advertisements`.
    """

    before: Dealt
    survivors: tuple[int, ...]
    total: Words = field(repr=False)
    refused: Mapping[int, str]

    def message(self) -> str:
        """The text that every client in U3 is sent."""
        return _messages.survivors_text(self.survivors)


@dataclass(frozen=True, kw_only=True)
class Signed:
    """After the fifth exchange; `signatures` is {client in U4: its signature of the survivors}."""

    before: MaskedSum
    signatures: Mapping[int, str]
    refused: Mapping[int, str]

    def message(self) -> str:
        """The text that every client in U4 is sent: t signatures."""
        first = sorted(self.signatures)[: self.before.before.before.terms.threshold]
        return _messages.signatures_text({client: self.signatures[client] for client in first})


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The outcome.

    Attributes:
        values: the survivors' sum as integers in [-2^(m-1), 2^(m-1)), int64 [d].
        survivors: U3, whose values it holds, ascending.
        revealed: U5, ascending.
        refused: see `Advertisements`.
    """

    values: NDArray[np.int64]
    survivors: tuple[int, ...]
    revealed: tuple[int, ...]
    refused: Mapping[int, str]


def collect_advertisements(
    terms: Terms, received: Mapping[int, str], *, verify: Verify = keys.verify
) -> Advertisements:
    """U1, from {client: text}; a key that a client before it has already shown is refused.

    Raises:
        TooFewError: fewer than t clients are left.
    """
    seen: set[bytes] = set()

    def read(client: int, text: str) -> Advertisement:
        shown = _messages.advertisement_from_text(text)
        check_advertisement(terms, client, shown, verify)
        for key in (shown.encryption_key, shown.mask_key):
            agreements(_ANY_PRIVATE_KEY, {client: key})
        keys_shown = {shown.encryption_key, shown.mask_key}
        if len(keys_shown) < 2 or keys_shown & seen:
            raise ProtocolError(f"client {client}: one of its keys occurs twice")
        seen.update(keys_shown)
        return shown

    shown, refused = _collected("advertisements", received, terms.by_client, terms, read)
    return Advertisements(terms=terms, shown=shown, refused=refused)


def collect_shares(state: Advertisements, received: Mapping[int, str]) -> Dealt:
    """U2, from {client: text}.

    Raises:
        TooFewError: fewer than t clients are left.
    """

    def read(client: int, text: str) -> dict[int, bytes]:
        parts = _messages.dealt_from_text(text, client)
        if parts.keys() != state.shown.keys():
            raise ProtocolError(f"client {client}: its shares must be for exactly those who advertised")
        return parts

    dealt, refused = _collected("shares", received, state.shown, state.terms, read)
    return Dealt(before=state, dealt=dealt, refused=refused)


def collect_checks(state: Dealt, received: Mapping[int, str]) -> Dealt:
    """U2 less those who did not answer, from {client: text}, and who dealt or complained dishonestly.

    The server opens the shares in question with the key that a complaint holds: what a client says of another decides
    nothing.

    Raises:
        TooFewError: nobody was dishonest, and fewer than t clients are left.
    """
    dishonest: dict[int, str] = {}

    def read(client: int, text: str) -> None:
        complaint = _messages.complaint_from_text(text)
        dishonest.update(_judged(state, client, complaint))
        if complaint.dealers:
            raise ProtocolError(f"client {client}: complained of client {complaint.dealers[0]}; its part is over")

    kept, refused = _collected("checks", received, state.dealt, state.before.terms, read, enough=False)
    if not dishonest:
        _check_enough("checks", len(kept), state.before.terms, refused)
    dealt = {client: state.dealt[client] for client in kept if client not in dishonest}
    return replace(state, dealt=dealt, refused=refused, dishonest=dishonest)


def _judged(state: Dealt, client: int, complaint: Complaint) -> dict[int, str]:
    """{client: what it did} of those whom a complaint shows to be dishonest: the dealers, or who complains."""
    shown = state.before.shown
    if not complaint.dealers:
        return {}
    if public_half(complaint.opening) != shown[client].encryption_key:
        return {client: f"client {client}: complained of shares that it does not open"}
    found = {}
    for dealer in complaint.dealers:
        if dealer == client or dealer not in state.dealt:
            return {client: f"client {client}: complained of shares that nobody dealt"}
        route = Route(transcript=state.before.transcript, dealer=dealer, holder=client)
        try:
            agreed = agreements(complaint.opening, {dealer: shown[dealer].encryption_key})
            unseal(state.dealt[dealer][client], route, agreed[dealer])
        except ProtocolError as error:
            found[dealer] = f"client {dealer}: dealt shares of no use: {error}"
        else:
            return {client: f"client {client}: complained of shares from client {dealer} that are sound"}
    return found


def collect_masked(state: Dealt, received: Mapping[int, NDArray[Any]]) -> MaskedSum:
    """U3 and the masked sum, from {client: words [d]}.

    Raises:
        TooFewError: fewer than t clients are left.
    """
    terms = state.before.terms
    dtype = word_dtype(terms)

    def read(client: int, vector: NDArray[Any]) -> Words:
        if vector.dtype != dtype or vector.shape != (terms.dimension,):
            raise ProtocolError(
                f"client {client}: its vector is {vector.dtype} {vector.shape}, must be {dtype} ({terms.dimension},)"
            )
        return vector

    vectors, refused = _collected("masked vectors", received, state.dealt, terms, read)
    total = np.zeros(terms.dimension, dtype)
    for vector in vectors.values():
        total += vector
    return MaskedSum(before=state, survivors=tuple(vectors), total=total, refused=refused)


def collect_signatures(state: MaskedSum, received: Mapping[int, str], *, verify: Verify = keys.verify) -> Signed:
    """U4, from {client: text}.

    Raises:
        TooFewError: fewer than t clients are left.
    """
    advertisements = state.before.before
    message = confirmed(advertisements.transcript, state.survivors)

    def read(client: int, text: str) -> str:
        signature = _messages.signature_from_text(text)
        if not verify(advertisements.terms.participant(client).identity, message, signature):
            raise ProtocolError(f"client {client}: it did not sign this list of survivors")
        return signature

    signatures, refused = _collected("signatures", received, state.survivors, advertisements.terms, read)
    return Signed(before=state, signatures=signatures, refused=refused)


def recover(state: Signed, received: Mapping[int, str]) -> Recovered:
    """The survivors' sum, from {client in U4: text}.

    Guarantee: the sum of exactly what the survivors masked, or an error; a client that reveals other shares than it
    was dealt is left out by name, and so is not trusted to be right. What a survivor masked is its own affair.

    Raises:
        TooFewError: fewer than t clients revealed what they were dealt.
        DealerError: the shares that a client dealt do not give the seed that it advertised.
    """
    masked = state.before
    advertisements, terms = masked.before.before, masked.before.before.terms
    transcript = advertisements.transcript
    dropped = tuple(client for client in masked.before.dealt if client not in masked.survivors)

    def read(client: int, text: str) -> Reveal:
        revealed = _messages.reveal_from_text(text)
        _check_reveal(masked, transcript, client, dropped, revealed)
        return revealed

    reveals, refused = _collected("reveals", received, state.signatures, terms, read)
    shares = {
        holder: [*map(told.self_shares.__getitem__, masked.survivors), *map(told.mask_shares.__getitem__, dropped)]
        for holder, told in [*reveals.items()][: terms.threshold]
    }
    seeds = dict(zip((*masked.survivors, *dropped), combine(shares, terms), strict=True))
    total = masked.total.copy()
    for client in masked.survivors:
        seed = seeds[client]
        if self_commitment(seed, client, terms) != advertisements.shown[client].self_commitment:
            raise DealerError(client, "seed")
        total -= self_mask(seed, client, terms)
    for client in dropped:
        private = mask_private_key(seeds[client], client, terms)
        if public_half(private) != advertisements.shown[client].mask_key:
            raise DealerError(client, "key")
        # Its masks for survivors are the negatives of the survivors' for it.
        agreed = agreements(private, {peer: advertisements.shown[peer].mask_key for peer in masked.survivors})
        total += pairwise_masks(agreed, client, terms)
    return Recovered(values=to_centred(total), survivors=masked.survivors, revealed=tuple(reveals), refused=refused)


def _check_reveal(
    masked: MaskedSum, transcript: bytes, client: int, dropped: tuple[int, ...], revealed: Reveal
) -> None:
    """Refuse a reveal that is not of exactly the right shares, unchanged."""
    if revealed.client != client:
        raise ProtocolError(f"client {client}: its reveal names client {revealed.client}")
    if revealed.self_shares.keys() != set(masked.survivors) or revealed.mask_shares.keys() != set(dropped):
        raise ProtocolError(f"client {client}: must reveal the self-masks of survivors and the mask keys of dropouts")
    for kind, start, shares in (("self", 0, revealed.self_shares), ("mask", DIGEST_BYTES, revealed.mask_shares)):
        for dealer, share in shares.items():
            committed = masked.before.dealt[dealer][client][start : start + DIGEST_BYTES]
            if share_hash(kind, share, Route(transcript=transcript, dealer=dealer, holder=client)) != committed:
                raise ProtocolError(f"client {client}: its share of client {dealer}'s seed is not the one it was dealt")


def _collected(
    name: str,
    received: Mapping[int, P],
    among: Any,
    terms: Terms,
    read: Callable[[int, P], M],
    *,
    enough: bool = True,
) -> tuple[dict[int, M], dict[int, str]]:
    """{client: what was read of it} in ascending order, and {client: why it was refused}.

    Raises:
        TooFewError: fewer than t were read, where as many are asked for.
    """
    kept: dict[int, M] = {}
    refused: dict[int, str] = {}
    for client in sorted(received):
        try:
            if client not in among:
                raise ProtocolError(f"client {client}: took no part in the exchange before")
            kept[client] = read(client, received[client])
        except ProtocolError as error:
            refused[client] = str(error)
    if enough:
        _check_enough(name, len(kept), terms, refused)
    return kept, refused


def _check_enough(name: str, num: int, terms: Terms, refused: Mapping[int, str]) -> None:
    if num < terms.threshold:
        named = f"; refused: {'; '.join(refused.values())}" if refused else ""
        raise TooFewError(f"{name}: came from {num} clients, must come from at least {terms.threshold}{named}")
