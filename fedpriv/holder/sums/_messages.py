"""Messages that participants send each other through the server: the bytes that they sign, their texts, and the checks.

A message that fails a check is refused by name before a node or the server goes on. Texts are JSON, strictly read:
clients are keys in decimal, bytes are base64, and a masked vector alone travels as an array. Every `..._from_text`
raises a ProtocolError of one line for a text that is too long, has other fields, names a client twice, or writes a
client or bytes in an unusual way.
"""

from __future__ import annotations

import binascii
import hmac
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedpriv.holder.sums._masks import (
    COMMITMENT_BYTES,
    DIGEST_BYTES,
    KEY_BYTES,
    SEALED_BYTES,
    SEED_BYTES,
    Verify,
    context,
    derive,
    digest,
)
from fedpriv.holder.sums._terms import (
    MAX_CLIENT,
    MAX_PARTICIPANTS,
    ProtocolError,
    Terms,
    TooFewError,
    exactly,
    integer,
    parsed_object,
    shown,
)

MAX_SIGNATURE = 200
MAX_RECEIPTS = 8
"""Receipts that an advertisement holds at most."""

MAX_RECEIPT = 1500
"""Characters of one such receipt at most."""

_CLIENT = re.compile(r"0|[1-9][0-9]{0,9}")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Advertisement:
    """Two fresh public keys of a participant, signed with its registered key.

    Attributes:
        client: whose keys they are.
        encryption_key: X25519 public key for sealing shares, 32 bytes.
        mask_key: X25519 public key for masks, 32 bytes.
        self_commitment: hash of the self-mask's seed, 32 bytes; a sum that would be made with another seed is refused.
        signature: of `advertised(terms, self)`, in base64.
        receipts: texts for the participant's peers, which the protocol does not read; nobody on the way can drop one.
    """

    client: int
    encryption_key: bytes
    mask_key: bytes
    self_commitment: bytes
    signature: str
    receipts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """The dealers whose shares a participant cannot use, told before anything is masked.

    Attributes:
        dealers: clients that sealed shares for it which do not open, or do not fit their hashes.
        opening: the 32-byte private key of this attempt for sealed shares, with which the server tries them itself;
            empty without complaints. Who gives it away takes no further part.
    """

    dealers: tuple[int, ...] = ()
    opening: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """The shares of its peers' seeds that a participant gives away: of each peer one of the two, never both.

    Attributes:
        client: who reveals.
        self_shares: {survivor: 16-byte share of its self-mask's seed}.
        mask_shares: {client that shared but sent no masked vector: 16-byte share of its mask key's seed}.
    """

    client: int
    self_shares: Mapping[int, bytes] = field(repr=False)
    mask_shares: Mapping[int, bytes] = field(repr=False)


def advertised(terms: Terms, advertisement: Advertisement) -> bytes:
    """The bytes that the signature of an advertisement signs: the attempt, all its terms, the client and its keys."""
    return context(
        "advertisement",
        terms.run.encode(),
        terms.round,
        terms.attempt.encode(),
        terms.digest(),
        advertisement.client,
        advertisement.encryption_key,
        advertisement.mask_key,
        advertisement.self_commitment,
        *(receipt.encode(errors="surrogatepass") for receipt in advertisement.receipts),
    )


def transcript_of(terms: Terms, advertisements: Mapping[int, Advertisement]) -> bytes:
    """Digest [32 bytes] of the terms and of all keys that a node was shown; it differs between any two sessions.

    Signatures of a list of survivors hold for one transcript. So those of an earlier session under the same terms are
    of no use, and nodes that were shown different keys do not confirm a list together.
    """
    parts: list[bytes | int] = []
    for client in sorted(advertisements):
        shown = advertisements[client]
        parts += [client, shown.encryption_key, shown.mask_key, shown.self_commitment]
    return digest("transcript", terms.digest(), *parts)


def confirmed(transcript: bytes, survivors: Iterable[int]) -> bytes:
    """The bytes that a participant signs when it confirms a list of survivors."""
    return context("survivors", transcript, *sorted(survivors))


def self_commitment(seed: bytes, client: int, terms: Terms) -> bytes:
    """Hash of a self-mask's seed [32 bytes]; the seed's 128 bits hide it."""
    return digest("self mask seed", terms.digest(), client, seed)


def mask_private_key(seed: bytes, client: int, terms: Terms) -> bytes:
    """The X25519 private key for masks that a 16-byte seed gives [32 bytes]; so Shamir shares 16 bytes."""
    return derive(seed, context("mask key", terms.digest(), client))


def check_advertisements(
    terms: Terms, advertisements: Mapping[int, Advertisement], verify: Verify, *, trusted: int | None = None
) -> None:
    """Refuse advertisements that no honest server would pass on; `trusted` is a client whose signature needs no check.

    Raises:
        ProtocolError: one is of an unknown or another client, has a key of the wrong form or one that occurs twice, or
            is not signed by its client for these terms.
        TooFewError: they are fewer than the threshold.
    """
    check_members("advertisements", list(advertisements), terms.by_client, terms)
    owners: dict[bytes, int] = {}
    for client, each in advertisements.items():
        check_advertisement(terms, client, each, None if client == trusted else verify)
        for key in (each.encryption_key, each.mask_key):
            if key in owners:
                raise ProtocolError(f"client {client}: one of its keys is also a key of client {owners[key]}")
            owners[key] = client


