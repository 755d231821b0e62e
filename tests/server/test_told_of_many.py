"""Of many clients a line names some, and counts the others."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from fedpriv.config import RunConfig
from fedpriv.protocol import Registration
from server.bookkeeping import announce_budgets
from server.observer import LogObserver


def test_the_first_line_of_a_run_names_fifty_sizes(caplog):
    made = [Registration(client=k, num_records=40, name=f"client {k}", data_set=f"d{k}") for k in range(10_000)]
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        LogObserver().started(RunConfig(noise_multiplier=1.0), made, None)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    (line,) = [record.getMessage() for record in caplog.records if "run with" in record.getMessage()][:1]
    assert line.endswith("client 49: 40, 9,950 more, 400,000 in all")
    assert "client 50" not in line


def test_budgets_that_end_early_are_named_for_twenty_clients_and_counted_for_the_rest():
    allowed = {client: 2 + client % 3 for client in range(1000)}
    books = SimpleNamespace(rounds_allowed=allowed, sizes=dict.fromkeys(allowed, 40))
    notices = []
    announce_budgets(
        books,
        RunConfig(rounds=5, budget_epsilon=(4.0,), min_clients=2),
        {client: f"client {client}" for client in allowed},
        SimpleNamespace(notice=notices.append),
    )
    (notice,) = notices
    assert "client 0: 2, client 1: 3, " in notice
    assert "client 19: 3 and 980 more, the least 2; these clients then retire" in notice
