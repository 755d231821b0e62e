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
from server.bookkeeping import Books
from server.exchange import Exchange, MalformedError, answer_in, content_of, digest_of, message_to, wire_bytes
from server.inclusion import Inclusions
from server.registration import Nodes, label_of
from server.round import Receipts

log = logging.getLogger("flwr")

# Two-sided quantile of the standard normal distribution at 95 %.
_QUANTILE = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class AccuracyEstimate:
    """An accuracy that was read from noised counts.

    Attributes:
        accuracy: in [0, 1]; None where the noise left neither hits nor misses.
        low, high: ends of the 95 % interval, 0 <= low <= high <= 1; it is [0, 1] where the noise drowns the counts.
    """

    accuracy: float | None
    low: float
    high: float


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
    inclusions: Inclusions | None = None,
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
        inclusions: the records of the rounds' sums; None shows none.

    Raises:
        LedgerError: the charge cannot be written, so nobody was asked.
    """
    clients = [client for client in books.able_to_evaluate() if client not in skipped]
    broadcast = Broadcast(adapter=model.adapter, merged=model.merged)
    fields = kinds.pack_instruction(run, round_, spec)
    request = Request.of(EVALUATE, fields=fields, arrays=kinds.pack_model(broadcast))
    books.charge_evaluation(round_, dict.fromkeys(clients, request.digest))
    told = {
        client: replace(
            request,
            own=(receipts.shown_to(client) if receipts else {}) | (inclusions.shown_to(client) if inclusions else {}),
        )
        for client in clients
    }
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


def accuracy_from_counts(hits: float, misses: float, noise_stddev: float) -> AccuracyEstimate:
    """The accuracy h / (h + m) behind counts with independent noise N(0, s^2) on each, with a 95 % interval.

    The interval is Fieller's. At the true a = h / (h + m), (1 - a) h - a m = 0, so (1 - a) H - a M is normal with
    mean 0 and standard deviation s sqrt((1 - a)^2 + a^2), whatever h and m are. The set of all a with
    |(1 - a) H - a M| <= 1.96 s sqrt((1 - a)^2 + a^2) therefore covers the true one with a probability of exactly 95 %,
    if h + m > 0. The result is the smallest interval in [0, 1] around this set, so it covers at least as often.

    A negative count is first raised to 0, which keeps every a of the set: where H < 0 < M, both terms have one sign,
    and without the first their sum is nearer 0; where both are negative, all of [0, 1] results.

    It says how far the noise may have moved the accuracy on the evaluated records, not how well these stand for others.

    Args:
        hits: H, the noised number of correct predictions.
        misses: M, the noised number of wrong ones.
        noise_stddev: s >= 0, of the noise on each of them.

    Raises:
        ValueError: a value is not finite, or noise_stddev is negative.

    Source: Fieller 1954.
    """
    if not (math.isfinite(hits) and math.isfinite(misses) and 0 <= noise_stddev < math.inf):
        raise ValueError(f"hits = {hits}, misses = {misses}, noise_stddev = {noise_stddev}: must be finite, noise >= 0")
    hits, misses = max(0.0, hits), max(0.0, misses)
    total, width = hits + misses, _QUANTILE * noise_stddev
    if total == 0:
        return AccuracyEstimate(accuracy=None, low=0.0, high=1.0)
    low, high = _lower_end(hits, misses, width), 1 - _lower_end(misses, hits, width)
    accuracy = hits / total
    # Rounding must not put the estimate outside of its interval.
    return AccuracyEstimate(accuracy=accuracy, low=min(low, accuracy), high=max(high, accuracy))


def _lower_end(hits: float, misses: float, width: float) -> float:
    """The smallest a in [0, 1] with |(1 - a) H - a M| <= w sqrt((1 - a)^2 + a^2), for H, M >= 0.

    Squared, this is a^2 (S^2 - 2 w^2) - 2 a (H S - w^2) + H^2 - w^2 <= 0 with S = H + M. It holds at 0 if H <= w.
    Otherwise its only root between 0 and H / S is (H^2 - w^2) / (H S - w^2 + w sqrt(H^2 + M^2 - w^2)), a form in which
    S^2 - 2 w^2 may be 0 or negative.
    """
    if hits <= width:
        return 0.0
    product = hits * (hits + misses) - width**2
    return (hits**2 - width**2) / (product + width * math.sqrt(hits**2 + misses**2 - width**2))
