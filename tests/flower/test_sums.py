"""Secure sums as a mod and a strategy: plain FedAvg's numbers, and what a server that deviates gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedMedian

from fedpriv.accounting import epsilon_of
from fedpriv.errors import InputError
from fedpriv.flower import Account, SumMod, SumStrategy
from fedpriv.flower.sums import CONFIRM, REVEAL, SUM, VECTOR
from fedpriv.ledger import reading
from fedpriv.secure_aggregation import MAX_RUNS, make_identity, terms_from_text
from fedpriv.vault.frames import REFUSED
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from tests.foreign import planted

SIZES = {2: 30, 3: 50, 4: 120, 5: 7}
START = {"weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "bias": np.float32(0.25)}
NOISE_OFF = {"clip_norm": 10.0, "noise_multiplier": 0.0}
NOISED = {"clip_norm": 1.0, "noise_multiplier": 2.0}


def record(arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def update_of(node: int, received):
    """A node's own model: it depends on the node and on what the node received."""
    return {name: (array * 0.9 + np.float32(node) / 10).astype(array.dtype) for name, array in received.items()}


@dataclass
class Federation:
    """Nodes in this process, and what travelled.

    Attributes:
        folder: of the nodes' ledgers.
        mods: of each node.
        failing: nodes whose train messages are lost.
        altered: changes a message on its way to a node.
        sent: all replies of the nodes.
    """

    folder: Path
    mods: Callable[[Callable[[Context], Account]], list]
    failing: tuple[int, ...] = ()
    altered: Callable[[Message], None] = lambda message: None
    sent: list[Message] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def account(self, context: Context) -> Account:
        node = context.node_id
        return Account(
            ledger=self.folder / f"{node}.sqlite",
            client=str(node),
            num_records=SIZES[node],
            delta=1e-5,
            budget_view="aggregate",
        )

    def __post_init__(self) -> None:
        mods = self.mods(self.account)
        app = ClientApp(mods=mods)
        for mod in mods:
            mod.join(app)
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in SIZES}

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.calls.append(context.node_id)
            assert list(message.content) == ["arrays", "config"]
            received = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
            numbers = MetricRecord({"num-examples": SIZES[context.node_id], "loss": 0.5})
            content = RecordDict({"arrays": record(update_of(context.node_id, received)), "metrics": numbers})
            return Message(content, reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

        def answer(message: Message, context: Context) -> Message:
            self.altered(message)
            if context.node_id in self.failing and message.metadata.message_type == "train":
                raise TimeoutError
            reply = app(message, context)
            self.sent.append(copy.deepcopy(reply))  # the strategy gets its own
            return reply

        self.grid = LocalGrid(self.contexts, None, answer)

    def run(self, strategy, rounds: int = 2):
        with task_identity(1):
            result = strategy.start(self.grid, record(START), num_rounds=rounds)
        return {name: array.numpy() for name, array in result.arrays.items()}

    def replies(self, kind: str) -> list[Message]:
        return [each for each in self.sent if each.metadata.message_type == kind]


def fed_avg(kind=FedAvg, **options):
    return kind(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4, **options)


def federation(folder, numbers=NOISE_OFF, **options) -> Federation:
    parts = {key: options.pop(key) for key in ("failing", "altered") if key in options}
    return Federation(folder, lambda account_of: [SumMod(account_of, **numbers, **options)], **parts)


@pytest.mark.parametrize(("kind", "options"), [(FedAvg, {}), (FedAvgM, {"server_momentum": 0.5})])
def test_without_noise_the_strategy_makes_what_it_makes_of_single_replies(kind, options, tmp_path):
    plain = Federation(tmp_path, lambda account_of: []).run(fed_avg(kind, **options))
    summed = federation(tmp_path).run(SumStrategy(fed_avg(kind, **options), **NOISE_OFF))
    assert summed.keys() == plain.keys()
    for name, array in plain.items():
        assert summed[name].dtype == array.dtype
        # A step of the grid is 2e-8 of an update's unit.
        np.testing.assert_allclose(summed[name], array, atol=2e-7)
    assert np.abs(plain["weight"] - START["weight"]).max() > 0.3, "the check would be blind"


def test_the_average_is_weighted_by_registered_records_of_those_who_are_left(tmp_path):
    nodes = federation(tmp_path, failing=(3,))
    summed = nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    left = {node: size for node, size in SIZES.items() if node != 3}
    expected = sum(size * update_of(node, START)["weight"] for node, size in left.items()) / sum(left.values())
    np.testing.assert_allclose(summed["weight"], expected, atol=2e-7)


def test_with_too_few_left_the_model_stays_and_nothing_is_unmasked(tmp_path):
    nodes = federation(tmp_path, failing=(2, 3))
    result = SumStrategy(fed_avg(), **NOISE_OFF)
    with task_identity(1):
        assert not result.start(nodes.grid, record(START), num_rounds=1).arrays
    assert not nodes.replies(REVEAL)


def test_what_a_node_sends_is_a_masked_vector_and_its_registered_number(tmp_path):
    nodes = federation(tmp_path)
    nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    first = next(each.content for each in nodes.replies("train") if each.metadata.src_node_id == 2)
    assert list(first) == [SUM, "metrics"]
    assert dict(first.metric_records["metrics"]) == {"num-examples": SIZES[2]}
    values = first.array_records[SUM][VECTOR].numpy()
    # An update of this grid's unit has below 2^28 steps; masks are uniform on 2^32.
    assert values.dtype == np.int32
    assert np.abs(values.astype(np.int64)).max() > 2**28


def test_a_noised_sum_is_charged_for_the_noise_of_all_and_for_its_own_alone(tmp_path):
    nodes = federation(tmp_path, NOISED)
    nodes.run(SumStrategy(fed_avg(), **NOISED), rounds=2)
    for context in nodes.contexts.values():
        account = nodes.account(context)
        with reading(account.ledger) as db:
            (release,) = db.releases(account.data_set.id)
        assert (release.event.count, release.event.unit, release.num_readers) == (2, "client", 1)
        # A power of two as the grid of the largest client; a scale of others may round it a little coarser.
        assert release.event.effective_noise_multiplier == pytest.approx(1.0, rel=1e-4)
        # Of three survivors one is this node, and one reads the sum; the third may be the smallest of all others.
        own = SIZES[context.node_id]
        smallest = min(size for size in SIZES.values() if size != own)
        assert release.aggregate_scale == pytest.approx(np.hypot(own, smallest) / own)
        local, shared = (epsilon_of([release.seen_by(view)], 1e-5).epsilon for view in ("local", "aggregate"))
        assert shared <= local
    assert nodes.account(next(iter(nodes.contexts.values()))).data_set.num_records == 30


def test_the_sum_carries_the_noise_of_all(tmp_path):
    size = 4000
    start = {"weight": np.zeros(size)}
    sums = SumStrategy(fed_avg(), **NOISED)
    nodes = federation(tmp_path, NOISED)
    with task_identity(1):
        arrays = sums.start(nodes.grid, record(start), num_rounds=1).arrays
    (noised,) = (array.numpy() for array in arrays.values())
    # Client k's part is z C N_k / N, and the update's own coordinates are below C / sqrt(4000) = 0.016.
    expected = 2.0 * np.sqrt(sum(n**2 for n in SIZES.values())) / sum(SIZES.values())
    assert noised.std() == pytest.approx(expected, rel=0.05)


def test_a_train_message_sent_again_gets_the_stored_vector_until_the_attempt_is_over(tmp_path):
    nodes, kept, again = federation(tmp_path, NOISED), [], []

    def ask_again() -> Message:
        (reply,) = nodes.grid.send_and_receive([Message(RecordDict(dict(kept[0])), 2, "train")])
        return reply

    def keep(message: Message) -> None:
        if message.metadata.dst_node_id == 2 and message.metadata.message_type == "train" and not kept:
            kept.append(RecordDict(dict(message.content)))
        if message.metadata.dst_node_id == 2 and message.metadata.message_type == CONFIRM:
            again.append(ask_again())

    nodes.altered = keep
    nodes.run(SumStrategy(fed_avg(), **NOISED), rounds=1)
    first = next(reply for reply in nodes.replies("train") if reply.metadata.src_node_id == 2)
    assert again[0].content == first.content
    with task_identity(1):
        assert ask_again().error.code == REFUSED
    assert nodes.calls.count(2) == 1


@pytest.mark.parametrize(
    "values",
    [{"noise_multiplier": 0.0}, {"clip_norm": 2.0}, {"run": "2"}, {"grid_exponent": -3}, {"request": "0" * 64}],
)
def test_terms_that_the_operator_did_not_agree_to_get_no_vector(values, tmp_path, monkeypatch):
    agreed = SumStrategy._terms
    monkeypatch.setattr(SumStrategy, "_terms", lambda *arguments: replace(agreed(*arguments), **values))
    nodes = federation(tmp_path, NOISED)
    with task_identity(1):
        assert not SumStrategy(fed_avg(), **NOISED).start(nodes.grid, record(START), num_rounds=1).arrays
    assert not nodes.calls
    assert {reply.error.code for reply in nodes.sent if reply.has_error()} == {REFUSED}


@pytest.mark.parametrize(
    ("node", "server"), [({"min_survivors": 4}, {}), ({"colluding": 1}, {}), ({}, {"min_clients": 5})]
)
def test_a_sum_with_fewer_honest_clients_than_agreed_is_none(node, server, tmp_path):
    nodes = federation(tmp_path, NOISE_OFF, **node)
    with task_identity(1):
        assert not SumStrategy(fed_avg(), **NOISE_OFF, **server).start(nodes.grid, record(START), num_rounds=1).arrays
    assert not nodes.calls


def test_a_node_masks_nothing_under_other_terms_than_it_signed(tmp_path):
    def coarser(message: Message) -> None:
        if message.metadata.message_type == "train":
            record = message.content.config_records[SUM]
            terms = terms_from_text(str(record["terms"]))
            record["terms"] = replace(terms, grid_exponent=terms.grid_exponent - 1).text()

    nodes = federation(tmp_path, NOISED, altered=coarser)
    with task_identity(1):
        assert not SumStrategy(fed_avg(), **NOISED).start(nodes.grid, record(START), num_rounds=1).arrays
    assert not nodes.calls


def test_peers_that_the_operator_did_not_approve_are_refused(tmp_path):
    nodes = federation(tmp_path, peers=[make_identity().public_line])
    with task_identity(1):
        assert not SumStrategy(fed_avg(), **NOISE_OFF).start(nodes.grid, record(START), num_rounds=1).arrays
    assert not nodes.calls


def test_two_lists_of_survivors_are_not_both_signed(tmp_path):
    nodes = federation(tmp_path)
    asked = []

    def twice(message: Message) -> None:
        if message.metadata.message_type == CONFIRM:
            asked.append((message.metadata.dst_node_id, RecordDict(dict(message.content))))

    nodes.altered = twice
    nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    with task_identity(1):
        again = list(nodes.grid.send_and_receive([Message(content, node, CONFIRM) for node, content in asked[:1]]))
    assert again[0].error.code == REFUSED


def test_a_node_that_restarts_between_two_exchanges_has_dropped_out_and_leaves_no_secret(tmp_path):
    """Its state, which a SuperNode has in memory, is lost; the file is not."""
    nodes = federation(tmp_path)

    def restart(message: Message) -> None:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 3:
            nodes.contexts[3].state.clear()

    nodes.altered = restart
    summed = nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    left = {node: size for node, size in SIZES.items() if node != 3}
    expected = sum(size * update_of(node, START)["weight"] for node, size in left.items()) / sum(left.values())
    np.testing.assert_allclose(summed["weight"], expected, atol=2e-7)
    assert 3 not in nodes.calls
    assert [len(list((tmp_path / f"{node}.sqlite.sums").iterdir())) for node in SIZES] == [0, 1, 0, 0]
    assert not any("session-key" in context.state.config_records.get(SUM, {}) for context in nodes.contexts.values())


def test_a_node_whose_process_dies_in_an_exchange_has_dropped_out(tmp_path, monkeypatch):
    """As by `kill -9` while the app trains: nothing of the session is left for a second masked vector."""

    class KilledError(BaseException):
        pass

    def killed(node, received):
        if node == 3:
            assert not list((tmp_path / "3.sqlite.sums").iterdir()), "would outlive the process"
            raise KilledError
        return dict(received)

    monkeypatch.setattr(f"{__name__}.update_of", killed)
    nodes = federation(tmp_path)
    with pytest.raises(KilledError):
        nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)


