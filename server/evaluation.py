"""The evaluation of the final model on the holders' records: one noised pair of counts from each, and their sum."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, Request
from fedpriv.holder.wire.kinds import Broadcast, EvaluationRelease
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training.private_evaluation import EvaluationSpec, planned_event
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.intervals import AccuracyEstimate, accuracy_from_counts
from server.bookkeeping import Books
from server.exchange import Exchange, MalformedError, answer_in, content_of, digest_of, message_to, wire_bytes
from server.registration import Nodes, label_of
from server.round import Receipts

log = logging.getLogger("flwr")


@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """The result of the holders' noised counts.

    Attributes:
        estimate: of the accuracy on the records of all holders that answered.
        noise_multiplier: z, the standard deviation of each holder's noise.
        num_asked: holders that were charged for it.
        num_answers: holders whose counts are in the sum.
        bytes_up, bytes_down: {client: of its message}.
    """

    estimate: AccuracyEstimate
    noise_multiplier: float
    num_asked: int
    num_answers: int
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]


def evaluate_privately(
    grid: Grid,
    nodes: Nodes,
    books: Books,
    model: GlobalModel,
    spec: EvaluationSpec,
    *,
    run: str,
    round_: int,
    seconds: float,
    skipped: Collection[int] = (),
    receipts: Receipts | None = None,
) -> PrivateEvaluation:
    """Ask every client whose budget allows it, once it is charged, and add up what those that answer release.

    Args:
        grid: of the run.
        nodes: that take part.
        books: of the run; all rounds are settled.
        model: to evaluate.
        spec: of the evaluation.
        run: the run's id.
        round_: one above the last round, under which the evaluation is charged.
        seconds: to wait for replies.
        skipped: clients that are not asked, since their nodes do not answer.
        receipts: of the nodes' charges; None shows and keeps none.

    Raises:
        LedgerError: the charge cannot be written, so nobody was asked.
    """
    clients = [client for client in books.able_to_evaluate() if client not in skipped]
    broadcast = Broadcast(adapter=model.adapter, merged=model.merged)
    fields = kinds.pack_instruction(run, round_, spec)
    request = Request.of(EVALUATE, fields=fields, arrays=kinds.pack_model(broadcast))
    books.charge_evaluation(round_, dict.fromkeys(clients, request.digest))
    told = {client: replace(request, own=receipts.shown_to(client) if receipts else {}) for client in clients}
    by_node = {nodes[client][0]: client for client in clients}
    messages = [message_to(node_id, told[client], round_) for node_id, client in by_node.items()]
    releases: dict[int, EvaluationRelease] = {}
    digests: dict[int, str] = {}
    bytes_up: dict[int, int] = {}
    for reply in Exchange().replies(grid, messages, seconds):
        client = by_node.get(reply.metadata.src_node_id)
        try:
            if client is None or client in releases:
                raise MalformedError("not expected")
            releases[client] = _read(reply, round_, planned_event(spec))
            digests[client] = digest_of(reply)
            if receipts is not None:
                receipts.take(client, releases[client].receipt)
            bytes_up[client] = wire_bytes(reply.content)
        except MalformedError as error:
            who = "a stranger" if client is None else label_of(nodes, client)
            log.warning("evaluation, %s: %s", who, error)
    books.settle_evaluation(digests)
    counts = [releases[client].counts for client in sorted(releases)]
    return PrivateEvaluation(
        estimate=accuracy_from_counts(
            math.fsum(each.hits for each in counts),
            math.fsum(each.misses for each in counts),
            spec.noise_multiplier * math.sqrt(len(counts)),
        ),
        noise_multiplier=spec.noise_multiplier,
        num_asked=len(clients),
        num_answers=len(counts),
        bytes_up=bytes_up,
        bytes_down={client: wire_bytes(content_of(each)) for client, each in told.items()},
    )


def _read(reply: Message, round_: int, event: Event) -> EvaluationRelease:
    """A client's release.

    Raises:
        MalformedError: it is an error, malformed, or not what was asked for.
    """
    release: EvaluationRelease = answer_in(reply, EVALUATE)
    if release.round != round_ or release.event != event:
        raise MalformedError(f"reply of round {release.round} paid {release.event}, asked were {round_} and {event}")
    return release
