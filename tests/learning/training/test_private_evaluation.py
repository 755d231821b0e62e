"""Noised counts of hits: against plain evaluation, their sensitivity of 1, their noise, and records that fail."""

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records, tokenize
from fedpriv.learning.data.text import TextData
from fedpriv.learning.training import private_evaluation
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_evaluation import EvaluationSpec, NoisedCounts, count, noised, planned_event
from fedpriv.learning.training.rehearsal import synthetic_records
from fedpriv.learning.training.stacked import local_update, stacked_updates
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_isolation import Fragile
from tests.tiny import LABELS, WORDS, move, tiny_causal

NUM = 8
NUM_DRAWS = 1000
FAILING = "cannot be read"


@pytest.fixture(scope="module")
def data() -> TextData:
    rng = np.random.default_rng(0)
    texts = tuple(" ".join(rng.choice(WORDS, size=rng.integers(1, 12))) for _ in range(NUM))
    return TextData(texts, tuple(rng.choice(LABELS, size=NUM).tolist()))


@pytest.fixture(scope="module")
def base(tiny_bert):
    return load_base(str(tiny_bert), task="SEQ_CLS", num_labels=len(LABELS))


@pytest.fixture(scope="module")
def model(base):
    return TrainingModel(move(attach(base, LoraSettings(rank=4))), memory_limit=2**30)


@pytest.fixture(scope="module")
def read(base):
    return partial(
        tokenize, tokenizer=Fragile(base.tokenizer, RuntimeError(), FAILING), label_names=LABELS, max_length=16
    )


def counts_of(model: TrainingModel, data: TextData, read) -> torch.Tensor:
    return count(model, model.initial, {}, read(data))


@pytest.mark.parametrize("num_prompt", [None, 1, 4])
def test_a_causal_model_adds_each_record_s_share_of_correct_tokens(data, num_prompt):
    model = TrainingModel(move(attach(tiny_causal("gpt2"), LoraSettings(rank=4, task="CAUSAL_LM"))), memory_limit=2**30)

    def read(data: TextData) -> Records:
        tokens = tuple(torch.tensor([1 + WORDS.index(word) for word in text.split()]) for text in data.texts)
        features = {"input_ids": tokens}
        if num_prompt is not None:
            # Some records have nothing but a prompt: a miss, like a text of a single token.
            features[RESPONSE_MASK] = tuple(torch.arange(len(of)).ge(num_prompt).long() for of in tokens)
        return Records(features, torch.tensor([], dtype=torch.int64), pad_token_id=0)

    unlabelled = TextData(data.texts, ())
    hits, misses = counts_of(model, unlabelled, read).tolist()
    assert hits + misses == NUM
    assert hits / NUM == pytest.approx(evaluate(model, read(unlabelled)).accuracy, abs=2**-20)
    assert (hits * 2**20).is_integer()


def test_counts_are_those_of_plain_evaluation_and_each_record_moves_them_by_one_and_no_other_record_s_part(
    model, data, read
):
    whole = counts_of(model, data, read)
    assert whole[0] / NUM == evaluate(model, read(data)).accuracy
    assert whole.sum() == NUM
    for gone in range(NUM):
        rest = data.part([index for index in range(NUM) if index != gone])
        moved = whole - counts_of(model, rest, read)
        assert sorted(moved.tolist()) == [0.0, 1.0]
        assert torch.equal(moved, counts_of(model, data.part([gone]), read))


@pytest.mark.parametrize(
    "odd", [("a text that cannot be read", LABELS[0]), ("the", "a label that the run does not know"), ("", LABELS[0])]
)
def test_a_record_that_fails_adds_nothing_and_stops_no_other(model, data, read, odd):
    with_odd = TextData((*data.texts[:5], odd[0], *data.texts[5:]), (*data.labels[:5], odd[1], *data.labels[5:]))
    moved = counts_of(model, with_odd, read) - counts_of(model, data, read)
    assert float(torch.linalg.vector_norm(moved)) <= 1
    if odd[0]:
        assert moved.tolist() == [0.0, 0.0]
    assert counts_of(model, TextData((odd[0],), (odd[1],)), read).tolist() == moved.tolist()


def task_of(model, records: Records, draw: int = 0) -> UpdateTask:
    spec, source = UpdateSpec.counts(3.0), SeededSource(0, draw, "evaluation")
    sampler = spec.sampler(NUM, source)
    return UpdateTask(adapter=model.initial, data=records, spec=spec, round=1, sampler=sampler, noise=source)


