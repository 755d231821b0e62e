"""Costs of a round for each client: events, weights and the worst case over who else is in its sum.

A run that was interrupted has charges in the ledger already, which count as they stand there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property

from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.learning.aggregation import weights_by_size
from fedpriv.learning.training.local_update import UpdateSpec, planned_event
from fedpriv.learning.training.noise_plan import view_scale
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.private_evaluation import planned_event as planned_evaluation
from fedpriv.learning.training.rounds import RunSchedule, client_masses, grid_of
from fedpriv.privacy.accounting.events import Event, Unit
from fedpriv.privacy.accounting.views import Release, num_readers, rho_bar, smallest_aggregate_scales, smallest_rho_bars
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.mechanisms.discrete_gaussian import ClientGrid, SumGrid


class RoundCosts:
    """Costs of a run's rounds, from its configuration and the registered sizes alone.

    Args:
        config: of the run.
        sizes: {client: registered N_k}.
        initial: the adapter; what noise costs depends on its tensors.

    Attributes:
        masses: {client: to which rho_k is in proportion}.
    """

    def __init__(self, config: RunConfig, sizes: Mapping[int, int], initial: Mapping[str, Tensor]) -> None:
        self._config = config
        self._sizes = sizes
        self._schedule = RunSchedule.of(config)
        self.masses = client_masses(config, sizes)
        self._grids = grids = {spec: grid_of(config, spec, sizes) for spec in self._schedule.totals}

        @cache  # one for all clients of a size and grid, of which there may be many
        def planned(num_records: int, parts: tuple[ClientGrid | None, ...]) -> dict[UpdateSpec, Event]:
            return {
                spec: planned_event(spec, spec.probability(num_records), initial, part)
                for spec, part in zip(grids, parts, strict=True)
            }

        self._events = {
            client: planned(n, tuple(grid.of(client) if grid else None for grid in grids.values()))
            for client, n in sizes.items()
        }
        evaluation = EvaluationSpec.of(config)
        self._evaluation = planned_evaluation(evaluation) if evaluation else None

    def event(self, client: int, round_: int) -> Event:
        """The event that a round, from 1, costs the client on the `local` view."""
        return self._events[client][self._schedule.spec(round_)]

    def is_same_each_round(self, client: int) -> bool:
        """Whether all rounds of the run have one specification, so that each costs the client the same."""
        return len(self._events[client]) == 1

    def events(self, client: int, after: int, num_rounds: int) -> list[Event]:
        """The events that rounds after a finished one cost a client on the `local` view if it takes part in each."""
        own = self._events[client]
        counts = self._schedule.counts(after, num_rounds)
        return [own[spec].with_count(count * own[spec].count) for spec, count in counts.items()]

    def worst_events(self, client: int, after: int, num_rounds: int) -> list[Event]:
        """The same on the run's `privacy_view`, in the worst case over which clients are in the sums."""
        view = self._config.privacy_view
        events = []
        for spec, count in self._schedule.counts(after, num_rounds).items():
            event = self._worst_of(spec, [client], self._sizes)[client].seen_by(view)
            events.append(event.with_count(count * event.count))
        return events

    def planned(self, client: int, after: int, num_rounds: int) -> list[tuple[Release, int]]:
        """(one of the client's releases, how many of them): the evaluation's, for which budgets are kept, and then
        those of the next rounds, in their order.
        """
        planned = [(release, 1) for release in self.evaluation_releases]
        num_kept = len(planned)
        for phase, count in self._schedule.following(after, num_rounds):
            release = self._worst_of(phase.spec, [client], self._sizes)[client]
            if len(planned) > num_kept and planned[-1][0] == release:
                planned[-1] = (release, planned[-1][1] + count)
            else:
                planned.append((release, count))
        return planned

    def asked(self, client: int, after: int, num_rounds: int) -> list[tuple[UpdateSpec, Release]]:
        """(what the next rounds, and the evaluation, ask of a client, one such release), each once."""
        specs = self._schedule.counts(after, num_rounds)
        asked = [(spec, self._worst_of(spec, [client], self._sizes)[client]) for spec in specs]
        evaluation = EvaluationSpec.of(self._config)
        return asked + [(evaluation.update, release) for release in self.evaluation_releases if evaluation]

    def grid(self, round_: int) -> SumGrid | None:
        """The grid of a round's sum, from 1; None without secure aggregation."""
        return self._grids[self._schedule.spec(round_)]

    def weights(self, clients: Iterable[int]) -> dict[int, float]:
        """{client: rho_k} of uploads of these clients in a round's sum."""
        return weights_by_size({client: self.masses[client] for client in clients})

    @property
    def caveat(self) -> str:
        """The reason why the cost of the run's releases is no privacy guarantee; empty if it is one."""
        return "; ".join(sorted({event.caveat for event in self._all_events if event.caveat}))

    @property
    def units(self) -> set[Unit]:
        """The unit that the run's releases protect: a single one, since all clients follow the same instruction."""
        return {event.unit for event in self._all_events}

    @property
    def _all_events(self) -> Iterator[Event]:
        return (event for by_spec in self._events.values() for event in by_spec.values())

    @property
    def reserved(self) -> list[Event]:
        """The release that budgets keep for the evaluation after the last round; the same on every view."""
        return [self._evaluation] if self._evaluation else []

    @property
    def evaluation_releases(self) -> list[Release]:
        """The evaluation as a release: nobody else's noise is counted, and no view scales its own."""
        scale = 1.0 if self._config.secure_aggregation else None
        return [Release(event=event, rho_bar=1.0, aggregate_scale=scale) for event in self.reserved]

    @cached_property
    def calibrated_scale(self) -> float:
        """The factor by which calibration took every client's noise to be multiplied, at least, on the run's view."""
        return view_scale(self._config, list(self._sizes.values()))

    def worst(self, round_: int, clients: Iterable[int], *, beside: Iterable[int]) -> dict[int, Release]:
        """The clients' releases in a round in the worst case over which others are in its sum.

        Args:
            round_: from 1.
            clients: in it.
            beside: who may be in its sum too.
        """
        return self._worst_of(self._schedule.spec(round_), clients, beside)

    def _worst_of(self, spec: UpdateSpec, clients: Iterable[int], beside: Iterable[int]) -> dict[int, Release]:
        clients = list(clients)
        together = {*beside, *clients}
        bars = smallest_rho_bars(
            {client: self.masses[client] for client in together}, of=clients, most=self._most_in_a_sum
        )
        scales = self._worst_scales(together, self._grids[spec])
        return {
            client: Release(
                event=self._events[client][spec],
                rho_bar=bars[client],
                aggregate_scale=scales[client] if scales else None,
                num_readers=num_readers(self._config.colluding_clients),
            )
            for client in clients
        }

    @property
    def _most_in_a_sum(self) -> int | None:
        """The number of uploads that a client's release can be weighed with, its own included; None without a limit.

        A round asks `clients_per_round` more only while fewer than `min_clients` have replied, and replies to what it
        asked before no longer count then. A client that failed pays as if its upload were in the sum too.
        """
        each = self._config.clients_per_round
        return self._config.min_clients + each if each else None

    def _worst_scales(self, clients: Iterable[int], grid: SumGrid | None) -> dict[int, float] | None:
        """Each client's smallest noise of any sum that is seen, relative to its own; None if uploads are seen.

        As each of these clients' nodes computes it from the terms that all of them sign.
        """
        if grid is None:
            return None
        return smallest_aggregate_scales(
            {client: grid.scales[client] for client in clients},
            threshold=self._config.min_clients,
            colluding=self._config.colluding_clients,
        )

    def settled(self, charged: Mapping[int, Release], uploads: Iterable[int]) -> dict[int, Release]:
        """Charged releases once it is known which uploads are in the sum, each client's own counted among them.

        On the `aggregate` view they stay what was charged: for exactly as many survivors as a sum needs.

        Args:
            charged: {client: its release}.
            uploads: the clients whose uploads are in the sum.
        """
        uploads = set(uploads)

        @cache
        def bar(beside: int | None) -> float:
            return rho_bar(self.weights(uploads if beside is None else {*uploads, beside}).values())

        return {
            client: replace(release, rho_bar=bar(None if client in uploads else client))
            for client, release in charged.items()
        }


