"""How the budget of a node's data set is enforced: by a filter, or by plans that its operator committed."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from fedpriv.accounting import events, filters
from fedpriv.accounting.filters import CommittedPlan, CommittedPlans, GaussianFilter, RenyiFilter, Rule
from fedpriv.errors import InputError
from fedpriv.ledger.entries import DataSet
from fedpriv.ledger.ledger import Ledger

log = logging.getLogger(__name__)

Choice = RenyiFilter | GaussianFilter | CommittedPlan
"""What an operator can choose at once."""


def note_of(rule: Choice | None, epsilon: float, delta: float, notes: Sequence[str] = ()) -> str:
    """What a ledger notes of what enforces a budget.

    Args:
        rule: what the operator chose; None stands for the Renyi filter whose order epsilon and delta decide.
        epsilon, delta: of the budget.
        notes: that the ledger has of the data set.

    Raises:
        InputError: the budget does not allow the rule, or the rule allows no release.
    """
    note = filters.to_json(rule or RenyiFilter.derived(epsilon, delta))
    new = filters.rule_of([*notes, note])
    assert new is not None, "it holds the note"
    if isinstance(new, CommittedPlans):
        if not new.fits(epsilon, delta):
            raise InputError(f"plan: {new}, above this data set's epsilon {epsilon:g} at delta {delta:g}")
    elif new.limit(epsilon, delta) <= 0:
        raise InputError(f"budget_epsilon = {epsilon:g}: {new} allows nothing at delta {delta:g}; use a larger one")
    return note


def settled_rule(ledger: Ledger, data_set: DataSet, epsilon: float) -> Rule:
    """How the budget is enforced. A ledger that does not say, since it is older, says so from now on.

    Its order depends on epsilon and delta, which no upload decided, so the history counts under the filter as well.

    Raises:
        ValueError: the ledger names a rule that is unknown.
        LedgerError: the ledger cannot be written.
    """
    rule = filters.rule_of(ledger.bounds(data_set.id))
    if rule is None:
        rule = RenyiFilter.derived(epsilon, data_set.delta_for_releases)
        ledger.bound(data_set, filters.to_json(rule))
        log.warning("the budget of %s is enforced by %s from now on", data_set.id, rule)
    return rule


def choose(ledger: Ledger, data_set: DataSet, rule: Choice, epsilon: float) -> Rule:
    """Note how the operator wants the budget to be enforced, and return all that holds then.

    Args:
        ledger: of the node.
        data_set: its last one. Nothing was charged to it yet, unless a further plan follows plans.
        rule: a filter, or a plan, whose cost is added to that of the plans before.
        epsilon: of the budget.

    Raises:
        InputError: the budget does not allow it, or another rule holds already.
    """
    notes = ledger.bounds(data_set.id)
    adds = isinstance(rule, CommittedPlan) and isinstance(filters.rule_of(notes), CommittedPlans)
    if ledger.chain(data_set.id).newest.counter and not adds:
        raise InputError(f"data set {data_set.id}: something is charged to it, so what enforces its budget stays")
    ledger.bound(data_set, note_of(rule, epsilon, data_set.delta_for_releases, notes))
    return settled_rule(ledger, data_set, epsilon)


def read_rule(text: str) -> RenyiFilter | GaussianFilter:
    """The filter that `renyi:ORDER` or `gaussian` names.

    Raises:
        InputError: the text is another one.
    """
    name, _, order = text.partition(":")
    try:
        if text == "gaussian":
            return GaussianFilter()
        if name == "renyi":
            return RenyiFilter(order=int(order))
    except ValueError:
        pass
    raise InputError(f"filter = {text!r}: must be gaussian, or renyi:ORDER with ORDER in 2..63, 128, 256, 512 or 1024")


def read_plan(path: Path, client: int, data_set: DataSet, view: str, delta: float | None) -> CommittedPlan:
    """A client's plan from a file that `fedpriv plan --out` wrote; its cost is computed again.

    Args:
        path: of the file.
        client: number of the node's partition.
        data_set: of the node.
        view: of the node's budget.
        delta: of the plan, of which the share that is left for releases counts; None takes that of the file.

    Raises:
        InputError: the file cannot be used, or was made for other records or another view.
    """
    try:
        values = json.loads(path.read_text())
        planned = next(each for each in values["clients"] if each["client"] == client)
        found = [events.from_json(json.dumps(each)) for each in planned["events"]]
        share = (planned["delta"] if delta is None else delta) / data_set.delta  # 1 and halves are exact
        plan = CommittedPlan.of(found, share * data_set.delta_for_releases)
        facts = {"num_records": (planned["num_records"], data_set.num_records), "view": (values["view"], view)}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except StopIteration:
        raise InputError(f"{path}: plans nothing for client {client}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: must be a plan that `fedpriv plan --out` wrote ({error})") from None
    for name, (theirs, own) in facts.items():
        if theirs != own:
            raise InputError(f"{path}: {name} = {theirs}: this node has {own}")
    return plan
