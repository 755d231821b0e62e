"""Keys that two nodes agree on, and keys derived from seeds; each for one purpose, attempt and pair.

Source: Bonawitz et al. 2017, Section 3 (key agreement); Langley, Hamburg and Turner 2016 (X25519); Krawczyk and
Eronen 2010 (HKDF).
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpriv.secure_aggregation.errors import ProtocolError

KEY_BYTES = 32
SEED_BYTES = 16
DIGEST_BYTES = 32

_DOMAIN = "fedpriv secure aggregation 1"


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
    """What X25519 makes of a private and a peer's public key [32 bytes].

    Raises:
        ProtocolError: the public key is one of the few with which every agreement is zero; names the peer.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError(f"client {peer}: its X25519 key agrees on zero with everyone") from None
