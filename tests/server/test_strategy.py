"""The server averages by registered sizes, charges whom it asked, and refuses malformed replies by name."""

import math
import random
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from clients.app import message_of
from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Arrays, Response, Scalars
from fedpriv.holder.wire.kinds import UploadRelease
from fedpriv.learning.adapters.codecs import CODECS
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.sources import SeededSource
from server import exchange
from server.exchange import MalformedError, read_reply, set_message_id
from server.strategy import RuleStrategy
from tests.events import gaussian
from tests.marks import slow
from tests.server.parts import ADAPTER, SlowGrid, answer, nodes_of, registered, strategy_of
from tests.wire import answered, arrays_of, given_up, records_of, request_in, response_in, with_body

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 600, 1: 300, 2: 100}


def make_strategy(on_round=lambda *_: None, ledger=None, resumed_after=None, **changes) -> RuleStrategy:
    config = parse({"rounds": 2, "batch_size": 10, "noise_multiplier": 1.0, **changes})
    return strategy_of(config, nodes_of(registered(SIZES)), ledger, resumed_after, on_round=on_round)


def ask(strategy: RuleStrategy, round_: int = 1) -> list[Message]:
    return list(strategy.configure_train(round_, ArrayRecord(ADAPTER), ConfigRecord(), None))


def next_model(strategy: RuleStrategy, *replies: Message) -> list[float]:
    """The values of B after the first round with these replies."""
    arrays, _ = strategy.aggregate_train(1, replies)
    return arrays.to_torch_state_dict()["B"].tolist()


def test_average_is_weighted_by_registered_sizes_in_any_order_of_arrival():
    strategy = make_strategy()
    replies = [answer(strategy, message, value) for message, value in zip(ask(strategy), (1.0, 2.0, 4.0), strict=True)]
    assert next_model(strategy, *reversed(replies)) == pytest.approx([1.6] * 4)


def test_weights_are_renormalised_over_those_who_answered_and_everyone_who_was_asked_is_charged():
    strategy = make_strategy()
    messages = ask(strategy)
    for number, message in enumerate(messages):
        set_message_id(message, f"m{number}")
    error = Message(Error(101, "training failed"), reply_to=messages[1])
    replies = [answer(strategy, messages[client], value) for client, value in ((0, 1.0), (2, 8.0), (0, math.nan))]
    assert next_model(strategy, error, *replies) == pytest.approx([2.0] * 4), "of a client's replies the first counts"
    assert [strategy.books.accounts.num_releases(client) for client in SIZES] == [1, 1, 1]
    assert [row.status for row in strategy._rows] == ["ok", "failed", "ok"]


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


def test_too_few_replies_end_the_run_after_the_round_is_reported_and_charged():
    seen = []
    strategy = make_strategy(min_clients=2, on_round=lambda row, clients: seen.append((row, clients)))
    with pytest.raises(TooFewClientsError, match="round 1: 0 usable replies, min_clients = 2"):
        strategy.start(SlowGrid(), ArrayRecord(ADAPTER), num_rounds=2, timeout=0)
    row, clients = seen[-1]
    assert (row.round, row.num_replies, row.num_failures) == (1, 0, 3)
    assert {client.status for client in clients} == {"no reply"}
    assert all(client.epsilon_local > 0 for client in clients)
    strategy = make_strategy(min_clients=2)
    reply = answer(strategy, ask(strategy)[0], 1.0)
    assert strategy.aggregate_train(1, [reply]) == (None, None), "fewer than the minimum are not averaged"
    assert strategy.books.accounts.num_releases(0) == 1


def test_a_pull_that_outlasts_the_deadline_costs_nobody_else_the_round(monkeypatch):
    seen, clock = [], SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(exchange, "time", clock)

    class Dying(SlowGrid):
        def pull_messages(self, message_ids):
            if len(message_ids) == 3:  # until Flower gives up on arrays that were announced
                clock.now += 2
            return super().pull_messages(message_ids)

    def answers(message):
        client = message.metadata.dst_node_id - 100
        return answer(strategy, message, 1.0), 1 if client == 2 else 2

    strategy = make_strategy(on_round=lambda row, clients: seen.append(clients))
    strategy.start(Dying(answers), ArrayRecord(ADAPTER), num_rounds=1, timeout=1)
    assert [client.status for client in seen[1]] == ["ok"] * 3


