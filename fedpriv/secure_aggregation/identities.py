"""Who signs in an attempt: a vault's registered key, or one made in memory for a simulation."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpriv.deployment import keys

Sign = Callable[[bytes], str]
"""(message) -> signature in base64, of at most 200 characters"""

Verify = Callable[[str, bytes, str], bool]
"""(public line, message, signature) -> whether it holds; False for anything malformed"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """An Ed25519 key pair: its public line in OpenSSH's format and what signs with it."""

    public_line: str
    sign: Sign = field(repr=False)


def make_identity() -> Identity:
    """A new identity in memory, for simulations and tests; `fedpriv.deployment.keys.verify` checks its signatures."""
    key = Ed25519PrivateKey.generate()
    return Identity(public_line=keys.line_of(key), sign=lambda message: base64.b64encode(key.sign(message)).decode())


@lru_cache(maxsize=2**16)
def verify_once(public_line: str, message: bytes, signature: str) -> bool:
    """`fedpriv.deployment.keys.verify`, which is pure, remembered: where all nodes share a process, each of K nodes
    would check the same K signatures."""
    return keys.verify(public_line, message, signature)
