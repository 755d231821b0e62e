"""The coordinator's books: every client's account and budget, the ledger behind both, and the rounds they allow."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal, overload

from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.accounting.accountants import PrivacySpent, epsilon_of
from fedpriv.privacy.accounting.calibration import first_rounds_within
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.law import Accountant
from fedpriv.privacy.accounting.views import Release, View
from fedpriv.privacy.ledger.accounts import Accounts, Part
from fedpriv.privacy.ledger.entries import RELEASED, Charge, DataSet, Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.texts import holder_label
from server.costs import EarlierCharges, RoundCosts
from server.observer import Observer

log = logging.getLogger("flwr")

# Up to this many clients, the rounds that a budget allows are counted by pld; beyond, by rdp, which allows fewer.
_MAX_COUNTED_BY_PLD = 32

# No target is offered that takes so many times the noise: nothing would be learned.
_MOST_NOISE = 1000.0

# Clients whose budgets end early that a notice names.
_MOST_NAMED = 20


class Books:
    """Charges clients before they compute, and records afterwards what happened.

    Args:
        config: of the run.
        run: its random id.
        registrations: of the clients.
        accounts: {client: whose account the ledger keeps}; a client that is missing is known there by its number.
        initial: the adapter; what noise costs depends on its tensors.
        ledger: the durable record, which knows earlier runs; None for a series of rounds that costs nothing.
        resumed_after: the last round that the run had finished when it was interrupted; None for a new run. The ledger
            may hold charges of later rounds: a node that repeats its reply to the byte is asked again at no new
            charge, any other is charged again.

    Raises:
        InputError: a registration, delta or unit contradicts what the ledger holds of the data set.
        LedgerError: the ledger cannot be written.
    """

    def __init__(
        self,
        config: RunConfig,
        run: str,
        registrations: Sequence[Registration],
        *,
        initial: Mapping[str, Tensor],
        accounts: Mapping[int, str] | None = None,
        ledger: Ledger | None = None,
        resumed_after: int | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._data_sets = {registration.client: registration.data_set for registration in registrations}
        self._charged: dict[int, Charge] = {}
        self.retired: dict[int, str] = {}
        self.sizes = {registration.client: registration.num_records for registration in registrations}
        charged = ledger.charged_data_sets() if ledger else set[str]()
        used = {client: id_ for client, id_ in self._data_sets.items() if id_ in charged}
        self._earlier = {c: ledger.releases(id_, excluding_run=run) for c, id_ in used.items()} if ledger else {}
        self.earlier_runs = Counter(
            {c: sum(known.run != run for known in ledger.runs(id_)) for c, id_ in used.items()} if ledger else {}
        )
        self.accounts = Accounts(self.sizes, config.delta, self._earlier, config.holders_per_person)
        self.costs = RoundCosts(config, self.sizes, initial)
        self.num_evaluations: Counter[int] = Counter()
        self._budgets = {client: config.budget_of(client) for client in self.sizes}
        self._round = 0
        self._after, self.is_new = resumed_after or 0, resumed_after is None
        self._earlier_charges = EarlierCharges()
        if ledger is not None:
            self._register(ledger, accounts or {})
            if resumed_after is not None:
                # Each attempt at a sum has terms of its own, so no request for a part in one is ever made again.
                repeats = {
                    r.client
                    for r in registrations
                    if (r.keeps_replies or config.noise_source == "seeded") and not config.secure_aggregation
                }
                self._resume(ledger, resumed_after, repeats)
        spenders = self.accounts.spenders()
        self._num_before = Counter({client: self.accounts.num_releases(client) for client in spenders})
        self._history_before = {client: self.accounts.history(client, "local") for client in spenders}

    def _resume(self, ledger: Ledger, after: int, repeats: set[int]) -> None:
        """Account for what the ledger holds of this run, except for charges that later rounds can use again.

        Args:
            ledger: of the run.
            after: the last finished round.
            repeats: the clients that repeat their reply to the byte when they are asked again.
        """
        for key, release in ledger.releases_of(None, self._run):
            client = int(key.client)
            reusable = key.round > after and client in repeats
            self._earlier_charges.add(key, release, reusable=reusable)
            if not reusable:
                self.accounts.record(client, release)

    def _register(self, ledger: Ledger, accounts: Mapping[int, str]) -> None:
        """Register the data sets that the ledger does not know, and check the others."""
        known = {data_set.id: data_set for data_set in ledger.data_sets()}
        (unit,) = self.costs.units
        new = []
        for client, id_ in self._data_sets.items():
            size, delta, whose = self.sizes[client], self.accounts.deltas[client], accounts.get(client, str(client))
            if id_ not in known:
                new.append(DataSet(id=id_, client=whose, num_records=size, delta=delta))
                continue
            known[id_].check_fixed(ledger.path, num_records=size, delta=delta)
            if any(release.event.unit != unit for release in self._earlier.get(client, ())):
                raise InputError(
                    f"noise_on = {self._config.noise_on}: {ledger.path} holds releases of another unit than {unit} on "
                    f"the data of client {whose}; the two have no common epsilon"
                )
        if new:
            ledger.register_all(new)

    @overload
    def epsilon_so_far(self, client: int, view: Literal["local", "rho"]) -> float: ...

    @overload
    def epsilon_so_far(self, client: int, view: View) -> float | None: ...

    def epsilon_so_far(self, client: int, view: View) -> float | None:
        """An upper bound of what the client has spent, cheap enough for every round; None if the view does not hold.

        It is computed by rdp. On the run's `privacy_view` it is at most the budget, which pld has shown to be kept, and
        at most the target, as long as the client has released nothing beyond what the noise was calibrated for.
        """
        return self._so_far(client, view, "whole")

    def _so_far(self, client: int, view: View, part: Part) -> float | None:
        """`epsilon_so_far` of a part of the client's account."""
        cost = self.accounts.epsilon_of(client, view, "rdp", part=part)
        if cost is None:
            return None
        if view != self._config.privacy_view or part == "before" or not self.accounts.num_releases(client):
            return cost.epsilon
        budget = self._budgets[client]
        epsilon = self._as_planned(cost, [client], part)
        return epsilon if budget is None else min(epsilon, budget)

    def _as_planned(self, cost: PrivacySpent, clients: Iterable[int], part: Part) -> float:
        """The epsilon, at most the target where none of these clients released more than noise was calibrated for."""
        target, epsilon = self._config.target_epsilon, cost.epsilon
        is_above = target is not None and target < epsilon < math.inf and cost.is_guarantee
        if target is not None and is_above and all(self._keeps_plan(client, part) for client in clients):
            return target
        return epsilon

    def _keeps_plan(self, client: int, part: Part) -> bool:
        """Whether this part holds no more than the noise was calibrated for, on the run's view too.

        A round that asks further clients in place of those that failed may have more uploads than were calibrated for,
        and an earlier run had: then less of the noise in them is the client's to count on.
        """
        planned = [*self.costs.events(client, 0, self._config.rounds), *self.costs.reserved]
        return self.accounts.is_part_of(
            client, planned, self._config.privacy_view, self.costs.calibrated_scale, part=part
        )

    @overload
    def largest_so_far(self, view: Literal["local", "rho"]) -> float: ...

    @overload
    def largest_so_far(self, view: View) -> float | None: ...

    def largest_so_far(self, view: View) -> float | None:
        """The largest `epsilon_so_far` of anyone protected; None if the view does not hold for a client."""
        return self._largest(view, "whole")

    def largest_part(self, part: Part) -> float | None:
        """The largest cost of a part of an account on the run's view, as `epsilon_so_far`; None where one lacks it.

        None too where no earlier run has released anything, so that this run is the whole of every account.
        """
        if not self.accounts.has_earlier:
            return None
        return self._largest(self._config.privacy_view, part)

    def _largest(self, view: View, part: Part) -> float | None:
        if self._config.holders_per_person == 1:
            costs = [self._so_far(client, view, part) for client in self.accounts.spenders(part)]
            return None if None in costs else max((cost for cost in costs if cost is not None), default=0.0)
        cost = self.accounts.largest_bound(view, part=part)
        if cost is None or view != self._config.privacy_view or part == "before":
            return cost.epsilon if cost else None
        return self._as_planned(cost, self.sizes, part)

    @property
    def rounds_charged_again(self) -> list[int]:
        """The rounds of this run that a client was charged for more than once, each time for another release."""
        if self._ledger is None:
            return []
        rounds = Counter((key.client, key.round) for key, _ in self._ledger.releases_of(None, self._run))
        return sorted({round_ for (_, round_), num_charges in rounds.items() if num_charges > 1})

    @cached_property
    def rounds_allowed(self) -> dict[int, int]:
        """For each client with a budget, the round up to which it may take part in each one.

        This assumes the worst case over who survives each round, so on views other than `local` it may become more.
        """
        accountant: Accountant = "pld" if self._counts_by_pld else "rdp"
        return {
            client: self._after
            + first_rounds_within(
                budget,
                self.accounts.deltas[client],
                partial(self._spent_after, client),
                at_most=self._config.rounds - self._after,
                accountant=accountant,
            )
            for client, budget in self._budgets.items()
            if budget is not None
        }

    def _spent_after(self, client: int, num_rounds: int) -> list[Event]:
        """The releases of a client that takes part in the next rounds, on the view of the budget."""
        before = [*self.accounts.history(client, self._config.privacy_view), *self.costs.reserved]
        return [*before, *self.costs.worst_events(client, self._after, num_rounds)]

    def target_within(self, clients: Sequence[int]) -> float | None:
        """A target_epsilon at which no budget of these ends before the run does, rounded down; None if none is left.

        All noise of the run is taken to grow by one factor. It is the least, by rdp, at which each budget holds the
        client's account and the run's releases. The target is what these then cost by pld, which is less.
        """
        left, deltas = self._config.rounds - self._after, self.accounts.deltas
        own = {client: self.costs.worst_events(client, self._after, left) for client in clients}
        before = {client: self._spent_after(client, 0) for client in clients}

        def cost(client: int, factor: float, others: Sequence[Event], accountant: Accountant) -> float:
            events = [*others, *(event.with_noise(factor) for event in own[client])]
            return epsilon_of(events, deltas[client], accountant).epsilon

        def fits(factor: float) -> bool:
            return all(cost(each, factor, before[each], "rdp") <= (self._budgets[each] or math.inf) for each in clients)

        low, high = 1.0, _MOST_NOISE
        if not fits(high):
            return None
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return math.floor(100 * max(cost(client, high, (), "pld") for client in clients)) / 100 or None

    @property
    def _counts_by_pld(self) -> bool:
        return len(self.sizes) <= _MAX_COUNTED_BY_PLD

    def within_budget(self, round_: int, selected: Iterable[int]) -> list[int]:
        """The clients whose budget allows this round, whichever clients survive it; the others are retired."""
        selected = [client for client in selected if client not in self.retired]
        worst = self._at_worst(round_, (client for client in selected if self._budgets[client] is not None))
        for client, release in worst.items():
            if not self._fits(client, release, round_):
                self.retire(client, f"budget_epsilon = {self._budgets[client]:g} allows no further round")
        return [client for client in selected if client not in self.retired]

    def retired_by_request(self, round_: int, requests: Mapping[int, str]) -> list[int]:
        """The clients, now retired, whose budget allows the round, but not with what it was charged for already.

        A request that differs from the one that the client was sent in this round before an interruption is another
        release; both count.

        Args:
            round_: from 1.
            requests: {client: digest of its request}.
        """
        beside = self._earlier_charges.beside(requests, round_)
        if not beside:
            return []
        worst = self._at_worst(round_, beside)
        view, retired = self._config.privacy_view, []
        for client, others in beside.items():
            budget = self._budgets[client]
            releases = [worst[client], *others, *self.costs.evaluation_releases]
            if budget is not None and not self.accounts.fits(client, releases, view, budget):
                self.retire(client, f"budget_epsilon = {budget:g} allows no second request of an interrupted round")
                retired.append(client)
        return retired

    def _fits(self, client: int, release: Release, round_: int) -> bool:
        budget, view = self._budgets[client], self._config.privacy_view
        if budget is None:
            return True
        taken = self.accounts.num_releases(client) - self._num_before[client]
        num_before = round_ - 1 - self._after
        # Where every round costs the same, or the client has released no more than every round so far asked for,
        # counting is enough.
        same = self.costs.is_same_each_round(client)
        if view == "local" and (same or self._keeps_schedule(client, num_before)):
            if self._after + (taken if same else num_before) < self.rounds_allowed[client]:
                return True
            if self._counts_by_pld and (same or taken == num_before):
                return False
        return self.accounts.fits(client, [release, *self.costs.evaluation_releases], view, budget)

    def _keeps_schedule(self, client: int, num_rounds: int) -> bool:
        """Whether these books have charged the client for no more than their first rounds, each at most once.

        A number of releases does not tell: after a resume a costly round may be charged twice, and a cheap one missed.
        """
        planned = self.costs.events(client, self._after, num_rounds)
        return self.accounts.is_part_of(client, [*self._history_before.get(client, ()), *planned])

    def able_to_evaluate(self) -> list[int]:
        """The clients whose budgets allow the evaluation; also those that have retired, since it was kept for them."""
        view, releases = self._config.privacy_view, self.costs.evaluation_releases
        return [
            client
            for client, budget in sorted(self._budgets.items())
            if budget is None or self.accounts.fits(client, releases, view, budget)
        ]

    def retire(self, client: int, reason: str) -> None:
        """Do not ask the client any more."""
        log.info("client %s retires: %s", client, reason)
        self.retired[client] = reason

    @property
    def active(self) -> list[int]:
        """The clients that may still be asked, in order."""
        return [client for client in sorted(self.sizes) if client not in self.retired]

    def charge(self, round_: int, requests: Mapping[int, str], *, among: Iterable[int] | None = None) -> None:
        """Charge clients durably before any of them is asked; a round may charge more clients until it is settled.

        Each charge is the worst case over all that the round may still ask, so none of them falls short of what a
        round costs that does ask others.

        Args:
            round_: from 1.
            requests: {client: digest of its request}.
            among: the clients in the terms of a sum, on whose noise each of these counts; None stands for those asked.

        Raises:
            LedgerError: the charge cannot be written, so nobody may be asked.
        """
        releases = (
            self._at_worst(round_, requests) if among is None else self.costs.worst(round_, requests, beside=among)
        )
        self._charge(round_, requests, releases)

    def charge_evaluation(self, round_: int, requests: Mapping[int, str]) -> None:
        """Charge clients for the evaluation, as `charge` does for a round."""
        (release,) = self.costs.evaluation_releases
        self._charge(round_, requests, dict.fromkeys(requests, release))

    def _charge(self, round_: int, requests: Mapping[int, str], releases: Mapping[int, Release]) -> None:
        self._round = round_
        new = []
        for client, release in releases.items():
            key = Key(run=self._run, client=str(client), round=round_, request=requests[client])
            key, is_paid = self._earlier_charges.key_for(key)
            charge = Charge(
                key=key,
                data_set=self._data_sets[client],
                release=release,
                noise_source=self._config.noise_source,
            )
            self._charged[client] = charge
            if not is_paid:
                new.append(charge)
        if self._ledger is not None and new:
            self._ledger.charge(new)

    def settle(self, replies: Mapping[int, str]) -> None:
        """Record what happened in the round that was charged.

        Every charged client pays: a client that was asked may have released something, whether or not it arrived. A
        client whose upload is not in the sum pays as if it were.

        Args:
            replies: {client: digest of its reply} of those in the sum.

        Raises:
            LedgerError: it cannot be written.
        """
        charged = {client: charge.release for client, charge in self._charged.items()}
        self._settle(self.costs.settled(charged, replies), replies)

    def settle_evaluation(self, replies: Mapping[int, str]) -> None:
        """Record the evaluation that was charged, as `settle` does for a round."""
        self.num_evaluations.update(self._charged.keys())
        self._settle({client: charge.release for client, charge in self._charged.items()}, replies)

    def _settle(self, releases: Mapping[int, Release], replies: Mapping[int, str]) -> None:
        done = []
        for client, release in releases.items():
            charge = self._charged[client]
            self.accounts.record(client, release)
            if self._ledger is not None and (
                charge.key not in self._earlier_charges or self._ledger.phase(charge.key) != RELEASED
            ):
                done.append((replace(charge, release=release), replies.get(client)))
        if self._ledger is not None and done:
            self._ledger.release(done)
        self._charged = {}
        self.count_unused(self._round)

    def count_unused(self, up_to: int) -> None:
        """Account for charges of rounds up to this one that an interrupted attempt made and no round used again."""
        for client, release in self._earlier_charges.pop_unused(up_to):
            self.accounts.record(client, release)

    def _at_worst(self, round_: int, clients: Iterable[int]) -> dict[int, Release]:
        """The cost of a round in the worst case over all that may still be asked.

        A round with too few replies asks others, and its uploads then count less each. Nobody joins a sum that is made
        in secret.
        """
        clients = list(clients)
        beside = clients if self._config.secure_aggregation else [*self.active, *self._charged]
        return self.costs.worst(round_, clients, beside=beside)


