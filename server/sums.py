"""Secure aggregation as the server runs it: a round's sum in exchanges around the train messages."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.sums import DealerError, Participant, Terms, TooFewError, to_centred, word_dtype
from fedpriv.holder.sums.server import (
    Dealt,
    collect_advertisements,
    collect_checks,
    collect_masked,
    collect_shares,
    collect_signatures,
    recover,
)
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import ADVERTISE, CHECK, CONFIRM, REVEAL, SHARE, Request
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training.local_update import UpdateSpec, num_trained_values
from fedpriv.learning.training.rounds import mean_of_sum, mean_upload
from fedpriv.privacy.mechanisms.discrete_gaussian import SumGrid
from server.bookkeeping import Books
from server.exchange import (
    Exchange,
    ExpectedReply,
    MalformedError,
    Read,
    Vector,
    answer_in,
    message_to,
    read_sum,
    reason_of,
    wire_bytes,
)
from server.registration import label_of
from server.round import Round, RoundRequest

log = logging.getLogger("flwr")

_ATTEMPT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An attempt before its train messages.

    Attributes:
        terms: of the attempt.
        fields: {client: what its train message holds besides the instruction}, of those that are still in it.
        dealt: the state of the protocol; None in a simulation that leaves out what would cancel out.
        left_out: {client of the terms: why it is not in it any more}.
        dishonest: {client of the terms: what it did}; if there are any, nobody may be asked, and another attempt is to
            be made without them.
    """

    terms: Terms
    fields: Mapping[int, Mapping[str, str]]
    dealt: Dealt | None
    left_out: Mapping[int, str] = field(default_factory=dict)
    dishonest: Mapping[int, str] = field(default_factory=dict)


