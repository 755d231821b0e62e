"""Charges of releases to the node's own ledger, before anything is computed; the budget that bounds them; refusals.

A filter enforces the budget, or plans that the node's operator committed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedpriv.errors import InputError, LedgerError
from fedpriv.files import Journal, trace_without_message
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.holder.wire.frame import FAILED, REFUSED, RETIRED, WAITING, FrameError, Response
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import check_delta, epsilon_of, stays_within
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.filters import CommittedPlan, CommittedPlans, GaussianFilter, RenyiFilter, Rule
from fedpriv.privacy.accounting.views import PlannedView, Release, default_delta
from fedpriv.privacy.ledger import statement
from fedpriv.privacy.ledger.entries import CHARGED, RELEASED, Charge, DataSet, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import chain_of

log = logging.getLogger(__name__)

# Characters of a refusal, which may quote what a coordinator sent.
_LONGEST_REASON = 300

# Of a target that a coordinator has calibrated noise to.
_ROUNDING = 1e-6

Choice = RenyiFilter | GaussianFilter | CommittedPlan
"""A rule that an operator can choose at once."""


class RefusedError(Exception):
    """The guard refused before anything was computed; the message holds public values only, so it may be sent."""


class WaitingError(RefusedError):
    """The guard refused until the node's operator has looked at the run; it may then let the same request pass."""


class RetiredError(RefusedError):
    """The guard refused because the data's budget is spent; it will refuse every later request too."""


def refused(error: Exception, journal: Journal, **named: str | int) -> Response:
    """An error response, which says only that the guard refused, or that the request failed.

    An exception's text may contain a record, so it stays in this node's log.

    Args:
        error: that ended the request.
        journal: of the node, which notes it; what is beyond its quota is not logged either.
        named: run and round.
    """
    event, code = "failed", FAILED
    reason, said = "failed; this node's log says why", str(error)
    if isinstance(error, RetiredError):
        event, code, reason = "retired", RETIRED, f"retired: {error}"
    elif isinstance(error, (RefusedError, FrameError)):  # of which neither quotes a record
        code = WAITING if isinstance(error, WaitingError) else REFUSED
        event, reason = "refused", f"refused: {error}"[:_LONGEST_REASON]
    elif isinstance(error, LedgerError):
        event, code, reason = "refused", REFUSED, "refused: this node's ledger cannot be used; its log says why"
    elif not isinstance(error, InputError):  # which may name the node's own keys, columns or labels
        said = trace_without_message(error)
    if journal.write(event, **named, reason=reason):
        log.log(logging.WARNING if isinstance(error, RefusedError) else logging.ERROR, "%s: %s", event, said)
    return Response.of(code=code, reason=reason)


