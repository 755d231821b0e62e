"""Clients' weights in a round's sum, and the views under them: before the round its worst case, after it the record."""

import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedpriv.config import RunConfig, parse
from fedpriv.holder.sums import make_identity
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.kinds import UploadRelease
from fedpriv.learning.aggregation._fedavg import weights_by_size
from fedpriv.learning.training.noise_plan import view_scale
from fedpriv.learning.training.rounds import RunSchedule, client_masses, record_weights
from server.bookkeeping import Books
from server.strategy import RuleStrategy
from tests.server.parts import ADAPTER, nodes_of, registered, strategy_of
from tests.wire import answered

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


def answer(strategy: RuleStrategy, message: Message) -> Message:
    client = message.metadata.dst_node_id - 100
    release = UploadRelease(round=1, event=strategy.event(client), num_records=SIZES[client])
    vector = {kinds.SUM: np.full(10, 2**20, dtype=np.int32)}
    return answered(message, kinds.pack(release), arrays={kinds.ADAPTER: vector})


@pytest.mark.parametrize("num_replies", [2, 3])
def test_of_fewer_uploads_than_the_threshold_nothing_is_summed_or_kept(num_replies):
    nodes = nodes_of([replace(each, identity=make_identity().public_line) for each in registered(SIZES)])
    strategy = strategy_of(make(**SUMS, server_optimizer="momentum")[0], nodes)
    messages = list(strategy.configure_train(1, ArrayRecord(ADAPTER), ConfigRecord(), None))
    arrays, _ = strategy.aggregate_train(1, [answer(strategy, message) for message in messages[:num_replies]])
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
