"""An evaluation counts what the model predicts; figures agree with scikit-learn's, and errors with resampling."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from fedpriv.learning.data.records import num_tokens
from fedpriv.learning.training.evaluation import (
    TokenLosses,
    accuracy_standard_error,
    confusion_matrix,
    evaluate,
    log_perplexity_change,
    macro_f1,
    majority_share,
    mean_estimate,
    passes_by_length,
)
from fedpriv.learning.training.model import TrainingModel
from tests.instructions import random_prompts, records_of
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


def test_perplexity_is_that_of_transformers_own_loss_over_all_tokens(causal):
    model = TrainingModel(causal("llama"), memory_limit=2**30)
    records = random_records(70, classes=0, seed=5)
    total = count = 0.0
    for tokens in records.features["input_ids"]:
        with torch.no_grad():
            loss = model.peft_model(input_ids=tokens[None], labels=tokens[None]).loss
        total += float(loss) * (len(tokens) - 1)
        count += len(tokens) - 1
    assert evaluate(model, records).perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_perplexity_of_responses_is_that_of_transformers_with_masked_prompts(causal):
    model = TrainingModel(causal("llama"), memory_limit=2**30)
    pairs = [(prompt, prompt[::-1]) for prompt in random_prompts(20)] + [([5, 6], [])]
    found = evaluate(model, records_of(pairs)).tokens
    for i, (prompt, response) in enumerate(pairs[:-1]):
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            loss = model.peft_model(input_ids=torch.tensor([prompt + response]), labels=labels).loss
        assert found.counts[i] == len(response)
        assert found.sums[i] / len(response) == pytest.approx(float(loss), rel=1e-4)
    assert (found.counts[-1], found.sums[-1]) == (0, 0.0), "a response that is cut away counts for nothing"


def test_a_pass_is_bounded_in_tokens():
    items = random_records(50, longest=900, shortest=800).items()
    passes = list(passes_by_length(items))
    assert max(map(len, passes)) > 1
    assert all(len(positions) * max(num_tokens(items[i]) for i in positions) <= 4096 for positions in passes)


@pytest.mark.parametrize("num_classes", [2, 3, 21])
@pytest.mark.parametrize("num", [1, 7, 400])
def test_scikit_learn_finds_the_same(num, num_classes):
    generator = np.random.default_rng(num)
    labels = generator.integers(num_classes, size=num)
    predicted = np.where(generator.random(num) < 0.6, labels, generator.integers(num_classes, size=num))
    confusion = confusion_matrix(labels, predicted, num_classes)
    expected = metrics.confusion_matrix(labels, predicted, labels=range(num_classes))
    assert np.array_equal(confusion, expected)
    assert macro_f1(confusion) == pytest.approx(metrics.f1_score(labels, predicted, average="macro", zero_division=0))


def test_rows_are_true_classes():
    assert confusion_matrix([0, 0, 1], [1, 1, 1], 3) == ((0, 2, 0), (0, 1, 0), (0, 0, 0))


def test_a_model_that_always_guesses_the_largest_class_has_its_share_and_a_low_f1():
    confusion = ((60, 0), (40, 0))
    assert majority_share(confusion) == 0.6
    assert macro_f1(confusion) == pytest.approx(0.5 * (2 * 60 / (120 + 40)))
    assert accuracy_standard_error(confusion) == pytest.approx((0.6 * 0.4 / 100) ** 0.5)


def test_the_standard_error_is_the_spread_of_the_accuracy_over_test_sets():
    hits = np.random.default_rng(0).binomial(500, 0.8, size=4000) / 500
    assert accuracy_standard_error(((400, 100), (0, 0))) == pytest.approx(hits.std(), rel=0.05)


def draw(num: int, seed: int) -> tuple[TokenLosses, TokenLosses]:
    """Losses before and after: every token gains, those of short records more, and lengths vary more than gains."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, num)
    per_token = rng.gamma(4, 0.8, num)
    change = -0.5 + rng.normal(0, 0.1, num) - 1 / (counts + 5)
    before = TokenLosses(sums=counts * per_token, counts=counts)
    return before, TokenLosses(sums=counts * (per_token + change), counts=counts)


def test_every_token_counts_the_same():
    losses = TokenLosses(sums=np.array([8 * math.log(2), math.log(16)]), counts=np.array([8, 1]))
    assert losses.perplexity == pytest.approx(2 ** (12 / 9))


def test_without_tokens_there_is_no_perplexity():
    empty = TokenLosses(sums=np.zeros(2), counts=np.zeros(2, dtype=np.int64))
    assert empty.perplexity is None
    assert log_perplexity_change(empty, empty) is None
    assert TokenLosses(sums=np.array([1e6]), counts=np.array([1])).perplexity == math.inf


def test_the_change_is_the_difference_of_the_log_perplexities():
    before, after = draw(50, seed=0)
    expected = math.log(after.perplexity) - math.log(before.perplexity)
    assert log_perplexity_change(before, after).mean == pytest.approx(expected)


def test_the_standard_error_is_that_of_resampled_records():
    before, after = draw(400, seed=1)
    rng = np.random.default_rng(2)
    differences = after.sums - before.sums
    chosen = rng.integers(0, 400, (4000, 400))
    resampled = differences[chosen].sum(axis=1) / after.counts[chosen].sum(axis=1)
    # 4,000 resamples know their deviation to 1.1 %; the delta method errs by O(1 / 400).
    assert log_perplexity_change(before, after).standard_error == pytest.approx(resampled.std(), rel=0.05)


def test_the_standard_error_is_the_deviation_over_independent_test_sets():
    changes = [log_perplexity_change(*draw(200, seed)) for seed in range(2000)]
    deviation = np.std([found.mean for found in changes])
    assert np.mean([found.standard_error for found in changes]) == pytest.approx(deviation, rel=0.08)


def test_records_of_another_set_are_refused():
    with pytest.raises(ValueError, match="not of the same records"):
        log_perplexity_change(draw(5, seed=0)[0], draw(5, seed=1)[0])


def test_one_record_has_no_standard_error():
    assert mean_estimate(np.array([0.25])).standard_error is None
    assert mean_estimate(np.array([0.0, 1.0])).standard_error == pytest.approx(0.5)