@pytest.mark.parametrize("times", [1, 2])
def test_a_round_ends_at_its_deadline_and_what_comes_later_or_twice_is_counted_and_discarded(times):
    seen = []
    strategy = make_strategy(on_round=lambda row, clients: seen.append((row, clients)))

    class Repeating(SlowGrid):
        def pull_messages(self, message_ids):
            here = super().pull_messages(message_ids) * times
            return sorted(here, key=lambda each: each.metadata.reply_to_message_id)

    def answers(message):
        round_ = request_in(message).fields["round"]
        late = message.metadata.dst_node_id == 101 and round_ == 1
        return answer(strategy, message, 9.0 if late else float(round_)), 2 if late else 0

    strategy.start(Repeating(answers), ArrayRecord(ADAPTER), num_rounds=2, timeout=0)
    assert [row.num_late for row, _ in seen] == [0, 0, 1]
    assert [row.num_replies for row, _ in seen] == [0, 2, 3]
    assert [client.status for client in seen[1][1]] == ["ok", "no reply", "ok"]
    assert [client.status for client in seen[2][1]] == ["ok", "ok", "ok"], "its client pays nothing for it"
    assert strategy.model.adapter["B"].tolist() == [2.0] * 4
    assert strategy.books.accounts.num_releases(1) == 2


def test_an_error_that_the_link_sends_in_its_own_name_counts_for_the_client_it_is_about():
    seen = []
    strategy = make_strategy(on_round=lambda row, clients: seen.append(clients))

    def answers(message):
        if message.metadata.dst_node_id != 101:
            return answer(strategy, message, 1.0), 0
        return given_up(message, "the node went away\nTraceback: x"), 0

    strategy.start(SlowGrid(answers), ArrayRecord(ADAPTER), num_rounds=1, timeout=0)
    assert [client.status for client in seen[1]] == ["ok", "failed", "ok"]
    assert seen[1][1].detail == "the node went away Traceback: x"


def test_a_round_with_too_few_asks_others_and_charges_all():
    seen = []
    strategy = make_strategy(min_clients=1, clients_per_round=1, on_round=lambda _, clients: seen.append(clients))
    first = strategy.select(1)

    def answers(message):
        client = message.metadata.dst_node_id - 100
        return None if [client] == first else (answer(strategy, message, 3.0), 0)

    grid = SlowGrid(answers)
    strategy.start(grid, ArrayRecord(ADAPTER), num_rounds=1, timeout=0)
    assert grid.asked[0] == first[0]
    assert len(grid.asked) == len(set(grid.asked)) == 2
    assert [client.status for client in seen[1]] == ["no reply", "ok"]
    assert [strategy.books.accounts.num_releases(client) for client in grid.asked] == [1, 1]
    assert strategy.model.adapter["B"].tolist() == [3.0] * 4


@pytest.mark.parametrize("same", [True, False])
def test_an_interrupted_round_is_asked_again_only_as_its_charge_or_the_budget_allows(tmp_path, same):
    """The budget allows one round: the same request is paid for, another one is a release beside the first."""
    # A run that draws seeded noise repeats its replies to the byte.
    keys = {"simulate": True, "sampling_probability": 0.1, "delta": 1e-5}
    event = make_strategy(**keys).books.costs.event(0, 1)
    keys["budget_epsilon"] = 1.01 * epsilon_of([event], 1e-5).epsilon
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        interrupted = make_strategy(ledger=ledger, **keys)
        assert len(ask(interrupted)) == 3
        resumed = make_strategy(ledger=ledger, resumed_after=0, **keys)
        model = {name: tensor + (not same) for name, tensor in ADAPTER.items()}
        asked = list(resumed.configure_train(1, ArrayRecord(model), ConfigRecord(), None))
        assert len(asked) == (3 if same else 0)
        assert len(resumed.books.active) == len(asked)
        assert all(len(ledger.releases_of(f"d{client}", "run")) == 1 for client in SIZES)


def test_clients_are_chosen_by_partition_id_alone():
    chosen = [make_strategy(clients_per_round=2, seed=seed).select(round_) for seed in (0, 0) for round_ in range(9)]
    assert chosen[:9] == chosen[9:]
    assert len({tuple(clients) for clients in chosen}) > 1
    assert all(len(set(clients)) == 2 for clients in chosen)


