"""The protocol's messages as JSON texts, strictly read; a masked vector alone travels as an array.

Clients are keys in decimal, bytes are base64. Every `..._from_text` raises a ProtocolError of one line for a text that
is too long, has other fields, names a client twice, or writes a client or bytes in an unusual way.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fedpriv.holder.sums._masks import COMMITMENT_BYTES, DIGEST_BYTES, KEY_BYTES, SEALED_BYTES, SEED_BYTES
from fedpriv.holder.sums._messages import Advertisement, Complaint, Reveal
from fedpriv.holder.sums._terms import MAX_CLIENT, MAX_PARTICIPANTS, ProtocolError, integer, parsed_object, shown

MAX_SIGNATURE = 200
MAX_RECEIPTS = 8
"""Receipts that an advertisement holds at most."""

MAX_RECEIPT = 1500
"""Characters of one such receipt at most."""

_CLIENT = re.compile(r"0|[1-9][0-9]{0,9}")
T = TypeVar("T")


def advertisement_text(advertisement: Advertisement) -> str:
    """One node's advertisement, from node to server."""
    return _dumps(_advertisement_values(advertisement) | {"client": advertisement.client})


def advertisement_from_text(text: str) -> Advertisement:
    """The advertisement that `advertisement_text` wrote."""
    values = parsed_object("advertisement", text)
    receipts = {"receipts": values.pop("receipts")} if "receipts" in values else {}
    values = _exactly("advertisement", values, {"client", *_ADVERTISED}) | receipts
    return _advertisement(integer("advertisement: client", values.pop("client"), 0, MAX_CLIENT), values)


def advertisements_text(advertisements: Mapping[int, Advertisement]) -> str:
    """All advertisements, from server to nodes."""
    return _dumps({client: _advertisement_values(shown) for client, shown in advertisements.items()})


def advertisements_from_text(text: str) -> dict[int, Advertisement]:
    """{client: advertisement}, what `advertisements_text` wrote."""
    return _by_client("advertisements", text, _advertisement)


def sealed_text(sealed: Mapping[int, bytes]) -> str:
    """Sealed shares by holder, from node to server, or by sender, from server to node."""
    return _dumps({client: _encoded(part) for client, part in sealed.items()})


def dealt_from_text(text: str, dealer: int) -> dict[int, bytes]:
    """{holder: sealed shares} of one dealer; for itself the commitments alone."""

    def read(holder: int, part: Any) -> bytes:
        return _bytes(f"shares for client {holder}", part, COMMITMENT_BYTES if holder == dealer else SEALED_BYTES)

    return _by_client("shares", text, read)


def sealed_from_text(text: str) -> dict[int, bytes]:
    """{sender: sealed shares} for one holder."""
    return _by_client("shares", text, lambda peer, part: _bytes(f"shares from client {peer}", part, SEALED_BYTES))


def complaint_text(complaint: Complaint) -> str:
    """The dealers whose shares a node cannot use, from node to server."""
    return _dumps({"dealers": list(complaint.dealers), "opening": _encoded(complaint.opening)})


def complaint_from_text(text: str) -> Complaint:
    """The complaint that `complaint_text` wrote."""
    values = _exactly("complaint", parsed_object("complaint", text), {"dealers", "opening"})
    dealers = _listed("dealers", values["dealers"])
    opening = _bytes("complaint: opening", values["opening"], KEY_BYTES if dealers else 0)
    return Complaint(dealers=tuple(dealers), opening=opening)


def survivors_text(survivors: Iterable[int]) -> str:
    """The list of survivors, from server to nodes."""
    return _dumps({"survivors": sorted(survivors)})


def survivors_from_text(text: str) -> list[int]:
    """The clients that `survivors_text` wrote; whether a client is listed twice is for `confirm` to say."""
    return _listed("survivors", _exactly("survivors", parsed_object("survivors", text), {"survivors"})["survivors"])


def signature_text(signature: str) -> str:
    """One node's signature of the survivors, from node to server."""
    return _dumps({"signature": signature})


def signature_from_text(text: str) -> str:
    """The signature that `signature_text` wrote."""
    values = _exactly("signature", parsed_object("signature", text), {"signature"})
    return _short("signature", values["signature"])


def signatures_text(signatures: Mapping[int, str]) -> str:
    """Signatures of the survivors, from server to nodes."""
    return _dumps(signatures)


def signatures_from_text(text: str) -> dict[int, str]:
    """{client: signature}, what `signatures_text` wrote."""
    return _by_client("signatures", text, lambda peer, value: _short(f"signatures: client {peer}", value))


