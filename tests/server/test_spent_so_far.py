"""What the books show while a run goes on: never above the target, unless more was released than it was set for."""

from dataclasses import replace

import pytest
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.training.noise_plan import calibrated
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.ledger import Ledger
from server.bookkeeping import Books

ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}
SIZE = 400
REGISTERED = [Registration(client=0, num_records=SIZE, name="", data_set="d0")]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """Four rounds that together cost 8 by pld, and more by rdp."""
    keys = {"recipe": "per-sample", "local_steps": 1, "rounds": 4, "sampling_probability": 0.25}
    return calibrated(parse(keys | {"target_epsilon": 8.0, "batch_size": 8}), [SIZE], ADAPTER)


def books_of(config: RunConfig, ledger: Ledger | None = None, run: str = "run") -> Books:
    return Books(config, run, REGISTERED, initial=ADAPTER, ledger=ledger)


@pytest.fixture(scope="module")
def of_two_a_round() -> RunConfig:
    """Rounds of two of four clients, which together cost 8 on the view of Theorem 1."""
    keys = {"recipe": "per-sample", "local_steps": 1, "rounds": 4, "sampling_probability": 0.25}
    keys |= {"privacy_view": "rho", "clients_per_round": 2, "min_clients": 2}
    return calibrated(parse(keys | {"target_epsilon": 8.0, "batch_size": 8}), [SIZE] * 4, ADAPTER)


def four_of(config: RunConfig) -> Books:
    registered = [Registration(client=c, num_records=SIZE, name="", data_set=f"d{c}") for c in range(4)]
    return Books(config, "run", registered, initial=ADAPTER)


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


def test_a_shared_account_is_told_apart_into_this_run_and_what_stood_there_before(config, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        first = released(books_of(config, ledger, "first"), range(1, 3))
        assert first.largest_part("this run") is first.largest_part("before") is None, "it is the whole account"
        second = books_of(config, ledger, "second")
        assert (second.largest_part("this run"), second.largest_part("before")) == (0.0, by_rdp(first))
        released(second, range(1, 5))
        assert second.largest_part("before") == by_rdp(first)
        assert second.largest_part("this run") == 8.0 < second.epsilon_so_far(0, "local")
        released(second, range(5, 6))
        assert 8.0 < second.largest_part("this run") < second.epsilon_so_far(0, "local"), "a round beyond the plan"
        assert second.rounds_charged_again == []
        second.charge(5, {0: "another request"})
        assert second.rounds_charged_again == [5]


def test_less_noise_than_was_calibrated_is_never_hidden_behind_the_target(config):
    books = released(books_of(config), range(1, 5))
    louder = replace(config, noise_multiplier=config.noise_multiplier / 2)  # type: ignore[type-var]
    spent = released(books_of(louder), range(1, 5))
    for release in spent.accounts.history(0, "local"):
        assert not books.accounts.is_part_of(0, [release])


def test_rounds_with_more_uploads_than_were_calibrated_for_are_never_hidden_behind_the_target(of_two_a_round):
    """As when a round asks two others in place of two of whom one failed: each counts on less of the noise."""
    books = four_of(of_two_a_round)
    for round_ in range(1, 5):
        for batch in ((0, 1), (2, 3)):
            books.charge(round_, dict.fromkeys(batch, f"request {round_}"))
        books.settle(dict.fromkeys(range(4), "reply"))
    spent = epsilon_of(books.accounts.history(0, "rho"), books.accounts.deltas[0]).epsilon
    assert spent > 8.0
    assert books.epsilon_so_far(0, "rho") >= spent


def test_on_another_view_too_a_run_that_keeps_to_its_plan_shows_no_more_than_its_target(of_two_a_round):
    books = four_of(of_two_a_round)
    for round_ in range(1, 5):
        books.charge(round_, {0: f"request {round_}", 1: f"request {round_}"})
        books.settle({0: "reply", 1: "reply"})
    assert books.epsilon_so_far(0, "rho") == 8.0
