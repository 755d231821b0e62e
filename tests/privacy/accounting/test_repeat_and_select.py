"""Repeat-and-select costs more than one run and less than all of them, and is refused if its conditions fail."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import rdp

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import epsilon_of, repeat_and_select
from fedpriv.privacy.accounting.events import PureEpsilon, SubsampledGaussian

EVENT = SubsampledGaussian(noise_multiplier=4.0, sampling_probability=0.05, count=30)
HOLDS = {"number_is_random_and_secret": True, "losers_are_hidden": True}


def epsilon(mean: float = 20.0, **changes) -> float:
    return repeat_and_select([EVENT], 1e-5, mean_repetitions=mean, **HOLDS | changes)


def test_cost_lies_between_one_run_and_all_of_them_and_grows_with_their_number():
    assert (
        epsilon_of([EVENT], 1e-5, "rdp").epsilon
        < epsilon(1000)
        < epsilon_of([replace(EVENT, count=30_000)], 1e-5).epsilon
    )
    assert epsilon(2) < epsilon(20) < epsilon(200)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_agrees_with_dp_accounting_called_directly(shape):
    gaussian = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(4.0))
    run = dp_accounting.SelfComposedDpEvent(gaussian, 30)
    direct = rdp.RdpAccountant().compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 20.0, shape))
    assert epsilon(shape=shape) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("condition", HOLDS)
def test_a_condition_that_does_not_hold_is_named(condition):
    with pytest.raises(InputError, match=r"random and secret|nobody may see the losers"):
        epsilon(**{condition: False})


@pytest.mark.parametrize(
    "change", [{"mean_repetitions": 0.5}, {"mean_repetitions": math.nan}, {"shape": -1.0}], ids=str
)
def test_values_out_of_range_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        repeat_and_select([EVENT], 1e-5, **{"mean_repetitions": 2.0, **HOLDS, **change})


def test_events_that_the_bound_does_not_cover_are_refused():
    with pytest.raises(ValueError, match="subsampled Gaussians"):
        repeat_and_select([PureEpsilon(epsilon=0.1)], 1e-5, mean_repetitions=2.0, **HOLDS)
