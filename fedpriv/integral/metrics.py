"""Loss, accuracy and F1 of networks given by their weight vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedpriv.integral.networks import from_vectors


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of one network on one set of records.

    Attributes:
        loss: mean cross-entropy, nats.
        accuracy: in [0, 1]; equal to the micro-averaged F1 score.
        f1: macro-averaged F1 score, in [0, 1]; low for a model that predicts only one class.
    """

    loss: float
    accuracy: float
    f1: float


def metrics(network: nn.Module, vector: Tensor, features: Tensor, labels: Tensor) -> Metrics:
    """Loss, accuracy and F1 of the network with these weights.

    Args:
        network: gives the architecture.
        vector: [values].
        features: [records, ...], at least one.
        labels: int64 [records].
    """
    with torch.no_grad():
        logits = functional_call(network, from_vectors(network, vector.to(features)), (features,))
    return _of_predictions(float(F.cross_entropy(logits, labels)), logits.argmax(dim=1), labels)


def majority_class(train_labels: Tensor, labels: Tensor) -> Metrics:
    """Metrics of the constant prediction of the training records' class distribution."""
    counts = torch.bincount(train_labels, minlength=int(labels.max()) + 1).double()
    logits = (counts / counts.sum()).log()
    guess = torch.full_like(labels, int(counts.argmax()))
    return _of_predictions(float(-logits[labels].mean()), guess, labels)


def _of_predictions(loss: float, predicted: Tensor, labels: Tensor) -> Metrics:
    accuracy = float((predicted == labels).double().mean())
    f1 = f1_score(labels.numpy(), predicted.numpy(), average="macro", zero_division=0, labels=np.unique(labels.numpy()))
    return Metrics(loss=loss, accuracy=accuracy, f1=float(f1))
