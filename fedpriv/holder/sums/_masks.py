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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
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

_DOMAIN = b"fedpriv secure aggregation 1"


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
    pieces: list[bytes] = []
    for part in (_DOMAIN, label.encode(), *parts):
        encoded = part.to_bytes(8, "big") if isinstance(part, int) else part
        pieces += (len(encoded).to_bytes(8, "big"), encoded)
    return b"".join(pieces)


def digest(label: str, *parts: bytes | int) -> bytes:
    """SHA-256 of a purpose and its parts [32 bytes]."""
    return hashlib.sha256(context(label, *parts)).digest()


def derive(secret: bytes, info: bytes) -> bytes:
    """A key for the purpose that `info` names, by HKDF with SHA-256 and no salt [32 bytes]."""
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def public_half(private: bytes) -> bytes:
    """The X25519 public key of a private one, both of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreements(private: bytes, public: Mapping[int, bytes]) -> dict[int, bytes]:
    """{peer: the secret that X25519 makes of the private key and this peer's public one}, 32 bytes each.

    Raises:
        ProtocolError: a public key is one of the few with which every agreement is zero; names the peer.
    """
    key, agreed = X25519PrivateKey.from_private_bytes(private), {}
    for peer, theirs in public.items():
        try:
            agreed[peer] = key.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise ProtocolError(f"client {peer}: its X25519 key agrees on zero with everyone") from None
    return agreed


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


def pairwise_masks(agreed: Mapping[int, bytes], client: int, terms: Terms) -> Words:
    """The masks that client k adds for its peers: the sum of PRG(s_kj) over j > k less that over j < k, words [d].

    What k adds for j and what j adds for k cancel.

    Args:
        agreed: {j: secret of k's and j's mask keys}, of peers alone.
        client: k.
        terms: of the attempt.
    """
    total = np.zeros(terms.dimension, word_dtype(terms))
    for peer, secret in agreed.items():
        # The terms' digest covers run, round, attempt and every identity.
        key = derive(secret, context("pairwise mask", terms.digest(), *sorted((client, peer))))
        (np.add if client < peer else np.subtract)(total, _expand(key, terms), out=total)
    return total


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


def split(self_seed: bytes, mask_seed: bytes, terms: Terms) -> dict[int, Shares]:
    """{client: its shares} for all K participants: any t give a seed, fewer say nothing of it.

    A share is the value of a polynomial over GF(2^128), whose constant is the seed, at the holder's number.

    Args:
        self_seed: 16 bytes.
        mask_seed: 16 bytes.
        terms: the threshold, and at which x > 0 each participant's share lies.
    """
    drawn = [os.urandom(SEED_BYTES * (terms.threshold - 1)) + seed for seed in (self_seed, mask_seed)]
    num, points = len(terms.participants), [*terms.holder_numbers.values()] * 2
    low, values = _lanes([_ONES] * len(points)), 0
    # The lanes whose point has this bit. Points are public, and nothing else decides what is computed.
    chosen = [_lanes([_ONES * (x >> bit & 1) for x in points]) for bit in range(num.bit_length())]
    for place in range(0, len(drawn[0]), SEED_BYTES):  # Horner's rule, at all points of both polynomials
        product = 0
        for bit, lanes in enumerate(chosen):
            product ^= (values & lanes) << bit
        one, other = ([each[place : place + SEED_BYTES]] * num for each in drawn)
        values = _reduced(product, low) ^ _lanes(one + other)
    shares = _from_lanes(values, len(points))
    dealt = zip(terms.holder_numbers, shares, shares[num:], strict=False)
    return {client: Shares(self_seed=of_self, mask_seed=of_mask) for client, of_self, of_mask in dealt}


def combine(shares: Mapping[int, Sequence[bytes]], terms: Terms) -> list[bytes]:
    """The secrets [16 bytes each] of which t holders have shares.

    Args:
        shares: {client: its share of each secret, 16 bytes each}; the secrets are in the same order for all.
        terms: as for `split`.

    Raises:
        ProtocolError: there are not exactly t holders, one of them is no participant, or its shares are of another
            number or length than those of the first.
    """
    if len(shares) != terms.threshold:
        raise ProtocolError(f"shares: are of {len(shares)} clients, must be of {terms.threshold}")
    num, secrets = len(next(iter(shares.values()))), 0
    for client, held in shares.items():
        terms.participant(client)
        if [*map(len, held)] != [SEED_BYTES] * num:
            raise ProtocolError(f"client {client}: its shares must be {num} of {SEED_BYTES} bytes each")
    low, points = _lanes([_ONES] * num), {terms.holder_numbers[client]: held for client, held in shares.items()}
    for own, held in points.items():
        # Lagrange's factor of a value for that at zero: the product of x_j / (x_j - x_i) over j != i.
        above, below = 1, 1
        for other in points.keys() - {own}:
            above, below = _times(above, other), _times(below, own ^ other)
        secrets ^= _times(_lanes(held), _times(above, _inverse(below)), low)
    return _from_lanes(secrets, num)


# Elements of GF(2^128) are polynomials over GF(2) modulo this one, the lowest coefficient in the lowest bit. Lanes are
# elements in one integer, each in twice its bits, so that one operation works on all.
_MODULUS = 2**128 + 0b10000111
_ONES = b"\xff" * SEED_BYTES
_LANE_BYTES = 2 * SEED_BYTES


def _lanes(elements: Iterable[bytes]) -> int:
    return int.from_bytes(b"".join(element.rjust(_LANE_BYTES, b"\0") for element in elements), "big")


def _from_lanes(lanes: int, num: int) -> list[bytes]:
    whole = lanes.to_bytes(_LANE_BYTES * num, "big")
    return [whole[end - SEED_BYTES : end] for end in range(_LANE_BYTES, len(whole) + 1, _LANE_BYTES)]


def _times(lanes: int, factor: int, low: int = 2**128 - 1) -> int:
    """Each lane times an element that is public, since its bits decide what is computed."""
    product = 0
    for bit in range(factor.bit_length()):
        if factor >> bit & 1:
            product ^= lanes << bit
    return _reduced(product, low)


def _reduced(product: int, low: int) -> int:
    """Lanes of products modulo the field's polynomial; `low` has the lower half of each lane set."""
    while high := product >> 128 & low:
        product = (product & low) ^ high ^ high << 1 ^ high << 2 ^ high << 7
    return product


def _inverse(element: int) -> int:
    """1 / element, by Euclid's algorithm; the element is public and not zero."""
    one, other, of_one, of_other = element, _MODULUS, 1, 0
    while one != 1:
        if (shift := one.bit_length() - other.bit_length()) < 0:
            one, other, of_one, of_other, shift = other, one, of_other, of_one, -shift
        one, of_one = one ^ other << shift, of_one ^ of_other << shift
    return of_one


def commitments(shares: Shares, route: Route) -> bytes:
    """Hashes of the share of the self-mask's seed and of that of the mask key's [64 bytes]; each hides 128 bits."""
    return share_hash("self", shares.self_seed, route) + share_hash("mask", shares.mask_seed, route)


def share_hash(kind: str, share: bytes, route: Route) -> bytes:
    """Commitment to a single share [32 bytes]; `kind` is `self` or `mask`."""
    return digest(f"share of a {kind} seed", route.transcript, route.dealer, route.holder, share)


def seal(shares: Shares, route: Route, secret: bytes) -> bytes:
    """Commitments and ciphertext for the holder alone [124 bytes].

    Args:
        shares: of the holder.
        route: dealer and holder.
        secret: on which their keys for encryption agree, 32 bytes.
    """
    committed, nonce = commitments(shares, route), os.urandom(_NONCE_BYTES)
    box = ChaCha20Poly1305(_key(route, secret))
    return committed + nonce + box.encrypt(nonce, shares.self_seed + shares.mask_seed, committed + _routed(route))


def unseal(sealed: bytes, route: Route, secret: bytes) -> Shares:
    """The shares that a dealer sealed for this holder.

    Args:
        sealed: what `seal` returned.
        route: dealer and holder.
        secret: as for `seal`.

    Raises:
        ProtocolError: they were not sealed by this dealer for this holder in this exchange, or do not fit the
            commitments; names the dealer.
    """
    name = f"shares from client {route.dealer}"
    if len(sealed) != SEALED_BYTES:
        raise ProtocolError(f"{name}: are {len(sealed)} bytes, must be {SEALED_BYTES}")
    committed, rest = sealed[:COMMITMENT_BYTES], sealed[COMMITMENT_BYTES:]
    box = ChaCha20Poly1305(_key(route, secret))
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


def _key(route: Route, secret: bytes) -> bytes:
    """A key for one direction between two clients of one exchange."""
    return derive(secret, context("sealing", route.transcript, route.dealer, route.holder))


def _routed(route: Route) -> bytes:
    return context("sealed shares", route.transcript, route.dealer, route.holder)
