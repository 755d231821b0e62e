"""How the study evaluates its models for deduplication: correct answers, and how much each weight matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.dedup.saliency import Saliency, measure
from fedpriv.dedup.validation import PrivateRecords
from simulations.studies.dedup.digits import Digits
from simulations.studies.dedup.networks import Architecture, load, network


class DigitsEvaluator:
    """Counts correct answers on records of a task.

    Args:
        architecture: of the models.
        validation: the records that answers are counted on.
        saliency_records: public records on which the saliency of weights is measured.
        saliency: name of the measure.
        private: the data set of the validation records, if they count as private.
    """

    def __init__(
        self,
        architecture: Architecture,
        validation: Digits,
        *,
        saliency_records: Digits,
        saliency: str = "gradient",
        private: PrivateRecords | None = None,
    ) -> None:
        self.num_records, self.private = len(validation), private
        self._validation, self._measure = validation, measure(saliency)
        self._batches = [{"images": saliency_records.images, "labels": saliency_records.labels}]
        self._model = network(architecture).eval()

    @torch.no_grad()
    def count_correct(self, tensors: Mapping[str, NDArray[Any]]) -> int:
        """How many of the validation records the model with these tensors answers correctly."""
        logits = load(self._model, tensors)(self._validation.images)
        return int((logits.argmax(dim=1) == self._validation.labels).sum())

    def saliency(self, tensors: Mapping[str, NDArray[Any]]) -> Saliency:
        """How much each weight matters to the loss on the saliency's records."""
        return self._measure(load(self._model, tensors), self._batches, _losses)


def _losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")