def test_a_copy_of_the_file_brings_no_earlier_state_back(tmp_path):
    nodes, copies = federation(tmp_path), []
    folder = tmp_path / "3.sqlite.sums"

    def rewind(message: Message) -> None:
        if message.metadata.dst_node_id != 3:
            return
        if message.metadata.message_type == "train":
            copies.extend((path, path.read_bytes()) for path in folder.iterdir())
        if message.metadata.message_type == CONFIRM:
            for path, content in copies:
                path.write_bytes(content)

    nodes.altered = rewind
    nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    assert copies, "the check would be blind"
    (confirmed,) = (each for each in nodes.replies(CONFIRM) if each.metadata.src_node_id == 3)
    assert "takes part in no attempt" in confirmed.error.reason


def test_an_app_that_fails_is_a_part_of_the_sum_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.update_of", lambda node, received: {} if node == 4 else dict(received))
    summed = federation(tmp_path).run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    np.testing.assert_allclose(summed["weight"], START["weight"], atol=2e-7)


def test_evaluation_is_the_apps_own_and_must_be_allowed(tmp_path):
    for allowed in ([], ["evaluate"]):
        nodes = federation(tmp_path, uncovered=allowed)
        with task_identity(1):
            (reply,) = nodes.grid.send_and_receive([Message(RecordDict({"config": ConfigRecord({})}), 2, "evaluate")])
        assert reply.has_error() == (not allowed)


