"""What the books show while a run goes on: never above the target, unless more was released than it was set for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.config import RunConfig, parse
from fedpriv.ledger.ledger import Ledger
from fedpriv.protocol import Registration
from fedpriv.training.noise_plan import calibrated
from server.bookkeeping import Books

ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}
SIZE = 400
REGISTERED = [Registration(client=0, num_records=SIZE, name="", data_set="d0")]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """Four rounds that together cost 8 by pld, and more by rdp."""
    keys = {"recipe": "dp-lora-paper", "local_steps": 1, "rounds": 4, "sampling_probability": 0.25}
    return calibrated(parse(keys | {"target_epsilon": 8.0, "batch_size": 8}), [SIZE], ADAPTER)


def books_of(config: RunConfig, ledger: Ledger | None = None, run: str = "run") -> Books:
    return Books(config, run, REGISTERED, initial=ADAPTER, ledger=ledger)


def released(books: Books, rounds: range) -> Books:
    for round_ in rounds:
        books.charge(round_, {0: f"request {round_}"})
        books.settle({0: "reply"})
    return books


def by_rdp(books: Books) -> float:
    return epsilon_of(books.accounts.history(0, "local"), books.accounts.deltas[0], "rdp").epsilon


def test_a_run_that_keeps_to_its_plan_shows_no_more_than_its_target(config):
    books = books_of(config)
    for round_ in range(1, 5):
        released(books, range(round_, round_ + 1))
        assert books.epsilon_so_far(0, "local") == min(8.0, by_rdp(books))
    assert by_rdp(books) > 8.0, "else the test would prove nothing"
    assert books.epsilon_so_far(0, "rho") >= by_rdp(books), "the target is on another view"


def test_a_release_beyond_the_plan_is_never_hidden_behind_the_target(config):
    """A round that is charged twice, as a resumed run may: the figure rises above the target."""
    books = released(books_of(config), range(1, 6))
    assert books.epsilon_so_far(0, "local") == by_rdp(books) > 8.0


def test_what_an_earlier_run_spent_is_never_hidden_behind_the_target(config, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        released(books_of(config, ledger, "first"), range(1, 2))
        second = released(books_of(config, ledger, "second"), range(1, 5))
        assert second.epsilon_so_far(0, "local") == by_rdp(second) > 8.0


def test_less_noise_than_was_calibrated_is_never_hidden_behind_the_target(config):
    books = released(books_of(config), range(1, 5))
    louder = replace(config, noise_multiplier=config.noise_multiplier / 2)  # type: ignore[type-var]
    spent = released(books_of(louder), range(1, 5))
    for release in spent.accounts.history(0, "local"):
        assert not books.accounts.is_part_of(0, [release])
