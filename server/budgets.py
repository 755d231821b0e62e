"""What budgets allow, told before the first round."""

from __future__ import annotations

from collections.abc import Mapping

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.texts import holder_label
from server.bookkeeping import Books
from server.observer import Observer


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
