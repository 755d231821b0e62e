"""The rows that a round adds to the run's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedpriv.accounting.views import rho_bar
from fedpriv.runs.rows import USABLE, ClientRow, RoundRow
from fedpriv.training.evaluation import Evaluation
from fedpriv.training.local_update import UpdateSpec
from server.bookkeeping import Books
from server.round import Round
from server.wire import wire_bytes


def client_rows(round_: Round, books: Books, spec: UpdateSpec, weights: Mapping[int, float]) -> list[ClientRow]:
    """A row for each client that was asked in the round, in that order, and then for those that were left out.

    Args:
        round_: of which everything was collected.
        books: in which the round is settled.
        spec: of the run.
        weights: {client: rho_k} of those whose upload is in the sum.
    """
    clients = dict.fromkeys([*round_.messages, *round_.statuses])
    return [_client_row(client, round_, books, spec, weights) for client in clients]


def _client_row(client: int, round_: Round, books: Books, spec: UpdateSpec, weights: Mapping[int, float]) -> ClientRow:
    event, status = books.costs.event(client, round_.number), round_.statuses[client]
    message, reply, request = round_.messages.get(client), round_.replies.get(client), round_.requests.get(client)
    return ClientRow(
        round=round_.number,
        client=client,
        num_records=books.sizes[client],
        status=status.name,
        detail=status.detail,
        sampling_probability=getattr(event, "sampling_probability", 1.0),
        noise_multiplier=spec.noise_multiplier,
        effective_noise_multiplier=event.effective_noise_multiplier,
        steps=event.count,
        weight=weights.get(client, 0.0),
        rho_bar=rho_bar(weights.values()) if weights else 0.0,
        epsilon_local=books.epsilon_so_far(client, "local"),
        epsilon_rho=books.epsilon_so_far(client, "rho"),
        epsilon_aggregate=books.epsilon_so_far(client, "aggregate"),
        delta=books.accounts.deltas[client],
        bytes_up=round_.bytes_up[client] + (wire_bytes(reply.content) if reply and reply.has_content() else 0),
        bytes_down=round_.bytes_down[client] + (request.num_bytes if request else 0),
        seconds=reply.metadata.created_at - message.metadata.created_at if reply and message else math.nan,
    )


def round_row(
    number: int,
    clients: Sequence[ClientRow],
    books: Books,
    test: Evaluation | None,
    *,
    num_late: int,
    seconds: float,
) -> RoundRow:
    """The row of a round.

    Args:
        number: 0 for the untrained model.
        clients: the round's rows; empty for round 0.
        books: in which the round is settled.
        test: of the model after the round; None if the server has no test set.
        num_late: replies to earlier rounds that arrived in this one.
        seconds: that the round took.
    """
    return RoundRow(
        round=number,
        num_selected=len(clients),
        num_replies=sum(row.status == "ok" for row in clients),
        num_silent=sum(row.status == "silent" for row in clients),
        num_failures=sum(row.status not in USABLE for row in clients),
        num_late=num_late,
        num_retired=len(books.retired),
        test_accuracy=test.accuracy if test else None,
        test_loss=test.loss if test else None,
        test_perplexity=test.perplexity if test else None,
        epsilon_local_max=books.largest_so_far("local"),
        epsilon_rho_max=books.largest_so_far("rho"),
        epsilon_aggregate_max=books.largest_so_far("aggregate"),
        bytes_up=sum(row.bytes_up for row in clients),
        bytes_down=sum(row.bytes_down for row in clients),
        seconds=seconds,
    )