def test_a_strategy_that_sends_different_messages_is_refused(tmp_path):
    strategy = fed_avg()
    one_for_all = strategy.configure_train

    def configure(*arguments):
        for number, message in enumerate(one_for_all(*arguments)):
            message.content = RecordDict({**message.content, "extra": ConfigRecord({"number": number})})
            yield message

    strategy.configure_train = configure
    with pytest.raises(InputError, match="different messages"):
        federation(tmp_path).run(SumStrategy(strategy, **NOISE_OFF), rounds=1)


def test_strategies_of_single_updates_and_numbers_out_of_range_are_refused(tmp_path):
    with pytest.raises(InputError, match="strategy = FedMedian: needs single updates"):
        SumStrategy(fed_avg(FedMedian), **NOISE_OFF)
    for numbers in ({"clip_norm": 0.0}, {"noise_multiplier": -1.0}, {"clip_norm": 1}):
        with pytest.raises(InputError, match=next(iter(numbers))):
            SumStrategy(fed_avg(), **{**NOISE_OFF, **numbers})
        with pytest.raises(InputError, match=next(iter(numbers))):
            federation(tmp_path, {**NOISE_OFF, **numbers})


def test_a_nodes_old_sessions_go_and_what_others_keep_beside_them_stays(tmp_path, monkeypatch):
    nodes = federation(tmp_path)
    folder = tmp_path / "2.sqlite.sums"
    foreign = planted(folder, tmp_path / "outside", (f"letter-{number}.txt" for number in range(MAX_RUNS)))
    sessions = [folder / f"{number}-2" for number in range(MAX_RUNS + 1)]
    for session in sessions:
        session.touch()
    found = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [*found(path), path / "99-2"])  # which another process takes
    nodes.run(SumStrategy(fed_avg(), **NOISE_OFF), rounds=1)
    foreign.check()
    assert sum(session.exists() for session in sessions) == MAX_RUNS - 2, "with the taken one and the one under way"