class EarlierCharges:
    """Earlier charges of a run; each of them pays for at most one request after the run is resumed."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._reusable: dict[Key, Release] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key, release: Release, *, reusable: bool) -> None:
        """Remember a charge.

        Args:
            key: of the charge.
            release: that was charged.
            reusable: whether its client repeats the reply to the byte when it gets the same request again.
        """
        self._keys.add(key)
        if reusable:
            self._reusable[key] = release

    def key_for(self, key: Key) -> tuple[Key, bool]:
        """The key to charge a request under, and whether an earlier charge pays for it.

        A client that got the same request before the interruption, and does not repeat its reply, computes another
        release, which needs another key.
        """
        if self._reusable.pop(key, None) is not None:
            return key, True
        while key in self._keys:
            key = replace(key, request=hashlib.sha256(f"{key.request} again".encode()).hexdigest())
        return key, False

    def beside(self, requests: Mapping[int, str], round_: int) -> dict[int, list[Release]]:
        """{client: its reusable charges of the round that its request, of this digest, does not use}, if it has any."""
        unused: dict[int, list[Release]] = {}
        for key, release in self._reusable.items():
            client = int(key.client)
            if key.round == round_ and client in requests and key.request != requests[client]:
                unused.setdefault(client, []).append(release)
        return unused

    def pop_unused(self, up_to: int) -> list[tuple[int, Release]]:
        """(client, release) of each reusable charge of rounds up to this one that no request has used."""
        keys = [key for key in self._reusable if key.round <= up_to]
        return [(int(key.client), self._reusable.pop(key)) for key in keys]
