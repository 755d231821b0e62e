"""How much of a planned run the budget of a node allows: asked before the run charges anything, so that none is begun
that cannot end.

The answer depends on the plan and on what the node's ledger has charged, and charges nothing. It is no promise: a
charge is checked by itself when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedpriv.holder.vault._charging import NodePolicy, RefusedError, registered_data_set
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request, Response
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.ledger import Ledger


def afford(request: Request, holder: Holder) -> Response:
    """How many of the planned releases fit, one after the other.

    Raises:
        RefusedError: the plan is malformed, or the node's data are not registered with its ledger.
        LedgerError: the node's ledger cannot be used.
    """
    policy = holder.policy
    try:
        planned = kinds.unpack_plan(request.fields, policy.budget_view)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    total = sum(number for _, number in planned)
    data_set = registered_data_set(policy, str(holder.client), None) if policy.ledger is not None else None
    # Where the holder starts the runs, the coordinator knows the budget.
    fitting = total if data_set is None or policy.fixed_schedule else _fitting(policy, data_set, planned)
    holder.journal.write("asked", planned=total, affordable=fitting)
    return Response.of(fields=kinds.pack(kinds.Affordable(releases=fitting)))


def _fitting(policy: NodePolicy, data_set: DataSet, planned: Sequence[tuple[Event, int]]) -> int:
    """The number of releases, in this order, that the budget and the number of releases allow.

    Args:
        policy: with a ledger.
        data_set: that pays.
        planned: (what one release costs on the budget's view, how many of them).
    """
    assert policy.ledger is not None
    with Ledger(policy.ledger) as ledger:
        notes = ledger.bounds(data_set.id)
        history = [release.charged_on(policy.budget_view) for release in ledger.releases_in_order(data_set.id)]
        num_before = ledger.chain(data_set.id).newest.counter
        is_known = ledger.is_known_in_full(data_set.id)
    units = {event.unit for event in history} | {event.unit for event, _ in planned}
    if not is_known or len(units) > 1:
        return 0
    left = policy.limits.max_releases - num_before if policy.limits is not None else None
    epsilon, delta = policy.budget_epsilon, data_set.delta_for_releases
    rule = None if epsilon is None else filters.rule_in_force(notes, epsilon, delta)
    fitting = 0
    for event, number in planned:
        here = float(number)
        if epsilon is not None and rule is not None:
            here = min(here, rule.remaining(history, event, epsilon=epsilon, delta=delta))
        if left is not None:
            here = min(here, left - fitting)
        fitting += max(0, int(here))
        if here < number:
            break
        history.append(event.with_count(number * event.count))
    return fitting
