"""Rules that keep a budget although the coordinator chooses each release after it has seen the earlier ones.

To allow each release with which the privacy loss distribution of all stays within the budget bounds nothing: which of
two releases then does most harm may depend on what was seen (Regehr et al. 2026): a choice among four second requests,
each allowed at delta 1e-5, had delta 2.36e-5 at epsilon 8. Two ways are proven.

A *filter* fixes one measure of cost when a data set is registered, adds it up, and stops at a bound. Renyi divergence
of one fixed order (Feldman and Zrnic 2021) and Gaussian DP (Smith and Thakurta 2022; Koskela, Tobaben and Honkela 2023)
are such measures.

A *committed plan* fixes the releases themselves, in any order and each at most once. It costs what pld composes all of
them to (docs/appendices/budget_rules.md has the proof). Plans that follow each other cost at most the sums of their
epsilons and of their deltas, also if their releases alternate: all uploads of a plan are post-processing of one draw
from each of its pairs (Rogers et al. 2016).

A single run counts as fixed, and is composed by loss distributions: which clients replace those that did not reply
depends on who was reachable, which a record does not change at an honest node.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize
from scipy.special import log_ndtr

from fedpriv.errors import InputError
from fedpriv.privacy.accounting import events as known_events
from fedpriv.privacy.accounting.accountants import INTEGER_ORDERS, check_delta, epsilon_of
from fedpriv.privacy.accounting.events import Event, SubsampledGaussian, group
from fedpriv.privacy.accounting.law import Unit
from fedpriv.privacy.accounting.risk import Risk, risk_of
from fedpriv.privacy.accounting.trade_off import TradeOff, gaussian, renyi
from fedpriv.privacy.accounting.views import View

# A sum of costs counts as this much larger, which is far beyond the rounding of any term.
_ROUNDING = 1e-9


class _Filter:
    """The base of both filters: costs that add up, and a bound on their sum."""

    def cost(self, event: Event) -> float:
        """The cost that one event adds to the sum; infinite if no bound is known."""
        raise NotImplementedError

    def limit(self, epsilon: float, delta: float) -> float:
        """The largest sum for which all is (epsilon, delta)-DP; not positive if there is none."""
        raise NotImplementedError

    def trade_off(self, total: float) -> TradeOff:
        """The trade-off function that a bound on the sum guarantees, however the releases were chosen."""
        raise NotImplementedError

    def risk(self, history: Sequence[Event], *, epsilon: float | None, delta: float) -> Risk:
        """The risk of all that the filter lets pass within (epsilon, delta), however the releases are chosen.

        Args:
            history: all events so far, of one unit; what exceeds the limit counts too.
            epsilon: the largest budget ever in force: a lower one since takes back nothing of what a coordinator could
                choose before. None where it is not known: then the sum so far counts, as if it had been the limit.
            delta: in (0, 1).
        """
        unit: Unit = history[0].unit if history else "record"
        if not all(self.covers(each) for each in history):
            return Risk.none(unit)
        spent = math.fsum(map(self.cost, history))
        limit = 0.0 if epsilon is None else self.limit(epsilon, delta)
        return Risk.of(self.trade_off(max(spent, limit, 0.0)), delta, unit)

    def covers(self, event: Event) -> bool:
        """Whether the event may ever be released; one with a delta of its own, or without a guarantee, may not."""
        return event.total_delta == 0 and event.is_guarantee and self.cost(event) < math.inf

    def used(self, history: Sequence[Event], *, epsilon: float, delta: float) -> float:
        """The share of the bound that the history takes up, >= 0; arguments as for `remaining`."""
        spent, limit = math.fsum(map(self.cost, history)), self.limit(epsilon, delta)
        return spent / limit if limit > 0 else math.inf

    def remaining(self, history: Sequence[Event], event: Event, *, epsilon: float, delta: float) -> float:
        """How many further such events (epsilon, delta) allows after a history of one unit; infinite if free."""
        if not all(self.covers(each) for each in (*history, event)):
            return 0
        spent, cost = math.fsum(map(self.cost, history)), self.cost(event)
        left = self.limit(epsilon, delta) / (1 + _ROUNDING) - spent
        return max(0, math.floor(left / cost)) if cost else math.inf if left >= 0 else 0


@dataclass(frozen=True, kw_only=True)
class RenyiFilter(_Filter):
    """The sum of Renyi divergences of one order stays below a bound.

    Attributes:
        order: one of `INTEGER_ORDERS`, at which the curve of every mechanism is known.

    Raises:
        ValueError: the order is another one.
    """

    order: int

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or self.order not in INTEGER_ORDERS:
            raise ValueError(f"order = {self.order}: must be a whole number in 2..63, or 128, 256, 512 or 1024")

    @staticmethod
    def derived(epsilon: float, delta: float) -> RenyiFilter:
        """The smallest order that allows 95 % of the most releases of Gaussian noise without sampling, order / (2 z^2).

        The divergence of sampled noise rises steeply beyond some order, so one below the best for unsampled noise pays.
        If epsilon is so small that no order allows anything, it is the least bad one, and its limit is not positive.
        """
        check_delta(delta)
        filters = [RenyiFilter(order=int(order)) for order in INTEGER_ORDERS]
        allowed = [each.limit(epsilon, delta) / each.order for each in filters]
        enough = max(allowed) * (0.95 if max(allowed) > 0 else 1.0)
        return next(each for each, ratio in zip(filters, allowed, strict=True) if ratio >= enough)

    def cost(self, event: Event) -> float:
        """The Renyi divergence, of either neighbour from the other, whichever is larger."""
        return event.count * _divergence(event.with_count(1), self.order)

    def limit(self, epsilon: float, delta: float) -> float:
        """The largest divergence that implies (epsilon, delta)-DP (Canonne, Kamath, Steinke 2020, Proposition 12)."""
        order = self.order
        return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)

    def trade_off(self, total: float) -> TradeOff:
        """That of the Renyi divergence at this order alone."""
        return renyi(np.array([float(self.order)]), np.array([total]))

    def __str__(self) -> str:
        return f"a Renyi filter of order {self.order}"


@dataclass(frozen=True, kw_only=True)
class GaussianFilter(_Filter):
    """The sum of squared mu stays below a bound, for Gaussian noise alone.

    A sample counts as if it were all records, so amplification by sampling is lost.
    """

    def cost(self, event: Event) -> float:
        """mu^2 = 1 / z^2 of a Gaussian mechanism; infinite for any other, and without noise."""
        if event.sampling_probability == 0:
            return 0.0
        if not isinstance(event, SubsampledGaussian) or not event.is_noised:
            return math.inf
        return event.count / event.effective_noise_multiplier**2

    def limit(self, epsilon: float, delta: float) -> float:
        """The largest mu^2 with Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) <= delta.

        Source: Dong, Roth and Su 2022, Corollary 2.13.
        """

        def log_excess(log_mu: float) -> float:
            mu = math.exp(log_mu)
            above, below = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
            return float(above + math.log(max(-math.expm1(min(below - above, 0.0)), 1e-300)) - math.log(delta))

        root = optimize.brentq(log_excess, math.log(1e-8), math.log(1e8), xtol=1e-13)
        return math.exp(2 * root) * (1 - 1e-9)

    def trade_off(self, total: float) -> TradeOff:
        """That of N(0, 1) and N(mu, 1)."""
        return gaussian(math.sqrt(total))

    def __str__(self) -> str:
        return "a filter of Gaussian DP"


@dataclass(frozen=True, kw_only=True)
class CommittedPlan:
    """Releases that a data set may make, in any order and each at most once, and what all of them cost together.

    Attributes:
        events: one slot for each of their counts.
        epsilon: of all, at delta, > 0.
        delta: in (0, 1).
    """

    events: tuple[Event, ...]
    epsilon: float
    delta: float

    @staticmethod
    def of(events: Iterable[Event], delta: float) -> CommittedPlan:
        """The plan, with its cost by pld, or by rdp where that is not known: Renyi curves add up at every order.

        Raises:
            ValueError: there is no event; they protect different units; one has a delta of its own or no finite cost.
        """
        grouped = group(events)
        if not grouped:
            raise ValueError("plan: holds no release")
        if any(event.total_delta for event in grouped):
            raise ValueError("plan: holds a release with a delta of its own; adaptively chosen ones do not add up")
        spent = epsilon_of(grouped, delta)
        if not (spent.is_guarantee and math.isfinite(spent.epsilon)):
            raise ValueError("plan: holds a release whose cost is infinite, or no guarantee")
        return CommittedPlan(events=grouped, epsilon=spent.epsilon, delta=delta)


@dataclass(frozen=True, kw_only=True)
class CommittedPlans:
    """The plans of a data set, in the order in which they were committed; their epsilons and deltas add up."""

    plans: tuple[CommittedPlan, ...]

    @property
    def epsilon(self) -> float:
        """The sum of the plans' epsilons."""
        return math.fsum(plan.epsilon for plan in self.plans)

    @property
    def delta(self) -> float:
        """The sum of the plans' deltas."""
        return math.fsum(plan.delta for plan in self.plans)

    def fits(self, epsilon: float, delta: float) -> bool:
        """Whether all plans together cost at most so much; an epsilon may round, a delta is what was given."""
        return self.epsilon <= epsilon * (1 + _ROUNDING) and self.delta <= delta

    def covers(self, event: Event) -> bool:
        """Whether a slot, used or not, is for such a release."""
        return any(_dominates(slot, event) for slot, _ in _slots(self.plans))

    def used(self, history: Sequence[Event], *, epsilon: float, delta: float) -> float:
        """The share of the slots that the history has taken; arguments as for `remaining`."""
        taken, slots = (sum(event.count for event in each) for each in (history, self._events))
        return taken / slots

    def risk(self, history: Sequence[Event], *, epsilon: float | None, delta: float) -> Risk:
        """The risk of all slots, used or not, on the view for which they were planned; arguments as for a filter's.

        Nothing bounds it on a view where a release costs more than any slot.
        """
        if not all(self.covers(each) for each in history):
            return Risk.none(history[0].unit)
        return risk_of(self._events, delta)

    @property
    def _events(self) -> list[Event]:
        return [event for plan in self.plans for event in plan.events]

    def remaining(self, history: Sequence[Event], event: Event, *, epsilon: float, delta: float) -> int:
        """The number of such events that the remaining slots hold; 0 if the plans cost more than (epsilon, delta).

        Each release takes the first slot that dominates it, so what it took never depends on what came later.

        Args:
            history: all events so far, in the order in which they were charged.
            epsilon: finite, > 0.
            delta: in (0, 1).
        """
        if not self.fits(epsilon, delta):
            return 0
        left = list(_slots(self.plans))
        for earlier in history:
            missing = earlier.count
            for i, (slot, num) in enumerate(left):
                if missing and num and _dominates(slot, earlier):
                    left[i] = (slot, num - min(num, missing))
                    missing -= min(num, missing)
            if missing:
                return 0
        return sum(num for slot, num in left if _dominates(slot, event)) // event.count

    def __str__(self) -> str:
        number = "a plan" if len(self.plans) == 1 else f"{len(self.plans)} plans"
        return f"{number} committed for epsilon {self.epsilon:.4f} at delta {self.delta:g}"


