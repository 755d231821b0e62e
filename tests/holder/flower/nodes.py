"""Flower nodes in this process, an app with counted calls, and the messages that a coordinator likes to send."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.holder.flower import Account
from fedpriv.privacy.ledger import reading
from simulations.engines.flower_private import task_identity
from simulations.engines.grid import LocalGrid

Arrays = Mapping[str, np.ndarray]
Train = Callable[[dict[str, np.ndarray]], Arrays]

START: dict[str, np.ndarray] = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.float32([0.5])}


class Node:
    """One node with a ledger in a folder, an account of this budget, and an app with these mods around its update."""

    def __init__(self, folder: Path, mods: Callable[..., list], train: Train, budget: float | None = None) -> None:
        facts = {"client": "clinic", "num_records": 120, "budget_epsilon": budget, "delta": 1e-5}
        self.account = Account(ledger=folder / "ledger.sqlite", **facts)
        self.calls = 0
        self.context = Context(1, 2, {}, RecordDict(), {})
        self.app = ClientApp(mods=mods(lambda context: self.account))

        @self.app.train()
        def answer(message: Message, context: Context) -> Message:
            self.calls += 1
            received = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
            content = {
                "model": ArrayRecord({name: Array(np.asarray(a)) for name, a in train(received).items()}),
                "metrics": MetricRecord({"num-examples": 77, "loss": 0.25}),
                "notes": ConfigRecord({"first-record": "a rash on the knee"}),
            }
            return Message(RecordDict(content), reply_to=message)

        @self.app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=message)

    def ask(self, arrays: Arrays = START, kind: str = "train", **config: object) -> Message:
        """The reply to one message."""
        record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
        return self.ask_for(RecordDict({"arrays": record, "config": ConfigRecord({"server-round": 1, **config})}), kind)

    def ask_for(self, content: RecordDict, kind: str = "train") -> Message:
        """The reply to a message with this content."""
        with task_identity(self.context.run_id):
            grid = LocalGrid({self.context.node_id: self.context}, None, self.app)
            (reply,) = grid.send_and_receive([Message(content, self.context.node_id, kind)])
        return reply

    @property
    def num_charges(self) -> int:
        """How many releases the ledger was charged for; 0 before there is one."""
        return charges(self.account.ledger) if self.account.ledger.exists() else 0


def charges(ledger: Path) -> int:
    """How many releases a ledger was charged for."""
    with reading(ledger) as db:
        return sum(len(db.charges(each.id)) for each in db.data_sets())


def contexts(num_clients: int, run_id: int = 1, run_config: Mapping[str, object] | None = None) -> dict[int, Context]:
    """Those of so many nodes of a run, by their ids."""
    configs = [{"partition-id": k, "num-partitions": num_clients} for k in range(num_clients)]
    return {11 + k: Context(run_id, 11 + k, own, RecordDict(), dict(run_config or {})) for k, own in enumerate(configs)}


def arrays_of(reply: Message) -> dict[str, np.ndarray]:
    """The arrays of a reply."""
    assert not reply.has_error(), reply.error
    (record,) = reply.content.array_records.values()
    return {name: array.numpy() for name, array in record.items()}


def difference(reply: Message, start: Arrays = START) -> np.ndarray:
    """What a reply adds to the parameters that it answers, float64 [values]."""
    return np.concatenate([(a.astype(np.float64) - start[name]).ravel() for name, a in arrays_of(reply).items()])
