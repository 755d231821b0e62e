"""Handwritten digits, a linear classifier of them, and plain local training: the same in every example."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

_NUM_TEST = 297


def make_model() -> nn.Linear:
    """A linear classifier that knows nothing yet."""
    model = nn.Linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def records_of(partition: int, num_partitions: int) -> tuple[Tensor, Tensor]:
    """One client's images [records, 64] and labels [records]; later clients have more."""
    images, labels = (tensor[_NUM_TEST:] for tensor in _digits())
    start, end = (len(images) * k**2 // num_partitions**2 for k in (partition, partition + 1))
    return images[start:end], labels[start:end]


def train(model: nn.Linear, images: Tensor, labels: Tensor, *, steps: int = 5, rate: float = 0.5) -> float:
    """Gradient steps on all records; the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def accuracy(model: nn.Linear) -> float:
    """The share of the test images that the model recognises."""
    images, labels = (tensor[:_NUM_TEST] for tensor in _digits())
    return (model(images).argmax(dim=1) == labels).float().mean().item()
