"""A node's state between two exchanges as a text, for a program that is started for each message.

The text holds the secrets of an attempt: its keeper must seal it. It is read strictly, by the code that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedpriv.secure_aggregation import _client as node
from fedpriv.secure_aggregation import _wire
from fedpriv.secure_aggregation._masks import KEY_BYTES, SEED_BYTES, Shares, Sign, Verify
from fedpriv.secure_aggregation._messages import transcript_of
from fedpriv.secure_aggregation._terms import terms_from_text

State = node.Advertised | node.Shared | node.Masked | node.Confirmed


def state_text(state: State) -> str:
    """A state as JSON, with its secrets; what signs and verifies is left out."""
    return json.dumps(_values(state), allow_nan=False)


def state_from_text(text: str, *, sign: Sign, verify: Verify) -> State:
    """The state that `state_text` wrote.

    Args:
        text: written by this code, and not changed since.
        sign: signs with the node's registered key.
        verify: checks signatures.

    Raises:
        ValueError: a part is malformed.
    """
    values = json.loads(text)
    state: State = (begun := _advertised(values, sign, verify))
    if "advertisements" in values:
        state = _shared(values, begun)
        if "held" in values:
            state = node.Masked(shared=state, held=_shares_by_client(values["held"]))
            if "survivors" in values:
                state = node.Confirmed(masked=state, survivors=tuple(values["survivors"]))
    return state


def _values(state: State) -> dict[str, Any]:
    if isinstance(state, node.Confirmed):
        return _values(state.masked) | {"survivors": list(state.survivors)}
    if isinstance(state, node.Masked):
        return _values(state.shared) | {"held": {client: _texts(each) for client, each in state.held.items()}}
    if isinstance(state, node.Shared):
        return _values(state.begun) | {
            "advertisements": _wire.advertisements_text(state.advertisements),
            "own": _texts(state.own),
        }
    return {
        "terms": state.terms.text(),
        "client": state.client,
        "advertisement": _wire.advertisement_text(state.advertisement),
        "encryption_private": state.encryption_private.hex(),
        "self_seed": state.self_seed.hex(),
        "mask_seed": state.mask_seed.hex(),
    }


def _advertised(values: Mapping[str, Any], sign: Sign, verify: Verify) -> node.Advertised:
    return node.Advertised(
        terms=terms_from_text(values["terms"]),
        client=values["client"],
        sign=sign,
        verify=verify,
        encryption_private=_secret(values["encryption_private"], KEY_BYTES),
        self_seed=_secret(values["self_seed"], SEED_BYTES),
        mask_seed=_secret(values["mask_seed"], SEED_BYTES),
        advertisement=_wire.advertisement_from_text(values["advertisement"]),
    )


def _shared(values: Mapping[str, Any], begun: node.Advertised) -> node.Shared:
    advertisements = _wire.advertisements_from_text(values["advertisements"])
    return node.Shared(
        begun=begun,
        advertisements=advertisements,
        transcript=transcript_of(begun.terms, advertisements),
        own=_shares(values["own"]),
    )


def _texts(shares: Shares) -> list[str]:
    return [shares.self_seed.hex(), shares.mask_seed.hex()]


def _shares(texts: list[str]) -> Shares:
    of_self, of_mask = (_secret(each, SEED_BYTES) for each in texts)
    return Shares(self_seed=of_self, mask_seed=of_mask)


def _shares_by_client(values: Mapping[str, list[str]]) -> dict[int, Shares]:
    return {int(client): _shares(texts) for client, texts in values.items()}


def _secret(text: str, size: int) -> bytes:
    secret = bytes.fromhex(text)
    if len(secret) != size:
        raise ValueError(f"secret: is {len(secret)} bytes, must be {size}")
    return secret