Rule = RenyiFilter | GaussianFilter | CommittedPlans


def filtered_epsilon(events: Sequence[Event], delta: float) -> float:
    """The budget that all events need under the filter that the budget derives, to 1e-6, and never below it.

    Infinite if that is more than 1e6, or a filter does not cover an event.
    """

    def suffices(epsilon: float) -> bool:
        rule = RenyiFilter.derived(epsilon, delta)
        return not events or rule.remaining(events[:-1], events[-1], epsilon=epsilon, delta=delta) >= 1

    low, high = math.log(1e-6), math.log(1e6)
    if not suffices(math.exp(high)):
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(math.exp(middle)) else (middle, high)
    return math.exp(high)


def to_json(rule: RenyiFilter | GaussianFilter | CommittedPlan, budget: tuple[float, View] | None = None) -> str:
    """The rule that enforces a data set's budget, as one line for its ledger; `rule_of` reads it.

    Args:
        rule: a filter, or a plan, whose own cost is what it guarantees.
        budget: epsilon and view of what a filter enforces from its next charge on, for `largest_budget`.
    """
    fields: dict[str, Any]
    if isinstance(rule, RenyiFilter):
        fields = {"rule": "renyi", "order": rule.order}
    elif isinstance(rule, GaussianFilter):
        fields = {"rule": "gaussian"}
    else:
        listed = [json.loads(known_events.to_json(event)) for event in rule.events]
        fields = {"rule": "plan", "epsilon": rule.epsilon, "delta": rule.delta, "events": listed}
    if budget is not None:
        fields["budget"] = budget
    return json.dumps(fields, sort_keys=True)


