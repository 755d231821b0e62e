"""Accuracy by likelihood is that of scoring every answer after every prompt by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.training.evaluation import (
    Choices,
    _answer_tokens,
    _confusion_of,
    _log_likelihoods,
    _with_answer,
    choices_of,
    evaluate,
)
from fedpriv.training.model import TrainingModel
from tests.instructions import END, number_tokenizer, random_prompts, records_of

# Of one token and of several, one of them the beginning of another.
ANSWERS = {"w7": [7, END], "w7 w8 w9": [7, 8, 9, END], "w20 w21": [20, 21, END], "w30": [30, END]}


@pytest.fixture(params=["llama", "gpt2"])
def model(request, causal) -> TrainingModel:
    return TrainingModel(causal(request.param), memory_limit=2**30)


def records_with(responses: list[list[int]], *, seed: int = 0):
    return records_of(list(zip(random_prompts(len(responses), seed=seed), responses, strict=True)))


def choices(prompts, answers) -> Choices:
    prompts = [tuple(prompt) for prompt in prompts]
    records = tuple(_with_answer(prompts, tuple(answer), 0) for answer in answers)
    return Choices(records=records, truth=(0,) * len(prompts))


def alone(model: TrainingModel, prompt: list[int], answer: list[int]) -> float:
    """The log-likelihood of an answer by one pass over the whole text, without padding or kept states."""
    with torch.no_grad():
        logits = model.peft_model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    of_tokens = logits.log_softmax(dim=1)[len(prompt) - 1 : -1]
    return float(of_tokens[range(len(answer)), answer].sum())


def test_each_likelihood_is_that_of_the_whole_text_alone(model):
    prompts = random_prompts(11)
    expected = [[alone(model, prompt, answer) for answer in ANSWERS.values()] for prompt in prompts]
    found = _log_likelihoods(model, choices(prompts, ANSWERS.values()))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)


def test_the_probabilities_of_all_texts_add_up_to_at_most_one(model):
    single = [(token,) for token in range(60)]
    assert np.exp(_log_likelihoods(model, choices([(4, 5, 6)], single))).sum() == pytest.approx(1)


def test_accuracy_is_that_of_brute_force(model):
    answers = list(ANSWERS.values())
    prompts = random_prompts(40, seed=3)
    records = records_of([(prompt, answers[i % 4]) for i, prompt in enumerate(prompts)])
    scores = torch.tensor([[alone(model, prompt, answer) for answer in answers] for prompt in prompts])
    best = scores.argmax(dim=1).tolist()
    assert len(set(best)) > 1, "any constant guess would agree"
    found = evaluate(model, records, choices=choices_of(records, number_tokenizer(), list(ANSWERS)))
    assert found.accuracy == sum(i % 4 == one for i, one in enumerate(best)) / 40
    assert [sum(row) for row in found.confusion] == [10] * 4
    assert sum(found.confusion[i][i] for i in range(4)) == 40 * found.accuracy


def test_records_with_another_response_do_not_count(model, caplog):
    records = records_with([ANSWERS["w7"], [40, END], [], ANSWERS["w30"]])
    found = choices_of(records, number_tokenizer(), ["w30", "w7"])
    assert found.truth == (1, 0)
    assert sum(map(sum, _confusion_of(model, found))) == 2
    assert "2 of 4 test records" in caplog.text


def test_without_any_allowed_answer_the_error_names_them():
    with pytest.raises(InputError, match="answers = w50, w51: no test record"):
        choices_of(records_with([[7, END]]), number_tokenizer(), ["w50", "w51"])


def test_an_answer_that_no_record_has_is_ended_like_the_others():
    assert _answer_tokens(number_tokenizer(), ["w9 w4", "w7"], [(7, END)]) == ((9, 4, END), (7, END))
    assert _answer_tokens(number_tokenizer(), ["w9"], [(7, END, 8)]) == ((9, END, 8),)