def reveal_text(revealed: Reveal) -> str:
    """The shares that a node reveals, from node to server."""
    parts = {"self_shares": revealed.self_shares, "mask_shares": revealed.mask_shares}
    encoded = {name: {peer: _encoded(share) for peer, share in part.items()} for name, part in parts.items()}
    return _dumps(encoded | {"client": revealed.client})


def reveal_from_text(text: str) -> Reveal:
    """The shares that `reveal_text` wrote."""
    values = _exactly("reveal", parsed_object("reveal", text), {"client", "self_shares", "mask_shares"})

    def shares(name: str) -> dict[int, bytes]:
        return _clients(name, values[name], lambda peer, part: _bytes(f"{name}: client {peer}", part, SEED_BYTES))

    return Reveal(
        client=integer("reveal: client", values["client"], 0, MAX_CLIENT),
        self_shares=shares("self_shares"),
        mask_shares=shares("mask_shares"),
    )


_ADVERTISED = {
    "encryption_key": KEY_BYTES,
    "mask_key": KEY_BYTES,
    "self_commitment": DIGEST_BYTES,
    "signature": MAX_SIGNATURE,
}


def _advertisement_values(advertisement: Advertisement) -> dict[str, Any]:
    receipts = {"receipts": list(advertisement.receipts)} if advertisement.receipts else {}
    return receipts | {
        "encryption_key": _encoded(advertisement.encryption_key),
        "mask_key": _encoded(advertisement.mask_key),
        "self_commitment": _encoded(advertisement.self_commitment),
        "signature": advertisement.signature,
    }


def _advertisement(client: int, value: Any) -> Advertisement:
    name = f"client {client}'s advertisement"
    receipts = value.pop("receipts", []) if type(value) is dict else []
    values = _exactly(name, value, set(_ADVERTISED))
    if type(receipts) is not list or len(receipts) > MAX_RECEIPTS:
        raise ProtocolError(f"{name}: receipts = {shown(receipts)}: must be a list of at most {MAX_RECEIPTS}")
    if not all(type(each) is str and len(each) <= MAX_RECEIPT for each in receipts):
        raise ProtocolError(f"{name}: receipts: must be texts of at most {MAX_RECEIPT} characters")
    return Advertisement(
        client=client,
        encryption_key=_bytes(f"{name}: encryption_key", values["encryption_key"], KEY_BYTES),
        mask_key=_bytes(f"{name}: mask_key", values["mask_key"], KEY_BYTES),
        self_commitment=_bytes(f"{name}: self_commitment", values["self_commitment"], DIGEST_BYTES),
        signature=_short(f"{name}: signature", values["signature"]),
        receipts=tuple(receipts),
    )


def _dumps(value: Mapping[Any, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(name: str, value: Any, size: int) -> bytes:
    """Bytes from base64 in its one canonical form, of this size."""
    try:
        decoded = base64.b64decode(value, validate=True) if type(value) is str else b""
    except (binascii.Error, ValueError):
        decoded = b""
    if len(decoded) != size or _encoded(decoded) != value:
        raise ProtocolError(f"{name} = {shown(value)}: must be {size} bytes in base64")
    return decoded


def _short(name: str, value: Any) -> str:
    if type(value) is not str or len(value) > MAX_SIGNATURE:
        raise ProtocolError(f"{name} = {shown(value)}: must be a text of at most {MAX_SIGNATURE} characters")
    return value


def _listed(name: str, clients: Any) -> list[int]:
    """Clients in any order."""
    if type(clients) is not list or len(clients) > MAX_PARTICIPANTS:
        raise ProtocolError(f"{name} = {shown(clients)}: must be a list of at most {MAX_PARTICIPANTS}")
    return [integer(f"{name}: client", client, 0, MAX_CLIENT) for client in clients]


def _by_client(name: str, text: str, read: Callable[[int, Any], T]) -> dict[int, T]:
    return _clients(name, parsed_object(name, text), read)


def _clients(name: str, values: Any, read: Callable[[int, Any], T]) -> dict[int, T]:
    """{client: what `read` makes of client and value}."""
    if type(values) is not dict or len(values) > MAX_PARTICIPANTS:
        raise ProtocolError(f"{name}: must be an object of at most {MAX_PARTICIPANTS} clients")
    for key in values:
        if not _CLIENT.fullmatch(key):
            raise ProtocolError(f"{name}: {shown(key)} must be a client's number")
    return {int(key): read(int(key), value) for key, value in values.items()}


def _exactly(name: str, value: Any, expected: set[str]) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != expected:
        raise ProtocolError(f"{name} = {shown(value)}: must be an object with {', '.join(sorted(expected))}")
    return value
