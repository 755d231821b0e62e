"""Keys of an attempt, masks that cancel in the sum of all who added them, and shares of the masks' seeds.

A vault's registered key signs or, in a simulation, one made in memory. Every other key serves one purpose, attempt and
pair. Masks look uniform modulo 2^m. A node's two seeds are shared such that any t holders give them back; each share is
sealed for the peer that holds it. Every share is committed to by a hash that the server sees. So a holder that later
reveals something else is named by the server, and a dealer whose shares do not fit its commitments is named by the
holder.

Source: Bonawitz et al. 2017, Section 3 and Figure 4, rounds 1 (ShareKeys) and 2 (MaskedInputCollection); Shamir 1979;
Langley, Hamburg and Turner 2016 (X25519); Krawczyk and Eronen 2010 (HKDF); Nir and Langley 2018 (ChaCha20-Poly1305).
The commitments are an addition.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedpriv.holder.sums._terms import ProtocolError, Terms
from fedpriv.privacy.ledger import keys

KEY_BYTES = 32
SEED_BYTES = 16
DIGEST_BYTES = 32

_DOMAIN = "fedpriv secure aggregation 1"


Sign = Callable[[bytes], str]
"""(message) -> signature in base64, of at most 200 characters"""

Verify = Callable[[str, bytes, str], bool]
"""(public line, message, signature) -> whether it holds; False for anything malformed"""


def context(label: str, *parts: bytes | int) -> bytes:
    """An unambiguous encoding of a purpose and its parts: each after its length, so that no two lists share one.

    Args:
        label: the purpose.
        parts: bytes, or integers in [0, 2^64).
    """
    encoded = [_DOMAIN.encode(), label.encode()]
    encoded += [part.to_bytes(8, "big") if isinstance(part, int) else part for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)


def digest(label: str, *parts: bytes | int) -> bytes:
    """SHA-256 of a purpose and its parts [32 bytes]."""
    return hashlib.sha256(context(label, *parts)).digest()


def derive(secret: bytes, info: bytes) -> bytes:
    """A key for the purpose that `info` names, by HKDF with SHA-256 and no salt [32 bytes]."""
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def public_half(private: bytes) -> bytes:
    """The X25519 public key of a private one, both of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, peer: int) -> bytes:
    """The secret that X25519 makes of a private and a peer's public key [32 bytes].

    Raises:
        ProtocolError: the public key is one of the few with which every agreement is zero; names the peer.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError(f"client {peer}: its X25519 key agrees on zero with everyone") from None


@dataclass(frozen=True, kw_only=True)
class Identity:
    """An Ed25519 key pair: its public line in OpenSSH's format and what signs with it."""

    public_line: str
    sign: Sign = field(repr=False)


def make_identity() -> Identity:
    """A new identity in memory, for simulations and tests; `ledger.keys.verify` checks its signatures."""
    key = Ed25519PrivateKey.generate()
    return Identity(public_line=keys.line_of(key), sign=lambda message: base64.b64encode(key.sign(message)).decode())


def read_identity(path: Path) -> Identity:
    """The identity of a private key's file, which is read for each signature.

    Args:
        path: of a key that `fedpriv.privacy.ledger.keys.make_key_pair` made, such as a vault.key.

    Raises:
        InputError: the file is missing, or is no such key.
    """
    return Identity(public_line=keys.public_line(path), sign=partial(keys.sign, path))


verify_once: Verify = lru_cache(maxsize=2**16)(keys.verify)
"""`fedpriv.privacy.ledger.keys.verify`, which is pure, remembered: where all nodes share a process, each of K nodes
would check the same K signatures."""

Words = NDArray[Any]
"""uint32 or uint64 [d]: integers modulo 2^m, m = 32 or 64"""

_DTYPES: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}

_NONCE_BYTES = 12
_TAG_BYTES = 16
COMMITMENT_BYTES = 2 * DIGEST_BYTES
SEALED_BYTES = COMMITMENT_BYTES + _NONCE_BYTES + 2 * SEED_BYTES + _TAG_BYTES


def word_dtype(terms: Terms) -> np.dtype[Any]:
    """uint32 or uint64, little-endian, as masked vectors travel."""
    return _DTYPES[terms.modulus_bits]


def to_words(values: NDArray[np.int64], terms: Terms) -> Words:
    """Signed values modulo 2^m: int64 [d] to words [d]."""
    # From int64 to an unsigned type numpy keeps the low bits, which is the value modulo 2^m.
    return values.astype(word_dtype(terms))


def to_centred(words: Words) -> NDArray[np.int64]:
    """Words [d] as the integers in [-2^(m-1), 2^(m-1)) with the same remainder, int64 [d]."""
    signed = words.view(f"<i{words.dtype.itemsize}")
    return signed.astype(np.int64)


def self_mask(seed: bytes, client: int, terms: Terms) -> Words:
    """PRG(b_k), words [d].

    Args:
        seed: b_k, 16 bytes.
        client: k.
        terms: of the attempt.
    """
    return _expand(derive(seed, context("self mask", terms.digest(), client)), terms)


def pairwise_mask(private: bytes, client: int, public: bytes, peer: int, terms: Terms) -> Words:
    """The mask that client k adds for peer j: PRG(s_kj) if k < j, and its negative if k > j, words [d]; the two cancel.

    Args:
        private: k's mask key, 32 bytes.
        client: k.
        public: j's public mask key, 32 bytes.
        peer: j, another client.
        terms: of the attempt.

    Raises:
        ProtocolError: the public key agrees on zero with everyone.
    """
    # The terms' digest covers run, round, attempt and every identity.
    pair = (min(client, peer), max(client, peer))
    mask = _expand(derive(agree(private, public, peer), context("pairwise mask", terms.digest(), *pair)), terms)
    return mask if client < peer else np.negative(mask)


def _expand(key: bytes, terms: Terms) -> Words:
    """The AES-256-CTR key stream as words [d]; the counter starts at zero, since a key makes one stream."""
    dtype = word_dtype(terms)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(dtype.itemsize * terms.dimension)), dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """One holder's shares of one dealer's two seeds, 16 bytes each."""

    self_seed: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way of shares from their dealer to their holder in one exchange.

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
