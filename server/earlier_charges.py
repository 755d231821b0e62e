"""The charges that the ledger holds of a run from before it was interrupted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from fedpriv.accounting.views import Release
from fedpriv.ledger.entries import Key


class EarlierCharges:
    """Earlier charges of a run; each of them pays for at most one request after the run is resumed."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._reusable: dict[Key, Release] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key, release: Release, *, reusable: bool) -> None:
        """Remember a charge.

        Args:
            key: of the charge.
            release: that was charged.
            reusable: whether its client repeats the reply to the byte when it gets the same request again.
        """
        self._keys.add(key)
        if reusable:
            self._reusable[key] = release

    def key_for(self, key: Key) -> tuple[Key, bool]:
        """The key to charge a request under, and whether an earlier charge pays for it.

        A client that got the same request before the interruption, and does not repeat its reply, computes another
        release, which needs another key.
        """
        if self._reusable.pop(key, None) is not None:
            return key, True
        while key in self._keys:
            key = replace(key, request=hashlib.sha256(f"{key.request} again".encode()).hexdigest())
        return key, False

    def beside(self, requests: Mapping[int, str], round_: int) -> dict[int, list[Release]]:
        """{client: its reusable charges of the round that its request, of this digest, does not use}, if it has any."""
        unused: dict[int, list[Release]] = {}
        for key, release in self._reusable.items():
            client = int(key.client)
            if key.round == round_ and client in requests and key.request != requests[client]:
                unused.setdefault(client, []).append(release)
        return unused

    def pop_unused(self, up_to: int) -> list[tuple[int, Release]]:
        """(client, release) of each reusable charge of rounds up to this one that no request has used."""
        keys = [key for key in self._reusable if key.round <= up_to]
        return [(int(key.client), self._reusable.pop(key)) for key in keys]
