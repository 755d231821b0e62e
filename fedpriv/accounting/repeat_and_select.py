"""The cost of publishing only the best of several runs on the same records.

The sum over all runs, which a ledger keeps, is always a bound. Repeat-and-select costs less, but only if the number
of runs is random and secret and the losers stay hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import dp_accounting
from dp_accounting import rdp

from fedpriv.accounting.accountants import check_delta, quiet_absl
from fedpriv.accounting.events import Event, SubsampledGaussian, group
from fedpriv.errors import InputError


def repeat_and_select(
    events: Iterable[Event],
    delta: float,
    *,
    mean_repetitions: float,
    shape: float = 1.0,
    number_is_random_and_secret: bool,
    losers_are_hidden: bool,
) -> float:
    """Epsilon, by rdp, of publishing the best of a random number of runs that each release the given events.

    Args:
        events: of one run, all subsampled Gaussians.
        delta: in (0, 1).
        mean_repetitions: expected number of runs, >= 1.
        shape: of the truncated negative binomial distribution of that number, >= 0: 1 is geometric, 0 logarithmic,
            infinity Poisson.
        number_is_random_and_secret: whether the number of runs was drawn from that distribution and stays secret.
        losers_are_hidden: whether nobody, not even the server, sees anything of the runs that were not chosen.

    Raises:
        InputError: a condition does not hold. In a federation the server sees every run's uploads, so the bound never
            holds against it; it can hold against someone who gets only the chosen model.
        ValueError: a value is out of range.

    Source: Papernot and Steinke 2022, Theorems 2 and 6, by dp-accounting.
    """
    advice = "sum the runs, as one ledger for all of them does"
    if not number_is_random_and_secret:
        raise InputError(f"repeat-and-select: the number of runs must be random and secret; otherwise {advice}")
    if not losers_are_hidden:
        raise InputError(f"repeat-and-select: nobody may see the losers; otherwise {advice}")
    check_delta(delta)
    if not 1 <= mean_repetitions < math.inf:
        raise ValueError(f"mean_repetitions = {mean_repetitions}: must be finite and >= 1")
    if not shape >= 0:
        raise ValueError(f"shape = {shape}: must be >= 0")
    run = [_as_dp_event(event) for event in group(events)]
    accountant = rdp.RdpAccountant()
    with quiet_absl():
        accountant.compose(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.ComposedDpEvent(run), mean_repetitions, shape)
        )
        return float(accountant.get_epsilon(delta))


def _as_dp_event(event: Event) -> dp_accounting.DpEvent:
    if not isinstance(event, SubsampledGaussian):
        raise ValueError(f"event {event!r}: repeat-and-select supports only subsampled Gaussians")
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, event.count)