class SecureSums:
    """The sums of a run, which are all that the server learns of its clients' updates; see `uploads.Updates`.

    Args:
        config: of the run.
        nodes: {client: (node id, registration)}.
        run: the run's random id.
        exchange: with the nodes.
        books: say what a sum costs, and retire who is dishonest.
    """

    is_sum = True

    def __init__(
        self,
        config: RunConfig,
        nodes: Mapping[int, tuple[int, Registration]],
        *,
        run: str,
        exchange: Exchange,
        books: Books,
    ) -> None:
        self._config, self._nodes, self._run, self._exchange, self._books = config, nodes, run, exchange, books
        self._attempt: Opened | None = None
        self.last: dict[int, tuple[Adapter, Merged]] = {}

    @property
    def among(self) -> Iterable[int] | None:
        """The clients in the terms of the sum."""
        return self._attempt.terms.by_client if self._attempt else None

    def open(
        self, link: Grid, round_: Round, requests: Mapping[int, RoundRequest], spec: UpdateSpec, model: GlobalModel
    ) -> dict[int, RoundRequest]:
        """The requests of the clients that are still in the attempt once keys and shares have been exchanged."""
        (request, *_) = requests.values()
        sum_grid = self._books.costs.grid(round_.number)
        assert sum_grid is not None  # as for every round under secure aggregation
        try:
            opened = self._attempt = self.attempt(
                link,
                round_,
                requests,
                spec=spec,
                grid=sum_grid,
                request=request.digest,
                dimension=num_trained_values(model.adapter, spec.trains),
            )
        except TooFewError as error:
            raise TooFewClientsError(
                f"round {round_.number}: {error}; resume the run once more clients answer"
            ) from None
        if opened.dishonest:
            others = self._without(opened.dishonest, requests, round_)
            return self.open(link, round_, others, spec, model)
        for client, reason in opened.left_out.items():
            round_.leave_out(client, reason)
        digest = opened.terms.digest()
        return {client: request.told(own, digest) for client, own in opened.fields.items()}

    def _without(
        self, dishonest: Mapping[int, str], requests: Mapping[int, RoundRequest], round_: Round
    ) -> dict[int, RoundRequest]:
        """The requests of the others; the run asks the dishonest no more, and nobody was charged yet.

        Raises:
            TooFewClientsError: the others are fewer than a sum needs.
        """
        for client, reason in dishonest.items():
            self._books.retire(client, reason)
            round_.leave_out(client, reason)
        others = {client: request for client, request in requests.items() if client not in dishonest}
        if len(others) < self._config.min_clients:
            raise TooFewClientsError(
                f"round {round_.number}: {'; '.join(dishonest.values())}; {len(others)} clients are left, "
                f"min_clients = {self._config.min_clients}"
            )
        return others

    def read(self, reply: Message, expected: ExpectedReply) -> Read:
        """See `read_sum`."""
        assert self._attempt is not None, "nobody is asked before the sum is opened"
        terms = self._attempt.terms
        return read_sum(reply, expected, dimension=terms.dimension, modulus_bits=terms.modulus_bits)

    def close(
        self, link: Grid, round_: Round, contents: Mapping[int, Adapter | Vector], spec: UpdateSpec, model: GlobalModel
    ) -> list[Adapter]:
        """The one adapter that stands for the average of the updates, of which only the sum is known.

        Raises:
            TooFewError: fewer clients are left than a sum needs, so nothing is unmasked.
            DealerError: a client, which the run asks no more, dealt shares that do not fit together.
        """
        if self._attempt is None:  # nobody was asked
            return []
        vectors = {client: content for client, content in contents.items() if isinstance(content, np.ndarray)}
        try:
            total = self.total(link, round_, self._attempt, vectors)
        except DealerError as error:
            self._books.retire(error.client, str(error))
            raise
        mean = mean_of_sum(self._config, spec, self._books.sizes, torch.from_numpy(total), vectors.keys())
        broadcast = next(iter(round_.requests.values())).broadcast
        return [mean_upload(broadcast.adapter, spec, mean)]

    def attempt(
        self,
        link: Grid,
        round_: Round,
        clients: Collection[int],
        *,
        spec: UpdateSpec,
        grid: SumGrid,
        request: str,
        dimension: int,
    ) -> Opened:
        """Terms for these clients, and under masks the keys and shares that they exchange.

        Args:
            link: Flower's connection to the nodes.
            round_: that counts the bytes.
            clients: to take part.
            spec: of their update.
            grid: of their sum.
            request: digest of what they will be asked.
            dimension: number of values that the update trains.

        Raises:
            TooFewError: fewer clients are left than a sum needs; nothing was charged.
        """
        terms = Terms(
            run=self._run,
            round=round_.number,
            attempt=secrets.token_hex(_ATTEMPT_BYTES),
            participants=tuple(self._participant(client, spec, grid) for client in sorted(clients)),
            threshold=self._config.min_clients,
            colluding=self._config.colluding_clients,
            modulus_bits=grid.modulus_bits,
            grid_exponent=grid.exponent,
            dimension=dimension,
            clip_norm=spec.clip_norm,
            noise_multiplier=spec.noise_multiplier,
            request=request,
        )
        fields = {kinds.TERMS: terms.text()}
        if not self._config.masks:
            return Opened(terms=terms, fields=dict.fromkeys(terms.by_client, fields), dealt=None)
        unanswered: dict[int, str] = {}
        ask = partial(self._ask, link, round_, terms, unanswered)
        with _naming(unanswered):
            advertise = Request.of(ADVERTISE, own=fields)
            shown = collect_advertisements(terms, ask(dict.fromkeys(terms.by_client, advertise)))
            self._log(round_, "advertisement", shown.refused)
            dealt = collect_shares(shown, ask(dict.fromkeys(shown.shown, self._step(terms, SHARE, shown.message()))))
            self._log(round_, "shares", dealt.refused)
            sealed = {k: self._step(terms, CHECK, dealt.message(k)) for k in dealt.dealt}
            checked = collect_checks(dealt, ask(sealed))
            self._log(round_, "check", checked.refused)
        reasons = {**shown.refused, **dealt.refused, **checked.refused, **unanswered}
        dealt = checked
        return Opened(
            terms=terms,
            fields={client: {**fields, kinds.SEALED: dealt.message(client)} for client in dealt.dealt},
            dealt=dealt,
            left_out={k: reasons.get(k, "no answer in time") for k in terms.by_client if k not in dealt.dealt},
            dishonest=dealt.dishonest,
        )

    def total(self, link: Grid, round_: Round, opened: Opened, vectors: Mapping[int, Vector]) -> npt.NDArray[np.int64]:
        """The sum of what these clients sent, int64 [values].

        Args:
            link: Flower's connection to the nodes.
            round_: that counts the bytes.
            opened: the attempt.
            vectors: {client: words} of those whose reply is sound.

        Raises:
            TooFewError: fewer clients are left than a sum needs, so nothing is unmasked.
            DealerError: a client dealt shares that do not fit together.
        """
        terms = opened.terms
        if opened.dealt is None:
            if len(vectors) < terms.threshold:
                raise TooFewError(f"vectors: are of {len(vectors)} clients, must be of at least {terms.threshold}")
            return to_centred(np.sum(list(vectors.values()), axis=0, dtype=word_dtype(terms)))
        unanswered: dict[int, str] = {}
        ask = partial(self._ask, link, round_, terms, unanswered)
        with _naming(unanswered):
            masked = collect_masked(opened.dealt, vectors)
            confirm = self._step(terms, CONFIRM, masked.message())
            signed = collect_signatures(masked, ask(dict.fromkeys(masked.survivors, confirm)))
            self._log(round_, "signature", signed.refused)
            reveal = self._step(terms, REVEAL, signed.message())
            recovered = recover(signed, ask(dict.fromkeys(signed.signatures, reveal)))
        self._log(round_, "shares", recovered.refused)
        return recovered.values

    def _participant(self, client: int, spec: UpdateSpec, grid: SumGrid) -> Participant:
        registration = self._nodes[client][1]
        return Participant(
            client=client,
            identity=registration.identity,
            num_records=registration.num_records,
            sampling_probability=spec.probability(registration.num_records),
            scale=grid.scales[client],
        )

    def _step(self, terms: Terms, kind: str, message: str) -> Request:
        return Request.of(kind, fields=kinds.pack(kinds.Step(run=self._run, attempt=terms.attempt, message=message)))

    def _ask(
        self,
        link: Grid,
        round_: Round,
        terms: Terms,
        unanswered: dict[int, str],
        requests: Mapping[int, Request],
    ) -> dict[int, str]:
        """{client: the text that it answers}, of those that do in time; of the others `unanswered` gets the reason."""
        messages, clients, answers = [], {}, {}
        for addressee, request in requests.items():
            message = message_to(self._nodes[addressee][0], request, round_.number)
            clients[message.metadata.dst_node_id] = addressee
            round_.bytes_down[addressee] += wire_bytes(message.content)
            messages.append(message)
        round_.heard.difference_update(requests)  # what it answered before is not the last thing that it was asked
        for reply in self._exchange.replies(link, messages, self._config.round_seconds):
            client = clients.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                log.warning("round %s: ignored an unexpected reply of node %s", terms.round, reply.metadata.src_node_id)
                continue
            round_.heard.add(client)
            if reply.has_error():
                unanswered[client] = reason_of(reply)
                who = label_of(self._nodes, client)
                log.warning("round %s, %s, %s: %s", terms.round, who, requests[client].kind, unanswered[client])
            else:
                round_.bytes_up[client] += wire_bytes(reply.content)
                answers[client] = _text_of(reply, requests[client].kind)
        return answers

    def _log(self, round_: Round, what: str, refused: Mapping[int, str]) -> None:
        for reason in refused.values():
            log.warning("round %s: %s left out: %s", round_.number, what, reason)


@contextmanager
def _naming(unanswered: Mapping[int, str]) -> Iterator[None]:
    """Let an error that too few clients are left also give the reasons of those that answered with an error."""
    try:
        yield
    except TooFewError as error:
        named = [f"client {client}: {reason}" for client, reason in unanswered.items()]
        raise TooFewError("; ".join([str(error), *named])) from None


def _text_of(reply: Message, kind: str) -> str:
    """The text of an answer; empty, which no step reads, if there is none."""
    try:
        words: kinds.Words = answer_in(reply, kind)
    except MalformedError:
        return ""
    return words.message
