"""Keys of an attempt: those that sign, those that two nodes agree on, and those derived from seeds.

A vault's registered key signs or, in a simulation, one made in memory. Every other key serves one purpose, attempt and
pair.

Source: Bonawitz et al. 2017, Section 3 (key agreement); Langley, Hamburg and Turner 2016 (X25519); Krawczyk and
Eronen 2010 (HKDF).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpriv.deployment import keys
from fedpriv.secure_aggregation._terms import ProtocolError

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
    """A new identity in memory, for simulations and tests; `fedpriv.deployment.keys.verify` checks its signatures."""
    key = Ed25519PrivateKey.generate()
    return Identity(public_line=keys.line_of(key), sign=lambda message: base64.b64encode(key.sign(message)).decode())


def verify_once(public_line: str, message: bytes, signature: str) -> bool:
    """`fedpriv.deployment.keys.verify`, which is pure, remembered: where all nodes share a process, each of K nodes
    would check the same K signatures."""
    return _verified(public_line, message, signature)


@lru_cache(maxsize=2**16)
def _verified(public_line: str, message: bytes, signature: str) -> bool:
    return keys.verify(public_line, message, signature)
