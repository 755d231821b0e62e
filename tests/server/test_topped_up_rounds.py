"""A round that asks others in place of those that failed costs nobody more on `rho` than was checked and charged."""

import contextlib
import itertools
import math
from collections import Counter
from functools import cache

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import ArrayRecord, Error, Message

from fedpriv.config import RunConfig, parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.kinds import UploadRelease
from fedpriv.privacy.ledger.ledger import Ledger
from server.bookkeeping import Books
from server.strategy import RuleStrategy
from tests.marks import slow
from tests.server.parts import ADAPTER, nodes_of, registered, strategy_of
from tests.server.test_strategy import SlowGrid
from tests.wire import answered, arrays_of

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 400, 1: 400, 2: 400, 3: 400, 4: 150, 5: 900}
DELTA, NOISE, Q = 1e-5, 4.0, 0.25
KEYS = {
    "recipe": "per-sample",
    "local_steps": 1,
    "rounds": 6,
    "clients_per_round": 2,
    "min_clients": 2,
    "noise_multiplier": NOISE,
    "sampling_probability": Q,
    "delta": DELTA,
}


def config_of(**changes: object) -> RunConfig:
    return parse(KEYS | changes)


def epsilon_by_dp_accounting(bars: list[float]) -> float:
    """What releases cost on `rho`, by no code of ours."""
    return _epsilon(tuple(sorted(bars)))


@cache  # clients of one size pay the same
def _epsilon(bars: tuple[float, ...]) -> float:
    accountant = PLDAccountant(value_discretization_interval=5e-4)
    for bar, count in Counter(bars).items():
        accountant.compose(PoissonSampledDpEvent(Q, GaussianDpEvent(bar * NOISE)), count)
    return accountant.get_epsilon(DELTA)


def bar_of(clients: set[int]) -> float:
    total = sum(SIZES[client] for client in clients)
    return math.sqrt(sum((SIZES[client] / total) ** 2 for client in clients))


def run_of(config: RunConfig, fails) -> tuple[dict[int, list[float]], list[list], RuleStrategy]:
    """A whole run in which `fails(how many were asked in the round before)` decides who sends an error.

    Returns:
        {client: rho_bar of each round that it paid for}, the rows of every round, and the strategy.
    """
    rows: list[list] = []
    nodes = nodes_of(registered(SIZES))
    strategy = strategy_of(config, nodes, on_round=lambda row, clients: rows.append(clients))
    asked: Counter[int] = Counter()

    def replies(message: Message):
        round_ = int(message.metadata.group_id)
        asked[round_] += 1
        if fails(asked[round_]):
            return Message(Error(101, "training failed"), reply_to=message), 0
        client = message.metadata.dst_node_id - 100
        claims = UploadRelease(round=round_, event=strategy.event(client), num_records=SIZES[client])
        return answered(message, kinds.pack(claims), arrays={kinds.ADAPTER: arrays_of(ADAPTER)}), 0

    with contextlib.suppress(TooFewClientsError):
        strategy.start(SlowGrid(replies), ArrayRecord(ADAPTER), num_rounds=config.rounds, timeout=5)
    bars: dict[int, list[float]] = {client: [] for client in SIZES}
    for clients in rows:
        summed = {row.client for row in clients if row.status == "ok"}
        for row in clients:
            bars[row.client].append(bar_of(summed | {row.client}))
    return bars, rows, strategy


@pytest.mark.parametrize("num_rounds", [*slow(1), 2])
@pytest.mark.parametrize("failing", [{1, 2}, *slow({1}, {2}, {1, 3}, set())], ids=str)
def test_a_budget_on_rho_holds_in_rounds_that_ask_others(num_rounds, failing):
    """The budget is what some rounds of four equal clients cost and another one of two, but not one of three."""
    budget = epsilon_by_dp_accounting([math.sqrt(1 / 4)] * num_rounds + [math.sqrt(1 / 2)]) * 1.01
    config = config_of(privacy_view="rho", budget_epsilon=budget)
    bars, rows, strategy = run_of(config, failing.__contains__)
    assert any(len(each) > 2 for each in rows) == bool(failing), "else no round asked others"
    for client, paid in bars.items():
        spent = epsilon_by_dp_accounting(paid) if paid else 0.0
        assert spent <= budget * (1 + 1e-3), client
        shown = strategy.books.epsilon_so_far(client, "rho")
        assert shown >= spent * (1 - 1e-3), "no more may have been spent than is shown"


def test_a_round_that_asks_others_retires_nobody_on_the_local_view():
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(Q, GaussianDpEvent(NOISE)), 6)
    config = config_of(budget_epsilon=accountant.get_epsilon(DELTA) * 1.01)
    bars, _, strategy = run_of(config, {1}.__contains__)
    assert strategy.stopped is None
    assert not strategy.books.retired
    assert any(len(paid) > 1 for paid in bars.values())


@pytest.mark.parametrize("view", ["local", "rho"])
def test_a_crash_at_any_time_leaves_charges_that_no_round_exceeds(tmp_path, view):
    """The first two of a round are charged alone: whichever others join, what they really cost is no more."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        books = Books(config_of(privacy_view=view), "run", registered(SIZES), initial=ADAPTER, ledger=ledger)
        books.charge(1, {0: "request", 5: "request"})
        first = {c: ledger.releases_of(f"d{c}", "run")[0][1].rho_bar for c in (0, 5)}
        books.charge(1, {4: "request", 1: "request"})
        second = {c: ledger.releases_of(f"d{c}", "run")[0][1].rho_bar for c in (4, 1)}
    for charged in (first, second):
        for client, bar in charged.items():
            for num in range(1, 4):
                for summed in itertools.combinations([0, 1, 4, 5], num):
                    assert bar <= bar_of({client, *summed}), (client, summed)
    # Two of them, or one and two others, and who failed: a sum never has more than four uploads to be weighed with.
    assert min(first.values()) > bar_of(set(SIZES)) or min(first.values()) >= 0.5 * (1 - 1e-9)
