"""Checks of budgets, ranks and the privacy view before the first round."""

from __future__ import annotations

from collections.abc import Mapping

from fedpriv.config import RunConfig
from fedpriv.config_checks import check_clients
from fedpriv.errors import InputError
from fedpriv.names import holder_label
from server.aggregate_view import objections_to_aggregate
from server.bookkeeping import Books
from server.observer import Observer


def check_budget_and_view(config: RunConfig, num_clients: int) -> None:
    """Refuse keys that do not fit so many clients, and the `aggregate` view where it does not hold.

    Raises:
        InputError: names the key, or every condition that fails.
    """
    check_clients(config, num_clients)
    if config.privacy_view == "aggregate" and (objections := objections_to_aggregate(config)):
        raise InputError(f"privacy_view = aggregate: does not hold: {'; '.join(objections)}")


def announce_budgets(books: Books, config: RunConfig, names: Mapping[int, str], observer: Observer) -> None:
    """Tell the observer, before the first round, which budgets end before the run does, and after how many rounds.

    Raises:
        InputError: fewer clients than the run needs can take part in even one round.
    """
    allowed = books.rounds_allowed
    short = {client: rounds for client, rounds in allowed.items() if rounds < config.rounds}
    if len(books.sizes) < config.min_clients:
        raise InputError(f"min_clients = {config.min_clients}: only {len(books.sizes)} clients are registered")
    num_able = len(books.sizes) - sum(rounds == 0 for rounds in allowed.values())
    if num_able < config.min_clients:
        raise InputError(
            f"budget_epsilon = {list(config.budget_epsilon)}: allows {num_able} of {len(books.sizes)} clients a round, "
            f"min_clients = {config.min_clients}; use more noise, or a larger budget"
        )
    if short:
        each = ", ".join(f"{holder_label(client, names[client])}: {rounds}" for client, rounds in sorted(short.items()))
        observer.notice(
            f"budget_epsilon allows fewer than the {config.rounds} rounds of this run, on the {config.privacy_view} "
            f"view and whichever clients drop out: {each}; these clients then retire"
        )
