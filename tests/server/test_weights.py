"""Clients' weights in a round's sum, and the views under them: before the round its worst case, after it the record.

A round that asks others in place of those that failed costs nobody more on `rho` than was checked and charged.
"""

import contextlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from fedpriv.config import RunConfig, parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.sums import make_identity
from fedpriv.holder.wire import kinds
from fedpriv.learning.aggregation._fedavg import weights_by_size
from fedpriv.learning.training.noise_plan import view_scale
from fedpriv.learning.training.rounds import RunSchedule, client_masses, record_weights
from fedpriv.privacy.ledger.ledger import Ledger
from server.bookkeeping import Books
from server.strategy import RuleStrategy
from tests.events import by_dp_accounting, gaussian
from tests.marks import slow
from tests.server.parts import ADAPTER, SlowGrid, answer, nodes_of, registered, strategy_of

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 400, 1: 100, 2: 225, 3: 900}
SUMS = {"secure_aggregation": True, "privacy_view": "aggregate", "min_clients": 3}
PAPER = {"recipe": "per-sample", "local_steps": 1, "noise_multiplier": 1.5, "rounds": 2}


def make(**changes) -> tuple[RunConfig, Books]:
    config = parse({**PAPER, **changes})
    return config, Books(config, "run", registered(SIZES), initial=ADAPTER)


def settled(books: Books, uploads: list[int], asked: list[int] | None = None) -> None:
    books.charge(1, dict.fromkeys(asked or SIZES, "request"))
    books.settle(dict.fromkeys(uploads, "reply"))


@pytest.mark.parametrize(
    ("changes", "power"),
    [
        ({"client_weights": "uniform"}, 0.0),
        ({"client_weights": "uniform", **SUMS}, 0.0),
        ({"client_weights": "records"}, 1.0),
        ({"client_weights": "root-records"}, 1.5),
        ({"client_weights": "auto"}, 1.5),
        ({"client_weights": "auto", **SUMS}, 1.0),
    ],
)
def test_weights_follow_a_power_of_the_records_and_only_the_sum_lets_auto_weigh_all_records_alike(changes, power):
    config, books = make(**changes)
    total = sum(n**power for n in SIZES.values())
    assert books.costs.weights(SIZES) == pytest.approx({c: n**power / total for c, n in SIZES.items()})
    assert weights_by_size(client_masses(config, {0: 7, 2: 7})) == {0: 0.5, 2: 0.5}


@pytest.mark.parametrize(("weights", "power"), [("root-records", 1.5), ("uniform", 0.0)])
def test_the_rho_view_is_defined_under_the_weights_that_are_used(weights, power):
    _, books = make(client_weights=weights)
    settled(books, [0, 1, 3])
    for client, summed in ((0, (0, 1, 3)), (1, (0, 1, 3)), (2, (0, 1, 2, 3))):
        masses = [SIZES[c] ** power for c in summed]
        bar = math.hypot(*masses) / sum(masses)
        assert power or bar == pytest.approx(1 / math.sqrt(len(summed)))
        (event,) = books.accounts.history(client, "rho")
        assert event.noise_multiplier == pytest.approx(1.5 * bar)
        assert books.epsilon_so_far(client, "rho") > books.epsilon_so_far(client, "local")


@pytest.mark.parametrize(("weights", "power"), [("uniform", 0.0), ("records", 1.0), ("root-records", 1.5)])
@pytest.mark.parametrize("sampling", [{"sampling_probability": 0.25}, {"batch_size": 50}])
@pytest.mark.parametrize("clipping", ["joint", "batch"])
def test_noise_of_the_sum_is_that_of_the_design_for_every_kind_of_sampling(weights, power, sampling, clipping):
    """sqrt(sum_j w_j^2 z_j^2) / w_k with w_j = rho_j lr_j C_j / B_j, and no B_j under `batch`; less one reader's."""
    config, books = make(client_weights=weights, clipping=clipping, **sampling, **{**SUMS, "min_clients": 4})
    settled(books, list(SIZES))
    z, lr, clip = config.noise_multiplier, config.learning_rate, config.clip_norm
    rho = {c: n**power / sum(each**power for each in SIZES.values()) for c, n in SIZES.items()}
    size = {c: sampling.get("batch_size") or 0.25 * n for c, n in SIZES.items()}
    w = {c: rho[c] * lr * clip / (1 if clipping == "batch" else size[c]) for c in SIZES}
    for client in SIZES:
        reader = max((c for c in SIZES if c != client), key=lambda c: w[c])
        expected = math.sqrt(sum((w[c] * z) ** 2 for c in SIZES if c != reader)) / (w[client] * z)
        local, hidden = (books.accounts.history(client, view)[0] for view in ("local", "aggregate"))
        assert hidden.noise_multiplier == pytest.approx(local.noise_multiplier * expected)


