"""The aggregation rules as one Flower strategy with its own round loop: sample by partition id, weigh by N_k."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpriv import protocol
from fedpriv.accounting.events import Event
from fedpriv.accounting.views import VIEWS, rho_bar
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.aggregation.fedavg import weights_by_size
from fedpriv.aggregation.flora import fresh_start
from fedpriv.aggregation.global_model import GlobalModel
from fedpriv.aggregation.rules import RULES
from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.protocol import Broadcast, Registration
from fedpriv.runs.rows import ClientRow, RoundRow
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.local_update import UpdateSpec
from fedpriv.vault import guard
from server.bookkeeping import Books
from server.checkpoint import Checkpoint
from server.replies import Asked, MalformedError, read_reply
from server.wire import wire_bytes

log = logging.getLogger("flwr")

_POLL_SECONDS = 1.0

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
    """What is known of the round under way, by partition id: who was asked, who answered, and what was sound."""

    number: int
    letters: dict[int, _Letter] = field(default_factory=dict)
    sent: dict[int, Message] = field(default_factory=dict)
    arrived: dict[int, Message] = field(default_factory=dict)
    status: dict[int, tuple[str, str]] = field(default_factory=dict)
    adapters: dict[int, tuple[Adapter, str]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)


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
        self._overdue: set[str] = set()
        self._num_late = 0

    def select(self, round_: int, but: Iterable[int] = ()) -> list[int]:
        """The partition ids of a round's clients; seed, round, budgets and who was asked before fix them, no output.

        Args:
            round_: from 1.
            but: clients that were asked in this round already.
        """
        asked = set(but)
        clients = [client for client in self.books.active if client not in asked]
        num = self._config.clients_per_round or len(self.books.active)
        if num >= len(clients):
            return clients
        rng = np.random.default_rng((self._config.seed, round_, len(asked)) if asked else (self._config.seed, round_))
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
        return self._ask(config)

    def _ask(self, config: ConfigRecord) -> list[Message]:
        """Messages to clients that were not asked in this round; none where too few are left to reach the minimum."""
        round_ = self._round
        clients = self.select(round_.number, but=round_.sent)
        # Whom the budget leaves out is replaced, as long as there are others.
        while self.books.within_budget(clients) != clients:
            clients = self.select(round_.number, but=round_.sent)
        if not clients or len(round_.adapters) + len(round_.silent) + len(clients) < self._config.min_clients:
            return []
        instruction = ConfigRecord({**protocol.pack_instruction(self._run, round_.number, self.spec), **config})
        by_rank: dict[int, _Letter] = {}
        for client in clients:
            rank = self._config.rank_of(client)
            by_rank[rank] = by_rank.get(rank) or self._letter(rank, instruction)
            round_.letters[client] = by_rank[rank]
        self.books.charge(round_.number, {client: round_.letters[client].digest for client in clients})
        for client in clients:
            content = round_.letters[client].content
            round_.sent[client] = Message(content, self._node_ids[client], "train", group_id=str(round_.number))
            round_.status[client] = ("no reply", "")
        return [round_.sent[client] for client in clients]

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
        self._take(replies)
        return self._close(), None

    def _take(self, replies: Iterable[Message]) -> None:
        """Judge the replies of the round under way."""
        round_ = self._round
        by_node = {self._node_ids[client]: client for client in round_.sent}
        for reply in replies:
            node_id = reply.metadata.src_node_id
            client = self._about(reply) if reply.has_error() else None
            client = by_node.get(node_id) if client is None else client
            if client is None or client in round_.arrived:
                log.warning("round %s: a reply of node %s counts for nobody", round_.number, node_id)
                continue
            round_.arrived[client] = reply
            if reply.has_error():
                kind, reason = _STATUS.get(reply.error.code, "failed"), " ".join((reply.error.reason or "").split())
                if kind == "retired":
                    self.books.retire(client, reason or "its node's budget is spent")
                round_.status[client] = (kind, reason)
            else:
                try:
                    adapter, digest = read_reply(reply, self._asked(client))
                    if adapter is None:
                        round_.silent.add(client)
                        round_.status[client] = ("silent", "")
                    else:
                        round_.adapters[client] = (adapter, digest)
                        round_.status[client] = ("ok", "")
                except MalformedError as error:
                    round_.status[client] = ("malformed", str(error))
            if detail := round_.status[client][1]:
                log.warning("round %s, client %s: %s", round_.number, client, detail)

    def _about(self, error: Message) -> int | None:
        """Whose message an error answers: a link that gives up on a node answers in its own name."""
        answered = error.metadata.reply_to_message_id
        # Messages have ids from when they are pushed, so this cannot be looked up beforehand.
        sent = self._round.sent.items()
        return next((client for client, message in sent if message.metadata.message_id == answered), None)

    def _close(self) -> ArrayRecord | None:
        """Settle the round and make the next model, if enough clients are sound."""
        round_ = self._round
        # Ordered by partition id: sums do not depend on the order of arrival.
        adapters = {client: round_.adapters[client][0] for client in sorted(round_.adapters)}
        weights = weights_by_size({client: self.books.sizes[client] for client in adapters}) if adapters else {}
        self.books.settle({client: digest for client, (_, digest) in round_.adapters.items()})
        self._rows = [self._row(client, round_.status[client], weights, round_.arrived) for client in round_.sent]
        if not self._enough:
            return None
        if adapters:
            if not self._config.uploads_hidden:
                self.uploads.update({client: (adapter, self.model.merged) for client, adapter in adapters.items()})
            self.model = self._rule.aggregate(self.model, list(adapters.values()), list(weights.values()))
        return ArrayRecord(self.model.adapter)

    @property
    def _enough(self) -> bool:
        return len(self._round.adapters) + len(self._round.silent) >= self._config.min_clients

    def _exchange(self, grid: Grid, messages: Sequence[Message], seconds: float) -> Iterator[Message]:
        """The replies to the messages, as they come, until all are there or the time is up.

        What comes later is still fetched, in later rounds, and counted.
        """
        deadline = time.monotonic() + seconds
        grid.push_messages(messages)
        waiting = {message.metadata.message_id for message in messages}
        while waiting:
            for reply in grid.pull_messages(waiting | self._overdue):
                answered = reply.metadata.reply_to_message_id
                if answered in self._overdue:
                    self._overdue.discard(answered)
                    self._num_late += 1
                    log.warning("a reply of node %s to an earlier round is discarded", reply.metadata.src_node_id)
                    continue
                if answered not in waiting:
                    log.warning("a reply of node %s that was counted before is discarded", reply.metadata.src_node_id)
                    continue
                waiting.discard(answered)
                yield reply
            if not waiting or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        self._overdue |= waiting

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
            effective_noise_multiplier=self.books.effective_noise_multiplier(client),
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
        timeout: float = 3600,
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
            ask_config = train_config or ConfigRecord()
            messages = list(self.configure_train(round_, result.arrays, ask_config, grid))
            if not messages:
                self._stop(round_)
                break
            while messages:
                self._take(self._exchange(grid, messages, timeout))
                messages = [] if self._enough else self._ask(ask_config)
            arrays = self._close()
            result.arrays = arrays or result.arrays
            self._report(round_, started)
            if arrays is None and len(self.books.active) < self._config.min_clients:
                self._stop(round_)
                break
            if arrays is None:
                usable = sum(row.status in _SOUND for row in self._rows)
                raise TooFewClientsError(
                    f"round {round_}: {usable} usable replies, min_clients = {self._config.min_clients}; resume the "
                    "run once more clients answer"
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
        late, self._num_late = self._num_late, 0
        rows = self._rows
        self._on_round(
            RoundRow(
                round=round_,
                num_selected=len(rows),
                num_replies=sum(row.status == "ok" for row in rows),
                num_silent=sum(row.status == "silent" for row in rows),
                num_failures=sum(row.status not in _SOUND for row in rows),
                num_late=late,
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
