"""A run's books: charges of before an interruption pay once, and what is shown is never less than was spent."""

from dataclasses import replace

import pytest

from fedpriv.config import RunConfig, parse
from fedpriv.learning.training.noise_plan import calibrated
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from server.bookkeeping import Books
from server.costs import EarlierCharges
from tests.events import gaussian
from tests.server.parts import ADAPTER, registered, released

RELEASE = Release(event=gaussian(1.0, 0.1), rho_bar=1.0)
KEYS = {"recipe": "per-sample", "local_steps": 1, "rounds": 4, "sampling_probability": 0.25}
SIZE = 400


def key(round_: int, client: int = 0) -> Key:
    return Key(run="run", client=str(client), round=round_, request="digest")


@pytest.fixture
def charges() -> EarlierCharges:
    """Client 0 repeats its replies, client 1 does not."""
    made = EarlierCharges()
    made.add(key(3), RELEASE, reusable=True)
    made.add(key(3, client=1), RELEASE, reusable=False)
    return made


def test_a_client_that_repeats_its_reply_is_paid_for_once(charges: EarlierCharges) -> None:
    assert charges.key_for(key(4)) == (key(4), False), "there was no earlier charge"
    assert charges.key_for(key(3)) == (key(3), True)
    again, is_paid = charges.key_for(key(3))
    assert (again != key(3), is_paid) == (True, False)


def test_a_client_that_computes_another_release_gets_another_key(charges: EarlierCharges) -> None:
    first, is_paid = charges.key_for(key(3, client=1))
    assert (is_paid, first in charges) == (False, False)
    charges.add(first, RELEASE, reusable=False)
    assert charges.key_for(key(3, client=1))[0] not in (first, key(3, client=1))


def test_unused_charges_are_counted_once_and_not_before_their_round(charges: EarlierCharges) -> None:
    assert charges.pop_unused(2) == []
    assert charges.pop_unused(3) == [(0, RELEASE)]
    assert charges.pop_unused(3) == []
    assert key(3) in charges


def test_a_part_in_a_sum_that_was_interrupted_is_spent_before_the_next_attempt_is_judged(tmp_path):
    """Another attempt has other terms, so it is another release: a budget for one round does not allow both."""
    sums = {"secure_aggregation": True, "mechanism": "discrete-gaussian", "optimizer": "sgd", "min_clients": 3}
    config = parse(KEYS | sums | {"noise_multiplier": 2.0, "delta": 1e-5, "privacy_view": "local"})
    clients = registered(dict.fromkeys(range(3), SIZE), keeps_replies=True)
    one = Books(config, "run", clients, initial=ADAPTER).costs.event(0, 1)
    config = replace(config, budget_epsilon=(1.01 * epsilon_of([one], 1e-5).epsilon,))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        books = Books(config, "run", clients, initial=ADAPTER, ledger=ledger)
        assert books.within_budget(1, range(3)) == [0, 1, 2]
        books.charge(1, dict.fromkeys(range(3), "terms of the first attempt"))
        resumed = Books(config, "run", clients, initial=ADAPTER, ledger=ledger, resumed_after=0)
        assert resumed.within_budget(1, range(3)) == []
        assert [resumed.accounts.num_releases(client) for client in range(3)] == [1, 1, 1]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """Four rounds that together cost 8 by pld, and more by rdp."""
    return calibrated(parse(KEYS | {"target_epsilon": 8.0, "batch_size": 8}), [SIZE], ADAPTER)


def books_of(config: RunConfig, ledger: Ledger | None = None, run: str = "run", *, num_clients: int = 1) -> Books:
    return Books(config, run, registered(dict.fromkeys(range(num_clients), SIZE)), initial=ADAPTER, ledger=ledger)


@pytest.fixture(scope="module")
def of_two_a_round() -> RunConfig:
    """Rounds of two of four clients, which together cost 8 on the view of Theorem 1."""
    keys = KEYS | {"privacy_view": "rho", "clients_per_round": 2, "min_clients": 2}
    return calibrated(parse(keys | {"target_epsilon": 8.0, "batch_size": 8}), [SIZE] * 4, ADAPTER)


def by_rdp(books: Books) -> float:
    return epsilon_of(books.accounts.history(0, "local"), books.accounts.deltas[0], "rdp").epsilon


def test_a_run_shows_no_more_than_its_target_until_it_releases_more_than_it_planned(config):
    books = books_of(config)
    for round_ in range(1, 5):
        released(books, range(round_, round_ + 1))
        assert books.epsilon_so_far(0, "local") == min(8.0, by_rdp(books))
    assert by_rdp(books) > 8.0, "else the test would prove nothing"
    assert books.epsilon_so_far(0, "rho") >= by_rdp(books), "the target is on another view"
    released(books, range(5, 6))  # as when a resumed run charges a round twice
    assert books.epsilon_so_far(0, "local") == by_rdp(books) > 8.0


def test_a_shared_account_is_told_apart_into_this_run_and_what_stood_there_before(config, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        first = released(books_of(config, ledger, "first"), range(1, 3))
        assert first.largest_part("this run") is first.largest_part("before") is None, "it is the whole account"
        second = books_of(config, ledger, "second")
        assert (second.largest_part("this run"), second.largest_part("before")) == (0.0, by_rdp(first))
        released(second, range(1, 5))
        assert second.largest_part("before") == by_rdp(first)
        assert second.largest_part("this run") == 8.0 < second.epsilon_so_far(0, "local")
        assert second.epsilon_so_far(0, "local") == by_rdp(second), "what was spent earlier is never hidden"
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


def test_on_another_view_too_a_run_that_keeps_to_its_plan_shows_no_more_than_its_target(of_two_a_round):
    books = released(books_of(of_two_a_round, num_clients=4), range(1, 5), (0, 1))
    assert books.epsilon_so_far(0, "rho") == 8.0


def test_rounds_with_more_uploads_than_were_calibrated_for_are_never_hidden_behind_the_target(of_two_a_round):
    """As when a round asks two others in place of two of whom one failed: each counts on less of the noise."""
    books = books_of(of_two_a_round, num_clients=4)
    for round_ in range(1, 5):
        for batch in ((0, 1), (2, 3)):
            books.charge(round_, dict.fromkeys(batch, f"request {round_}"))
        books.settle(dict.fromkeys(range(4), "reply"))
    spent = epsilon_of(books.accounts.history(0, "rho"), books.accounts.deltas[0]).epsilon
    assert spent > 8.0
    assert books.epsilon_so_far(0, "rho") >= spent
