"""The in-process grid keeps Flower's manners: copies, one reply for each message, errors as replies."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from clients.app import app as client_app
from clients.node import TRUST_KEY
from fedpriv.apps import GARBAGE_THRESHOLDS
from fedpriv.config import parse, to_flower
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import FAILED, REFUSED, TRAIN
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import workbench
from simulations.engines import federation
from simulations.engines import grid as grid_module
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid
from tests.wire import arrays_of, asked, request_in, response_in


@pytest.fixture
def config(small_run):
    return parse(small_run)


@pytest.fixture
def grid(config):
    execute = partial(execute_one_by_one, workbench(config).model)
    flat = to_flower(config)
    contexts = {
        10 + k: Context(1, 10 + k, {"partition-id": k, "num-partitions": 3, TRUST_KEY: True}, RecordDict(), flat)
        for k in range(3)
    }
    with task_identity(1):
        yield LocalGrid(contexts, execute, client_app)


def train_message(config, node_id, adapter=None, **changes):
    fields = {**kinds.pack_instruction("run", 1, UpdateSpec.of(config)), **changes}
    adapter = arrays_of(workbench(config).initial if adapter is None else adapter)
    return asked(TRAIN, node_id, fields=fields, arrays={kinds.ADAPTER: adapter}, round_=1)


@pytest.mark.parametrize(("most", "in_turns"), [(grid_module._MOST_AT_ONCE, [3]), (2, [2, 1])])
def test_every_message_gets_its_own_nodes_reply_also_if_they_are_answered_in_turns(
    grid, config, monkeypatch, most, in_turns
):
    monkeypatch.setattr(grid_module, "_MOST_AT_ONCE", most)
    assert list(grid.send_and_receive([])) == []
    sizes, execute = [], grid._execute

    def counted(tasks):
        sizes.append(len(tasks))
        return execute(tasks)

    monkeypatch.setattr(grid, "_execute", counted)
    messages = [train_message(config, node) for node in (12, 10, 11)]
    replies = list(grid.send_and_receive(messages))
    assert [reply.metadata.src_node_id for reply in replies] == [12, 10, 11]
    assert all(reply.has_content() for reply in replies)
    asked = [message.metadata.message_id for message in messages]
    assert [reply.metadata.reply_to_message_id for reply in replies] == asked
    assert len(set(asked)) == 3
    assert sizes == in_turns


def test_one_failing_task_is_one_error_reply_and_tells_nothing(grid, config):
    secret = "SECRET RECORD"
    adapters = {10: None, 11: {secret: torch.zeros(2)}, 12: None}
    messages = [train_message(config, node, adapter) for node, adapter in adapters.items()]
    replies = list(grid.send_and_receive(messages))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.code == FAILED
    assert secret not in replies[1].error.reason


@pytest.mark.parametrize(
    "change",
    [{"noise_multiplier": float("nan")}, {"clip_norm": float("inf")}, {"batch_size": 10_000}, {"clipping": "no"}],
)
def test_the_guard_refuses_what_does_not_protect(grid, config, change):
    refused, malformed = grid.send_and_receive(
        [train_message(config, 10, **change), train_message(config, 11, surprise=1)]
    )
    assert refused.error.code == REFUSED
    assert next(iter(change)) in refused.error.reason
    assert malformed.has_error()


def test_a_reply_holds_the_adapter_and_its_event_and_nothing_else(grid, config):
    """N_k is registered, and whether a client stays silent follows from its noised update."""
    message = train_message(config, 10)
    before = bytes(request_in(message).frame)
    (reply,) = grid.send_and_receive([message])
    response = response_in(reply)
    assert set(reply.content) == {"frame-0"}
    assert set(response.fields) == {"round", "event", "num_records", "silent"}
    assert response.arrays.keys() == {kinds.ADAPTER}
    assert response.arrays[kinds.ADAPTER].keys() == set(workbench(config).initial)
    assert request_in(message).frame == before, "the node has a copy"
    assert not grid._contexts[10].state, "a simulated node keeps nothing"


def test_flowers_own_fedavg_drives_the_grid_unchanged():
    """A strategy that knows nothing of fedpriv gets its replies and averages them."""
    contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in (2, 3, 4)}

    def client(message: Message, context: Context) -> Message:
        arrays = [array + context.node_id for array in message.content["arrays"].to_numpy_ndarrays()]
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": context.node_id})}
        return Message(RecordDict(content), reply_to=message)

    class EvaluateOnly(LocalGrid):
        """Sends train messages to `evaluate` too, for an app that is not ours."""

        def _answer(self, messages):
            return [self._evaluate(message, self._contexts[message.metadata.dst_node_id]) for message in messages]

    with task_identity(1):
        grid = EvaluateOnly(contexts, lambda tasks: [], client)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord([np.zeros(3, dtype=np.float32)]), num_rounds=2)
    mean = (2 * 2 + 3 * 3 + 4 * 4) / 9
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx(2 * mean)


def test_a_run_leaves_the_search_for_cycles_as_it_was(monkeypatch):
    frozen, calls = [0, 7], []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen.pop(0))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # a command of this process may have raised it
    for _ in range(2):
        with federation._cycles_looked_for_seldom():
            assert gc.get_threshold() == GARBAGE_THRESHOLDS
        assert gc.get_threshold() == (700, 10, 10)
    gc.set_threshold(*threshold)
    assert calls == ["freeze", "unfreeze"], "what others froze stays so"
