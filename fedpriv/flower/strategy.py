"""A Flower strategy over secure sums: FedAvg, or one of its kind, gets the clients' average and no single update.

`fedpriv.flower.sums` is the clients' side. The exchanges around a round's train messages happen where Flower calls the
strategy anyway: before it sends them, and after it has their replies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

from fedpriv.errors import InputError
from fedpriv.flower._messages import METRICS, Parameters, parameters_of, request_digest
from fedpriv.flower.sums import (
    ADVERTISE,
    CHECK,
    CONFIRM,
    REGISTER,
    REVEAL,
    SHARE,
    SUM,
    VECTOR,
    check_noise,
)
from fedpriv.secure_aggregation import (
    Participant,
    ProtocolError,
    Terms,
    TooFewError,
    server,
    smallest_threshold,
    word_dtype,
)
from fedpriv.secure_aggregation.grid import sum_grid

log = logging.getLogger("flwr")

_ATTEMPT_BYTES = 16

# Strategies that make a new model of the weighted average of the replies alone.
_AVERAGING = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedProx, FedYogi)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """An attempt whose train messages are on their way.

    Attributes:
        dealt: the state of the protocol.
        received: parameters that the clients were sent.
    """

    dealt: server.Dealt
    received: Parameters

    @property
    def terms(self) -> Terms:
        return self.dealt.before.terms


class SumStrategy(Strategy):
    """A strategy that sees one reply a round: the clients' weighted average, of which only the sum was revealed.

    Clients are weighted by the N_k that they registered. A round in which too few clients are left has no result, and
    the model stays as it is.

    Args:
        strategy: FedAvg, or one that makes a new model of the weighted average alone.
        clip_norm: C, as every client's `SumMod` has it.
        noise_multiplier: z, as every client's `SumMod` has it.
        min_clients: t; sums need so many clients, and more where the protocol does.
        colluding: c, how many clients may collude with this server.
        seconds: to wait for each exchange.

    Raises:
        InputError: the strategy needs single updates, or a number is out of range.
    """

    def __init__(
        self,
        strategy: FedAvg,
        *,
        clip_norm: float,
        noise_multiplier: float,
        min_clients: int = 3,
        colluding: int = 0,
        seconds: float = 600.0,
    ) -> None:
        if type(strategy) not in _AVERAGING:
            known = ", ".join(each.__name__ for each in _AVERAGING)
            raise InputError(f"strategy = {type(strategy).__name__}: needs single updates; must be one of {known}")
        check_noise(clip_norm, noise_multiplier)
        self.strategy = strategy
        self._clip_norm, self._noise_multiplier = clip_norm, noise_multiplier
        self._min_clients, self._colluding, self._seconds = min_clients, colluding, seconds
        self._members: dict[int, Participant] = {}
        self._grid: Grid | None = None
        self._round: _Round | None = None

    def summary(self) -> None:
        """Log the strategy's summary, and that it sees sums alone."""
        log.info("\t├──> Secure sums: clip norm %g, noise multiplier %g", self._clip_norm, self._noise_multiplier)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's train messages to the clients that have exchanged keys and shares; none if too few have."""
        self._grid, self._round = grid, None
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        try:
            return self._opened(server_round, messages)
        except ProtocolError as error:
            log.warning("round %s: no sum: %s", server_round, error)
            return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own result for the average; nothing if there is none."""
        opened, vectors, answered = self._round, dict[int, np.ndarray](), list[Message]()
        if opened is None:
            return None, None
        for reply in replies:
            client = self._client_of(reply)
            if client is None or reply.has_error():
                log.warning("round %s: a client dropped out", server_round)
            elif (vector := _vector_of(reply, opened.terms)) is not None:
                vectors[client] = vector
                answered.append(reply)
        try:
            recovered = self._recovered(opened, vectors)
        except ProtocolError as error:
            log.warning("round %s: no sum: %s", server_round, error)
            return None, None
        reply = answered[0]
        reply.content = self._average(opened, recovered)
        return self.strategy.aggregate_train(server_round, [reply])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's own evaluate messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The strategy's own result for the replies."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def _opened(self, server_round: int, messages: list[Message]) -> list[Message]:
        """The train messages after the exchanges before them; clients that dealt dishonestly are left out."""
        content, kind = messages[0].content, messages[0].metadata.message_type
        digest = request_digest(kind, content)
        if any(request_digest(kind, each.content) != digest for each in messages):
            raise InputError("strategy: sends its clients different messages; a sum needs one for all")
        received = parameters_of(content)
        nodes = [each.metadata.dst_node_id for each in messages]
        self._register(nodes)
        clients = {self._members[node].client for node in nodes if node in self._members}
        while True:
            terms = self._terms(str(messages[0].metadata.run_id), server_round, clients, received.num_values, digest)
            dealt = self._dealt(terms)
            if not dealt.dishonest:
                break
            log.warning("round %s: repeated without: %s", server_round, "; ".join(dealt.dishonest.values()))
            clients -= dealt.dishonest.keys()
        self._round = _Round(dealt=dealt, received=received)
        added = {k: ConfigRecord({"terms": terms.text(), "sealed": dealt.message(k)}) for k in dealt.dealt}
        return [
            Message(RecordDict({**content, SUM: record}), self._node_of(client), kind, group_id=str(server_round))
            for client, record in added.items()
        ]

    def _register(self, nodes: Iterable[int]) -> None:
        """Ask nodes that are new who they are; one that names another's key is left out."""
        new = [node for node in nodes if node not in self._members]
        for node, fields in self._replies(REGISTER, {node: {} for node in new}).items():
            identities = {member.identity for member in self._members.values()}
            try:
                member = Participant(
                    client=len(self._members),
                    identity=fields.get("identity"),  # type: ignore[arg-type]  # it checks
                    num_records=fields.get("num_records"),  # type: ignore[arg-type]
                    sampling_probability=1.0,
                    scale=1.0,
                )
            except ProtocolError as error:
                log.warning("node %s is left out: %s", node, error)
                continue
            if member.identity not in identities:
                self._members[node] = member

    def _terms(self, run: str, server_round: int, clients: Collection[int], dimension: int, digest: str) -> Terms:
        members = {each.client: each for each in self._members.values() if each.client in clients}
        if len(members) < self._min_clients:
            raise TooFewError(f"clients: {len(members)} are left, must be at least {self._min_clients}")
        grid = sum_grid(
            clip_norm=self._clip_norm,
            noise_multiplier=self._noise_multiplier,
            weights={client: float(member.num_records) for client, member in members.items()},
            num_included=dict.fromkeys(members, 1.0),
        )
        return Terms(
            run=run,
            round=server_round,
            attempt=secrets.token_hex(_ATTEMPT_BYTES),
            participants=tuple(replace(members[k], scale=grid.scales[k]) for k in sorted(members)),
            threshold=max(self._min_clients, smallest_threshold(len(members), self._colluding)),
            colluding=self._colluding,
            modulus_bits=grid.modulus_bits,
            grid_exponent=grid.exponent,
            dimension=dimension,
            clip_norm=self._clip_norm,
            noise_multiplier=self._noise_multiplier,
            request=digest,
        )

    def _dealt(self, terms: Terms) -> server.Dealt:
        """The state after keys and shares."""
        asked = self._ask(ADVERTISE, terms, dict.fromkeys(terms.by_client, ""))
        shown = server.collect_advertisements(terms, asked)
        dealt = server.collect_shares(shown, self._ask(SHARE, terms, dict.fromkeys(shown.shown, shown.message())))
        return server.collect_checks(dealt, self._ask(CHECK, terms, {k: dealt.message(k) for k in dealt.dealt}))

    def _recovered(self, opened: _Round, vectors: Mapping[int, np.ndarray]) -> server.Recovered:
        """The survivors' sum, after the exchanges behind the train messages."""
        terms = opened.terms
        masked = server.collect_masked(opened.dealt, vectors)
        confirmed = self._ask(CONFIRM, terms, dict.fromkeys(masked.survivors, masked.message()))
        signed = server.collect_signatures(masked, confirmed)
        return server.recover(signed, self._ask(REVEAL, terms, dict.fromkeys(signed.signatures, signed.message())))

    def _average(self, opened: _Round, recovered: server.Recovered) -> RecordDict:
        """The content of a reply that holds the survivors' weighted average."""
        sizes = {each.client: each.num_records for each in opened.terms.participants}
        total = sum(sizes[client] for client in recovered.survivors)
        unit = max(sizes.values()) / (opened.terms.gamma * total)
        moved = opened.received.moved(torch.from_numpy(recovered.values).double() * unit)
        arrays = ArrayRecord({name: Array(array) for name, array in moved.arrays.items()})
        metrics = MetricRecord({self.strategy.weighted_by_key: total})
        return RecordDict({moved.record: arrays, METRICS: metrics})

    def _ask(self, kind: str, terms: Terms, texts: Mapping[int, str]) -> dict[int, str]:
        """{client: the text that it answers}, of those that do."""
        extra = {"terms": terms.text()} if kind == ADVERTISE else {"attempt": terms.attempt}
        fields = {self._node_of(client): {**extra, "text": text} for client, text in texts.items()}
        replies = self._replies(kind, fields)
        return {self._members[node].client: str(each.get("text")) for node, each in replies.items()}

    def _replies(self, kind: str, fields: Mapping[int, Mapping[str, str]]) -> dict[int, ConfigRecord]:
        """{node: the record that it answers}, of those that do."""
        assert self._grid is not None, "configure_train comes first"
        messages = [Message(RecordDict({SUM: ConfigRecord(dict(each))}), k, kind) for k, each in fields.items()]
        found = {}
        for reply in self._grid.send_and_receive(messages, timeout=self._seconds):
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("node %s, %s: %s", node, kind, reply.error.reason)
            elif node in fields and SUM in reply.content.config_records:
                found[node] = reply.content.config_records[SUM]
        return found

    def _client_of(self, reply: Message) -> int | None:
        member = self._members.get(reply.metadata.src_node_id)
        return None if member is None else member.client

    def _node_of(self, client: int) -> int:
        return next(node for node, member in self._members.items() if member.client == client)


def _vector_of(reply: Message, terms: Terms) -> np.ndarray | None:
    """The masked vector in a reply, words modulo 2^m; None if it holds none."""
    try:
        vector = reply.content.array_records[SUM][VECTOR].numpy()
        return vector.view(word_dtype(terms)) if vector.dtype == np.dtype(f"int{terms.modulus_bits}") else None
    except (KeyError, ValueError):
        return None