def with_adapter(**changes: torch.Tensor | None) -> dict[str, dict[str, torch.Tensor]]:
    """The claim of an adapter with other tensors, or without some."""
    return {"adapter": {name: tensor for name, tensor in {**ADAPTER, **changes}.items() if tensor is not None}}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (with_adapter(A=torch.tensor([[math.nan, 0, 0], [0, 0, 0]])), "A: holds NaN"),
        (with_adapter(B=torch.tensor([math.inf, 0, 0, 0])), "B: holds NaN or infinity"),
        (with_adapter(A=torch.zeros(3, 2)), r"A: float32 \(3, 2\), not float32 \(2, 3\)"),
        (with_adapter(A=ADAPTER["A"].double()), r"A: float64 \(2, 3\), not float32"),
        (with_adapter(B=None), "missing tensors: B"),
        (with_adapter(C=torch.zeros(1)), "extra tensors: C"),
        ({"round": 2}, "reply of round 2 in round 1"),
        ({"event": gaussian(9.0, 0.1)}, "the instruction costs"),
        ({"event": gaussian(50.0, 1e-6)}, "the instruction costs"),
        ({"num_records": 10**6}, "reply claims N_k = 1000000, registered is 300"),
        ({"silent": True}, "silent, though it was not asked"),
        (None, "malformed reply"),  # no claims at all
        (lambda body: body.replace(b"[2,3]", b"[999]"), "malformed reply: frame: its arrays are not safetensors"),
        (lambda body: b"\x80pickle", "malformed reply"),
    ],
)
def test_a_malformed_reply_or_one_that_claims_something_else_is_refused_by_name_and_the_round_goes_on(bad, named):
    strategy = make_strategy()
    messages = ask(strategy)
    reply = answered(messages[1], arrays={kinds.ADAPTER: arrays_of(ADAPTER)})
    if callable(bad):
        frame = response_in(answer(strategy, messages[1], 0.0)).frame
        reply = message_of(Response(with_body(frame, bad)), messages[1])
    elif bad is not None:
        reply = answer(strategy, messages[1], **bad)
    with pytest.raises(MalformedError, match=named):
        read_reply(reply, strategy._expected_reply(1))
    assert next_model(strategy, answer(strategy, messages[0], 3.0), reply) == pytest.approx([3.0] * 4)
    row = strategy._rows[1]
    assert (row.client, row.status) == (1, "malformed")
    assert re.search(named, row.detail)


def test_update_beyond_the_norm_bound_is_refused_and_one_at_the_bound_is_not():
    bound = math.sqrt(10)  # ten values of size 1
    strategy = make_strategy(max_update_norm=bound * 1.0001)
    messages = ask(strategy)
    replies = [answer(strategy, messages[0], 1.0), answer(strategy, messages[1], 1.01)]
    strategy.aggregate_train(1, replies)
    assert [row.status for row in strategy._rows] == ["ok", "malformed", "no reply"]
    assert "its update has norm 3.194, max_update_norm is 3.16" in strategy._rows[1].detail


@pytest.mark.parametrize(
    ("loud", "expected", "statuses"),
    [([5.0], 5.0, ["ok", "silent", "silent"]), ([], 1.0, ["silent", "silent", "silent"])],
    ids=["two", "all"],
)
def test_silent_clients_are_sound_and_weigh_nothing_and_if_all_are_the_model_stays(loud, expected, statuses):
    strategy = make_strategy(aggregation="cmfl", min_clients=3)
    strategy.aggregate_train(1, [answer(strategy, message, 1.0) for message in ask(strategy)])
    messages = list(strategy.configure_train(2, ArrayRecord(strategy.model.adapter), ConfigRecord(), None))
    replies = [answer(strategy, message, value) for message, value in zip(messages, loud, strict=False)]
    replies += [answer(strategy, message, silent=True) for message in messages[len(loud) :]]
    arrays, _ = strategy.aggregate_train(2, replies)
    assert arrays.to_torch_state_dict()["B"].tolist() == [expected] * 4
    assert [row.status for row in strategy._rows] == statuses
    assert [strategy.books.accounts.num_releases(client) for client in SIZES] == [2, 2, 2]
    assert not loud or strategy._rows[1].bytes_up < strategy._rows[0].bytes_up


def harmed_array(rng: random.Random, good: np.ndarray) -> np.ndarray:
    """An array of another type or shape, or with a value that is no number."""
    wrong = good.astype(np.float32)
    wrong.flat[rng.randrange(good.size)] = rng.choice([math.nan, math.inf, -math.inf])
    dtype = rng.choice(["float64", "float16", "int64", "bool"])
    longer = np.zeros((good.size + rng.randint(1, 9),), dtype=good.dtype)
    return rng.choice([good.astype(dtype), longer, wrong, good.reshape(-1)[:0], np.array(3.0, dtype=np.float32)])


