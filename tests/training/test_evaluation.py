"""An evaluation counts what the model predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedpriv.training.evaluation import evaluate, passes_by_length
from fedpriv.training.model import TrainingModel
from tests.tiny import random_records


def test_the_confusion_matrix_is_that_of_each_record_alone(encoder):
    model = TrainingModel(encoder(), memory_limit=2**30)
    records = random_records(100, seed=3)
    found = evaluate(model, records)
    expected = np.zeros((3, 3), dtype=int)
    with torch.no_grad():
        for item in records.items():
            logits, batch = model.logits([item], cached=False)
            expected[int(batch["labels"]), int(logits.argmax())] += 1
    assert np.array_equal(found.confusion, expected)
    assert not np.array_equal(expected, expected.T), "rows and columns would look the same"
    assert np.trace(expected) / 100 == found.accuracy


def test_a_causal_model_has_no_confusion_matrix(causal):
    model = TrainingModel(causal("gpt2"), memory_limit=2**30)
    assert evaluate(model, random_records(5, classes=0)).confusion is None


@pytest.mark.parametrize("num", [1, 64, 131])
def test_passes_hold_every_record_once(num):
    items = random_records(num).items()
    assert sorted(position for positions in passes_by_length(items) for position in positions) == list(range(num))