def check_advertisement(terms: Terms, client: int, shown: Advertisement, verify: Verify | None) -> None:
    """Refuse one advertisement by name; None leaves its signature unchecked.

    Raises:
        ProtocolError: see `check_advertisements`.
    """
    participant = terms.participant(client)
    if shown.client != client:
        raise ProtocolError(f"client {client}: its advertisement names client {shown.client}")
    for key in (shown.encryption_key, shown.mask_key):
        # X25519 ignores the highest bit, so a key with it set would be another key's second name.
        if len(key) != KEY_BYTES or key[-1] >> 7:
            raise ProtocolError(f"client {client}: its keys must be X25519 public keys of {KEY_BYTES} bytes")
    if len(shown.self_commitment) != DIGEST_BYTES:
        raise ProtocolError(f"client {client}: its commitment must be {DIGEST_BYTES} bytes")
    if verify is not None and not verify(participant.identity, advertised(terms, shown), shown.signature):
        raise ProtocolError(f"client {client}: its registered key did not sign these keys for these terms")


def check_approved(terms: Terms, client: int, approved: Mapping[int, str]) -> None:
    """Refuse terms with a peer of this client that is not among the approved {client: public line}.

    Raises:
        ProtocolError: a peer is not approved, or is approved with another identity.
    """
    for peer, participant in terms.by_client.items():
        if peer == client:
            continue
        if peer not in approved:
            raise ProtocolError(f"client {peer}: this node's operator has not approved it as a peer")
        if not hmac.compare_digest(approved[peer].encode(), participant.identity.encode()):
            raise ProtocolError(f"client {peer}: its identity is not the one that this node's operator approved")


def check_members(name: str, clients: Sequence[int], among: Container[int], terms: Terms) -> None:
    """Refuse a list that names a client twice or an unknown one, or that is shorter than the threshold.

    Raises:
        ProtocolError: a client is listed twice, or is not among those of the exchange before.
        TooFewError: they are fewer than the threshold.
    """
    seen: set[int] = set()
    for client in clients:
        if client not in among:
            raise ProtocolError(f"{name}: client {client} took no part in the exchange before")
        if client in seen:
            raise ProtocolError(f"{name}: client {client} is listed twice")
        seen.add(client)
    if len(clients) < terms.threshold:
        raise TooFewError(f"{name}: are of {len(clients)} clients, must be of at least {terms.threshold}")


def advertisement_text(advertisement: Advertisement) -> str:
    """One node's advertisement, from node to server."""
    return _dumps(_advertisement_values(advertisement) | {"client": advertisement.client})


def advertisement_from_text(text: str) -> Advertisement:
    """The advertisement that `advertisement_text` wrote."""
    values = parsed_object("advertisement", text)
    receipts = {"receipts": values.pop("receipts")} if "receipts" in values else {}
    values = exactly("advertisement", values, {"client", "signature", *_SIZES}) | receipts
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
    values = exactly("complaint", parsed_object("complaint", text), {"dealers", "opening"})
    dealers = _listed("dealers", values["dealers"])
    opening = _bytes("complaint: opening", values["opening"], KEY_BYTES if dealers else 0)
    return Complaint(dealers=tuple(dealers), opening=opening)


def survivors_text(survivors: Iterable[int]) -> str:
    """The list of survivors, from server to nodes."""
    return _dumps({"survivors": sorted(survivors)})


def survivors_from_text(text: str) -> list[int]:
    """The clients that `survivors_text` wrote; whether a client is listed twice is for `confirm` to say."""
    return _listed("survivors", exactly("survivors", parsed_object("survivors", text), {"survivors"})["survivors"])


def signature_text(signature: str) -> str:
    """One node's signature of the survivors, from node to server."""
    return _dumps({"signature": signature})


def signature_from_text(text: str) -> str:
    """The signature that `signature_text` wrote."""
    values = exactly("signature", parsed_object("signature", text), {"signature"})
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
    values = exactly("reveal", parsed_object("reveal", text), {"client", "self_shares", "mask_shares"})

    def shares(name: str) -> dict[int, bytes]:
        return _clients(name, values[name], lambda peer, part: _bytes(f"{name}: client {peer}", part, SEED_BYTES))

    return Reveal(
        client=integer("reveal: client", values["client"], 0, MAX_CLIENT),
        self_shares=shares("self_shares"),
        mask_shares=shares("mask_shares"),
    )


# {field of an advertisement that holds bytes: how many}
_SIZES = {"encryption_key": KEY_BYTES, "mask_key": KEY_BYTES, "self_commitment": DIGEST_BYTES}


def _advertisement_values(advertisement: Advertisement) -> dict[str, Any]:
    receipts = {"receipts": list(advertisement.receipts)} if advertisement.receipts else {}
    encoded = {field: _encoded(getattr(advertisement, field)) for field in _SIZES}
    return receipts | encoded | {"signature": advertisement.signature}


def _advertisement(client: int, value: Any) -> Advertisement:
    name = f"client {client}'s advertisement"
    receipts = value.pop("receipts", []) if type(value) is dict else []
    values = exactly(name, value, {*_SIZES, "signature"})
    if type(receipts) is not list or len(receipts) > MAX_RECEIPTS:
        raise ProtocolError(f"{name}: receipts = {shown(receipts)}: must be a list of at most {MAX_RECEIPTS}")
    if not all(type(each) is str and len(each) <= MAX_RECEIPT for each in receipts):
        raise ProtocolError(f"{name}: receipts: must be texts of at most {MAX_RECEIPT} characters")
    return Advertisement(
        client=client,
        **{field: _bytes(f"{name}: {field}", values[field], size) for field, size in _SIZES.items()},
        signature=_short(f"{name}: signature", values["signature"]),
        receipts=tuple(receipts),
    )


def _dumps(value: Mapping[Any, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _encoded(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _bytes(name: str, value: Any, size: int) -> bytes:
    """Bytes from base64 in its one canonical form, of this size: what is read leniently must be written the same."""
    try:
        decoded = binascii.a2b_base64(value) if type(value) is str else b""
    except ValueError:
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
