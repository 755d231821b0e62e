"""A client of a Flower app whose train function clips and noises per-record gradients."""

from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_records import task
from fedpriv.holder.flower import Account, LedgerMod
from fedpriv.learning.training import PoissonSampler, noised_sum, per_sample_gradients, trainable_layers
from fedpriv.privacy.accounting import SubsampledGaussian
from fedpriv.privacy.mechanisms import SecureSource

# The operator's choices, in no message and in no run's configuration.
LEDGERS = Path.home() / "ledgers"
BUDGET_EPSILON = 4.0
STEPS, RATE = 5, 0.5
SAMPLING_PROBABILITY = 0.25
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 2.0


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


def record_losses(model: torch.nn.Linear, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss for each record, which no other record moves."""
    return torch.nn.functional.cross_entropy(model(images), labels, reduction="none")


def private_train(model: torch.nn.Linear, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Steps on Poisson samples, each with clipped per-record gradients and noise: what `event` costs."""
    source = SecureSource()
    sampler = PoissonSampler.with_probability(SAMPLING_PROBABILITY, num_registered=len(images), source=source)
    layers, parameters = trainable_layers(model), dict(model.named_parameters())
    start = torch.nn.utils.parameters_to_vector(parameters.values()).detach()
    for _ in range(STEPS):
        drawn = sampler.draw(len(images))
        rows = []
        if drawn:
            losses = partial(record_losses, model, images[drawn], labels[drawn])
            gradients, _ = per_sample_gradients(layers, losses)
            rows = [torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)]
        total, _ = noised_sum(
            rows,
            start,
            clip_norm=CLIP_NORM,
            noise_multiplier=NOISE_MULTIPLIER,
            sampling_probability=sampler.sampling_probability,
            source=source,
        )
        start = start - RATE * total / sampler.expected_batch_size
        torch.nn.utils.vector_to_parameters(start, parameters.values())


event = SubsampledGaussian(noise_multiplier=NOISE_MULTIPLIER, sampling_probability=SAMPLING_PROBABILITY, count=STEPS)
app = ClientApp(mods=[LedgerMod(account_of, lambda context: event)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local training, as in any Flower app."""
    model = task.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = task.records_of(*partition_of(context))
    private_train(model, images, labels)
    metrics = MetricRecord({"num-examples": len(images)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