class AlreadyReleasedError(Exception):
    """The request was answered before: the stored reply is sent again, and nothing is computed.

    Args:
        content: the stored reply.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__("already answered; the stored reply is sent again")
        self.content = content


@dataclass(frozen=True, kw_only=True)
class NodePolicy:
    """The data holder's own rules.

    Attributes:
        allow_not_private: the holder agrees to releases that no epsilon covers, because its data are public or
            the whole federation is its own simulation.
        ledger: the node's own ledger; None is allowed only with `allow_unrecorded`.
        allow_unrecorded: the holder agrees to releases that only the coordinator's ledger records.
        budget_epsilon: the most that all runs on the data may cost together, on `budget_view`; None sets no bound.
        delta: of the budget, in (0, 1); None means 1/(10 N_k), at most 1e-5.
        limits: what an instruction may ask for; None allows every valid instruction.
        budget_view: `local`, or `aggregate`, where an upload under secure aggregation costs what the sum shows.
        min_survivors: t; terms under which fewer uploads make a sum are refused.
        colluding_clients: c, how many others may reveal their noise to the server; terms that count on fewer are
            refused.
        watch: notices that the ledger is an old copy; None without a ledger, or a key that signs.
        data_set: that was registered when this process read where the records are, so that no other one pays for
            them; empty if none was. None where a run brings the records.
        fixed_schedule: the holder starts the runs itself, so no release is chosen by what earlier ones showed, and
            losses may be composed by pld.

    Raises:
        InputError, ValueError: the budget or delta is out of range.
    """

    allow_not_private: bool = False
    ledger: Path | None = None
    allow_unrecorded: bool = False
    budget_epsilon: float | None = None
    delta: float | None = None
    limits: NodeLimits | None = field(default_factory=NodeLimits)
    budget_view: PlannedView = "local"
    min_survivors: int = 3
    colluding_clients: int = 0
    watch: ReceiptWatch | None = None
    data_set: str | None = None
    fixed_schedule: bool = False

    def __post_init__(self) -> None:
        if self.budget_epsilon is not None and not 0 < self.budget_epsilon < math.inf:
            raise InputError(f"budget-epsilon = {self.budget_epsilon}: must be finite and > 0")
        if self.delta is not None:
            check_delta(self.delta)


def registered_data_set(policy: NodePolicy, client: str, num_records: int | None) -> DataSet | None:
    """The client's data set in the node's own ledger; None if the node keeps no ledger.

    With `num_records`, a first one is registered. N_k stays as it was registered, however many records there are now.

    Raises:
        RefusedError: no data set is registered, and none may be registered here; it was registered since the start; or
            with another delta than is set.
        LedgerError: the ledger cannot be used.
    """
    if policy.ledger is None:
        return None
    with Ledger(policy.ledger) as ledger:
        if (data_set := ledger.data_set()) is not None:
            if policy.data_set not in (None, data_set.id):
                raise RefusedError(
                    "data: were registered since this node's vault started; its operator must restart it"
                )
            try:
                data_set.check_fixed(policy.ledger, delta=policy.delta)
            except InputError as error:
                log.error("%s", error)
                raise RefusedError(
                    "delta: is not what this node has registered; its operator must correct it"
                ) from None
            return data_set
        if num_records is None:
            raise RefusedError("data: this node's operator has registered none")
        return ledger.register(client, num_records, policy.delta or default_delta(num_records))


def log_content(policy: NodePolicy, data_set: DataSet, content: bytes, num_records: int) -> None:
    """Note in the ledger of a simulated node, and in its log, that the records changed; this resets no spending."""
    if policy.ledger is None:
        return
    with Ledger(policy.ledger) as ledger:
        _say_what_changed(ledger, data_set, content, num_records)
        ledger.log_content(data_set, content)


def opened_records(policy: NodePolicy, data_set: DataSet, content: bytes, num_records: int) -> tuple[bytes, str]:
    """`Ledger.coin_key`, and the note on all records together that the entries of their releases carry.

    Every entry has one, since one that only a change adds would tell of it by its room. So content, which is what all
    records are together, decides nothing about a release.

    Raises:
        LedgerError: the ledger cannot be used.
    """
    assert policy.ledger is not None, "a node with records of its own keeps a ledger"
    with Ledger(policy.ledger) as ledger:
        _say_what_changed(ledger, data_set, content, num_records)
        return ledger.coin_key(data_set), ledger.content_note(content)


def _say_what_changed(ledger: Ledger, data_set: DataSet, content: bytes, num_records: int) -> None:
    if (held := ledger.data_set_with(content)) not in (None, data_set.id):
        log.error("the records are those of data set %s, yet they are charged to %s", held, data_set.id)
    if ledger.has_changed(data_set, content):
        log.warning(
            "the records of %s changed; what was spent on them remains spent; `fedpriv node records` says what counts "
            "now",
            data_set.id,
        )
    if num_records > data_set.num_records:
        log.warning(
            "found %s records to train on, more than N_k = %s: all of them count, and are charged to %s",
            num_records,
            data_set.num_records,
            data_set.id,
        )
    elif num_records < data_set.num_records:
        log.warning("found %s records to train on; N_k stays %s", num_records, data_set.num_records)


def charge(
    policy: NodePolicy,
    key: Key,
    release: Release,
    data_set: DataSet | None,
    *,
    noise_source: str,
    shown: str = "",
    agreed: tuple[float, PlannedView] | None = None,
) -> tuple[bool, str]:
    """Charge a release to the node's own ledger, if it keeps one, durably and before anything is computed.

    Returns whether the charge is new, and `signed_receipt`. If it is not new, an earlier attempt ended before it stored
    a reply, perhaps because of a record: noise alone may be released for it, and the records must not be touched again.

    A release without noise, which `check_instruction` allows only on public data and in simulations, is not recorded,
    since no ledger can bound its cost.

    Raises:
        AlreadyReleasedError: the same request was answered before.
        RetiredError: the budget, or the number of releases, does not allow another one.
        RefusedError: the node has signed a receipt, `shown` by the coordinator or kept elsewhere, that its ledger
            lacks; the event protects nobody, on a node that releases nothing of that kind; its operator's plan or
            filter has no place for it; the same request was answered before, but the reply is no longer kept; it was
            charged to another data set; or earlier releases of these data have another unit.
        LedgerError: the ledger cannot be used.
    """
    event = release.event
    if not policy.allow_not_private:
        _check_event(event)
    if policy.ledger is None or data_set is None or not event.is_noised:
        return True, signed_receipt(policy, data_set)
    new_charge = Charge(key=key, data_set=data_set.id, release=release, noise_source=noise_source)
    with Ledger(policy.ledger) as ledger:
        current = ledger.data_set()
        if current is None or current.id != data_set.id:
            raise RefusedError("data: another data set was registered meanwhile; ask again")
        _check_newest(policy, ledger, shown)
        phase = ledger.phase(key)
        if phase == RELEASED:
            if (content := ledger.stored(key)) is None:
                raise RefusedError(f"round {key.round}: already answered, and the reply is no longer kept")
            raise AlreadyReleasedError(content)
        if phase == CHARGED:
            if ledger.charged_data_set(key) != data_set.id:
                raise RefusedError(f"round {key.round}: was charged to another data set of this node")
            return False, _sign_newest(policy, ledger, data_set)
        if not ledger.is_known_in_full(data_set.id):
            raise RetiredError("ledger: was restored, and what was spent before is not known in full")
        if policy.limits is not None and ledger.chain(data_set.id).newest.counter >= policy.limits.max_releases:
            raise RetiredError(f"max_releases = {policy.limits.max_releases}: these data have had so many releases")
        if agreed is not None:
            _check_target(ledger, new_charge, *agreed, data_set)
        _check_budget(policy, ledger, release, data_set)
        ledger.charge([new_charge])
        return True, _sign_newest(policy, ledger, data_set)


def spent_so_far(policy: NodePolicy, data_set: DataSet) -> str:
    """A line on what the data have spent by now and how much of the budget is used up, for the node's operator."""
    assert policy.ledger is not None, "a node with records of its own keeps a ledger"
    view, budget = policy.budget_view, policy.budget_epsilon
    with reading(policy.ledger) as db:
        events = [release.charged_on(view) for release in db.releases(data_set.id)]
        used = statement.enforced(db, data_set, budget, view)[1] if budget else 0.0
    spent = epsilon_of(events, data_set.delta, "rdp").epsilon
    left = f" of {budget:g}; {used:.0%} of the budget is used up by the rule that enforces it" if budget else ""
    return f"epsilon {spent:.3g} on the {view} view at delta {data_set.delta:.2g}{left}"