def announce_budgets(books: Books, config: RunConfig, names: Mapping[int, str], observer: Observer) -> None:
    """Tell the observer, before the first round, which budgets end before the run does, and after how many rounds.

    Raises:
        InputError: fewer clients than the run needs can take part in even one round, or a smaller target lets as many
            take part in all of them.
    """
    allowed = books.rounds_allowed
    short = {client: rounds for client, rounds in allowed.items() if rounds < config.rounds}
    if len(books.sizes) < config.min_clients:
        raise InputError(f"min_clients = {config.min_clients}: only {len(books.sizes)} clients are registered")
    num_able = len(books.sizes) - sum(rounds == 0 for rounds in allowed.values())
    if num_able < config.min_clients:
        raise InputError(
            f"budget_epsilon = {list(config.budget_epsilon)}: allows {num_able} of {len(books.sizes)} clients a round, "
            f"min_clients = {config.min_clients}; use more noise, or a larger budget"
        )
    if short:
        listed = [f"{holder_label(client, names[client])}: {rounds}" for client, rounds in sorted(short.items())]
        more = f" and {len(listed) - _MOST_NAMED:,} more, the least {min(short.values())}"
        each = ", ".join(listed[:_MOST_NAMED]) + (more if len(listed) > _MOST_NAMED else "")
        may_lower = books.is_new and config.target_epsilon and not config.clients_per_round
        fitting = books.target_within(sorted(short, key=short.__getitem__)[:_MOST_NAMED]) if may_lower else None
        if fitting and len(books.sizes) - len(short) < config.min_clients:
            raise InputError(
                f"target_epsilon = {config.target_epsilon:g}: what budget_epsilon leaves allows fewer than the "
                f"{config.rounds} rounds ({each}); target_epsilon = {fitting:g} allows all; nothing was charged"
            )
        observer.notice(
            f"budget_epsilon allows fewer than the {config.rounds} rounds of this run, on the {config.privacy_view} "
            f"view and whichever clients drop out: {each}; these clients then retire"
            + (f"; target_epsilon = {fitting:g} would keep them" if fitting else "")
        )
