"""Secure aggregation as the server runs it: a round's sum in exchanges around the train messages."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.config import RunConfig
from fedpriv.holder.sums import Participant, Terms, TooFewError, to_centred, word_dtype
from fedpriv.holder.sums.server import (
    Dealt,
    collect_advertisements,
    collect_checks,
    collect_masked,
    collect_shares,
    collect_signatures,
    recover,
)
from fedpriv.holder.wire import protocol
from fedpriv.holder.wire.protocol import Registration
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.mechanisms.discrete_gaussian import SumGrid
from server.exchange import Exchange, Vector, reason_of, wire_bytes
from server.registration import label_of
from server.round import Round

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
    """The exchanges of a run's sums.

    Args:
        config: of the run.
        nodes: {client: (node id, registration)}.
        run: the run's random id.
        exchange: with the nodes.
    """

    def __init__(
        self, config: RunConfig, nodes: Mapping[int, tuple[int, Registration]], *, run: str, exchange: Exchange
    ) -> None:
        self._config, self._nodes, self._run, self._exchange = config, nodes, run, exchange

    def open(
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
        fields = {protocol.TERMS: terms.text()}
        if not self._config.masks:
            return Opened(terms=terms, fields=dict.fromkeys(terms.by_client, fields), dealt=None)
        unanswered: dict[int, str] = {}
        ask = partial(self._ask, link, round_, terms, unanswered)
        with _naming(unanswered):
            shown = collect_advertisements(terms, ask(protocol.ADVERTISE, dict.fromkeys(terms.by_client, fields)))
            self._log(round_, "advertisement", shown.refused)
            dealt = collect_shares(shown, ask(protocol.SHARE, self._steps(terms, shown.shown, shown.message())))
            self._log(round_, "shares", dealt.refused)
            sealed = {k: protocol.pack_step(self._run, terms.attempt, dealt.message(k)) for k in dealt.dealt}
            checked = collect_checks(dealt, ask(protocol.CHECK, sealed))
            self._log(round_, "check", checked.refused)
        reasons = {**shown.refused, **dealt.refused, **checked.refused, **unanswered}
        dealt = checked
        return Opened(
            terms=terms,
            fields={client: {**fields, protocol.SEALED: dealt.message(client)} for client in dealt.dealt},
            dealt=dealt,
            left_out={k: reasons.get(k, "no answer in time") for k in terms.by_client if k not in dealt.dealt},
            dishonest=dealt.dishonest,
        )

    def close(self, link: Grid, round_: Round, opened: Opened, vectors: Mapping[int, Vector]) -> npt.NDArray[np.int64]:
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
            signed = collect_signatures(
                masked, ask(protocol.CONFIRM, self._steps(terms, masked.survivors, masked.message()))
            )
            self._log(round_, "signature", signed.refused)
            recovered = recover(signed, ask(protocol.REVEAL, self._steps(terms, signed.signatures, signed.message())))
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

    def _steps(self, terms: Terms, clients: Iterable[int], message: str) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(clients, protocol.pack_step(self._run, terms.attempt, message))

    def _ask(
        self,
        link: Grid,
        round_: Round,
        terms: Terms,
        unanswered: dict[int, str],
        kind: str,
        fields: Mapping[int, Mapping[str, Any]],
    ) -> dict[int, str]:
        """{client: the text that it answers}, of those that do in time; of the others `unanswered` gets the reason."""
        messages, clients, answers = [], {}, {}
        for addressee, each in fields.items():
            content = RecordDict({protocol.INSTRUCTION: ConfigRecord(dict(each))})
            node_id = self._nodes[addressee][0]
            clients[node_id] = addressee
            round_.bytes_down[addressee] += wire_bytes(content)
            messages.append(Message(content, node_id, kind, group_id=str(round_.number)))
        round_.heard.difference_update(fields)  # what it answered before is not the last thing that it was asked
        for reply in self._exchange.replies(link, messages, self._config.round_seconds):
            client = clients.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                log.warning("round %s: ignored an unexpected reply of node %s", terms.round, reply.metadata.src_node_id)
                continue
            round_.heard.add(client)
            if reply.has_error():
                unanswered[client] = reason_of(reply)
                who = label_of(self._nodes, client)
                log.warning("round %s, %s, %s: %s", terms.round, who, kind, unanswered[client])
            else:
                round_.bytes_up[client] += wire_bytes(reply.content)
                answers[client] = _text_of(reply)
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


def _text_of(reply: Message) -> str:
    """The text of an answer; empty, which no step reads, if there is none."""
    records = reply.content.config_records
    text = records[protocol.STEP].get(protocol.MESSAGE) if protocol.STEP in records else ""
    return text if isinstance(text, str) else ""
