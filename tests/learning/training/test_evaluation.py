"""An evaluation counts what the model predicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedpriv.learning.data.records import num_tokens
from fedpriv.learning.training.evaluation import TokenLosses, evaluate, passes_by_length
from fedpriv.learning.training.model import TrainingModel
from tests.instructions import random_prompts, records_of
from tests.tiny import random_records


def test_accuracy_loss_and_the_confusion_matrix_are_those_of_each_record_alone(encoder):
    model = TrainingModel(encoder(), memory_limit=2**30)
    records = random_records(100, seed=3)
    found = evaluate(model, records)
    expected, losses = np.zeros((3, 3), dtype=int), []
    with torch.no_grad():
        for item in records.items():
            logits, batch = model.logits([item], cached=False)
            expected[int(batch["labels"]), int(logits.argmax())] += 1
            losses.append(float(torch.nn.functional.cross_entropy(logits, batch["labels"])))
    assert np.array_equal(found.confusion, expected)
    assert not np.array_equal(expected, expected.T), "rows and columns would look the same"
    assert np.trace(expected) / 100 == found.accuracy
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(ValueError, match="at least one record"):
        evaluate(model, records.part([]))


@pytest.mark.parametrize(("num", "longest"), [(1, 12), (131, 12), (50, 900)])
def test_passes_hold_every_record_once_and_are_bounded_in_tokens(num, longest):
    items = random_records(num, longest=longest, shortest=longest - 10).items()
    passes = list(passes_by_length(items))
    assert sorted(position for positions in passes for position in positions) == list(range(num))
    assert max(map(len, passes)) > 1 or num == 1
    assert all(len(positions) * max(num_tokens(items[i]) for i in positions) <= 4096 for positions in passes)


@pytest.mark.parametrize("masked", [False, True], ids=["bare text", "responses"])
def test_perplexity_is_that_of_transformers_own_losses_of_what_is_learned(causal, masked):
    model = TrainingModel(causal("llama"), memory_limit=2**30)
    pairs = [(prompt, prompt[::-1]) for prompt in random_prompts(20)] + [([5, 6], [])]
    records = records_of(pairs)
    if not masked:
        records = replace(records, features={"input_ids": records.features["input_ids"]})
    found, total, count = evaluate(model, records), 0.0, 0
    for i, (prompt, response) in enumerate(pairs):
        labels = torch.tensor([([-100] * len(prompt) if masked else prompt) + response])
        num = len(response) if masked else len(prompt + response) - 1
        with torch.no_grad():
            loss = (
                float(model.peft_model(input_ids=torch.tensor([prompt + response]), labels=labels).loss) if num else 0.0
            )
        assert found.tokens.counts[i] == num, "a response that is cut away counts for nothing"
        assert found.tokens.sums[i] == pytest.approx(num * loss, rel=1e-4)
        total, count = total + num * loss, count + num
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.confusion is None


def test_every_token_counts_the_same_and_without_any_there_is_no_perplexity():
    losses = TokenLosses(sums=np.array([8 * math.log(2), math.log(16)]), counts=np.array([8, 1]))
    assert losses.perplexity == pytest.approx(2 ** (12 / 9))
    assert TokenLosses(sums=np.zeros(2), counts=np.zeros(2, dtype=np.int64)).perplexity is None
    assert TokenLosses(sums=np.array([1e6]), counts=np.array([1])).perplexity == math.inf
