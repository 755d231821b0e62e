"""Threshold shares of a node's two seeds, sealed for the peer that holds them.

Every share is committed to by a hash that the server sees. So a holder that later reveals something else is named by
the server, and a dealer whose shares do not fit its commitments is named by the holder.

Source: Shamir 1979; Bonawitz et al. 2017, Figure 4, round 1 (ShareKeys); Nir and Langley 2018 (ChaCha20-Poly1305).
The commitments are an addition.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedpriv.secure_aggregation.agreement import DIGEST_BYTES, SEED_BYTES, agree, context, derive, digest
from fedpriv.secure_aggregation.errors import ProtocolError
from fedpriv.secure_aggregation.terms import Terms

_NONCE_BYTES = 12
_TAG_BYTES = 16
COMMITMENT_BYTES = 2 * DIGEST_BYTES
SEALED_BYTES = COMMITMENT_BYTES + _NONCE_BYTES + 2 * SEED_BYTES + _TAG_BYTES


@dataclass(frozen=True, kw_only=True)
class Shares:
    """One holder's shares of one dealer's two seeds, 16 bytes each."""

    self_seed: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Route:
    """From whom shares go to whom, and in which exchange.

    Attributes:
        transcript: digest of the terms and of all advertisements, 32 bytes.
        dealer: client whose secrets are shared.
        holder: client that keeps the share.
    """

    transcript: bytes
    dealer: int
    holder: int


def split(secret: bytes, terms: Terms) -> dict[int, bytes]:
    """{client: its share}, 16 bytes each, for all K participants: any t give the secret, fewer say nothing of it.

    Args:
        secret: 16 bytes.
        terms: the threshold, and at which x > 0 each participant's share lies.
    """
    shares = dict(Shamir.split(terms.threshold, len(terms.participants), secret, ssss=False))
    return {client: shares[number] for client, number in terms.holder_numbers.items()}


def combine(shares: Mapping[int, bytes], terms: Terms) -> bytes:
    """The secret [16 bytes] that t shares {client: share} were made of.

    Raises:
        ProtocolError: there are not exactly t shares.
    """
    if len(shares) != terms.threshold:
        raise ProtocolError(f"shares: are {len(shares)}, must be {terms.threshold}")
    return Shamir.combine([(terms.holder_numbers[client], share) for client, share in shares.items()], ssss=False)


def commitments(shares: Shares, route: Route) -> bytes:
    """Hashes of the share of the self-mask's seed and of that of the mask key's [64 bytes]; each hides 128 bits."""
    return share_hash("self", shares.self_seed, route) + share_hash("mask", shares.mask_seed, route)


def share_hash(kind: str, share: bytes, route: Route) -> bytes:
    """Commitment to a single share [32 bytes]; `kind` is `self` or `mask`."""
    return digest(f"share of a {kind} seed", route.transcript, route.dealer, route.holder, share)


def seal(shares: Shares, route: Route, private: bytes, public: bytes) -> bytes:
    """Commitments and ciphertext for the holder alone [124 bytes].

    Args:
        shares: of the holder.
        route: dealer and holder.
        private: the dealer's key for encryption.
        public: the holder's.
    """
    committed, nonce = commitments(shares, route), os.urandom(_NONCE_BYTES)
    box = ChaCha20Poly1305(_key(route, private, public, route.holder))
    return committed + nonce + box.encrypt(nonce, shares.self_seed + shares.mask_seed, committed + _routed(route))


def unseal(sealed: bytes, route: Route, private: bytes, public: bytes) -> Shares:
    """The shares that a dealer sealed for this holder.

    Args:
        sealed: what `seal` returned.
        route: dealer and holder.
        private: the holder's key for encryption.
        public: the dealer's.

    Raises:
        ProtocolError: they were not sealed by this dealer for this holder in this exchange, or do not fit the
            commitments; names the dealer.
    """
    name = f"shares from client {route.dealer}"
    if len(sealed) != SEALED_BYTES:
        raise ProtocolError(f"{name}: are {len(sealed)} bytes, must be {SEALED_BYTES}")
    committed, rest = sealed[:COMMITMENT_BYTES], sealed[COMMITMENT_BYTES:]
    box = ChaCha20Poly1305(_key(route, private, public, route.dealer))
    try:
        plain = box.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], committed + _routed(route))
    except InvalidTag:
        raise ProtocolError(
            f"{name}: are not what it sealed for client {route.holder} after the same advertisements"
        ) from None
    shares = Shares(self_seed=plain[:SEED_BYTES], mask_seed=plain[SEED_BYTES:])
    if not hmac.compare_digest(commitments(shares, route), committed):
        raise ProtocolError(f"{name}: do not fit the hashes by which it committed to them")
    return shares


def _key(route: Route, private: bytes, public: bytes, peer: int) -> bytes:
    """A key for one direction between two clients of one exchange."""
    return derive(agree(private, public, peer), context("sealing", route.transcript, route.dealer, route.holder))


def _routed(route: Route) -> bytes:
    return context("sealed shares", route.transcript, route.dealer, route.holder)
