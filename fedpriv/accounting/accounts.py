"""Every client's account: what it released, and what that cost on each view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedpriv.accounting.curves import Accountant, PrivacySpent, check_delta, spent
from fedpriv.accounting.views import Release, View, default_delta, seen_by


class Accounts:
    """The releases of every client, which may only grow.

    Args:
        num_records: {client: registered N_k}.
        delta: for every client, or None for each client's default, 1/(10 N_k) and at most 1e-5.
    """

    def __init__(self, num_records: Mapping[int, int], delta: float | None = None) -> None:
        if delta is not None:
            check_delta(delta)
        self.deltas = {client: delta or default_delta(size) for client, size in num_records.items()}
        self._releases: dict[int, list[Release]] = {client: [] for client in num_records}

    def record(self, client: int, release: Release) -> None:
        """Charge the client for a release.

        Raises:
            KeyError: the client is not registered.
        """
        self._releases[client].append(release)

    def num_releases(self, client: int) -> int:
        """How many releases the client was charged for."""
        return len(self._releases[client])

    def spent(self, client: int, view: View, accountant: Accountant) -> PrivacySpent:
        """What the client's releases cost so far on the view: composed first, converted once."""
        return spent(seen_by(self._releases[client], view), self.deltas[client], accountant)

    def largest(self, view: View, accountant: Accountant) -> float:
        """The largest epsilon of all clients on the view, each at its own delta."""
        return max((self.spent(client, view, accountant).epsilon for client in self._releases), default=0.0)

    @property
    def clients(self) -> Iterable[int]:
        """The registered clients."""
        return self._releases.keys()
