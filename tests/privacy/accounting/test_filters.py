"""Filters and committed plans: their bounds against independent formulas, and what they let through."""

import math
from itertools import product

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedpriv.privacy.accounting.accountants import INTEGER_ORDERS, epsilon_of
from fedpriv.privacy.accounting.events import EpsilonDelta, Event, PureEpsilon
from fedpriv.privacy.accounting.filters import (
    CommittedPlan,
    CommittedPlans,
    GaussianFilter,
    RenyiFilter,
    filtered_epsilon,
    rule_of,
    to_json,
)
from tests.adversary.adaptive import Ask, delta_of
from tests.events import gaussian

DELTA = 1e-5


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_the_limit_of_an_order_converts_back_to_the_budget_by_dp_accounting(delta):
    for order, epsilon in product((2, 3, 10, 63, 128, 1024), (0.5, 1.0, 8.0, 30.0)):
        limit = RenyiFilter(order=order).limit(epsilon, delta)
        if limit > 0.01:
            assert compute_epsilon([order], [limit], delta)[0] == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize(("epsilon", "delta"), product((0.01, 0.5, 1.0, 8.0, 100.0), (1e-4, 1e-5, 1e-9)))
def test_the_limit_of_gaussian_dp_has_exactly_delta_in_the_closed_form(epsilon, delta):
    mu = math.sqrt(GaussianFilter().limit(epsilon, delta))
    found = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    assert found == pytest.approx(delta, rel=1e-5)
    assert found <= delta * (1 + 1e-7), "1e-7: the test's own difference cancels"


def test_gaussian_dp_loses_nothing_against_privacy_losses_without_sampling():
    limit = GaussianFilter().limit(2.0, DELTA)
    for count in (1, 7, 40):
        event = gaussian(math.sqrt(count / limit), count=count)
        assert epsilon_of([event], DELTA).epsilon == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 8.0, 50.0])
def test_the_derived_order_is_the_smallest_that_allows_95_percent_of_the_most(epsilon):
    allowed = {int(a): RenyiFilter(order=int(a)).limit(epsilon, DELTA) / a for a in INTEGER_ORDERS}
    order = RenyiFilter.derived(epsilon, DELTA).order
    assert allowed[order] >= 0.95 * max(allowed.values())
    assert all(value < 0.95 * max(allowed.values()) for smaller, value in allowed.items() if smaller < order)
    rule = RenyiFilter.derived(1e-4, 1e-9)  # a budget that no order can keep allows nothing
    assert rule.limit(1e-4, 1e-9) <= 0
    assert rule.remaining([], gaussian(1e5), epsilon=1e-4, delta=1e-9) == 0


@pytest.mark.parametrize("rule", [RenyiFilter(order=12), GaussianFilter()], ids=str)
@settings(max_examples=50)
@given(st.floats(0.5, 30.0), st.floats(0.001, 1.0), st.integers(1, 5))
def test_what_remains_fits_and_one_more_does_not(rule, z, q, count):
    event, budget = gaussian(z, q, count), {"epsilon": 3.0, "delta": DELTA}
    num = int(min(rule.remaining([], event, **budget), 2**50))
    limit, cost = rule.limit(**budget), rule.cost(event)
    assert num * cost <= limit
    assert (num + 1) * cost > limit * (1 - 1e-8)
    if num:
        assert rule.remaining([event.with_count(num * count)], event, **budget) == 0
        assert 0 < rule.used([event], **budget) <= 1


def test_what_a_filter_covers():
    renyi, gaussian_dp, with_delta = RenyiFilter(order=8), GaussianFilter(), EpsilonDelta(epsilon=0.01, delta=1e-12)
    assert not renyi.covers(with_delta)
    assert renyi.remaining([with_delta], gaussian(100.0), epsilon=8.0, delta=DELTA) == 0
    pure = PureEpsilon(epsilon=0.5, count=2)
    assert renyi.cost(pure) == pytest.approx(pure.rdp([8])[0])
    assert not gaussian_dp.covers(pure)
    for rule in (renyi, gaussian_dp):
        assert not rule.covers(gaussian(0.0)), "no release without noise"
        assert rule.remaining([], gaussian(1.0, 0.0), epsilon=8.0, delta=DELTA) == math.inf, "nobody can be drawn"


@pytest.mark.parametrize("order", [1, 64, 2.5, True, 2048])
def test_an_order_at_which_not_every_curve_is_known_is_refused(order):
    with pytest.raises(ValueError, match=r"order = .*: must be a whole number"):
        RenyiFilter(order=order)


@pytest.mark.parametrize("event", [gaussian(4.0, count=20), gaussian(1.5, 0.04, 100)], ids=["all", "sampled"])
def test_a_filter_needs_about_a_sixth_more_than_a_plan(event):
    needed, planned = filtered_epsilon([event], DELTA), epsilon_of([event], DELTA).epsilon
    assert 1.05 < needed / planned < 1.2
    rule = RenyiFilter.derived(needed, DELTA)
    assert rule.remaining([], event, epsilon=needed, delta=DELTA) >= 1
    assert rule.remaining([], event, epsilon=needed * 0.99, delta=DELTA) == 0


def plans(*events: Event, delta: float = DELTA) -> CommittedPlans:
    return CommittedPlans(plans=(CommittedPlan.of(events, delta),))


