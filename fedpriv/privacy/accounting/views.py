"""Views of one history: the observer determines which noise counts.

`local` protects against the server, which sees every upload. `rho` has the noise of the DP-LoRA paper's Theorem 1,
scaled by rho_bar, but not its formula; since rho_bar <= 1, its epsilon is never below the `local` one. `aggregate`
protects against those who see only the weighted sums, a participant among them, which knows its own part; it holds only
under the conditions that `aggregate_objections` checks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np

from fedpriv.privacy.accounting.events import Event, SubsampledGaussian
from fedpriv.privacy.accounting.gaussian import SummedGaussian

View = Literal["local", "rho", "aggregate"]
VIEWS: tuple[View, ...] = get_args(View)
# The views that say who is protected against whom; a run can be planned for them.
PlannedView = Literal["local", "aggregate"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """One upload of one client: the event that was charged, and how the other views scale its noise.

    Attributes:
        event: the event on the `local` view, with the effective noise multiplier.
        rho_bar: sqrt(sum rho_j^2) over the clients in the round's sum, in (0, 1].
        aggregate_scale: noise of the round's sum over this client's own, >= 1, see `aggregate_scale`; None if the
            `aggregate` view does not hold.
        num_readers: against how many participants that scale holds, together with the server, >= 0; 0, the server
            alone, where none was counted, as before fedpriv counted them.
        other_holders: (s_j, q_j) of each other holder in the sum at which a person may have records too: the most that
            the person moves its part by, over the same for this client, and its sampling probability; see
            `gaussian.worst_other_holders`.

    Raises:
        ValueError: a value is out of range.
    """

    event: Event
    rho_bar: float
    aggregate_scale: float | None = None
    num_readers: int = 0
    other_holders: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.rho_bar <= 1:
            raise ValueError(f"rho_bar = {self.rho_bar}: must lie in (0, 1]")
        if self.aggregate_scale is not None and not 1 <= self.aggregate_scale < math.inf:
            raise ValueError(f"aggregate_scale = {self.aggregate_scale}: must be finite and >= 1")
        if self.num_readers < 0:
            raise ValueError(f"num_readers = {self.num_readers}: must be >= 0")
        if self.other_holders:
            self._summed()  # which checks each of them

    @property
    def counts_on_others(self) -> bool:
        """Whether the `aggregate` view counts on noise of others, so that `num_readers` matters."""
        return self.aggregate_scale is not None and self.aggregate_scale > 1

    def seen_by(self, view: View) -> Event:
        """The event as the observer of the view sees it; ValueError if the view is unknown or does not hold.

        An event that states no noise counts in full on every view.
        """
        if view not in VIEWS:
            raise ValueError(f"view = {view!r}: must be one of {', '.join(VIEWS)}")
        if view == "rho":
            return self.event.with_noise(self.rho_bar)
        if view == "aggregate":
            if self.aggregate_scale is None:
                raise ValueError("view = aggregate: does not hold for this release, whose upload or steps were visible")
            if self.other_holders:
                return self._summed()
            if self.event.noise_adds_up:
                return self.event.with_noise(self.aggregate_scale)
        return self.event

    def _summed(self) -> Event:
        """The event on the `aggregate` view of a person at other holders too."""
        if not isinstance(self.event, SubsampledGaussian):
            raise ValueError(f"other_holders: what a sum costs with {type(self.event).__name__} is not known")
        return SummedGaussian(
            noise_multiplier=self.event.noise_multiplier * (self.aggregate_scale or 1.0),
            sensitivities=(1.0, *(sensitivity for sensitivity, _ in self.other_holders)),
            sampling_probabilities=(self.event.sampling_probability, *(q for _, q in self.other_holders)),
            count=self.event.count,
            unit=self.event.unit,
        )

    def charged_on(self, view: View) -> Event:
        """The event that counts against a budget on the view: on `aggregate`, an upload that the server saw counts in
        full.
        """
        return self.event if view == "aggregate" and self.aggregate_scale is None else self.seen_by(view)


def rho_bar(weights: Iterable[float]) -> float:
    """sqrt(sum rho_k^2) for aggregation weights rho_k; ValueError unless they sum to 1."""
    weights = tuple(weights)
    if not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights sum to {math.fsum(weights)}: aggregation weights must sum to 1")
    return min(1.0, math.sqrt(math.fsum(weight * weight for weight in weights)))


def smallest_rho_bars(
    sizes: Mapping[int, float], *, of: Iterable[int] | None = None, most: int | None = None
) -> dict[int, float]:
    """For each client, the smallest rho_bar of any round whose sum includes it, whichever other clients drop out.

    In the worst case, the other survivors are always the smallest few. For if x < y, x drops out and y survives, then
    adding x or dropping y lowers rho_bar. Adding x fails to lower it only if x (s1^2 - s2) >= 2 s1 s2,
    and dropping y fails to only if y (t1^2 - t2) <= 2 t1 t2, where s1, s2 are the sums of the sizes and of their
    squares with y, and t1, t2 those without. In units of t1, s1 = 1 + y and s2 = t2 + y^2, so the first, with y for x,
    gives y (1 - 3 t2) - 2 y^3 > 2 t2, and the second is 2 t2 >= y (1 - t2); together -y t2 > y^3: a contradiction.

    Args:
        sizes: {client: m_k > 0} of the clients in the round, to which its weight rho_k is in proportion.
        of: the clients whose smallest rho_bar is wanted; None stands for all.
        most: a sum never has more uploads than this, so no rho_bar is below 1 / sqrt(most); None if there is no limit.
    """
    wanted = sizes.keys() if of is None else set(of)
    floor = 0.0 if most is None else 1 / math.sqrt(most)
    values = np.sort(np.fromiter(sizes.values(), dtype=float, count=len(sizes)))
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    of_whole = np.minimum.accumulate((squares / sums**2)[::-1])[::-1]

    @cache
    def smallest(own: float) -> float:
        # Prefixes that contain a client of this size, and shorter ones, to which it is added.
        i = int(np.searchsorted(values, own))
        added = (squares[:i] + own**2) / (sums[:i] + own) ** 2
        ratio = min(of_whole[i], added.min(initial=1.0))
        # Slightly less, so that the rho_bar of the actual round never rounds to below it.
        return min(1.0, max(floor, math.sqrt(ratio))) * (1 - 1e-12)

    return {client: smallest(float(sizes[client])) for client in wanted}


def num_readers(colluding: int) -> int:
    """max(c, 1): how many participants may read a sum without their own noise in it, where c >= 0 may collude.

    Every participant learns the sum, since the next model shows it, and knows its own vector. So one that colludes with
    nobody reads as much as one that colludes with the server, and is one of the c who do.
    """
    return max(colluding, 1)


def aggregate_scale(weights: Mapping[int, float], client: int, *, colluding: int = 0) -> float:
    """The noise of a round's sum relative to the client's own noise, for equal z, C and learning rate.

    sqrt(sum_j v_j^2) / v_k over the clients whose noise counts: all those in the sum except `num_readers` others,
    assumed to be the ones with the largest noise, who subtract it.

    Guarantee: the view of the server and any so many participants is a function of the remaining vectors' sum, of what
    they know without it, and of public values. Its only noise on the client's records is that of the remaining
    vectors, which are independent, so at least this many times the client's own. The proof is in
    `docs/appendices/secure_sums.md`.

    Args:
        weights: {client: v_j > 0} of the clients in the sum, including this one: what one clipped gradient, and noise
            of scale z C, count for in the sum, up to a common factor. That is rho_j / B_j with the expected batch size,
            or rho_j under the clipping rule `batch`.
        colluding: number of other clients assumed to collude with the server, >= 0.
    """
    others = sorted(weight for other, weight in weights.items() if other != client)
    honest = others[: max(0, len(others) - num_readers(colluding))]
    return max(1.0, math.hypot(*honest, weights[client]) / weights[client])


def smallest_aggregate_scales(weights: Mapping[int, float], *, threshold: int, colluding: int = 0) -> dict[int, float]:
    """For each client, the smallest `aggregate_scale` of any sum of at least `threshold` uploads that includes it.

    In the worst case the other survivors have the smallest weights, and those among them with the largest read the sum.

    Args:
        weights: {client: v_j > 0} of all clients that may be in a sum.
        threshold: no sum of fewer uploads is ever seen, >= 1.
        colluding: as for `aggregate_scale`.
    """
    num_honest = max(0, min(threshold, len(weights)) - 1 - num_readers(colluding))
    ordered = sorted(weights, key=lambda client: weights[client])
    squares = np.array([weights[client] for client in ordered]) ** 2
    sums = np.append(0.0, np.cumsum(squares))
    smallest = {}
    for i, client in enumerate(ordered):
        others = sums[num_honest + 1] - squares[i] if i <= num_honest else sums[num_honest]
        # Slightly less, so that the scale of the actual round never rounds to below it.
        smallest[client] = max(1.0, math.sqrt(1 + others / squares[i]) * (1 - 1e-12))
    return smallest


def least_readers(releases: Iterable[Release]) -> int | None:
    """The number of participants, with the server, against whom all these hold on the `aggregate` view; None for all.

    A release that counts on nobody else's noise holds against all.
    """
    return min((release.num_readers for release in releases if release.counts_on_others), default=None)


def readers_label(num_readers: int | None) -> str:
    """The observers against whom the `aggregate` view protects, in words."""
    if num_readers is None:
        return "the server and all other participants"
    if num_readers == 0:
        return "the server alone"
    return f"the server and any {'one participant' if num_readers == 1 else f'{num_readers} participants'}"


def aggregate_objections(
    *,
    local_steps: int,
    optimizer: str,
    noise_on: str,
    linear: bool,
    secure_aggregation: bool,
    norms_limited: bool = False,
    mechanism: str = "",
    noise_adds_up: bool = True,
) -> tuple[str, ...]:
    """Why the `aggregate` view does not hold for a run, one line per failing condition; empty if it holds.

    Args:
        local_steps: steps in a round.
        optimizer: optimizer of the local update. The server's own does not matter: it steps from the sum, which is
            all that the observer sees anyway.
        noise_on: `gradients`, where the sum is of one step's gradients, or `upload`, where it is of noised updates.
        linear: whether the global adapter is a linear weighted sum of the uploads.
        secure_aggregation: whether the server learns nothing but sums.
        norms_limited: whether the server measures every upload and refuses those with a large norm.
        mechanism: name of the mechanism.
        noise_adds_up: whether the sum of the clients' noise follows the same kind of distribution.
    """
    on_upload = noise_on == "upload"
    conditions = {
        f"local_steps = {local_steps}: needs 1, since later steps depend on the client's own noise": (
            on_upload or local_steps == 1
        ),
        f"optimizer = {optimizer}: needs sgd, whose step is linear in the noise": on_upload or optimizer == "sgd",
        f"mechanism = {mechanism}: needs one whose sum is of the same kind": noise_adds_up,
        "aggregation: needs a linear weighted sum, and upload_codec = float32": linear,
        "secure_aggregation = false: the server sees every upload": secure_aggregation,
        "max_update_norm: needs none, since nobody sees an update to measure": not norms_limited,
    }
    return tuple(objection for objection, holds in conditions.items() if not holds)


def default_delta(num_records: int) -> float:
    """1 / (10 N_k), at most 1e-5."""
    if num_records < 1:
        raise ValueError(f"num_records = {num_records}: must be >= 1")
    return min(1e-5, 1 / (10 * num_records))