def test_before_a_round_the_sum_may_be_that_of_the_fewest_uploads_with_the_least_noise():
    _, books = make(sampling_probability=0.25, client_weights="root-records", **SUMS, colluding_clients=1)
    books.charge(1, dict.fromkeys(SIZES, "request"))
    # v is sqrt(N): 20, 10, 15, 30. Of two other survivors with the least noise, the louder colludes.
    heard = {0: (20, 10), 1: (10, 15), 2: (15, 10), 3: (30, 10)}
    expected = {client: math.hypot(own, other) / own for client, (own, other) in heard.items()}
    assert {c: charge.release.aggregate_scale for c, charge in books._charged.items()} == pytest.approx(expected)
    books.settle(dict.fromkeys([0, 2, 3], "reply"))
    (event,), (local,) = (books.accounts.history(3, view) for view in ("aggregate", "local"))
    scale = event.noise_multiplier / local.noise_multiplier
    assert scale == pytest.approx(math.hypot(30, 10) / 30), "what was charged, whoever survives"


@pytest.mark.parametrize("uploads", [[], [3], [0, 3], [0, 1, 2, 3]])
def test_a_round_costs_its_worst_case_whoever_replied(uploads):
    config, books = make(sampling_probability=0.25, **SUMS)
    settled(books, uploads)
    assert view_scale(config, list(SIZES.values())) == pytest.approx(math.sqrt(2))
    for client in SIZES:
        (event,) = books.accounts.history(client, "aggregate")
        assert event.noise_multiplier == pytest.approx(1.5 * math.sqrt(2), rel=1e-4)
        assert event.noise_multiplier < 1.5 * math.sqrt(2), "rounding costs something"


@pytest.mark.parametrize("num_replies", [2, 3])
def test_of_fewer_uploads_than_the_threshold_nothing_is_summed_or_kept(num_replies):
    nodes = nodes_of([replace(each, identity=make_identity().public_line) for each in registered(SIZES)])
    strategy = strategy_of(make(**SUMS, server_optimizer="momentum")[0], nodes)
    messages = list(strategy.configure_train(1, ArrayRecord(ADAPTER), ConfigRecord(), None))
    vector = {kinds.SUM: torch.full((10,), 2**20, dtype=torch.int32)}
    replies = [answer(strategy, message, adapter=vector) for message in messages[:num_replies]]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert (arrays is not None) == (num_replies == 3)
    moved = any(tensor.any() for tensor in strategy.model.adapter.values())
    assert (moved, bool(strategy.model.optimizer_state)) == (num_replies == 3, num_replies == 3)
    assert not strategy.uploads


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"privacy_view": "local"}, 1.0),
        ({"privacy_view": "rho"}, 0.5),
        ({"privacy_view": "rho", "clients_per_round": 2}, math.sqrt(0.5)),
        ({**SUMS, "sampling_probability": 0.5}, math.sqrt(2)),
        ({**SUMS, "min_clients": 4, "sampling_probability": 0.5}, math.sqrt(3)),
        # With equal batches v is N: the client of 900 records with the smaller of the two smallest; the other reads.
        ({**SUMS, "batch_size": 50}, math.sqrt(1 + 100**2 / 900**2)),
    ],
)
def test_what_a_view_makes_of_every_clients_noise_at_least(changes, scale):
    config = parse({**PAPER, **changes})
    assert view_scale(config, list(SIZES.values())) == pytest.approx(scale)


def test_all_phases_of_a_run_count():
    """The start takes all records, which weighs them alike; batches of one size weigh a large client's more."""
    of_batches = {"sampling_probability": "", "lora_rounds": 0}
    config = parse({**SUMS, **of_batches, "learning_rate": 0.1, "start_noise_multiplier": 2.0})
    by_phase = [record_weights(config, phase.spec, SIZES) for phase in RunSchedule.of(config).phases]
    assert set(by_phase[0].values()) == {1.0}
    assert by_phase[-1][3] / by_phase[-1][1] == pytest.approx(9)
    assert view_scale(config, list(SIZES.values())) < math.sqrt(3)


