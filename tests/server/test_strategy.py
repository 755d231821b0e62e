"""The server averages by registered sizes, charges whom it asked, and refuses malformed replies by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedpriv import protocol
from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.protocol import Registration
from fedpriv.training.evaluation import Evaluation
from server.bookkeeping import Books
from server.replies import MalformedError, adapter_of
from server.strategy import DpLora
from simulations.engines.flower_private import task_identity

SIZES = {0: 600, 1: 300, 2: 100}
ADAPTER = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(1):
        yield


def make_strategy(on_round=lambda *_: None, **changes) -> DpLora:
    config = parse({"rounds": 2, "batch_size": 10, "noise_multiplier": 1.0, **changes})
    nodes = {
        client: (100 + client, Registration(client=client, num_records=n, name="", data_set=f"d{client}"))
        for client, n in SIZES.items()
    }
    return DpLora(
        config,
        nodes,
        books=Books(config, "run", [each for _, each in nodes.values()], tensor_names=ADAPTER),
        run="run",
        evaluate=lambda _: Evaluation(accuracy=0.5, loss=1.0),
        on_round=on_round,
    )


def ask(strategy: DpLora, round_: int = 1) -> list[Message]:
    return list(strategy.configure_train(round_, ArrayRecord(ADAPTER), ConfigRecord(), None))


def answer(strategy: DpLora, message: Message, value: float, *, adapter=None, round_: int = 1, event=None) -> Message:
    client = message.metadata.dst_node_id - 100
    adapter = adapter or ArrayRecord({name: torch.full_like(t, value) for name, t in ADAPTER.items()})
    release = protocol.pack_release(round_, event or strategy.event(client))
    content = {protocol.ADAPTER: adapter, protocol.RELEASE: ConfigRecord(release)}
    return Message(RecordDict(content), reply_to=message)


def test_average_is_weighted_by_registered_sizes_in_any_order_of_arrival():
    strategy = make_strategy()
    replies = [answer(strategy, message, value) for message, value in zip(ask(strategy), (1.0, 2.0, 4.0), strict=True)]
    arrays, _ = strategy.aggregate_train(1, reversed(replies))
    assert arrays.to_torch_state_dict()["A"].flatten().tolist() == pytest.approx([1.6] * 6)


def test_weights_are_renormalised_over_those_who_answered():
    strategy = make_strategy()
    messages = ask(strategy)
    replies = [answer(strategy, messages[0], 1.0), answer(strategy, messages[2], 8.0)]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays.to_torch_state_dict()["B"].tolist() == pytest.approx([2.0] * 4)


def test_everyone_who_was_asked_is_charged_even_without_a_reply():
    strategy = make_strategy()
    messages = ask(strategy)
    error = Message(Error(101, "training failed"), reply_to=messages[1])
    strategy.aggregate_train(1, [answer(strategy, messages[0], 1.0), error])
    assert [strategy.books.accounts.num_releases(client) for client in SIZES] == [1, 1, 1]


def test_rho_view_uses_the_participants_of_the_round():
    strategy = make_strategy()
    messages = ask(strategy)
    strategy.aggregate_train(1, [answer(strategy, messages[0], 1.0), answer(strategy, messages[1], 1.0)])
    rho = math.hypot(600, 300) / 900
    everyone = math.sqrt(600**2 + 300**2 + 100**2) / 1000
    accounts = strategy.books.accounts
    for client, expected in ((0, rho), (1, rho), (2, everyone)):  # who dropped out pays as if it were in the sum
        (event,) = accounts.history(client, "rho")
        assert event.noise_multiplier == pytest.approx(expected * strategy.event(client).noise_multiplier)


class SilentGrid:
    """Nobody answers."""

    def send_and_receive(self, messages, *, timeout=None):
        return []


def test_too_few_replies_end_the_run_after_the_round_is_reported_and_charged():
    seen = []
    strategy = make_strategy(min_clients=2, on_round=lambda row, clients: seen.append((row, clients)))
    with pytest.raises(TooFewClientsError, match="round 1: 0 usable replies, min_clients = 2"):
        strategy.start(SilentGrid(), ArrayRecord(ADAPTER), num_rounds=2)
    row, clients = seen[-1]
    assert (row.round, row.num_replies, row.num_failures) == (1, 0, 3)
    assert {client.status for client in clients} == {"no reply"}
    assert all(client.epsilon_local > 0 for client in clients)


def test_fewer_than_the_minimum_are_not_averaged():
    strategy = make_strategy(min_clients=2)
    messages = ask(strategy)
    assert strategy.aggregate_train(1, [answer(strategy, messages[0], 1.0)]) == (None, None)
    assert strategy.books.accounts.num_releases(0) == 1


def test_clients_are_chosen_by_partition_id_alone():
    chosen = [make_strategy(clients_per_round=2, seed=seed).select(round_) for seed in (0, 0) for round_ in range(9)]
    assert chosen[:9] == chosen[9:]
    assert len({tuple(clients) for clients in chosen}) > 1
    assert all(len(set(clients)) == 2 for clients in chosen)


def bad_arrays(case: str) -> ArrayRecord:
    good = {name: tensor.clone() for name, tensor in ADAPTER.items()}
    match case:
        case "nan":
            good["A"][0, 0] = math.nan
        case "infinity":
            good["B"][0] = math.inf
        case "shape":
            good["A"] = torch.zeros(3, 2)
        case "dtype":
            good["A"] = good["A"].double()
        case "missing":
            del good["B"]
        case "extra":
            good["C"] = torch.zeros(1)
        case "lying header":
            record = ArrayRecord(good)
            data = Array(np.zeros(999, dtype=np.float32)).data
            record["A"] = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=data)
            return record
        case "garbage":
            record = ArrayRecord(good)
            record["A"] = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=b"\x80pickle")
            return record
    return ArrayRecord(good)


@pytest.mark.parametrize("case", ["nan", "infinity", "shape", "dtype", "missing", "extra", "lying header", "garbage"])
def test_malformed_adapter_is_refused_and_the_round_goes_on(case):
    strategy = make_strategy()
    messages = ask(strategy)
    bad = answer(strategy, messages[1], 0.0, adapter=bad_arrays(case))
    with pytest.raises(MalformedError):
        adapter_of(bad, like=ADAPTER, round_=1, event=strategy.event(1))
    arrays, _ = strategy.aggregate_train(1, [answer(strategy, messages[0], 3.0), bad])
    assert arrays.to_torch_state_dict()["B"].tolist() == pytest.approx([3.0] * 4)


@pytest.mark.parametrize("claim", ["round", "event", "nothing"])
def test_reply_that_claims_something_else_is_refused(claim):
    strategy = make_strategy()
    message = ask(strategy)[0]
    if claim == "nothing":
        reply = Message(RecordDict({protocol.ADAPTER: ArrayRecord(ADAPTER)}), reply_to=message)
    else:
        reply = answer(
            strategy,
            message,
            1.0,
            round_=2 if claim == "round" else 1,
            event=strategy.event(1) if claim == "event" else None,
        )
    with pytest.raises(MalformedError):
        adapter_of(reply, like=ADAPTER, round_=1, event=strategy.event(0))
