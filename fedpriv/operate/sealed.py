"""A file that somebody carries from one machine to another: sealed for its reader, and signed by its writer.

    mark | lengths of header and body | header in JSON | body | signature of all before it

Both sides have keys on secp384r1, as node.key and a coordinator's server.key are. A fresh key of each file agrees with
the reader's (ECDH), and HKDF makes of that the key of ChaCha20-Poly1305, which so seals one body, under the header.
Nothing is compressed or unpickled: a file takes the memory of its bytes.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedpriv.errors import InputError
from fedpriv.texts import printable

Private: TypeAlias = ec.EllipticCurvePrivateKey
Public: TypeAlias = ec.EllipticCurvePublicKey
CURVE, _SIGNED = ec.SECP384R1(), ec.ECDSA(hashes.SHA384())

_MARK = b"fedpriv sealed 1\n"
_LENGTHS = struct.Struct(">II")
_PREFIX_BYTES, _POINT_BYTES, _NUMBER_BYTES, _TAG_BYTES = len(_MARK) + _LENGTHS.size, 97, 48, 16
_MOST_HEADER_BYTES, _MOST_BODY_BYTES = 2**14, 2**29 + 2**22  # a frame's arrays, and its headers
_NONCE = bytes(12)  # a key seals once


@dataclass(frozen=True)
class Sealed:
    """A file as it came; before `opened`, its header is nobody's word."""

    name: str
    header: Mapping[str, Any]
    head: bytes = field(repr=False)
    body: bytes = field(repr=False)
    signature: bytes = field(repr=False)

    def opened(self, reader: Private, writer: Public) -> bytes:
        """The content that the writer has sealed for the reader.

        Raises:
            InputError: the writer did not sign it, or it is sealed for another reader.
        """
        numbers = (int.from_bytes(self.signature[i : i + _NUMBER_BYTES], "big") for i in (0, _NUMBER_BYTES))
        try:
            writer.verify(utils.encode_dss_signature(*numbers), self.head + self.body, _SIGNED)
        except InvalidSignature:
            raise InputError(f"{self.name}: was changed on its way, or is signed by another key") from None
        point, sealed = self.body[:_POINT_BYTES], self.body[_POINT_BYTES:]
        try:
            return _box(reader, Public.from_encoded_point(CURVE, point), point).decrypt(_NONCE, sealed, self.head)
        except (InvalidTag, ValueError):
            raise InputError(f"{self.name}: is sealed for another reader") from None


def seal(header: Mapping[str, Any], content: bytes, *, reader: Public, writer: Private) -> bytes:
    """The bytes of a file that `read` and `Sealed.opened` take."""
    own, told = ec.generate_private_key(CURVE), json.dumps(header).encode()
    head = _MARK + _LENGTHS.pack(len(told), _POINT_BYTES + len(content) + _TAG_BYTES) + told
    point = encoded(own.public_key())
    signed = head + point + _box(own, reader, point).encrypt(_NONCE, content, head)
    numbers = utils.decode_dss_signature(writer.sign(signed, _SIGNED))
    return signed + b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers)


def encoded(key: Public) -> bytes:
    """A public key as a point, 97 bytes, which `ec.EllipticCurvePublicKey.from_encoded_point` reads."""
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _box(own: Private, other: Public, point: bytes) -> ChaCha20Poly1305:
    hkdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_MARK + point)
    return ChaCha20Poly1305(hkdf.derive(own.exchange(ec.ECDH(), other)))


def read(path: Path) -> Sealed:
    """The file at a path where others may write.

    Raises:
        InputError: it is no such file, or not whole, for instance since it is still being copied.
    """
    name = printable(path)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX_BYTES) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
            if not prefix.startswith(_MARK) or len(prefix) < _PREFIX_BYTES:
                raise InputError(f"{name}: is no file of `post` or `answer`, or not whole yet")
            told, body = _LENGTHS.unpack(prefix[len(_MARK) :])
            whole = _PREFIX_BYTES + told + body + 2 * _NUMBER_BYTES
            if told > _MOST_HEADER_BYTES or not _POINT_BYTES <= body <= _MOST_BODY_BYTES:
                raise InputError(f"{name}: states {whole} bytes, which no file of `post` or `answer` has")
            if size != whole:
                raise InputError(f"{name}: has {size} of {whole} bytes; wait until it is copied, or copy it again")
            head, parts = prefix + file.read(told), (file.read(body), file.read(2 * _NUMBER_BYTES))
        header = json.loads(head[_PREFIX_BYTES:])
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}; must be a file, and no link") from None
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise InputError(f"{name}: its header is not JSON") from None
    return Sealed(name, header if isinstance(header, dict) else {}, head, *parts)