def rule_of(notes: Sequence[str]) -> Rule | None:
    """The rule that lines of `to_json` make together, in order; None without a line, ValueError if one is unknown.

    A filter holds until another line follows it; a plan adds to the plans before.
    """
    rule: Rule | None = None
    for each in map(_rule, notes):
        if isinstance(each, CommittedPlan):
            rule = CommittedPlans(plans=(*(rule.plans if isinstance(rule, CommittedPlans) else ()), each))
        else:
            rule = each
    return rule


def rule_in_force(notes: Sequence[str], epsilon: float, delta: float) -> Rule:
    """`rule_of` the lines or, of a ledger that has none since it is older, the filter that the budget derives.

    Its order depends on epsilon and delta, which no upload decided, so the history counts under the filter as well.
    """
    return rule_of(notes) or RenyiFilter.derived(epsilon, delta)


def check_allows(rule: Rule, epsilon: float, delta: float) -> None:
    """Refuse, and say from which on it would do, a budget so small that the rule would never let anything pass."""
    if isinstance(rule, CommittedPlans):
        if not rule.fits(epsilon, delta):
            raise InputError(f"plan: {rule}, above this data set's epsilon {epsilon:g} at delta {delta:g}")
    elif (limit := rule.limit(epsilon, delta)) <= 0:  # which grows as epsilon does
        raise InputError(
            f"budget_epsilon = {epsilon:g}: {rule} allows nothing at delta {delta:g}; set at least "
            f"{math.ceil(100 * (epsilon - limit) + 1) / 100:g}"
        )


