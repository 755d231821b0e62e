"""How the study evaluates its models for deduplication: correct answers, and how much each weight matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.dedup.saliency import Saliency, measure
from fedpriv.dedup.validation import PrivateRecords
from simulations.studies.dedup.dp_sgd import losses
from simulations.studies.dedup.networks import Architecture, load, network
from simulations.studies.dedup.records import Pass, StudyRecords


class RecordsEvaluator:
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
        validation: StudyRecords,
        *,
        saliency_records: StudyRecords,
        saliency: str = "gradient",
        private: PrivateRecords | None = None,
    ) -> None:
        self.num_records, self.private = len(validation), private
        self._passes, self._measure = list(validation.passes()), measure(saliency)
        self._batches = [{"inputs": inputs, "labels": labels} for inputs, labels in saliency_records.passes()]
        self._model = network(architecture).eval()

    def count_correct(self, tensors: Mapping[str, NDArray[Any]]) -> int:
        """How many of the validation records the model with these tensors answers correctly."""
        return int(_right(load(self._model, tensors), self._passes).sum())

    def saliency(self, tensors: Mapping[str, NDArray[Any]]) -> Saliency:
        """How much each weight matters to the loss on the saliency's records."""
        return self._measure(load(self._model, tensors), self._batches, _losses)


def _losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return losses(model, (batch["inputs"], batch["labels"]))


def right_answers(architecture: Architecture, records: StudyRecords, tensors: Mapping[str, NDArray[Any]]) -> Tensor:
    """Which records a model answers correctly, bool [records], in the order of their passes."""
    return _right(load(network(architecture).eval(), tensors), records.passes())


@torch.no_grad()
def _right(model: nn.Module, passes: Iterable[Pass]) -> Tensor:
    return torch.cat([model(inputs).argmax(dim=1) == labels for inputs, labels in passes])
