"""DP-LoRA as a Flower strategy with its own round loop: sample by partition id, average by registered sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpriv import protocol
from fedpriv.accounting.accounts import Accounts
from fedpriv.accounting.events import Event
from fedpriv.accounting.views import Release, rho_bar
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.aggregation.weighted import weighted_average, weights_by_size
from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.protocol import Registration
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.local_update import UpdateSpec, planned_event
from server.history import ClientRow, RoundRow
from server.replies import MalformedError, adapter_of

log = logging.getLogger("flwr")

ROUND_SECONDS = 3600.0

Evaluate = Callable[[Adapter], Evaluation]
OnRound = Callable[[RoundRow, list[ClientRow]], None]


@dataclass
class _Round:
    """What is known of the round under way."""

    number: int
    sent: dict[int, Message]  # by partition id
    started: float


class DpLora(Strategy):
    """Weighted average of noised adapters, with an account for every client.

    Args:
        config: of the run.
        nodes: {partition id: (node id, registration)}.
        tensor_names: of the adapter; the clipping rule's sensitivity depends on them.
        evaluate: the server's own test of an adapter.
        on_round: told of every finished round, round 0 being the untrained model.
    """

    def __init__(
        self,
        config: RunConfig,
        nodes: Mapping[int, tuple[int, Registration]],
        *,
        tensor_names: Iterable[str],
        evaluate: Evaluate,
        on_round: OnRound,
    ) -> None:
        self.spec = UpdateSpec.of(config)
        self.sizes = {client: registration.num_records for client, (_, registration) in nodes.items()}
        self.accounts = Accounts(self.sizes, config.delta)
        self.uploads: dict[int, Adapter] = {}
        self._config = config
        self._node_ids = {client: node_id for client, (node_id, _) in nodes.items()}
        self._tensor_names = tuple(tensor_names)
        self._evaluate = evaluate
        self._on_round = on_round
        self._adapter: Adapter = {}
        self._round = _Round(0, {}, 0.0)
        self._rows: list[ClientRow] = []

    def select(self, round_: int) -> list[int]:
        """The partition ids of a round's clients; the seed and the round fix them, and nothing that was released."""
        clients = sorted(self.sizes)
        num = self._config.clients_per_round or len(clients)
        if num >= len(clients):
            return clients
        rng = np.random.default_rng((self._config.seed % 2**63, round_))
        return sorted(rng.choice(clients, size=num, replace=False).tolist())

    def event(self, client: int) -> Event:
        """What one round costs the client on the local view."""
        return planned_event(self.spec, self.spec.batch_size / self.sizes[client], self._tensor_names)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each selected client: the adapter and the instruction."""
        instruction = ConfigRecord({**protocol.pack_instruction(server_round, self.spec), **config})
        self._adapter = dict(arrays.to_torch_state_dict())
        self._round = _Round(server_round, {}, time.monotonic())
        for client in self.select(server_round):
            content = RecordDict({protocol.ADAPTER: arrays, protocol.INSTRUCTION: instruction})
            self._round.sent[client] = Message(content, self._node_ids[client], "train", group_id=str(server_round))
        return list(self._round.sent.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The weighted average over the clients whose reply is sound; None where they are fewer than `min_clients`.

        Every selected client is charged: who was asked may have released something, whether or not it arrived.
        """
        adapters: dict[int, Adapter] = {}
        status = dict.fromkeys(self._round.sent, "no reply")
        arrived: dict[int, Message] = {}
        # Node ids, not message ids: a message has no id before Flower's link has given it one.
        by_node = {self._node_ids[client]: client for client in self._round.sent}
        for reply in replies:
            client = by_node.get(reply.metadata.src_node_id)
            if client is None:
                log.warning("round %s: a reply of node %s counts for nobody", server_round, reply.metadata.src_node_id)
                continue
            arrived[client] = reply
            if reply.has_error():
                status[client] = "refused" if (reply.error.reason or "").startswith("refused") else "failed"
                log.warning("round %s, client %s: %s", server_round, client, reply.error.reason)
                continue
            try:
                event = self.event(client)
                adapters[client] = adapter_of(reply, like=self._adapter, round_=server_round, event=event)
                status[client] = "ok"
            except MalformedError as error:
                status[client] = "malformed"
                log.warning("round %s, client %s: %s", server_round, client, error)
        # The mapping is ordered by partition id: sums do not depend on the order of arrival.
        adapters = dict(sorted(adapters.items()))
        weights = weights_by_size({client: self.sizes[client] for client in adapters}) if adapters else {}
        self._charge(weights)
        self._rows = [self._row(client, status[client], weights, arrived) for client in self._round.sent]
        if len(adapters) < self._config.min_clients:
            return None, None
        self.uploads.update(adapters)
        return ArrayRecord(weighted_average(list(adapters.values()), list(weights.values()))), None

    def _charge(self, weights: Mapping[int, float]) -> None:
        """Record the releases; a client that dropped out may have been seen among any of those selected."""
        selected = rho_bar(weights_by_size({client: self.sizes[client] for client in self._round.sent}).values())
        happened = rho_bar(weights.values()) if weights else selected
        for client in self._round.sent:
            scale = happened if client in weights else min(happened, selected)
            self.accounts.record(client, Release(event=self.event(client), rho_bar=scale))

    def _row(self, client: int, status: str, weights: Mapping[int, float], arrived: Mapping[int, Message]) -> ClientRow:
        event, sent, reply = self.event(client), self._round.sent[client], arrived.get(client)
        return ClientRow(
            round=self._round.number,
            client=client,
            num_records=self.sizes[client],
            status=status,
            sampling_probability=event.sampling_probability,
            noise_multiplier=self.spec.noise_multiplier,
            effective_noise_multiplier=event.noise_multiplier,
            steps=event.count,
            weight=weights.get(client, 0.0),
            rho_bar=rho_bar(weights.values()) if weights else 0.0,
            epsilon_local=self.accounts.spent(client, "local", "rdp").epsilon,
            epsilon_rho=self.accounts.spent(client, "rho", "rdp").epsilon,
            delta=self.accounts.deltas[client],
            bytes_up=_count_bytes(reply) if reply is not None else 0,
            bytes_down=_count_bytes(sent),
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
        log.info("DP-LoRA: %s clients, %s", len(self.sizes), self.spec)

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
        """Run all rounds. Unlike Flower's loop it tests with its own set alone and reports every round.

        Raises:
            TooFewClientsError: a round ended with fewer usable replies than `min_clients`; it is reported first,
                since its clients were charged.
        """
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        self._report(0, initial_arrays, time.monotonic())
        for round_ in range(1, num_rounds + 1):
            started = time.monotonic()
            messages = self.configure_train(round_, result.arrays, train_config or ConfigRecord(), grid)
            arrays, _ = self.aggregate_train(round_, grid.send_and_receive(messages, timeout=timeout))
            result.arrays = arrays or result.arrays
            self._report(round_, result.arrays, started)
            if arrays is None:
                usable = sum(row.status == "ok" for row in self._rows)
                raise TooFewClientsError(
                    f"round {round_}: {usable} usable replies, min_clients = {self._config.min_clients}"
                )
        return result

    def _report(self, round_: int, arrays: ArrayRecord, started: float) -> None:
        test = self._evaluate(dict(arrays.to_torch_state_dict()))
        rows = self._rows
        self._on_round(
            RoundRow(
                round=round_,
                num_selected=len(rows),
                num_replies=sum(row.status == "ok" for row in rows),
                num_failures=sum(row.status != "ok" for row in rows),
                test_accuracy=test.accuracy,
                test_loss=test.loss,
                epsilon_local_max=self.accounts.largest("local", "rdp"),
                epsilon_rho_max=self.accounts.largest("rho", "rdp"),
                bytes_up=sum(row.bytes_up for row in rows),
                bytes_down=sum(row.bytes_down for row in rows),
                seconds=time.monotonic() - started,
            ),
            rows,
        )


def _count_bytes(message: Message) -> int:
    """Bytes of the message's records."""
    return sum(record.count_bytes() for record in message.content.values()) if message.has_content() else 0
