"""A node's two key pairs: one shows the node to the SuperLink, the other one signs what its vault says.

They have different types, so neither stands for the other: the program that connects to the SuperLink, and whose user
runs the coordinator's code, holds the first, and what that signs is no word of the vault's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedpriv.errors import InputError
from fedpriv.files import User, read_text, replace_file

Kind = Literal["ecdsa-sha2-nistp384", "ssh-ed25519"]
"""The type of a key, with which its public line begins."""

NODE: Kind = "ecdsa-sha2-nistp384"
"""The kind of node.key, with which the SuperNode connects: ECDSA on secp384r1, as Flower's authentication wants."""

VAULT: Kind = "ssh-ed25519"
"""The kind of vault.key, which never leaves the vault and signs all that it says."""

EARLIER = ".earlier"
"""In place of `.pub`, ends the name of a file with the public lines of a node's earlier keys, which signed for it."""

_FILES = {NODE: "node.key.pub", VAULT: "vault.key.pub"}
_DIGEST = ec.ECDSA(hashes.SHA256())

_Private = ec.EllipticCurvePrivateKey | Ed25519PrivateKey
_Public = ec.EllipticCurvePublicKey | Ed25519PublicKey


def make_key_pair(path: Path, kind: Kind = VAULT, *, owner: User | None = None, replaces: bool = False) -> None:
    """Write a new private key to `path`, readable only by its owner, and its public line to `path`.pub.

    Both are in OpenSSH's format. The private key comes first, and the public line follows from it.

    Args:
        owner: whose files they become; None stands for the user of this process.
        replaces: whether an old pair, if there is one, is overwritten.

    Raises:
        InputError: one of the two files exists, and is not to be replaced.
    """
    for file in () if replaces else (path, public_path(path)):
        if file.exists():
            raise InputError(f"key = {file}: exists; give another path, or move the old key away first")
    key: _Private = Ed25519PrivateKey.generate() if kind == VAULT else ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    replace_file(path, private, mode=0o600, owner=owner)
    replace_file(public_path(path), f"{line_of(key)}\n".encode(), owner=owner)


def coordinators(node_keys: Path) -> Path:
    """The coordinator's private key, which signs for the sums of its runs: beside the folder with its nodes' keys."""
    return node_keys.with_name("coordinator.key")


def public_path(path: Path) -> Path:
    """The file with the public line of a private key."""
    return path.with_name(f"{path.name}.pub")


def public_line(path: Path) -> str:
    """The public half of a private key, as one line in OpenSSH's format without a comment.

    Raises:
        InputError: the file is missing, or is no OpenSSH private key of a `Kind` without a passphrase.
    """
    return line_of(private_key(path))


def read_public_line(path: Path, kind: Kind | None = VAULT) -> str:
    """The public line in a file, without a comment.

    Args:
        kind: that the key must have; None accepts each.

    Raises:
        InputError: the file is missing, or holds no public key of this kind in OpenSSH's format.
    """
    wanted = _FILES[kind] if kind else ".pub file"
    try:
        line = read_text(path).strip()
    except (OSError, InputError) as error:
        raise InputError(f"public key = {path}: {_reason(error)}; give the node's {wanted}") from None
    if _public_key(line) is None:
        raise InputError(f"public key = {path}: must be one line `{kind or VAULT} ...`, a node's {wanted}")
    if kind is not None and (found := kind_of(line)) != kind:
        raise InputError(f"public key = {path}: is a {found} key, as in a {_FILES[found]}; give the {wanted}")
    return " ".join(line.split()[:2])


def read_lines(path: Path) -> tuple[str, ...]:
    """The public lines in a file, of each kind; none if there is no file.

    Raises:
        InputError: a line is no public key.
    """
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()] if path.exists() else []
    except (OSError, InputError) as error:
        raise InputError(f"public keys = {path}: {_reason(error)}") from None
    if wrong := [number for number, line in enumerate(lines, start=1) if _public_key(line) is None]:
        raise InputError(f"public keys = {path}: line {wrong[0]} is no public key `{VAULT} ...` or `{NODE} ...`")
    return tuple(" ".join(line.split()[:2]) for line in lines)


def files_of_nodes(folder: Path, suffix: str = ".pub") -> dict[int, Path]:
    """{partition id: file} of the files in a folder that are named by one."""
    return {int(file.stem): file for file in folder.glob(f"*{suffix}") if file.stem.isdigit()}


def add_line(path: Path, public_line: str, *, owner: User | None = None) -> None:
    """Add a line to a file that `read_lines` reads, unless it is there; for `owner` see `make_key_pair`."""
    lines = dict.fromkeys((*read_lines(path), public_line))
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(), owner=owner)


def fingerprint(text: str) -> str:
    """Five groups of four letters and digits, 100 bits, that stand for a text such as a public line.

    Two people can compare them by telephone, and nobody finds another text that has them.

    They are the first bits of SHA-256, in base32, which has none of 0, 1, 8 and 9.

    Source: Josefsson 2006.
    """
    letters = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode()
    return "-".join(letters[start : start + 4] for start in range(0, 20, 4))


def kind_of(public_line: str) -> Kind:
    """The kind of the key in a public line that `read_public_line` returned."""
    return NODE if public_line.startswith(f"{NODE} ") else VAULT


def is_public_line(text: object, kind: Kind = VAULT) -> bool:
    """Whether this is the public line of a key of this kind, in the one way to write it: so two texts are two keys."""
    key = _public_key(text) if type(text) is str else None
    return key is not None and text == (line := line_of(key)) and kind_of(line) == kind


def sign(private_key_path: Path, message: bytes) -> str:
    """A signature of a message, in base64: Ed25519, or ECDSA with SHA-256 by a key of the other kind.

    Raises:
        InputError: the file is missing, or is no OpenSSH private key of a `Kind` without a passphrase.
    """
    key = private_key(private_key_path)
    signature = key.sign(message) if isinstance(key, Ed25519PrivateKey) else key.sign(message, _DIGEST)
    return base64.b64encode(signature).decode()


def verify(public_line: str, message: bytes, signature: str) -> bool:
    """Whether `sign` made this signature of the message with the private half of this key; False if it is malformed.

    Args:
        public_line: one line in OpenSSH's format, with or without a comment.
        signature: in base64.
    """
    key = _public_key(public_line)
    if key is None:
        return False
    try:
        decoded = base64.b64decode(signature, validate=True)
        if isinstance(key, Ed25519PublicKey):
            key.verify(decoded, message)
        else:
            key.verify(decoded, message, _DIGEST)
    except (binascii.Error, ValueError, InvalidSignature):
        return False
    return True


def line_of(key: _Private | _Public) -> str:
    """The public line of a key in memory."""
    public = key if isinstance(key, _Public) else key.public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def private_key(path: Path) -> _Private:
    """The private key in a file.

    Raises:
        InputError: the file is missing, or is no OpenSSH private key of a `Kind` without a passphrase.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"key = {path}: {_reason(error)}; give a node's private key") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        raise InputError(f"key = {path}: must be an OpenSSH private key without a passphrase") from None
    if isinstance(key, Ed25519PrivateKey) or (
        isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)
    ):
        return key
    raise InputError(f"key = {path}: must be an Ed25519 key, or an EC key on secp384r1")


def _public_key(line: str) -> _Public | None:
    try:
        key = load_ssh_public_key(line.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    if "\n" in line.strip():
        return None
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)
    ):
        return key
    return None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "is not text"
