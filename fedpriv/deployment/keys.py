"""A node's key pair: it identifies the node to the SuperLink and signs what the node sends."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedpriv.deployment.files import write_new
from fedpriv.errors import InputError

_DIGEST = ec.ECDSA(hashes.SHA256())


def make_key_pair(path: Path) -> None:
    """Write a new private key to `path`, readable only by its owner, and its public line to `path`.pub.

    Both are in OpenSSH's format, on the curve secp384r1, which Flower's SuperNode authentication accepts.

    Raises:
        InputError: one of the two files exists; nothing is overwritten.
    """
    public = public_path(path)
    for file in (path, public):
        if file.exists():
            raise InputError(f"key = {file}: exists; give another path, or move the old key away first")
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_new(path, private, mode=0o600)
    write_new(public, f"{_line(key)}\n".encode())


def public_path(path: Path) -> Path:
    """The file with the public line of a private key."""
    return path.with_name(f"{path.name}.pub")


def public_line(path: Path) -> str:
    """The public half of a private key, as one line in OpenSSH's format without a comment.

    Raises:
        InputError: the file is missing, or is not an OpenSSH private key on secp384r1 without a passphrase.
    """
    return _line(_private_key(path))


def read_public_line(path: Path) -> str:
    """The public line in a file, without a comment.

    Raises:
        InputError: the file is missing, or is not a public EC key on secp384r1 in OpenSSH's format.
    """
    try:
        line = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"public key = {path}: {_reason(error)}; give the node's .pub file") from None
    if _public_key(line) is None:
        raise InputError(f"public key = {path}: must be one line `ecdsa-sha2-nistp384 ...`, a node's .pub file")
    return " ".join(line.split()[:2])


def sign(private_key_path: Path, message: bytes) -> str:
    """An ECDSA signature with SHA-256 of a message, in base64.

    Raises:
        InputError: the file is missing, or is not an OpenSSH private key on secp384r1 without a passphrase.
    """
    return base64.b64encode(_private_key(private_key_path).sign(message, _DIGEST)).decode()


def verify(public_line: str, message: bytes, signature: str) -> bool:
    """Whether `sign` made this signature of the message with the private half of this key; False if it is malformed.

    Args:
        public_line: one line in OpenSSH's format, with or without a comment.
        message: that was signed.
        signature: in base64.
    """
    key = _public_key(public_line)
    if key is None:
        return False
    try:
        key.verify(base64.b64decode(signature, validate=True), message, _DIGEST)
    except (binascii.Error, ValueError, InvalidSignature):
        return False
    return True


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"key = {path}: {_reason(error)}; give a node's private key") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        raise InputError(f"key = {path}: must be an OpenSSH private key without a passphrase") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"key = {path}: must be an EC key on secp384r1")
    return key


def _public_key(line: str) -> ec.EllipticCurvePublicKey | None:
    try:
        key = load_ssh_public_key(line.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    usable = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)
    return key if usable and "\n" not in line.strip() else None  # type: ignore[return-value]  # `usable` says so


def _line(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "is not text"
