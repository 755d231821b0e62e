"""What participants tell each other through the server, and what exactly they sign."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedpriv.secure_aggregation.agreement import context, derive, digest
from fedpriv.secure_aggregation.terms import Terms


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
    """Whose shares a participant cannot use, told before anything is masked.

    Attributes:
        dealers: clients that sealed shares for it which do not open, or do not fit their hashes.
        opening: the 32-byte private key of this attempt for sealed shares, with which the server tries them itself;
            empty without complaints. Who gives it away takes no further part.
    """

    dealers: tuple[int, ...] = ()
    opening: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """What a participant gives away of its peers' seeds: of each peer one of the two, never both.

    Attributes:
        client: who reveals.
        self_shares: {survivor: 16-byte share of its self-mask's seed}.
        mask_shares: {client that shared but sent no masked vector: 16-byte share of its mask key's seed}.
    """

    client: int
    self_shares: Mapping[int, bytes] = field(repr=False)
    mask_shares: Mapping[int, bytes] = field(repr=False)


def advertised(terms: Terms, advertisement: Advertisement) -> bytes:
    """What the signature of an advertisement signs: the attempt, all its terms, the client and its keys."""
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
    """What a participant signs when it confirms a list of survivors."""
    return context("survivors", transcript, *sorted(survivors))


def self_commitment(seed: bytes, client: int, terms: Terms) -> bytes:
    """Hash of a self-mask's seed [32 bytes]; the seed's 128 bits hide it."""
    return digest("self mask seed", terms.digest(), client, seed)


def mask_private_key(seed: bytes, client: int, terms: Terms) -> bytes:
    """The X25519 private key for masks that a 16-byte seed gives [32 bytes]; so Shamir shares 16 bytes."""
    return derive(seed, context("mask key", terms.digest(), client))