def _check_event(event: Event) -> None:
    """Refuse an event that protects nobody, whatever its mechanism says of itself."""
    if not event.is_noised:
        raise RefusedError("noise_multiplier: its effective value is 0; this node releases nothing without noise")
    if not event.is_guarantee:
        raise RefusedError(f"mechanism: its cost is no privacy guarantee ({event.caveat}); this node needs one")


def _check_newest(policy: NodePolicy, ledger: Ledger, shown: str) -> None:
    """Refuse to go on from an old copy of the ledger: what it lacks would be spent a second time."""
    if policy.watch is None:
        return
    try:
        lost = policy.watch.lost(ledger.chains(), shown)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    if lost is None:
        return
    log.error(
        "%s was restored from an old copy: this node has signed charge %s of data set %s, which it lacks; "
        "see `fedpriv ledger recover`",
        ledger.path,
        lost.counter,
        lost.data_set,
    )
    with suppress(OSError):  # so that it is also noticed when nobody shows it
        policy.watch.keep(lost)
    raise RefusedError("ledger: is older than a release that this node has signed; its operator must recover it")


def _sign_newest(policy: NodePolicy, ledger: Ledger, data_set: DataSet) -> str:
    """Sign and keep the receipt of the last charge, before anything is computed for it; empty if none is kept."""
    return policy.watch.sign(ledger.chain(data_set.id)).text() if policy.watch is not None else ""


def _check_target(ledger: Ledger, new: Charge, target: float, view: PlannedView, data_set: DataSet) -> None:
    """Refuse a release with which the run's rounds, each counted once, cost more epsilon than its holders agreed to.

    A round that is asked again costs again, and the budget bounds that.
    """
    rounds: dict[int | None, Event] = {}
    for key, release in (*ledger.releases_of(data_set.id, new.key.run), (new.key, new.release)):
        event = release.charged_on(view)
        known = rounds.setdefault(key.round, event)
        if event.effective_noise_multiplier < known.effective_noise_multiplier:
            rounds[key.round] = event
    if not stays_within(rounds.values(), data_set.delta, target * (1 + _ROUNDING)):
        raise RefusedError(f"target_epsilon = {target:g}: this run's rounds would cost more than that, as was agreed")


