"""Messages that participants send each other through the server, the bytes that they sign, and the checks of both.

A message that fails a check is refused by name before a node or the server goes on.
"""

from __future__ import annotations

import hmac
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedpriv.holder.sums._masks import DIGEST_BYTES, KEY_BYTES, Verify, agree, context, derive, digest
from fedpriv.holder.sums._terms import ProtocolError, Terms, TooFewError

# The public keys that agree on zero do so with every private key, and so with this one.
_ANY_PRIVATE_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class Advertisement:
    """Two fresh public keys of a participant, signed with its registered key.

    Attributes:
        client: whose keys they are.
        encryption_key: X25519 public key for sealing shares, 32 bytes.
        mask_key: X25519 public key for masks, 32 bytes.
        self_commitment: hash of the self-mask's seed, 32 bytes; a sum that would be made with another seed is refused.
        signature: of `advertised(terms, self)`, in base64.
        receipts: texts for the participant's peers, which the protocol does not read; nobody on the way can drop one.
    """

    client: int
    encryption_key: bytes
    mask_key: bytes
    self_commitment: bytes
    signature: str
    receipts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """The dealers whose shares a participant cannot use, told before anything is masked.

    Attributes:
        dealers: clients that sealed shares for it which do not open, or do not fit their hashes.
        opening: the 32-byte private key of this attempt for sealed shares, with which the server tries them itself;
            empty without complaints. Who gives it away takes no further part.
    """

    dealers: tuple[int, ...] = ()
    opening: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """The shares of its peers' seeds that a participant gives away: of each peer one of the two, never both.

    Attributes:
        client: who reveals.
        self_shares: {survivor: 16-byte share of its self-mask's seed}.
        mask_shares: {client that shared but sent no masked vector: 16-byte share of its mask key's seed}.
    """

    client: int
    self_shares: Mapping[int, bytes] = field(repr=False)
    mask_shares: Mapping[int, bytes] = field(repr=False)


def advertised(terms: Terms, advertisement: Advertisement) -> bytes:
    """The bytes that the signature of an advertisement signs: the attempt, all its terms, the client and its keys."""
    return context(
        "advertisement",
        terms.run.encode(),
        terms.round,
        terms.attempt.encode(),
        terms.digest(),
        advertisement.client,
        advertisement.encryption_key,
        advertisement.mask_key,
        advertisement.self_commitment,
        *(receipt.encode(errors="surrogatepass") for receipt in advertisement.receipts),
    )


def transcript_of(terms: Terms, advertisements: Mapping[int, Advertisement]) -> bytes:
    """Digest [32 bytes] of the terms and of all keys that a node was shown; it differs between any two sessions.

    Signatures of a list of survivors hold for one transcript. So those of an earlier session under the same terms are
    of no use, and nodes that were shown different keys do not confirm a list together.
    """
    parts: list[bytes | int] = []
    for client in sorted(advertisements):
        shown = advertisements[client]
        parts += [client, shown.encryption_key, shown.mask_key, shown.self_commitment]
    return digest("transcript", terms.digest(), *parts)


def confirmed(transcript: bytes, survivors: Iterable[int]) -> bytes:
    """The bytes that a participant signs when it confirms a list of survivors."""
    return context("survivors", transcript, *sorted(survivors))


def self_commitment(seed: bytes, client: int, terms: Terms) -> bytes:
    """Hash of a self-mask's seed [32 bytes]; the seed's 128 bits hide it."""
    return digest("self mask seed", terms.digest(), client, seed)


def mask_private_key(seed: bytes, client: int, terms: Terms) -> bytes:
    """The X25519 private key for masks that a 16-byte seed gives [32 bytes]; so Shamir shares 16 bytes."""
    return derive(seed, context("mask key", terms.digest(), client))


def check_advertisements(
    terms: Terms, advertisements: Mapping[int, Advertisement], verify: Verify, *, trusted: int | None = None
) -> None:
    """Refuse advertisements that no honest server would pass on; `trusted` is a client whose signature needs no check.

    Raises:
        ProtocolError: one is of an unknown or another client, has a key of the wrong form or one that occurs twice, or
            is not signed by its client for these terms; or a key agrees on zero with everyone.
        TooFewError: they are fewer than the threshold.
    """
    check_members("advertisements", list(advertisements), terms.by_client, terms)
    owners: dict[bytes, int] = {}
    for client, shown in advertisements.items():
        check_advertisement(terms, client, shown, None if client == trusted else verify)
        for key in (shown.encryption_key, shown.mask_key):
            if key in owners:
                raise ProtocolError(f"client {client}: one of its keys is also a key of client {owners[key]}")
            owners[key] = client


def check_advertisement(terms: Terms, client: int, shown: Advertisement, verify: Verify | None) -> None:
    """Refuse one advertisement by name; None leaves its signature unchecked.

    Raises:
        ProtocolError: see `check_advertisements`.
    """
    participant = terms.participant(client)
    if shown.client != client:
        raise ProtocolError(f"client {client}: its advertisement names client {shown.client}")
    for key in (shown.encryption_key, shown.mask_key):
        # X25519 ignores the highest bit, so a key with it set would be another key's second name.
        if len(key) != KEY_BYTES or key[-1] >> 7:
            raise ProtocolError(f"client {client}: its keys must be X25519 public keys of {KEY_BYTES} bytes")
        agree(_ANY_PRIVATE_KEY, key, client)
    if len(shown.self_commitment) != DIGEST_BYTES:
        raise ProtocolError(f"client {client}: its commitment must be {DIGEST_BYTES} bytes")
    if verify is not None and not verify(participant.identity, advertised(terms, shown), shown.signature):
        raise ProtocolError(f"client {client}: its registered key did not sign these keys for these terms")


def check_approved(terms: Terms, client: int, approved: Mapping[int, str]) -> None:
    """Refuse terms with a peer of this client that is not among the approved {client: public line}.

    Raises:
        ProtocolError: a peer is not approved, or is approved with another identity.
    """
    for peer, participant in terms.by_client.items():
        if peer == client:
            continue
        if peer not in approved:
            raise ProtocolError(f"client {peer}: this node's operator has not approved it as a peer")
        if not hmac.compare_digest(approved[peer].encode(), participant.identity.encode()):
            raise ProtocolError(f"client {peer}: its identity is not the one that this node's operator approved")


def check_members(name: str, clients: Sequence[int], among: Container[int], terms: Terms) -> None:
    """Refuse a list that names a client twice or an unknown one, or that is shorter than the threshold.

    Raises:
        ProtocolError: a client is listed twice, or is not among those of the exchange before.
        TooFewError: they are fewer than the threshold.
    """
    seen: set[int] = set()
    for client in clients:
        if client not in among:
            raise ProtocolError(f"{name}: client {client} took no part in the exchange before")
        if client in seen:
            raise ProtocolError(f"{name}: client {client} is listed twice")
        seen.add(client)
    if len(clients) < terms.threshold:
        raise TooFewError(f"{name}: are of {len(clients)} clients, must be of at least {terms.threshold}")
