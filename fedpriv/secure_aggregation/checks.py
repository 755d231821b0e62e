"""What a message must satisfy before a node or the server goes on; everything else is refused by name."""

from __future__ import annotations

import hmac
from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.secure_aggregation.agreement import DIGEST_BYTES, KEY_BYTES, agree
from fedpriv.secure_aggregation.errors import ProtocolError, TooFewError
from fedpriv.secure_aggregation.identities import Verify
from fedpriv.secure_aggregation.messages import Advertisement, advertised
from fedpriv.secure_aggregation.terms import Terms

# The public keys that agree on zero do so with every private key, and so with this one.
_ANY_PRIVATE_KEY = bytes(KEY_BYTES)


def check_advertisements(
    terms: Terms, advertisements: Mapping[int, Advertisement], verify: Verify, *, trusted: int | None = None
) -> None:
    """Refuse advertisements that no honest server would pass on; `trusted` is a client whose signature needs no check.

    Raises:
        ProtocolError: one is of an unknown or another client, has a key of the wrong form or one that occurs twice, or
            is not signed by its client for these terms; or a key agrees on zero with everyone.
        TooFewError: they are fewer than the threshold.
    """
    check_members("advertisements", list(advertisements), terms.by_client, terms)
    owners: dict[bytes, int] = {}
    for client, shown in advertisements.items():
        check_advertisement(terms, client, shown, None if client == trusted else verify)
        for key in (shown.encryption_key, shown.mask_key):
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
        agree(_ANY_PRIVATE_KEY, key, client)
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


def check_values(values: NDArray[np.int64], terms: Terms) -> None:
    """Refuse values that are not int64 [d]."""
    if values.dtype != np.int64 or values.shape != (terms.dimension,):
        raise ProtocolError(f"values: are {values.dtype} {values.shape}, must be int64 ({terms.dimension},)")