def _check_budget(policy: NodePolicy, ledger: Ledger, release: Release, data_set: DataSet) -> None:
    """Refuse a release that the budget does not allow after all earlier ones, however a coordinator chose them.

    Raises:
        RefusedError, RetiredError: see `charge`.
    """
    view, epsilon = policy.budget_view, policy.budget_epsilon
    history = [earlier.charged_on(view) for earlier in ledger.releases(data_set.id)]
    event = release.charged_on(view)
    if any(earlier.unit != event.unit for earlier in history):
        raise RefusedError(
            f"noise_on: its unit is the {event.unit}; earlier releases of these data have another, "
            "and the two do not compose"
        )
    if epsilon is None:
        return
    delta, notes = data_set.delta_for_releases, ledger.bounds(data_set.id)
    rule = None if policy.fixed_schedule else filters.rule_in_force(notes, epsilon, delta)
    if rule is None:
        fits = stays_within([*history, event], data_set.delta, epsilon)
    else:
        if not rule.covers(event):
            q, noise = event.sampling_probability, event.effective_noise_multiplier
            raise RefusedError(f"mechanism: {rule} allows no such release, of q = {q:g} and effective noise {noise:g}")
        if isinstance(rule, CommittedPlans):  # which slots are left depends on the order of what took them
            history = [earlier.charged_on(view) for earlier in ledger.releases_in_order(data_set.id)]
        fits = rule.remaining(history, event, epsilon=epsilon, delta=delta) >= 1
    if not fits:
        log.warning("data set %s: another such release would exceed the budget of epsilon %g", data_set.id, epsilon)
        raise RetiredError("budget_epsilon: another round would exceed this node's budget")
    if rule is None or isinstance(rule, CommittedPlans):  # a plan is the guarantee itself
        return
    # What is proven of all releases is the largest budget that any of them had, whatever the settings say later.
    if (note := filters.to_json(rule, (epsilon, view))) not in notes[-1:]:
        ledger.bound(data_set, note)
        log.info("the budget of %s, epsilon %g on the %s view, is enforced by %s", data_set.id, epsilon, view, rule)


def signed_receipt(policy: NodePolicy, data_set: DataSet | None) -> str:
    """The receipt of the last charge on the node's data, as text, signed and kept; empty if it keeps no receipts.

    Raises:
        LedgerError: the ledger cannot be used.
    """
    if policy.ledger is None or policy.watch is None or data_set is None:
        return ""
    with reading(policy.ledger) as db:
        return policy.watch.sign(chain_of(db, data_set.id)).text()


def store_reply(policy: NodePolicy, key: Key, event: Event, content: bytes, note: str | None = None) -> bytes:
    """Store a reply before it is sent, and return the reply to send: an earlier one if one was stored.

    Args:
        policy: of the node.
        key: of the charge.
        event: of the charge.
        content: of the reply.
        note: on the records, of `opened_records`; None where they are not the node's own.

    Raises:
        LedgerError: it cannot be stored, so it must not be sent.
    """
    if policy.ledger is None or not event.is_noised:
        return content
    with Ledger(policy.ledger) as ledger:
        return ledger.store(key, content, note)


def rule_note(rule: Choice | None, epsilon: float, delta: float, notes: Sequence[str] = ()) -> str:
    """The note in a ledger on the rule that enforces a budget.

    Args:
        rule: what the operator chose; None stands for the Renyi filter whose order epsilon and delta decide.
        epsilon: of the budget.
        delta: of the budget.
        notes: that the ledger has of the data set.

    Raises:
        InputError: the budget does not allow the rule, or the rule allows no release.
    """
    note = filters.to_json(rule or RenyiFilter.derived(epsilon, delta))
    new = filters.rule_of([*notes, note])
    assert new is not None, "it holds the note"
    filters.check_allows(new, epsilon, delta)
    return note


def choose_rule(ledger: Ledger, data_set: DataSet, rule: Choice, epsilon: float) -> Rule:
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
    ledger.bound(data_set, rule_note(rule, epsilon, data_set.delta_for_releases, notes))
    return filters.rule_in_force(ledger.bounds(data_set.id), epsilon, data_set.delta_for_releases)