def test_the_noise_of_a_release_is_that_of_its_event_and_of_no_other_scale(model, data, read, monkeypatch):
    monkeypatch.setattr(private_evaluation, "count", lambda *_: torch.tensor([20.0, 7.0], dtype=torch.float64))

    records = read(data)
    updates = [local_update(model, task_of(model, records, draw)) for draw in range(NUM_DRAWS)]
    pairs = [NoisedCounts.of(update.noised) for update in updates]
    values = np.array([[pair.hits - 20, pair.misses - 7] for pair in pairs])
    assert {update.event for update in updates} == {planned_event(EvaluationSpec(noise_multiplier=3.0))}
    # Variances of normal values, and their correlation: five standard errors, once in 1.7 million.
    standard_error = math.sqrt(2 / NUM_DRAWS)
    for scale, accepted in ((3.0, True), (2.0, False), (4.5, False)):
        errors = np.abs(values.var(axis=0) / scale**2 - 1)
        assert (errors < 5 * standard_error).all() == accepted
    assert np.abs(values.mean(axis=0)).max() < 5 * 3 / math.sqrt(NUM_DRAWS)
    assert abs(np.corrcoef(values.T)[0, 1]) < 5 / math.sqrt(NUM_DRAWS)


def test_released_counts_lie_on_a_grid_that_does_not_depend_on_the_counts():
    spec = UpdateSpec.counts(3.0)
    for exact in ([20.0, 7.0], [2**-20, 1 - 2**-20], [1e9, 0.0]):
        sums, _ = noised(torch.tensor(exact, dtype=torch.float64), spec, SeededSource(1, "evaluation"))
        pair = NoisedCounts.of(sums)
        assert all((value * 2**17).is_integer() for value in (pair.hits, pair.misses))


def test_one_evaluation_costs_what_the_gaussian_mechanism_costs():
    event = planned_event(EvaluationSpec(noise_multiplier=4.0))
    assert event == SubsampledGaussian(noise_multiplier=4.0, sampling_probability=1.0, count=1, unit="record")
    # The exact trade-off of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018, Theorem 8).
    epsilon, normal = epsilon_of([event], 1e-5).epsilon, NormalDist()
    delta = normal.cdf(1 / 8 - 4 * epsilon) - math.exp(epsilon) * normal.cdf(-1 / 8 - 4 * epsilon)
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_counts_are_no_objective_under_other_bounds_nor_in_a_stack(model):
    """Their sensitivity is 1 by themselves: no clip norm makes it smaller, and no sampling hides them."""
    task = task_of(model, Records({"input_ids": ()}, torch.tensor([], dtype=torch.int64), pad_token_id=0))
    assert local_update(model, task).event == planned_event(EvaluationSpec(noise_multiplier=3.0))
    for change in ({"clip_norm": 0.1}, {"sampling_probability": 0.1}, {"local_steps": 2}, {"noise_on": "upload"}):
        with pytest.raises(ValueError, match="objective = counts"):
            local_update(model, replace(task, spec=replace(task.spec, **change)))
    with pytest.raises(ValueError, match="objective = 'counts'"):
        stacked_updates(model, [task])


def test_a_model_that_does_not_fit_is_refused_by_name(model):
    private_evaluation.check_fits(model, model.initial, {})
    name, tensor = next(iter(model.initial.items()))
    for adapter in (
        {key: value for key, value in model.initial.items() if key != name},
        model.initial | {name: tensor[:-1]},
        model.initial | {"another": tensor},
    ):
        with pytest.raises(ValueError, match=r"adapter: .* has shape"):
            private_evaluation.check_fits(model, adapter, {})


def test_a_rehearsal_refuses_a_model_whose_losses_are_no_numbers(model):
    """Its hits would be counted all the same: the likeliest class of NaN is the first."""
    synthetic = synthetic_records(model, max_length=16, num_labels=len(LABELS))
    adapter = dict(model.initial)
    assert private_evaluation.rehearse(model, adapter, {}, synthetic) > 0
    broken = {name: torch.full_like(tensor, 3e38) for name, tensor in adapter.items()}
    with pytest.raises(InputError, match=r"a bert model cannot train here \(its losses or gradients are NaN"):
        private_evaluation.rehearse(model, broken, {}, synthetic)
