"""A node that drops out of a secure sum before it is asked costs nothing, and nobody counts on more noise for it."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedpriv.config import parse
from fedpriv.errors import InputError, TooFewClientsError
from fedpriv.holder.sums import TooFewError, make_identity
from fedpriv.holder.vault import _summed
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import CONFIRM, REGISTER, SHARE
from fedpriv.learning.training._coordinates import Coordinates
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.rounds import mean_of_sum
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.mechanisms.discrete_gaussian import integers
from fedpriv.runs.plan.preflight import check_clients, objections_to_aggregate
from server.exchange import set_message_id
from server.round import client_rows
from server.strategy import RuleStrategy
from simulations.engines import federation
from simulations.engines.grid import LocalGrid
from tests.marks import slow
from tests.server.parts import ADAPTER, nodes_of, registered, rounds_charged, run, strategy_of
from tests.wire import request_in

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 600, 1: 300, 2: 100, 3: 200}
LAST_NODE_ID = 5
VALUES = {
    **{"rounds": 1, "num_clients": 4, "batch_size": 10, "local_steps": 1, "optimizer": "sgd", "learning_rate": 0.1},
    **{"noise_multiplier": 4.0, "secure_aggregation": True, "min_clients": 3},
}


@pytest.fixture
def strategy(tmp_path):
    nodes = nodes_of([replace(each, identity=make_identity().public_line) for each in registered(SIZES)])
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield strategy_of(parse(VALUES), nodes, ledger, evaluate=lambda _: None)


def ask(strategy: RuleStrategy) -> list[int]:
    messages = strategy.configure_train(1, ArrayRecord(ADAPTER), ConfigRecord(), None)
    return [message.metadata.dst_node_id - 100 for message in messages]


def charged(tmp_path) -> dict[int, float]:
    """{client: the scale that the server's ledger charged}."""
    with reading(tmp_path / "ledger.sqlite") as db:
        return {int(e.client): e.aggregate_scale for e in db.entries() if e.phase == "charged"}


def test_who_dropped_out_before_training_is_not_charged_but_stays_in_the_terms(strategy, monkeypatch, tmp_path):
    def without_2(*args, open_=strategy._updates.attempt, **options):
        opened = open_(*args, **options)
        fields = {client: each for client, each in opened.fields.items() if client != 2}
        return replace(opened, fields=fields, left_out={2: "no answer in time"})

    monkeypatch.setattr(strategy._updates, "attempt", without_2)
    assert ask(strategy) == [0, 1, 3]
    # In the worst case the other survivors are the two smallest clients that signed, as each node computes it, and the
    # larger of them reads the sum.
    expected = {k: math.hypot(SIZES[k], 100) / SIZES[k] for k in (0, 1, 3)}
    assert charged(tmp_path) == pytest.approx(expected, rel=1e-9)
    rows = client_rows(strategy._round, strategy.books, strategy.spec, {})
    statuses = {0: "no reply", 1: "no reply", 2: "left out", 3: "no reply"}
    assert {row.client: row.status for row in rows} == statuses
    (left_out,) = (row for row in rows if row.client == 2)
    assert (left_out.detail, left_out.epsilon_aggregate) == ("no answer in time", 0)


def test_a_sum_that_never_begins_is_charged_to_nobody(strategy, monkeypatch, tmp_path):
    def too_few(*_, **__):
        raise TooFewError("advertisements: came from 1 clients, must come from at least 3; client 0: refused: closed")

    monkeypatch.setattr(strategy._updates, "attempt", too_few)
    with pytest.raises(TooFewClientsError, match=r"round 1: advertisements: .* client 0: refused: closed; resume"):
        ask(strategy)
    assert charged(tmp_path) == {}


@pytest.mark.parametrize(("lost", "charged_in"), [(SHARE, []), (CONFIRM, [1, 2])])
def test_who_leaves_a_later_question_of_sums_unanswered_is_skipped(small_run, tmp_path, monkeypatch, lost, charged_in):
    class Lossy(LocalGrid):
        asked = 0

        def push_messages(self, messages):
            arriving = []
            for message in messages:
                kind, to = request_in(message).kind, message.metadata.dst_node_id
                Lossy.asked += kind == lost and to == LAST_NODE_ID
                # Once the rounds have begun it does not register again either.
                if to == LAST_NODE_ID and (kind == lost or (kind == REGISTER and Lossy.asked)):
                    set_message_id(message, f"lost {id(message)}")
                else:
                    arriving.append(message)
            return super().push_messages(arriving)

    monkeypatch.setattr(federation, "LocalGrid", Lossy)
    changes = {"client_column": "", "secure_masks": True, "rounds": 4, "round_seconds": 0.1, "evaluate_every": 100}
    ledger = run({**small_run, **VALUES, **changes}, tmp_path / "run") / "ledger.sqlite"
    assert Lossy.asked == 2
    assert (rounds_charged(ledger, 3), rounds_charged(ledger, 0)) == (charged_in, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("changes", "range_"),
    [
        ({"num_clients": 6, "min_clients": 3}, "needs 4 to 6"),
        ({"min_clients": 5}, "needs 3 to 4"),
        ({"colluding_clients": 1, "min_clients": 3, "num_clients": 6}, "needs 4 to 6"),
        ({"num_clients": 9, "clients_per_round": 6, "min_clients": 3}, "needs 4 to 6"),
        ({"num_clients": 2}, "needs 3 to 2"),
    ],
)
def test_a_threshold_that_two_disjoint_lists_could_reach_is_refused_before_the_first_round(changes, range_):
    config = parse({**VALUES, **changes})
    with pytest.raises(InputError, match=rf"min_clients = {config.min_clients}: secure_aggregation = true {range_}"):
        check_clients(config, config.num_clients)


def test_a_holder_reads_the_others_sum_off_the_next_model_and_each_has_paid_for_that(small_run, tmp_path, monkeypatch):
    """It knows the broadcasts and its own vector, and asks nobody for anything."""
    parts, starts = {}, {}

    def noted_part(request, *args, part_of=_summed.part_of, **options):
        part = part_of(request, *args, **options)
        starts[part.terms.round] = {k: torch.tensor(np.array(v)) for k, v in request.arrays[kinds.ADAPTER].items()}
        return part

    def noted_vector(part, update, vector=_summed.Part.vector):
        parts[part.terms.round, part.client] = part, integers(update.noised, part.grid.points).numpy()
        return vector(part, update)

    monkeypatch.setattr(_summed, "part_of", noted_part)
    monkeypatch.setattr(_summed.Part, "vector", noted_vector)
    values = {**small_run, **VALUES, "num_clients": 3, "server_optimizer": "sgd", "rounds": 2}
    out, config = run(values, tmp_path / "run"), parse(values)
    part, _ = parts[1, 0]
    spec, terms, sizes = UpdateSpec.of(config), part.terms, {c: p.num_records for c, p in part.terms.by_client.items()}
    coordinates = Coordinates.of(spec, {name: tensor.shape for name, tensor in starts[1].items()})
    (before, _), (after, _) = (coordinates.start(starts[round_]) for round_ in (1, 2))
    unit = mean_of_sum(config, spec, sizes, torch.ones(1), sizes)  # what one step of the grid moves the average by
    total = ((before.double() - after.double()) / spec.learning_rate / unit).numpy()
    deviations = {client: terms.noise_stddev(client) for client in sizes}
    with reading(out / "ledger.sqlite") as db:
        scales = {int(e.client): e.aggregate_scale for e in db.entries() if e.phase == "charged" and e.round == 1}
    for reader in sizes:
        others = [client for client in sizes if client != reader]
        unknown = total - parts[1, reader][1] - sum(parts[1, client][1] for client in others)
        # It has the others' sum, to the last digits of float32.
        assert np.abs(unknown).max() < 1e-5 * deviations[reader]
        for client in others:
            assert scales[client] * deviations[client] <= math.hypot(*(deviations[k] for k in others))


COST = ("phase", "client", "round", "event", "rho_bar", "aggregate_scale", "delta", "noise_source")


@pytest.mark.parametrize("others", [("adam",), *slow(("momentum", "adam", "yogi"))])
def test_the_server_optimizer_decides_the_model_and_neither_a_charge_nor_an_epsilon(small_run, tmp_path, others):
    """Of runs that differ in nothing else."""
    sums = {"local_steps": 1, "secure_aggregation": True, "min_clients": 3, "privacy_view": "aggregate"}
    costs, rounds = {}, {}
    for optimizer in ("sgd", *others):
        folder = run(small_run, tmp_path / optimizer, **sums, server_optimizer=optimizer)
        rounds[optimizer] = pd.read_csv(folder / "rounds.csv")
        with reading(folder / "ledger.sqlite") as db:
            costs[optimizer] = [tuple(getattr(entry, name) for name in COST) for entry in db.entries()]
    assert sum(cost[0] == "released" for cost in costs["sgd"]) == 2 * 3
    assert all(each == costs["sgd"] for each in costs.values())
    assert len({each["test_loss"].iloc[-1] for each in rounds.values()}) == 1 + len(others)
    for column in ("epsilon_local_max", "epsilon_rho_max", "epsilon_aggregate_max"):
        assert all(each[column].equals(rounds["sgd"][column]) for each in rounds.values())
        assert rounds["sgd"][column].notna().all(), "the view holds with every one of them"


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "yogi"])
def test_the_aggregate_view_objects_to_the_clients_optimizer_alone(small_run, optimizer):
    values = small_run | {"local_steps": 1, "secure_aggregation": True, "min_clients": 3, "server_optimizer": optimizer}
    assert objections_to_aggregate(parse(values)) == ()
    with pytest.raises(InputError, match="optimizer = adamw: secure_aggregation = true"):
        parse(values | {"optimizer": "adamw"})
