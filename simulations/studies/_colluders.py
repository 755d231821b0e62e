"""The cost of colluders and of a threshold: epsilon against a reader of sums, and the noise that equal epsilon needs.

Equal clients, and the law of the discrete mechanism on the grid that they would have. A client is protected by its own
noise and that of the honest others among t survivors: t - c noises in all, of the K that the accuracy pays for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import sqrt
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from fedpriv.holder.sums import smallest_threshold
from fedpriv.privacy.accounting.accountants import PrivacySpent, epsilon_of
from fedpriv.privacy.accounting.calibration import calibrate, noise_multiplier_for
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.views import Release, num_readers, smallest_aggregate_scales
from fedpriv.privacy.mechanisms.discrete_gaussian import largest_number_included, sum_grid
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest

SAMPLING_PROBABILITY, NUM_STEPS, DELTA = 0.256, 30, 1e-5
TARGET = 2.0
NUM_CLIENTS = (5, 10, 30, 100)

_NUM_RECORDS, _DIMENSION, _CLIP_NORM = 800, 28_000, 0.8


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The members of a sum, and how many of them may collude.

    Attributes:
        clients: K >= 3, whose noise the accuracy pays for.
        threshold: t <= K, survivors that a sum needs.
        colluding: c, at most t - 2; a participant that colludes with nobody reads sums too.
    """

    clients: int
    threshold: int
    colluding: int

    @property
    def honest(self) -> int:
        """t - max(c, 1): clients whose noise protects each of them from those who read the sum and know their own."""
        return self.threshold - num_readers(self.colluding)

    @property
    def noise_over_central(self) -> float:
        """sqrt(K / (t - max(c, 1))): the sum's noise over that of central DP-SGD of equal epsilon, but for the grid."""
        return sqrt(self.clients / self.honest)

    @property
    def is_allowed(self) -> bool:
        """Whether no two disjoint lists of survivors can both be unmasked, and somebody else's noise protects each."""
        return smallest_threshold(self.clients, self.colluding) <= self.threshold <= self.clients


def client_event(num_clients: int, noise_multiplier: float) -> Event:
    """The epsilon of each client against a reader of its own uploads, on the grid that as many equal clients have."""
    clients = range(num_clients)
    grid = sum_grid(
        clip_norm=_CLIP_NORM,
        noise_multiplier=noise_multiplier,
        weights=dict.fromkeys(clients, 1.0),
        num_included=dict.fromkeys(clients, largest_number_included(_NUM_RECORDS, SAMPLING_PROBABILITY)),
    )
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=_CLIP_NORM,
        dimension=_DIMENSION,
        sampling_probabilities=(SAMPLING_PROBABILITY,),
        count=NUM_STEPS,
        grids=(grid.of(0).points,),
        bounds=(grid.of(0).bound,),
    )
    (event,) = MECHANISMS.named("discrete-gaussian").planned_events(request)
    return event


def events_in(each: Sum, noise_multiplier: float) -> list[Event]:
    """A client's releases as a reader of the sums sees them who knows the colluders' noise."""
    weights = dict.fromkeys(range(each.clients), 1.0)
    scale = smallest_aggregate_scales(weights, threshold=each.threshold, colluding=each.colluding)[0]
    event = client_event(each.clients, noise_multiplier)
    return [Release(event=event, rho_bar=1.0, aggregate_scale=scale).seen_by("aggregate")]


@cache
def epsilon_in(each: Sum, noise_multiplier: float) -> PrivacySpent:
    """The epsilon that the sums cost a client at delta 1e-5."""
    return epsilon_of(events_in(each, noise_multiplier), DELTA)


def epsilon_alone(num_clients: int, noise_multiplier: float) -> PrivacySpent:
    """The same against a reader of the client's own uploads, as with more colluders than were assumed."""
    return epsilon_of([client_event(num_clients, noise_multiplier)], DELTA)


@lru_cache
def noise_for(each: Sum, epsilon: float = TARGET) -> float:
    """z of each client with which the sums cost it epsilon."""
    return calibrate(lambda noise: events_in(each, noise), epsilon, DELTA)


@cache
def central_noise(epsilon: float = TARGET) -> float:
    """z of central DP-SGD with continuous noise and the same schedule."""
    return noise_multiplier_for(epsilon, DELTA, sampling_probability=SAMPLING_PROBABILITY, steps=NUM_STEPS)


def sums(num_clients: int) -> Iterator[Sum]:
    """The table's rows for K clients: every client's upload or the fewest with none or a third colluding; then most.

    Sums with as many honest clients cost the same and are one row.
    """
    seen = set[int]()
    for colluding in sorted({0, num_clients // 3, num_clients - 2}):
        for threshold in sorted({num_clients, smallest_threshold(num_clients, colluding)}, reverse=True):
            each = Sum(clients=num_clients, threshold=threshold, colluding=colluding)
            if each.is_allowed and each.honest not in seen:
                seen.add(each.honest)
                yield each


def plot(path: Path) -> None:
    """Epsilon by colluders with the noise for none, and the noise that equal epsilon needs, by K."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_epsilon, by_noise = figure.subplots(1, 2)
    for number, num_clients in enumerate(NUM_CLIENTS):
        colour, noise = f"C{number}", noise_for(Sum(clients=num_clients, threshold=num_clients, colluding=0))
        counts = _spread(num_clients - 2)
        for fewest, style in ((False, "-"), (True, "--")):
            chosen = [_sum(num_clients, colluding, fewest=fewest) for colluding in counts]
            label = None if fewest else f"K = {num_clients}"
            spent = [epsilon_in(each, noise).epsilon for each in chosen]
            by_epsilon.plot(counts, spent, style, color=colour, marker=".", label=label)
            factors = [each.noise_over_central for each in chosen]
            by_noise.plot(counts, factors, style, color=colour, marker=".", label=label)
    by_epsilon.set(title="epsilon with the noise for c = 0, t = K", xlabel="colluders c", ylabel="epsilon")
    by_noise.set(title="noise of equal epsilon over central", xlabel="colluders c", ylabel="sqrt(K / (t - max(c, 1)))")
    for axes in (by_epsilon, by_noise):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_yscale("log")
        axes.set_xticks([0, 1, 2, 5, 10, 20, 50, 98])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(visible=True, alpha=0.3)
    by_epsilon.set_yticks([2, 3, 5, 10, 20, 50])
    by_noise.set_yticks([1, 1.5, 2, 3, 5, 7])
    by_noise.plot([], [], "-", color="grey", label="t = K")
    by_noise.plot([], [], "--", color="grey", label="smallest t")
    by_noise.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _sum(num_clients: int, colluding: int, *, fewest: bool) -> Sum:
    threshold = smallest_threshold(num_clients, colluding) if fewest else num_clients
    return Sum(clients=num_clients, threshold=threshold, colluding=colluding)


def _spread(last: int) -> Sequence[int]:
    """Counts from 0 to the last, near enough to draw a line through."""
    return sorted({count for count in (0, 1, 2, 3, 5, 8, 13, 20, 28, 40, 60, 80, last) if count <= last})