def harmed_bytes(rng: random.Random, content: bytes) -> RecordDict:
    """Records that carry all arrays, with a header, data or name that is wrong."""
    types, shapes = rb'"dtype":"[A-Z0-9]+"', rb'"shape":\[[0-9,]+\]'
    name = "frame-0"
    match rng.choice(["cut", "garbage", "type", "huge", "empty", "longer", "lying", "crowd", "names", "lengths"]):
        case "cut":
            content = content[: rng.randrange(len(content))]
        case "garbage":
            content = rng.randbytes(len(content))
        case "type":
            content = re.sub(types, b'"dtype":"O8"', content)
        case "huge":  # a header that asks for terabytes, as long as before
            content = re.sub(shapes, lambda found: b'"shape":[' + b"9" * (len(found[0]) - 10) + b"]", content)
        case "empty":
            content = b""
        case "longer":
            content += b"\0" * rng.randint(1, 9)
        case "lying":
            name = rng.choice(["frame", "frame-1", "own", ""])
        case "crowd":
            content = b"[" * 10**5 + content
        case "names":
            content = content.replace(b'"A"', b'"B"') if b'"A"' in content else content[:-1]
        case "lengths":
            content = b"\xff" * 8 + content[8:]
    return records_of(content, name)


def harmed(rng: random.Random, message: Message, release: Scalars, good: Arrays) -> Message:
    """The reply with something wrong in it."""
    fields, records, arrays = dict(release), dict(good), dict(good[kinds.ADAPTER])
    name = rng.choice(sorted(arrays))
    once = ["missing", "extra", "renamed", "record", "field", "value", "silent"]
    match rng.choice(["array"] * 3 + ["bytes"] * 4 + once):
        case "array":
            arrays[name] = harmed_array(rng, arrays[name])
        case "bytes":
            whole = Response.of(fields=fields, arrays=good).frame
            return Message(harmed_bytes(rng, whole), reply_to=message)
        case "missing":
            del arrays[name]
        case "extra":
            arrays["extra"] = arrays[name]
        case "renamed":
            arrays[f"{name}x"] = arrays.pop(name)
        case "record":
            records["metrics" if rng.random() < 0.5 else "more"] = arrays
        case "field":
            fields.pop(rng.choice(sorted(fields)))
        case "value":
            fields[rng.choice(sorted(fields))] = rng.choice([9999, -1, 2**62, 3.5, "", "{}", "[" * 1000])
        case "silent":
            fields["silent"] = True
    return answered(message, fields, arrays={**records, kinds.ADAPTER: arrays})


@pytest.mark.parametrize("num", [80, *slow(250)])
@pytest.mark.parametrize("codec", ["float32", "ternary", *slow(*sorted(set(CODECS) - {"float32", "ternary"}))])
def test_many_malformed_replies(codec, num):
    """Replies from a generator: none is aggregated, none stops the server, each is counted by name."""
    rng = random.Random(codec)
    strategy = make_strategy(upload_codec=codec, rounds=num)
    broadcast = kinds.Broadcast(adapter=ADAPTER)
    moved = {name: torch.full_like(tensor, 0.25) for name, tensor in ADAPTER.items()}
    reasons: Counter[str] = Counter()
    for round_ in range(1, num + 1):
        replies = []
        for client, message in enumerate(ask(strategy, round_)):
            release = UploadRelease(round=round_, event=strategy.event(client), num_records=SIZES[client])
            encoded = kinds.pack_upload(moved, broadcast, strategy.spec, ADAPTER, SeededSource(round_, client))
            fields = kinds.pack(release)
            bad = harmed(rng, message, fields, encoded) if client == 1 else None
            replies.append(bad or answered(message, fields, arrays=encoded))
        arrays, _ = strategy.aggregate_train(round_, replies)
        assert [row.status for row in strategy._rows] == ["ok", "malformed", "ok"], strategy._rows[1].detail
        assert strategy._rows[1].detail
        assert "\n" not in strategy._rows[1].detail
        reasons[":".join(strategy._rows[1].detail.split(":")[:2])] += 1
        for tensor in arrays.to_torch_state_dict().values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, 0.25))
    assert len(reasons) >= 5, reasons
