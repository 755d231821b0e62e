"""A client of a Flower app with LocalDpMod, which a ledger charges for every round."""

from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from digits_ledger import task
from fedpriv.holder.flower import Account, LedgerMod, local_dp_event

# The operator's choices, in no message and in no run's configuration.
LEDGERS = Path.home() / "ledgers"
BUDGET_EPSILON = 20.0
CLIPPING_NORM = 1.0
EPSILON = 4.0  # of one round, by the classical bound that LocalDpMod uses


def partition_of(context: Context) -> tuple[int, int]:
    """Which part of the images this node has, and of how many."""
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])


def account_of(context: Context) -> Account:
    """The ledger and the budget of this node."""
    partition, num_partitions = partition_of(context)
    return Account(
        ledger=LEDGERS / f"{partition}.sqlite",
        client=f"client {partition}",
        num_records=len(task.records_of(partition, num_partitions)[0]),
        budget_epsilon=BUDGET_EPSILON,
        delta=1e-5,
    )


local_dp = LocalDpMod(CLIPPING_NORM, sensitivity=2 * CLIPPING_NORM, epsilon=EPSILON, delta=1e-5)
ledger = LedgerMod(account_of, lambda context: local_dp_event(local_dp), noise_source="numpy")
app = ClientApp(mods=[ledger, local_dp])  # the ledger first: it pays before all that comes after it


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local training, as in any Flower app."""
    model = task.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = task.records_of(*partition_of(context))
    loss = task.train(model, images, labels)
    metrics = MetricRecord({"num-examples": len(images), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
