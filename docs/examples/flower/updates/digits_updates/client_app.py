"""A client of a Flower app whose whole update is clipped, noised and charged by a mod."""

from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_updates import task
from fedpriv.holder.flower import Account, UpdateMod

# The operator's choices, in no message and in no run's configuration.
LEDGERS = Path.home() / "ledgers"
BUDGET_EPSILON = 8.0
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 8.0


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


app = ClientApp(mods=[UpdateMod(account_of, clip_norm=CLIP_NORM, noise_multiplier=NOISE_MULTIPLIER)])


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
