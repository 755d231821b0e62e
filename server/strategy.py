"""The aggregation rules as one Flower strategy with its own round loop: sample by partition id, weigh by N_k."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpriv import guard, protocol
from fedpriv.accounting.events import Event
from fedpriv.accounting.views import VIEWS, rho_bar
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.aggregation.exact import fresh_start
from fedpriv.aggregation.global_model import GlobalModel
from fedpriv.aggregation.rules import RULES
from fedpriv.aggregation.weighted import weights_by_size
from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.protocol import Broadcast, Registration
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.local_update import UpdateSpec
from server.bookkeeping import Books
from server.checkpoint import Checkpoint
from server.history import ClientRow, RoundRow
from server.replies import Asked, MalformedError, read_reply
from server.wire import wire_bytes

log = logging.getLogger("flwr")

ROUND_SECONDS = 3600.0

_SOUND = ("ok", "silent")
_STATUS = {protocol.REFUSED: "refused", protocol.RETIRED: "retired"}

Evaluate = Callable[[GlobalModel], Evaluation]
OnRound = Callable[[RoundRow, list[ClientRow]], None]


@dataclass(frozen=True, eq=False)
class _Letter:
    """What all clients of one rank are told in a round."""

    broadcast: Broadcast
    content: RecordDict
    num_bytes: int
    digest: str


@dataclass(frozen=True, eq=False)
class _Round:
    """What is known of the round under way, by partition id."""

    number: int
    letters: dict[int, _Letter] = field(default_factory=dict)
    sent: dict[int, Message] = field(default_factory=dict)


class RuleStrategy(Strategy):
    """An aggregation rule over the clients that their budgets allow, with an account for every client.

    Args:
        config: of the run.
        nodes: {partition id: (node id, registration)}.
        books: charges the clients and says whom the budget still allows.
        run: the run's random id.
        initial: the tensors that the run starts from.
        resumed: where an interrupted run goes on; None for a new one.
        evaluate: the server's own test of a global model.
        on_round: told of every finished round, round 0 being the untrained model.
    """

    def __init__(
        self,
        config: RunConfig,
        nodes: Mapping[int, tuple[int, Registration]],
        *,
        books: Books,
        run: str,
        initial: Adapter,
        resumed: Checkpoint | None = None,
        evaluate: Evaluate,
        on_round: OnRound,
    ) -> None:
        self.spec = UpdateSpec.of(config)
        self.books = books
        self.model = resumed.model if resumed else GlobalModel(initial=initial, adapter=initial)
        self.uploads: dict[int, tuple[Adapter, Merged]] = dict(resumed.uploads) if resumed else {}
        self._finished = resumed.round if resumed else None
        self.stopped: str | None = None
        self._config = config
        self._rule = RULES[config.aggregation]
        self._run = run
        self._node_ids = {client: node_id for client, (node_id, _) in nodes.items()}
        self._evaluate = evaluate
        self._on_round = on_round
        self._round = _Round(0)
        self._rows: list[ClientRow] = []

    def select(self, round_: int) -> list[int]:
        """The partition ids of a round's clients; the seed, the round and who is within budget fix them, no output."""
        clients = self.books.active
        num = self._config.clients_per_round or len(clients)
        if num >= len(clients):
            return clients
        rng = np.random.default_rng((self._config.seed, round_))
        return sorted(rng.choice(clients, size=num, replace=False).tolist())

    def event(self, client: int) -> Event:
        """What one round costs the client on the local view."""
        return self.books.event(client)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each selected client, the model and the instruction, once all of them are charged."""
        self.model = replace(self.model, adapter=dict(arrays.to_torch_state_dict()))
        self._round = _Round(server_round)
        clients = self.select(server_round)
        # Whom the budget leaves out is replaced, as long as there are others.
        while self.books.within_budget(clients) != clients:
            clients = self.select(server_round)
        if len(clients) < self._config.min_clients:
            return []
        instruction = ConfigRecord({**protocol.pack_instruction(self._run, server_round, self.spec), **config})
        by_rank: dict[int, _Letter] = {}
        for client in clients:
            rank = self._config.rank_of(client)
            by_rank[rank] = by_rank.get(rank) or self._letter(rank, instruction)
            self._round.letters[client] = by_rank[rank]
        self.books.charge(server_round, {client: self._round.letters[client].digest for client in clients})
        for client, letter in self._round.letters.items():
            message = Message(letter.content, self._node_ids[client], "train", group_id=str(server_round))
            self._round.sent[client] = message
        return list(self._round.sent.values())

    def _letter(self, rank: int, instruction: ConfigRecord) -> _Letter:
        """What a client of this rank is told in the round under way."""
        model, round_ = self.model, self._round.number
        adapter = model.adapter
        if self._rule.restarts:
            adapter = fresh_start(model, rank=rank, seed=self._config.seed, round_=round_)
        signs = {name: tensor.sign() for name, tensor in model.last_update.items()}
        # The codec rounds what everybody may know; only that both sides read the same matters.
        rounding = SeededSource(self._config.seed, round_, "broadcast")
        whole = Broadcast(adapter=adapter, merged=model.merged, signs=signs)
        arrays = protocol.pack_broadcast(whole, self.spec, model.initial, rounding)
        broadcast = protocol.unpack_broadcast(arrays, self.spec, model.initial)
        records = {name: ArrayRecord(dict(tensors)) for name, tensors in arrays.items()}
        content = RecordDict({**records, protocol.INSTRUCTION: instruction})
        return _Letter(broadcast, content, wire_bytes(content), guard.request_digest(broadcast, self.spec))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rule's next model from the clients whose reply is sound; None where those are fewer than `min_clients`.

        A client that stays silent counts as sound, and where all do, the model stays as it is.
        """
        adapters: dict[int, Adapter] = {}
        digests: dict[int, str] = {}
        status = dict.fromkeys(self._round.sent, ("no reply", ""))
        arrived: dict[int, Message] = {}
        # Node ids, not message ids: a message has no id before Flower's link has given it one.
        by_node = {self._node_ids[client]: client for client in self._round.sent}
        for reply in replies:
            client = by_node.get(reply.metadata.src_node_id)
            if client is None:
                log.warning("round %s: a reply of node %s counts for nobody", server_round, reply.metadata.src_node_id)
                continue
            if client in arrived:
                log.warning("round %s, client %s: a second reply is ignored", server_round, client)
                continue
            arrived[client] = reply
            if reply.has_error():
                kind, reason = _STATUS.get(reply.error.code, "failed"), " ".join((reply.error.reason or "").split())
                if kind == "retired":
                    self.books.retire(client, reason or "its node's budget is spent")
                status[client] = (kind, reason)
            else:
                try:
                    adapter, digests[client] = read_reply(reply, self._asked(client))
                    status[client] = ("silent", "") if adapter is None else ("ok", "")
                    if adapter is not None:
                        adapters[client] = adapter
                except MalformedError as error:
                    status[client] = ("malformed", str(error))
            if status[client][1]:
                log.warning("round %s, client %s: %s", server_round, client, status[client][1])
        # The mapping is ordered by partition id: sums do not depend on the order of arrival.
        adapters = dict(sorted(adapters.items()))
        weights = weights_by_size({client: self.books.sizes[client] for client in adapters}) if adapters else {}
        self.books.settle({client: digests[client] for client in adapters})
        self._rows = [self._row(client, status[client], weights, arrived) for client in self._round.sent]
        if len(digests) < self._config.min_clients:
            return None, None
        if adapters:
            if not self._config.uploads_hidden:
                self.uploads.update({client: (adapter, self.model.merged) for client, adapter in adapters.items()})
            self.model = self._rule.aggregate(self.model, list(adapters.values()), list(weights.values()))
        return ArrayRecord(self.model.adapter), None

    def _asked(self, client: int) -> Asked:
        return Asked(
            round=self._round.number,
            event=self.event(client),
            num_records=self.books.sizes[client],
            spec=self.spec,
            broadcast=self._round.letters[client].broadcast,
            initial=self.model.initial,
            max_norm=self._config.max_update_norm,
        )

    def _row(
        self, client: int, status: tuple[str, str], weights: Mapping[int, float], arrived: Mapping[int, Message]
    ) -> ClientRow:
        event, sent, reply = self.event(client), self._round.sent[client], arrived.get(client)
        return ClientRow(
            round=self._round.number,
            client=client,
            num_records=self.books.sizes[client],
            status=status[0],
            detail=status[1],
            sampling_probability=getattr(event, "sampling_probability", 1.0),
            noise_multiplier=self.spec.noise_multiplier,
            effective_noise_multiplier=getattr(event, "noise_multiplier", 0.0),
            steps=event.count,
            weight=weights.get(client, 0.0),
            rho_bar=rho_bar(weights.values()) if weights else 0.0,
            **{f"epsilon_{view}": self.books.epsilon_so_far(client, view) for view in VIEWS},
            delta=self.books.accounts.deltas[client],
            bytes_up=wire_bytes(reply.content) if reply is not None and reply.has_content() else 0,
            bytes_down=self._round.letters[client].num_bytes,
            seconds=reply.metadata.created_at - sent.metadata.created_at if reply is not None else float("nan"),
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: an accuracy on a client's data is not covered by its epsilon, so none is asked for."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing; see `configure_evaluate`."""
        return None

    def summary(self) -> None:
        """Log what the run is about to do."""
        log.info("%s: %s clients, %s", self._config.aggregation, len(self.books.sizes), self.spec)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = ROUND_SECONDS,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are not finished. Unlike Flower's loop it tests with its own set alone and reports each.

        It ends early, with the reason in `stopped`, when fewer than `min_clients` are within their budgets.

        Raises:
            TooFewClientsError: a round ended with fewer usable replies than `min_clients`, not for their budgets; it is
                reported first, since its clients were charged.
            LedgerError: a round could not be charged, so nobody was asked.
        """
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        if self._finished is None:
            self._report(0, time.monotonic())
        for round_ in range((self._finished or 0) + 1, num_rounds + 1):
            started = time.monotonic()
            messages = list(self.configure_train(round_, result.arrays, train_config or ConfigRecord(), grid))
            if not messages:
                self._stop(round_)
                break
            arrays, _ = self.aggregate_train(round_, grid.send_and_receive(messages, timeout=timeout))
            result.arrays = arrays or result.arrays
            self._report(round_, started)
            if arrays is None and len(self.books.active) < self._config.min_clients:
                self._stop(round_)
                break
            if arrays is None:
                usable = sum(row.status in _SOUND for row in self._rows)
                raise TooFewClientsError(
                    f"round {round_}: {usable} usable replies, min_clients = {self._config.min_clients}"
                )
        return result

    def _stop(self, round_: int) -> None:
        self.stopped = (
            f"round {round_}: {len(self.books.active)} of {len(self.books.sizes)} clients are within their budgets, "
            f"min_clients = {self._config.min_clients}"
        )
        log.info("the run ends early: %s", self.stopped)

    def _report(self, round_: int, started: float) -> None:
        test = self._evaluate(self.model)
        rows = self._rows
        self._on_round(
            RoundRow(
                round=round_,
                num_selected=len(rows),
                num_replies=sum(row.status == "ok" for row in rows),
                num_silent=sum(row.status == "silent" for row in rows),
                num_failures=sum(row.status not in _SOUND for row in rows),
                test_accuracy=test.accuracy,
                test_loss=test.loss,
                num_retired=len(self.books.retired),
                **{f"epsilon_{view}_max": self.books.largest_so_far(view) for view in VIEWS},
                bytes_up=sum(row.bytes_up for row in rows),
                bytes_down=sum(row.bytes_down for row in rows),
                seconds=time.monotonic() - started,
            ),
            rows,
        )
