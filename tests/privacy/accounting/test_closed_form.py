"""The DP-LoRA paper's closed form: its formula, its scaling, and the narrow range in which its conditions hold."""

from __future__ import annotations

import math

import pytest

from fedpriv.privacy.accounting.accountants import ClosedForm, closed_form, epsilon_of
from fedpriv.privacy.accounting.events import PureEpsilon, SubsampledGaussian

BASE = {"noise_multiplier": 2.0, "sampling_probability": 0.02, "steps": 400, "delta": 1e-5, "rho_bar": 0.5}


def answer(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    rho_bar: float,
    **constants: float,
) -> ClosedForm:
    event = SubsampledGaussian(
        noise_multiplier=rho_bar * noise_multiplier, sampling_probability=sampling_probability, count=steps
    )
    return closed_form([event], delta, **constants)


def epsilon(**changes):
    return answer(**BASE | changes).epsilon


def test_epsilon_is_that_of_the_formula_worked_by_hand():
    # 2 * 0.02 * sqrt(400 ln 1e5) / (0.5 * 2) = 0.04 * 20 * 3.393070 = 2.714456
    assert epsilon() == pytest.approx(2.714456, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"sampling_probability": 0.04}, 2.0),
        ({"steps": 1600}, 2.0),
        ({"noise_multiplier": 4.0}, 0.5),
        ({"rho_bar": 1.0}, 0.5),
        ({"c2": 1.0}, 0.5),
        ({"delta": 1e-20}, 2.0),
    ],
)
def test_epsilon_scales_as_the_formula_says(change, factor):
    assert epsilon(**change) == pytest.approx(factor * epsilon(), rel=1e-12)


# At rho_bar sigma = 1 and q just below 1/16: epsilon < q^2 T means T > 4 * 16^2 * ln 1e5 = 11789.2.
@pytest.mark.parametrize(("steps", "hold"), [(11_700, False), (11_900, True)])
def test_conditions_hold_from_the_number_of_steps_that_arithmetic_gives(steps, hold):
    schedule = {"noise_multiplier": math.sqrt(5), "rho_bar": 1 / math.sqrt(5) + 1e-12, "delta": 1e-5}
    result = answer(sampling_probability=0.0625 * (1 - 1e-6), steps=steps, **schedule)
    assert result.conditions_hold is hold
    assert result.violated == (() if hold else ("epsilon < c1 q^2 T",))


def test_without_noise_epsilon_is_infinite_and_the_conditions_fail():
    result = answer(**BASE | {"noise_multiplier": 0.0})
    assert (result.epsilon, result.conditions_hold) == (math.inf, False)


@pytest.mark.parametrize(
    "change",
    [{"delta": 0.0}, {"delta": 1.0}, {"noise_multiplier": -1.0}, {"sampling_probability": 1.5}, {"steps": 0}],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change)).replace("steps", "count")):
        epsilon(**change)


def test_a_composition_that_the_theorem_does_not_cover_is_refused():
    mixed = [SubsampledGaussian(noise_multiplier=z, sampling_probability=0.1) for z in (1.0, 2.0)]
    for events in (mixed, [PureEpsilon(epsilon=0.1)]):
        with pytest.raises(ValueError, match="closed-form"):
            closed_form(events, 1e-5)
    assert closed_form([], 1e-5).epsilon == 0


def test_n_releases_cost_the_same_as_one_event_of_count_n():
    one = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.1)
    many = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.1, count=7)
    assert closed_form([one] * 7, 1e-5) == closed_form([many], 1e-5)


def test_closed_form_can_underestimate_epsilon_although_its_conditions_hold():
    event = SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.04, count=10**5)
    result = closed_form([event], 1e-5)
    assert result.conditions_hold
    assert result.epsilon == pytest.approx(86, abs=0.5)
    assert epsilon_of([event], 1e-5, "rdp").epsilon > 190


def test_closed_form_names_every_condition_that_fails():
    event = SubsampledGaussian(noise_multiplier=0.5, sampling_probability=0.5, count=10)
    result = closed_form([event], 1e-5)
    assert result.violated == ("rho_bar * sigma >= 1", "q < 1 / (16 rho_bar * sigma)", "epsilon < c1 q^2 T")
