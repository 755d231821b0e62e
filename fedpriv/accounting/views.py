"""Views of one history: who observes it decides which noise counts.

`local` protects against the server, which sees every upload. `rho` is the DP-LoRA paper's Theorem 1: the noise
scaled by rho_bar at unit sensitivity. Since rho_bar <= 1 the `rho` epsilon is never below the `local` one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fedpriv.accounting.events import Event

View = Literal["local", "rho"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """One upload of one client: the event that was charged and the rho_bar of its round.

    Attributes:
        event: the event on the `local` view, with the effective noise multiplier.
        rho_bar: sqrt(sum rho_j^2) over the clients that the round selected, in (0, 1].
    """

    event: Event
    rho_bar: float


def rho_bar(weights: Iterable[float]) -> float:
    """sqrt(sum rho_k^2) for aggregation weights rho_k that sum to one.

    Raises:
        ValueError: the weights do not sum to one.
    """
    weights = tuple(weights)
    if not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights sum to {math.fsum(weights)}: aggregation weights must sum to 1")
    return min(1.0, math.sqrt(math.fsum(weight * weight for weight in weights)))


def seen_by(releases: Iterable[Release], view: View) -> list[Event]:
    """The events of a client's releases as the view's observer sees them."""
    if view == "local":
        return [release.event for release in releases]
    return [
        replace(release.event, noise_multiplier=release.rho_bar * release.event.noise_multiplier)
        for release in releases
    ]


def default_delta(num_records: int) -> float:
    """1 / (10 N_k), at most 1e-5."""
    if num_records < 1:
        raise ValueError(f"num_records = {num_records}: must be >= 1")
    return min(1e-5, 1 / (10 * num_records))