class TestACommittedPlan:
    def test_gives_each_slot_once_in_any_order(self):
        rule = plans(gaussian(4.0, count=2), PureEpsilon(epsilon=0.1))
        budget = {"epsilon": rule.epsilon, "delta": DELTA}
        assert rule.remaining([], gaussian(4.0), **budget) == 2
        assert rule.remaining([PureEpsilon(epsilon=0.1), gaussian(4.0)], gaussian(4.0), **budget) == 1
        assert rule.remaining([PureEpsilon(epsilon=0.1)], PureEpsilon(epsilon=0.1), **budget) == 0
        assert rule.remaining([], gaussian(4.0, count=2), **budget) == 1
        assert rule.remaining([], gaussian(4.0, count=3), **budget) == 0
        assert rule.remaining([gaussian(3.0)], gaussian(4.0), **budget) == 0, "nor after what is not of the plan"

    def test_takes_more_noise_and_a_smaller_sample_but_nothing_else(self):
        rule = plans(gaussian(4.0, 0.1))
        assert rule.covers(gaussian(4.1, 0.05))
        assert not rule.covers(gaussian(3.999, 0.05))
        assert not rule.covers(gaussian(9.0, 0.1001))
        assert not rule.covers(gaussian(4.0, 0.0, unit="client"))

    def test_a_release_keeps_the_slot_that_it_took(self):
        # The first release takes the slot with q = 0.1 though a later one would have needed it.
        rule = plans(gaussian(4.0, 0.1), gaussian(4.0, 1.0))
        budget = {"epsilon": rule.epsilon, "delta": DELTA}
        assert rule.remaining([gaussian(4.0, 0.1)], gaussian(4.0, 1.0), **budget) == 1
        assert rule.remaining([gaussian(9.0, 0.1)], gaussian(4.0, 0.1), **budget) == 1, "the larger slot is left"
        assert rule.remaining([gaussian(9.0, 0.1), gaussian(9.0, 0.1)], gaussian(4.0, 0.1), **budget) == 0

    def test_adds_epsilon_and_delta_to_those_of_earlier_plans(self):
        first, second = CommittedPlan.of([gaussian(5.0)], 5e-6), CommittedPlan.of([gaussian(6.0)], 5e-6)
        both = CommittedPlans(plans=(first, second))
        assert first.epsilon == epsilon_of([gaussian(5.0)], 5e-6).epsilon
        assert (both.epsilon, both.delta) == (first.epsilon + second.epsilon, 1e-5)
        assert both.epsilon > epsilon_of([gaussian(5.0), gaussian(6.0)], 1e-5).epsilon
        assert both.remaining([], gaussian(6.0), epsilon=both.epsilon, delta=1e-5) == 2
        assert both.remaining([], gaussian(6.0), epsilon=both.epsilon * 0.99, delta=1e-5) == 0, "a lowered budget"
        assert both.remaining([], gaussian(6.0), epsilon=both.epsilon, delta=9e-6) == 0

    @pytest.mark.parametrize("over", [0.0, 5e-10, 2e-9])
    def test_releases_under_each_budget_for_which_it_may_be_committed(self, over):
        """Slack for the rounding of a calibration, and for none of a delta, which is given."""
        rule = plans(gaussian(4.0, count=9))
        for epsilon, delta, fits in (
            (rule.epsilon / (1 + over), DELTA, over < 1e-9),
            (rule.epsilon, DELTA / (1 + over), not over),
        ):
            assert rule.fits(epsilon, delta) == fits
            assert rule.remaining([], gaussian(4.0), epsilon=epsilon, delta=delta) == (9 if fits else 0)

    @pytest.mark.parametrize(
        ("events", "message"),
        [
            ([], "holds no release"),
            ([EpsilonDelta(epsilon=0.1, delta=1e-9)], "a delta of its own"),
            ([gaussian(0.0)], "infinite"),
        ],
    )
    def test_without_a_finite_cost_is_refused(self, events, message):
        with pytest.raises(ValueError, match=message):
            CommittedPlan.of(events, DELTA)


def test_more_noise_and_a_smaller_sample_are_dominated_at_every_epsilon_and_in_both_directions():
    rng = np.random.default_rng(1)
    for _ in range(60):
        q, z = rng.uniform(0.01, 1.0), rng.uniform(0.4, 5.0)
        inner = Ask(q * rng.uniform(0.05, 1.0), z * rng.uniform(1.0, 3.0))
        for epsilon in (0.0, 0.1, 1.0, 3.0):
            assert delta_of(inner, epsilon) <= delta_of(Ask(q, z), epsilon) * (1 + 1e-9) + 1e-15


def test_rules_come_back_from_their_lines_and_unknown_ones_are_refused():
    plan = CommittedPlan.of([gaussian(4.0, 0.3, 7), PureEpsilon(epsilon=0.1)], DELTA)
    assert rule_of([]) is None
    for rule in (RenyiFilter(order=9), GaussianFilter()):
        assert rule_of([to_json(rule)]) == rule
    assert rule_of([to_json(plan), to_json(plan)]) == CommittedPlans(plans=(plan, plan))
    assert rule_of([to_json(RenyiFilter(order=9)), to_json(plan)]) == CommittedPlans(plans=(plan,))
    for line in ("{}", '{"rule": "trust"}', "x", '{"rule": "renyi", "order": 64}', '{"rule": "renyi", "more": 1}'):
        with pytest.raises(ValueError, match="unknown to this fedpriv"):
            rule_of([line])
