"""The aggregation rules as one Flower strategy with its own round loop: sample by partition id, weigh by N_k."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.sums import DealerError, ProtocolError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import TRAIN, Request, Scalars
from fedpriv.holder.wire.kinds import Broadcast
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.aggregation import RULES, GlobalModel, fresh_start, recentred, started
from fedpriv.learning.aggregation.rules import ServerOptimizer, server_step
from fedpriv.learning.training.evaluation import Evaluation
from fedpriv.learning.training.local_update import UpdateSpec, trained_names
from fedpriv.learning.training.noise_plan import start_noise
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.sources import SeededSource
from fedpriv.runs import ClientRow, RoundRow
from server.bookkeeping import Books
from server.checkpoint import Checkpoint
from server.exchange import Exchange, ExpectedReply, Read, Vector
from server.inclusion import Inclusions
from server.observer import Follow, answers
from server.registration import Nodes
from server.round import ROUNDS_WITHOUT_ANSWER, Absences, Receipts, Round, RoundRequest, client_rows, round_row
from server.sums import SecureSums
from server.uploads import Updates, Uploads

log = logging.getLogger("flwr")

Evaluate = Callable[[GlobalModel], Evaluation | None]
OnRound = Callable[[RoundRow, list[ClientRow]], None]


class RuleStrategy(Strategy):
    """An aggregation rule over the clients that their budgets allow, with an account for every client.

    Args:
        config: of the run.
        nodes: {partition id: (node id, registration)}.
        books: charges the clients and says which of them their budgets still allow.
        run: the run's random id.
        initial: the tensors that the run starts from.
        resumed: the checkpoint from which an interrupted run resumes; None for a new run.
        evaluate: the server's own test of a global model; None if it has no test set.
        on_round: called after every finished round; round 0 is the untrained model.
        follow: told what the clients of a round do, and how many have answered.
        absences: who is skipped for not answering; by default a record that nobody else is told of.
        receipts: of the nodes' charges, which are shown to them; None shows and keeps none.
        inclusions: the signed records of the rounds' sums, which are shown to the nodes; None makes none.
    """

    def __init__(
        self,
        config: RunConfig,
        nodes: Nodes,
        *,
        books: Books,
        run: str,
        initial: Adapter,
        resumed: Checkpoint | None = None,
        evaluate: Evaluate,
        on_round: OnRound,
        follow: Follow = lambda progress: None,
        absences: Absences | None = None,
        receipts: Receipts | None = None,
        inclusions: Inclusions | None = None,
    ) -> None:
        self.schedule = RunSchedule.of(config)
        self.books = books
        self.model = resumed.model if resumed else GlobalModel(initial=initial, adapter=initial)
        self.stopped: str | None = None
        self.absences = Absences(nodes) if absences is None else absences
        self._last_finished = resumed.round if resumed else None
        self._config = config
        self._rule = RULES[config.aggregation]
        self._run = run
        self._nodes = nodes
        self._evaluate = evaluate
        self._on_round = on_round
        self._follow = follow
        self._receipts, self._inclusions = receipts, inclusions
        self._exchange = Exchange(self._told)
        self._updates: Updates = (
            SecureSums(config, nodes, run=run, exchange=self._exchange, books=books)
            if config.secure_aggregation
            else Uploads(config, len(nodes), resumed.uploads if resumed else None)
        )
        self._no_sum: ProtocolError | None = None
        self._round = Round(0, nodes)
        self._rows: list[ClientRow] = []
        self._link: Grid

    def select(self, round_: int, exclude: Iterable[int] = ()) -> list[int]:
        """The partition ids of a round's clients, fixed by the seed, the round, the budgets, who answers and `exclude`.

        They do not depend on what is in any upload.

        Args:
            round_: from 1.
            exclude: clients that were already asked in this round.
        """
        excluded = set(exclude)
        left_out = {*excluded, *self.absences.skipped}
        clients = [client for client in self.books.active if client not in left_out]
        num = self._config.clients_per_round or len(self.books.active)
        if num >= len(clients):
            return clients
        seed = (self._config.seed, round_, *([len(excluded)] if excluded else []))
        return sorted(np.random.default_rng(seed).choice(clients, size=num, replace=False).tolist())

    def event(self, client: int) -> Event:
        """The event that the current round costs the client on the local view."""
        return self.books.costs.event(client, self._round.number)

    @property
    def uploads(self) -> dict[int, tuple[Adapter, Merged]]:
        """{client: (its last upload, what had been added to the frozen weights)}, of those that are kept."""
        return self._updates.last

    @property
    def spec(self) -> UpdateSpec:
        """The update that the current round asks for; before the first round, that of the first."""
        return self.schedule.spec(self._round.number)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each selected client, with the model and the instruction, once all of them are charged."""
        self.model = replace(self.model, adapter=dict(arrays.to_torch_state_dict()))
        self._round, self._link, self._no_sum = Round(server_round, self._nodes), grid, None
        return self._charged_messages(config)

    def _charged_messages(self, config: ConfigRecord) -> list[Message]:
        """Messages to clients not yet asked in this round, charged for; none if too few are left for the minimum."""
        round_ = self._round
        clients = self.select(round_.number, exclude=round_.messages)
        # A client that its budget leaves out is replaced as long as there are others.
        while self.books.within_budget(round_.number, clients) != clients:
            clients = self.select(round_.number, exclude=round_.messages)
        if not clients or round_.num_usable + len(clients) < self._config.min_clients:
            return []
        instruction = {**kinds.pack_instruction(self._run, round_.number, self.spec), **cast("Scalars", config)}
        ranks = {client: self._config.rank_of(client) for client in clients}
        by_rank = {rank: self._request(rank, instruction) for rank in dict.fromkeys(ranks.values())}
        requests = {client: by_rank[rank] for client, rank in ranks.items()}
        requests = self._updates.open(self._link, round_, requests, self.spec, self.model)
        digests = {client: request.digest for client, request in requests.items()}
        # Others may take their places, but not in the terms of a sum, whose requests are never repeated.
        if not self._updates.is_sum and self.books.retired_by_request(round_.number, digests):
            return self._charged_messages(config)
        self.books.charge(round_.number, digests, among=self._updates.among)
        for each in (self._receipts, self._inclusions):
            if each is not None:
                requests |= {client: request.told(each.shown_to(client)) for client, request in requests.items()}
        return [round_.message_to(client, self._nodes[client][0], requests[client]) for client in requests]

    def _request(self, rank: int, instruction: Scalars) -> RoundRequest:
        """The request to clients of this rank in the current round."""
        model, round_ = self.model, self._round.number
        adapter = model.adapter
        if self._rule.restarts:
            adapter = fresh_start(model, rank=rank, seed=self._config.seed, round_=round_)
        signs = {name: tensor.sign() for name, tensor in model.last_update.items()}
        # The codec rounds values that are public, so a seed does; only both sides must read the same.
        rounding = SeededSource(self._config.seed, round_, "broadcast")
        whole = Broadcast(adapter=adapter, merged=model.merged, signs=signs)
        arrays, broadcast = kinds.pack_broadcast(whole, self.spec, model.initial, rounding)
        request = Request.of(TRAIN, fields=instruction, arrays=arrays)
        return RoundRequest(broadcast, request, request.digest)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rule's next model from the clients whose reply is usable; None if they are fewer than `min_clients`.

        The reply of a client that stays silent is usable, and if all stay silent, the model stays as it is.
        """
        self._collect(replies)
        return self._close_round(), None

    def _collect(self, replies: Iterable[Message]) -> None:
        """Judge the replies, and retire the clients that ask for it."""
        for client, reason in self._round.collect(replies, self._read).items():
            self.books.retire(client, reason)

    def _told(self, kind: str, asked: Collection[int], silent: Collection[int]) -> None:
        """Tell the follower what each node that was asked does: that, and no more, is what it learns of answers."""
        known = self._round.client_of
        until = "training" if kind == TRAIN else "asked"
        doing = {known[node_id]: until if node_id in silent else "replied" for node_id in asked if node_id in known}
        self._follow(answers(self._round.number, len(asked) - len(silent), len(asked), doing))

    def _read(self, client: int, reply: Message) -> Read:
        """The content of a client's reply."""
        read = self._updates.read(reply, self._expected_reply(client))
        if self._receipts is not None:
            self._receipts.take(client, read.receipt)
        return read

    def _close_round(self) -> ArrayRecord | None:
        """Settle the round and make the next model, if enough clients replied."""
        # Ordered by partition id: sums do not depend on the order of arrival.
        uploads = dict(sorted(self._round.uploads.items()))
        adapters = self._adapters({k: upload.content for k, upload in uploads.items() if upload.content is not None})
        weights = self.books.costs.weights(uploads) if uploads else {}
        self.books.settle({client: upload.digest for client, upload in uploads.items()})
        self._rows = client_rows(self._round, self.books, self.spec, weights)
        self.absences.note(self._round)
        objection = self._objection
        if self._inclusions is not None:
            contents = {client: upload.content for client, upload in uploads.items() if upload.content is not None}
            self._inclusions.note(self._round, self.books.costs.masses, contents, objection)
        if objection or adapters is None:
            return None
        if uploads:
            shares = [1.0] if self._updates.is_sum else list(weights.values())
            self.model = self._next_model(adapters, shares, [self.books.sizes[client] for client in uploads])
        return ArrayRecord(self.model.adapter)

    def _adapters(self, contents: Mapping[int, Adapter | Vector]) -> list[Adapter] | None:
        """The adapters that the rule averages; None if there is no sum, and `_no_sum` says why."""
        try:
            return self._updates.close(self._link, self._round, contents, self.spec, self.model)
        except ProtocolError as error:
            self._no_sum = error
            return None

    def _next_model(self, adapters: Sequence[Adapter], weights: Sequence[float], sizes: Sequence[int]) -> GlobalModel:
        """The global model that a round makes of these adapters, in which clients of these sizes take part."""
        aggregated = self._rule.aggregate(self.model, adapters, weights)
        if self.schedule.phase(self._round.number).name != "start":
            trained = trained_names(aggregated.adapter, self.spec.trains)
            stepped = server_step(
                self.model, aggregated, server_optimizer(self._config, self._round.number), trained=trained
            )
            if self.spec.centred:
                stepped = recentred(stepped, self.model)
            return self._rule.finish(stepped) if self._rule.finish else stepped
        return started(self.model, aggregated.adapter, noise=start_noise(self._config, sizes))

    @property
    def _has_enough(self) -> bool:
        return self._round.num_usable >= self._config.min_clients

    @property
    def _objection(self) -> str:
        """The reason why the round has no sum; empty if it has one."""
        if self._has_enough and self._no_sum is None:
            return ""
        return str(self._no_sum or f"{self._round.num_usable} usable replies, min_clients = {self._config.min_clients}")

    def _expected_reply(self, client: int) -> ExpectedReply:
        return ExpectedReply(
            round=self._round.number,
            event=self.event(client),
            num_records=self.books.sizes[client],
            spec=self.spec,
            broadcast=self._round.requests[client].broadcast,
            initial=self.model.initial,
            max_norm=self._config.max_update_norm,
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: a round's epsilon covers no accuracy on a client's data; see `server/evaluation.py`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing; see `configure_evaluate`."""
        return None

    def summary(self) -> None:
        """Log what the run is about to do."""
        for spec, num_rounds in self.schedule.totals.items():
            log.info("%s rounds: %s", num_rounds, spec)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are not finished yet.

        Unlike Flower's loop, it tests on the server's own test set alone and reports every round. It ends early, with
        the reason in `stopped`, once fewer than `min_clients` are within their budgets.

        Raises:
            TooFewClientsError: a round ended with fewer usable replies than `min_clients`, for another reason than
                budgets; the round is reported first, since its clients were charged. Or too few nodes answer for
                another round, which costs nobody anything.
            LedgerError: a round could not be charged, so nobody was asked.
        """
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        if self._last_finished is None:
            self._report(0, time.monotonic())
        for round_ in range((self._last_finished or 0) + 1, num_rounds + 1):
            started = time.monotonic()
            self.absences.look_for(grid, round_)
            config = train_config or ConfigRecord()
            messages = list(self.configure_train(round_, result.arrays, config, grid))
            if not messages:
                self._check_present(round_)
                self._stop(round_)
                break
            while messages:
                self._collect(self._exchange.replies(grid, messages, timeout))
                # A sum is of those that have exchanged keys: nobody can join them.
                messages = [] if self._has_enough or self._updates.is_sum else self._charged_messages(config)
            arrays = self._close_round()
            result.arrays = arrays or result.arrays
            self._report(round_, started)
            is_misdealt = isinstance(self._no_sum, DealerError)
            if is_misdealt and len(self.books.active) >= self._config.min_clients:
                # To repeat the round would be charged again; the next one costs no more, and is without the dealer.
                log.warning("round %s has no sum, and the run goes on: %s", round_, self._no_sum)
                continue
            if arrays is None and not is_misdealt and len(self.books.active) < self._config.min_clients:
                self._stop(round_)
                break
            if arrays is None:
                raise TooFewClientsError(f"round {round_}: {self._objection}; resume the run once more clients answer")
        return result

    def _check_present(self, round_: int) -> None:
        """Refuse to end a run early, as if budgets were spent, because clients are skipped."""
        active, skipped = self.books.active, self.absences.skipped
        if len(active) < self._config.min_clients or not (missing := [c for c in active if c in skipped]):
            return
        raise TooFewClientsError(
            f"round {round_}: {len(active) - len(missing)} of {len(active)} clients answer, min_clients = "
            f"{self._config.min_clients}; skipped after {ROUNDS_WITHOUT_ANSWER} rounds without an answer: "
            f"{', '.join(map(str, missing))}; resume the run once more clients answer"
        )

    def _stop(self, round_: int) -> None:
        self.stopped = (
            f"round {round_}: {len(self.books.active)} of {len(self.books.sizes)} clients are within their budgets, "
            f"min_clients = {self._config.min_clients}"
        )
        log.info("the run ends early: %s", self.stopped)

    def _report(self, round_: int, started: float) -> None:
        self._round.release()
        is_due = round_ % self._config.evaluate_every == 0 or round_ == self._config.rounds
        test, rows = self._evaluate(self.model) if is_due or self.stopped else None, self._rows
        num_late, seconds = self._exchange.pop_num_late(), time.monotonic() - started
        self._on_round(
            round_row(round_, rows, self.books, test, num_late=num_late, seconds=seconds),
            rows,
        )


def server_optimizer(config: RunConfig, round_: int) -> ServerOptimizer:
    """The optimizer that a run's configuration asks for in a round, from 1.

    Rates that fall linearly do so from the configured ones in round 1 to 1 / rounds of them in the last round.
    """
    left = max(1, config.rounds + 1 - round_) / config.rounds if config.server_rate_decay == "linear" else 1.0
    rate, momentum = config.server_learning_rate * left, config.server_momentum
    optimizer = ServerOptimizer(name=config.server_optimizer, learning_rate=rate, momentum=momentum)
    if config.lora_server_optimizer == "same":
        return optimizer
    rate, name = config.lora_server_learning_rate * left, config.lora_server_optimizer
    return replace(optimizer, of_lora=ServerOptimizer(name=name, learning_rate=rate, momentum=momentum))
