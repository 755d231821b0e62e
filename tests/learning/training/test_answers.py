"""Answers and their likelihoods in a batch are those that transformers gives each prompt and each text alone."""

import numpy as np
import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.learning.adapters import lora
from fedpriv.learning.adapters._arithmetic import add_products, factors_of
from fedpriv.learning.training import answers as decoding
from fedpriv.learning.training.answers import greedy_answers, with_adapter
from fedpriv.learning.training.evaluation import (
    Choices,
    _answer_tokens,
    _confusion_of,
    _log_likelihoods,
    _with_answer,
    choices_of,
    evaluate,
    prompt_and_response,
)
from fedpriv.learning.training.model import TrainingModel
from tests.instructions import END, number_tokenizer, random_prompts, records_of


@pytest.fixture(params=["llama", "gpt2"])
def model(request, causal) -> TrainingModel:
    return TrainingModel(causal(request.param), memory_limit=2**30)


def generated(model: TrainingModel, prompt: list[int], most: int, end: int) -> tuple[int, ...]:
    found = model.peft_model.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=end, pad_token_id=0
    )[0, len(prompt) :].tolist()
    return tuple(found[: found.index(end)] if end in found else found)


def test_each_answer_is_what_generate_gives_alone(model):
    prompts = random_prompts(12)
    expected = [generated(model, prompt, 9, END) for prompt in prompts]
    # An end that some answers have and others have not, at different places.
    end = max({token for answer in expected for token in answer}, key=lambda t: sum(t in a for a in expected))
    expected = [generated(model, prompt, 9, end) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 1, "all answers would end at the same place"
    found = greedy_answers(model, [tuple(p) for p in prompts], max_new_tokens=9, ends=[end])
    assert found == expected


def test_answers_do_not_depend_on_the_passes(model, monkeypatch):
    prompts = [tuple(prompt) for prompt in random_prompts(9, seed=1)]
    together = greedy_answers(model, prompts, max_new_tokens=5, ends=[END])
    monkeypatch.setattr(decoding, "TOKENS_OF_A_PASS", 40)
    told: list[int] = []
    assert greedy_answers(model, prompts, max_new_tokens=5, ends=[END], on_answered=told.append) == together
    assert len(told) > 2
    assert told[-1] == 9


def test_an_answer_ends_where_the_model_has_no_positions_left(model):
    prompts = [tuple(range(4, 59)), (7, 8), tuple([9] * 64)]
    found = greedy_answers(model, prompts, max_new_tokens=20, ends=[])
    assert [len(answer) for answer in found] == [9, 20, 0]


def test_a_pass_of_prompts_and_their_answers_is_bounded(model, monkeypatch):
    passes, read = [], decoding.read
    monkeypatch.setattr(decoding, "read", lambda model, prompts: (passes.append(prompts), read(model, prompts))[1])
    monkeypatch.setattr(decoding, "TOKENS_OF_A_PASS", 60)
    prompts = [tuple([9] * num) for num in (40, 3, 8, 4, 60, 5)]
    greedy_answers(model, prompts, max_new_tokens=2, ends=[])
    assert sorted(prompt for together in passes for prompt in together) == sorted(prompts)
    assert all(len(together) * (max(map(len, together)) + 2) <= 60 or len(together) == 1 for together in passes)
    assert max(map(len, passes)) > 2


def test_the_last_response_is_what_is_to_be_answered():
    records = records_of([([4, 5], [6, 3])])
    several = records.features["response_mask"][0].new_tensor([0, 1, 0, 1])
    records.features["response_mask"] = (several,)
    assert prompt_and_response((records, 0)) == ((4, 5, 6), (3,))
    assert prompt_and_response((records_of([([4, 5], [])]), 0)) == ((), ())


def test_another_adapter_is_set_and_the_model_is_as_before_afterwards(model):
    before = lora.read_parameters(model.parameters)
    weights = {name: p.clone() for name, p in model.peft_model.named_parameters()}
    added = add_products({}, {name: [factors] for name, factors in factors_of(before).items()})
    prompts = [tuple(prompt) for prompt in random_prompts(6, seed=2)]
    plain = greedy_answers(model, prompts, max_new_tokens=6, ends=[])
    with with_adapter(model, model.initial, added):
        assert greedy_answers(model, prompts, max_new_tokens=6, ends=[]) != plain
    assert greedy_answers(model, prompts, max_new_tokens=6, ends=[]) == plain
    assert all(torch.equal(p, weights[name]) for name, p in model.peft_model.named_parameters())
    assert not model.peft_model.training


# Of one token and of several, one of them the beginning of another.
ANSWERS = {"w7": [7, END], "w7 w8 w9": [7, 8, 9, END], "w20 w21": [20, 21, END], "w30": [30, END]}


def records_with(responses: list[list[int]], *, seed: int = 0):
    return records_of(list(zip(random_prompts(len(responses), seed=seed), responses, strict=True)))


def choices(prompts, answers) -> Choices:
    prompts = [tuple(prompt) for prompt in prompts]
    records = tuple(_with_answer(prompts, tuple(answer), 0) for answer in answers)
    return Choices(records=records, truth=(0,) * len(prompts))


def likelihood_alone(model: TrainingModel, prompt: list[int], answer: list[int]) -> float:
    """The log-likelihood of an answer by one pass over the whole text, without padding or kept states."""
    with torch.no_grad():
        logits = model.peft_model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    of_tokens = logits.log_softmax(dim=1)[len(prompt) - 1 : -1]
    return float(of_tokens[range(len(answer)), answer].sum())


def test_each_likelihood_is_that_of_the_whole_text_alone(model):
    prompts = random_prompts(11)
    expected = [[likelihood_alone(model, prompt, answer) for answer in ANSWERS.values()] for prompt in prompts]
    found = _log_likelihoods(model, choices(prompts, ANSWERS.values()))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)


def test_the_probabilities_of_all_texts_add_up_to_at_most_one(model):
    single = [(token,) for token in range(60)]
    assert np.exp(_log_likelihoods(model, choices([(4, 5, 6)], single))).sum() == pytest.approx(1)


def test_accuracy_is_that_of_brute_force(model):
    answers = list(ANSWERS.values())
    prompts = random_prompts(40, seed=3)
    records = records_of([(prompt, answers[i % 4]) for i, prompt in enumerate(prompts)])
    scores = torch.tensor([[likelihood_alone(model, prompt, answer) for answer in answers] for prompt in prompts])
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