# Rounds that ask others in place of those that failed; who takes part in them.
ASKED = {0: 400, 1: 400, 2: 400, 3: 400, 4: 150, 5: 900}
DELTA, NOISE, Q = 1e-5, 4.0, 0.25
KEYS = PAPER | {"rounds": 6, "clients_per_round": 2, "min_clients": 2, "noise_multiplier": NOISE}
KEYS |= {"sampling_probability": Q, "delta": DELTA}


@cache  # clients of one size pay the same
def epsilon_by_dp_accounting(*bars: float) -> float:
    """What releases cost on `rho`, by no code of ours."""
    events = (gaussian(bar * NOISE, Q, count) for bar, count in Counter(bars).items())
    return by_dp_accounting("pld", *events, interval=5e-4).get_epsilon(DELTA)


def bar_of(clients: set[int]) -> float:
    total = sum(ASKED[client] for client in clients)
    return math.sqrt(sum((ASKED[client] / total) ** 2 for client in clients))


def run_of(config: RunConfig, fails) -> tuple[dict[int, list[float]], list[list], RuleStrategy]:
    """A whole run in which `fails(how many were asked in the round before)` decides who sends an error.

    Returns:
        {client: rho_bar of each round that it paid for}, the rows of every round, and the strategy.
    """
    rows: list[list] = []
    nodes = nodes_of(registered(ASKED))
    strategy = strategy_of(config, nodes, on_round=lambda row, clients: rows.append(clients))
    asked: Counter[int] = Counter()

    def replies(message: Message):
        round_ = int(message.metadata.group_id)
        asked[round_] += 1
        if fails(asked[round_]):
            return Message(Error(101, "training failed"), reply_to=message), 0
        return answer(strategy, message, 0.0), 0

    with contextlib.suppress(TooFewClientsError):
        strategy.start(SlowGrid(replies), ArrayRecord(ADAPTER), num_rounds=config.rounds, timeout=5)
    bars: dict[int, list[float]] = {client: [] for client in ASKED}
    for clients in rows:
        summed = {row.client for row in clients if row.status == "ok"}
        for row in clients:
            bars[row.client].append(bar_of(summed | {row.client}))
    return bars, rows, strategy


@pytest.mark.parametrize("num_rounds", [*slow(1), 2])
@pytest.mark.parametrize("failing", [{1, 2}, *slow({1}, {2}, {1, 3}, set())], ids=str)
def test_a_budget_on_rho_holds_in_rounds_that_ask_others(num_rounds, failing):
    """The budget is what some rounds of four equal clients cost and another one of two, but not one of three."""
    budget = epsilon_by_dp_accounting(*[math.sqrt(1 / 4)] * num_rounds, math.sqrt(1 / 2)) * 1.01
    config = parse(KEYS | {"privacy_view": "rho", "budget_epsilon": budget})
    bars, rows, strategy = run_of(config, failing.__contains__)
    assert any(len(each) > 2 for each in rows) == bool(failing), "else no round asked others"
    for client, paid in bars.items():
        spent = epsilon_by_dp_accounting(*sorted(paid)) if paid else 0.0
        assert spent <= budget * (1 + 1e-3), client
        shown = strategy.books.epsilon_so_far(client, "rho")
        assert shown >= spent * (1 - 1e-3), "no more may have been spent than is shown"


def test_a_round_that_asks_others_retires_nobody_on_the_local_view():
    spent = by_dp_accounting("pld", gaussian(NOISE, Q, 6)).get_epsilon(DELTA)
    config = parse(KEYS | {"budget_epsilon": spent * 1.01})
    bars, _, strategy = run_of(config, {1}.__contains__)
    assert strategy.stopped is None
    assert not strategy.books.retired
    assert any(len(paid) > 1 for paid in bars.values())


@pytest.mark.parametrize("view", ["local", "rho"])
def test_a_crash_at_any_time_leaves_charges_that_no_round_exceeds(tmp_path, view):
    """The first two of a round are charged alone: whichever others join, what they really cost is no more."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = parse(KEYS | {"privacy_view": view})
        books = Books(config, "run", registered(ASKED), initial=ADAPTER, ledger=ledger)
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
    assert min(first.values()) > bar_of(set(ASKED)) or min(first.values()) >= 0.5 * (1 - 1e-9)