def largest_budget(notes: Sequence[str], view: View) -> float | None:
    """The largest epsilon of the budgets that lines of `to_json` note for a view, or for `local`, which bounds each."""
    budgets = [json.loads(note).get("budget", (0.0, "")) for note in notes]
    return max((epsilon for epsilon, its_view in budgets if its_view in ("local", view)), default=None)


@lru_cache(maxsize=64)
def _rule(note: str) -> RenyiFilter | GaussianFilter | CommittedPlan:
    try:
        fields = json.loads(note)
        fields.pop("budget", None)
        match fields.pop("rule"):
            case "renyi":
                return RenyiFilter(**fields)
            case "gaussian":
                return GaussianFilter(**fields)
            case "plan":
                listed = fields.pop("events")
                return CommittedPlan(
                    events=tuple(known_events.from_json(json.dumps(each)) for each in listed), **fields
                )
        raise ValueError("rule: must be renyi, gaussian or plan")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"rule {note[:100]!r}: unknown to this fedpriv ({error})") from None


@lru_cache(maxsize=65536)
def _divergence(event: Event, order: int) -> float:
    return float(event.rdp([order])[0])


def _slots(plans: Iterable[CommittedPlan]) -> Iterable[tuple[Event, int]]:
    """Each plan's single releases and their numbers, those that protect most first."""
    for plan in plans:
        for event in sorted(plan.events, key=lambda e: (e.sampling_probability, -e.effective_noise_multiplier)):
            yield event.with_count(1), event.count


def _dominates(slot: Event, event: Event) -> bool:
    """Whether the pair that dominates one release of the slot dominates one of the event's too.

    It does if they are equal. It does for Gaussian noise if q is at most the slot's and z at least: noise added to the
    slot's gives the larger z; and with q' = r q, P' = r P + (1 - r) Q against Q is, by convexity, nowhere larger.
    """
    if isinstance(slot, SubsampledGaussian) and isinstance(event, SubsampledGaussian):
        if slot.unit != event.unit:
            return False
        closer = event.effective_noise_multiplier >= slot.effective_noise_multiplier
        return closer and event.sampling_probability <= slot.sampling_probability
    return slot == event.with_count(1)
