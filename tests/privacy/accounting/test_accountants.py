"""The DP-LoRA paper's closed form, and what publishing the best of many runs costs: formulas, scaling, conditions."""

import math

import dp_accounting
import pytest
from dp_accounting import rdp

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.accountants import ClosedForm, closed_form, epsilon_of, repeat_and_select
from fedpriv.privacy.accounting.events import PureEpsilon
from tests.events import gaussian

EVENT = gaussian(4.0, 0.05, 30)
HOLDS = {"number_is_random_and_secret": True, "losers_are_hidden": True}


def answer(
    *, noise_multiplier=2.0, sampling_probability=0.02, steps=400, delta=1e-5, rho_bar=0.5, **constants: float
) -> ClosedForm:
    event = gaussian(rho_bar * noise_multiplier, sampling_probability, steps)
    assert closed_form([event.with_count(1)] * 3, delta) == closed_form([event.with_count(3)], delta)
    return closed_form([event], delta, **constants)


def test_epsilon_is_that_of_the_formula_worked_by_hand():
    # 2 * 0.02 * sqrt(400 ln 1e5) / (0.5 * 2) = 0.04 * 20 * 3.393070 = 2.714456
    assert answer().epsilon == pytest.approx(2.714456, abs=1e-6)


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
    assert answer(**change).epsilon == pytest.approx(factor * answer().epsilon, rel=1e-12)


# At rho_bar sigma = 1 and q just below 1/16: epsilon < q^2 T means T > 4 * 16^2 * ln 1e5 = 11789.2.
@pytest.mark.parametrize(("steps", "hold"), [(11_700, False), (11_900, True)])
def test_conditions_hold_from_the_number_of_steps_that_arithmetic_gives(steps, hold):
    noise = {"noise_multiplier": math.sqrt(5), "rho_bar": 1 / math.sqrt(5) + 1e-12}
    result = answer(sampling_probability=0.0625 * (1 - 1e-6), steps=steps, **noise)
    assert result.conditions_hold is hold
    assert result.violated == (() if hold else ("epsilon < c1 q^2 T",))


def test_conditions_that_fail_are_named_and_without_noise_epsilon_is_infinite():
    assert answer(noise_multiplier=0.0).epsilon == math.inf
    assert not answer(noise_multiplier=0.0).conditions_hold
    result = answer(noise_multiplier=1.0, sampling_probability=0.5, steps=10)
    assert result.violated == ("rho_bar * sigma >= 1", "q < 1 / (16 rho_bar * sigma)", "epsilon < c1 q^2 T")


@pytest.mark.parametrize(
    "change",
    [{"delta": 0.0}, {"delta": 1.0}, {"noise_multiplier": -1.0}, {"sampling_probability": 1.5}, {"steps": 0}],
    ids=str,
)
def test_values_out_of_range_of_the_closed_form_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change)).replace("steps", "count")):
        answer(**change)


def test_a_composition_that_the_theorem_does_not_cover_is_refused():
    for events in ([gaussian(1.0, 0.1), gaussian(2.0, 0.1)], [PureEpsilon(epsilon=0.1)]):
        with pytest.raises(ValueError, match="closed-form"):
            closed_form(events, 1e-5)
    assert closed_form([], 1e-5).epsilon == 0


def test_closed_form_can_underestimate_epsilon_although_its_conditions_hold():
    event = gaussian(1.0, 0.04, 10**5)
    result = closed_form([event], 1e-5)
    assert result.conditions_hold
    assert result.epsilon == pytest.approx(86, abs=0.5)
    assert epsilon_of([event], 1e-5, "rdp").epsilon > 190


def selection_epsilon(mean: float = 20.0, **changes) -> float:
    return repeat_and_select([EVENT], 1e-5, mean_repetitions=mean, **HOLDS | changes)


def test_cost_lies_between_one_run_and_all_of_them_and_grows_with_their_number():
    one, all_ = epsilon_of([EVENT], 1e-5, "rdp").epsilon, epsilon_of([EVENT.with_count(30_000)], 1e-5).epsilon
    assert one < selection_epsilon(1000) < all_
    assert selection_epsilon(2) < selection_epsilon(20) < selection_epsilon(200)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_agrees_with_dp_accounting_called_directly(shape):
    gaussian = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(4.0))
    run = dp_accounting.SelfComposedDpEvent(gaussian, 30)
    direct = rdp.RdpAccountant().compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 20.0, shape))
    assert selection_epsilon(shape=shape) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("condition", HOLDS)
def test_a_condition_that_does_not_hold_is_named(condition):
    with pytest.raises(InputError, match=r"random and secret|nobody may see the losers"):
        selection_epsilon(**{condition: False})


@pytest.mark.parametrize("bad", [{"mean_repetitions": 0.5}, {"mean_repetitions": math.nan}, {"shape": -1.0}], ids=str)
def test_values_out_of_range_of_a_selection_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        repeat_and_select([EVENT], 1e-5, **{"mean_repetitions": 2.0, **HOLDS, **bad})


def test_events_that_the_bound_does_not_cover_are_refused():
    with pytest.raises(ValueError, match="subsampled Gaussians"):
        repeat_and_select([PureEpsilon(epsilon=0.1)], 1e-5, mean_repetitions=2.0, **HOLDS)
