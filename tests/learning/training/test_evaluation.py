"""An evaluation counts what the model predicts; answers and likelihoods are those of each prompt and text alone.

Noised counts of hits agree with it; their sensitivity is 1, and records that fail add nothing.
"""

import json
import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base, lora
from fedpriv.learning.adapters._arithmetic import add_products, factors_of
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Choices, Records, num_tokens, tokenize
from fedpriv.learning.data.text import TextData, unpacked_choices
from fedpriv.learning.training import answers as decoding
from fedpriv.learning.training import evaluation, private_evaluation
from fedpriv.learning.training.answers import greedy_answers, with_adapter
from fedpriv.learning.training.evaluation import TokenLosses, evaluate, prompt_and_response
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_evaluation import EvaluationSpec, NoisedCounts, count, noised, planned_event
from fedpriv.learning.training.rehearsal import synthetic_records
from fedpriv.learning.training.stacked import local_update, stacked_updates
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.chats import chat_model
from tests.instructions import END, random_prompts, records_of
from tests.learning.training.test_isolation import Fragile
from tests.tiny import LABELS, WORDS, move, random_records, tiny_causal


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
    passes = list(evaluation.passes_by_length(items))
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
        tokens = torch.tensor([prompt + response])
        labels = torch.tensor([([-100] * len(prompt) if masked else prompt) + response])
        num = len(response) if masked else len(prompt + response) - 1
        with torch.no_grad():
            loss = float(model.peft_model(input_ids=tokens, labels=labels).loss) if num else 0.0
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


# ---------------------------------------------------------------- answers and choices


@pytest.fixture(params=["llama", "gpt2"])
def model(request, causal) -> TrainingModel:
    return TrainingModel(causal(request.param), memory_limit=2**30)


def generated(model: TrainingModel, prompt: list[int], most: int, end: int) -> tuple[int, ...]:
    found = model.peft_model.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=end, pad_token_id=0
    )[0, len(prompt) :].tolist()
    return tuple(found[: found.index(end)] if end in found else found)


def test_each_answer_is_what_generate_gives_alone(model):
    prompts = random_prompts(8)
    expected = [generated(model, prompt, 9, END) for prompt in prompts]
    # An end that some answers have and others have not, at different places.
    end = max({token for answer in expected for token in answer}, key=lambda t: sum(t in a for a in expected))
    expected = [generated(model, prompt, 9, end) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 1, "all answers would end at the same place"
    found = greedy_answers(model, [tuple(p) for p in prompts], max_new_tokens=9, ends=[end])
    assert found == expected


def test_answers_do_not_depend_on_the_passes_whose_prompts_and_answers_are_bounded(model, monkeypatch):
    passes, told, read = [], [], decoding.read
    monkeypatch.setattr(decoding, "read", lambda model, prompts: (passes.append(prompts), read(model, prompts))[1])
    prompts = [tuple(prompt) for prompt in random_prompts(9, seed=1, shortest=3)] + [(9,) * 60]
    together = greedy_answers(model, prompts, max_new_tokens=2, ends=[END])
    monkeypatch.setattr(decoding, "TOKENS_OF_A_PASS", 60)
    passes.clear()
    assert greedy_answers(model, prompts, max_new_tokens=2, ends=[END], on_answered=told.append) == together
    assert (told[-1], len(told)) == (len(prompts), len(passes))
    assert sorted(prompt for together in passes for prompt in together) == sorted(prompts)
    assert all(len(together) * (max(map(len, together)) + 2) <= 60 or len(together) == 1 for together in passes)
    assert max(map(len, passes)) > 2


def test_an_answer_ends_where_the_model_has_no_positions_left(model):
    prompts = [tuple(range(4, 59)), (7, 8), tuple([9] * 64)]
    found = greedy_answers(model, prompts, max_new_tokens=20, ends=[])
    assert [len(answer) for answer in found] == [9, 20, 0]


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


def choices(prompts, answers, truth=None, *, by_length=False) -> Choices:
    records = (records_of([(prompt, answer) for prompt in prompts]) for answer in answers)
    places = tuple(replace(each, are_choices=by_length) for each in records)
    return Choices(places, tuple(truth or (0,) * len(prompts)))


def likelihood_alone(model: TrainingModel, prompt: list[int], answer: list[int]) -> float:
    """The log-likelihood of an answer by one pass over the whole text, without padding or kept states."""
    with torch.no_grad():
        logits = model.peft_model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    of_tokens = logits.log_softmax(dim=1)[len(prompt) - 1 : -1]
    return float(of_tokens[range(len(answer)), answer].sum())


def test_each_likelihood_is_that_of_the_whole_text_alone_and_all_probabilities_add_up_to_one(model):
    prompts = random_prompts(6)
    expected = [[likelihood_alone(model, prompt, answer) for answer in ANSWERS.values()] for prompt in prompts]
    found = evaluation._log_likelihoods(model, choices(prompts, ANSWERS.values()))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5)
    single = [(token,) for token in range(60)]
    assert np.exp(evaluation._log_likelihoods(model, choices([(4, 5, 6)], single))).sum() == pytest.approx(1)


def judged(model, prompts, answers, truth, **options):
    """The evaluation of records whose own answers are these."""
    records = records_of([(prompt, answers[max(own, 0)]) for prompt, own in zip(prompts, truth, strict=True)])
    return evaluate(model, replace(records, choices=choices(prompts, answers, truth, **options)))


def test_accuracy_is_that_of_brute_force(model):
    answers, prompts = list(ANSWERS.values()), random_prompts(20, seed=3)
    scores = torch.tensor([[likelihood_alone(model, prompt, answer) for answer in answers] for prompt in prompts])
    best = scores.argmax(dim=1).tolist()
    per_token = (scores / torch.tensor([len(answer) for answer in answers])).argmax(dim=1).tolist()
    assert len(set(best)) > 1, "any constant guess would agree"
    assert best != per_token, "both ways of scoring would agree"
    for by_length, expected in ((False, best), (True, per_token)):
        found = judged(model, prompts, answers, [i % 4 for i in range(20)], by_length=by_length)
        assert found.accuracy == sum(i % 4 == one for i, one in enumerate(expected)) / 20
        assert [sum(row) for row in found.confusion] == [5] * 4
        assert sum(found.confusion[i][i] for i in range(4)) == 20 * found.accuracy


def test_records_with_another_response_do_not_count_and_equal_choices_are_found_by_none(model):
    found = judged(model, random_prompts(4), list(ANSWERS.values()), [1, -1, -1, 0])
    assert sum(map(sum, found.confusion)) == 2
    # As when both are cut to the same tokens: the first place would be a hit for nothing.
    assert judged(model, random_prompts(6), [[7, END], [7, END]], [0] * 6, by_length=True).accuracy == 0


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A run of records with two to five choices, one of which is too long."""
    folder, texts = chat_model(tmp_path_factory.mktemp("chat")), ["a rash", "a cough", "pain " * 30, "flu", "no"]
    choices = [[*texts[i % 3 :], *texts[: i % 3]][: 2 + i % 4] for i in range(24)]
    rows = [{"q": f"What is flu {i}?", "c": own, "a": i % len(own), "s": i % 2} for i, own in enumerate(choices)]
    data = folder / "r.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data": str(data), "prompt_column": "q", "response_column": "a", "choice_columns": ["c"], "max_choices": 5}
    keys |= {"client_column": "s", "simulate": True, "batch_size": 2, "max_length": 60, "model": str(folder)}
    return workbench(parse({**keys, "base_dtype": "float32", "layers": "all", "test_fraction": 0.5}))


def test_a_run_scores_each_choice_as_a_response_of_its_own_to_the_whole_chat(bench):
    """Against transformers alone, with the template's own text: no tokens, masks or passes of ours."""
    move(bench.model.peft_model)
    tokenizer, model = bench.base.tokenizer, bench.model.peft_model
    hits = []
    for text, pair in zip(bench.data.test.texts, bench.data.test.pairs, strict=True):
        right, texts = unpacked_choices(pair)
        chat = [{"role": "user", "content": text}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        before = tokenizer(asked, add_special_tokens=False)["input_ids"]
        scores = []
        for choice in texts:
            whole = tokenizer(f"{asked}{choice.strip()}<|im_end|>", add_special_tokens=False)["input_ids"][:59]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(dim=1)
            of_tokens = logits[range(len(before) - 1, len(whole) - 1), whole[len(before) :]]
            scores.append(float(of_tokens.mean()))
        hits.append(max(range(len(texts)), key=scores.__getitem__) == right)
    assert 0 < sum(hits) < len(hits)
    assert bench.evaluate().accuracy == sum(hits) / len(hits)
    exact = count(bench.model, lora.read_parameters(bench.model.parameters), {}, bench.test)
    assert exact.tolist() == [sum(hits), len(hits) - sum(hits)]


def test_one_record_changes_the_counts_by_one_pair_and_no_other_records_part(bench):
    adapter = lora.read_parameters(bench.model.parameters)
    data = bench.data.test
    whole = count(bench.model, adapter, {}, bench.tokenize_tested(data))
    for gone in range(2):
        rest = bench.tokenize_tested(data.part([row for row in range(len(data)) if row != gone]))
        assert sorted((whole - count(bench.model, adapter, {}, rest)).tolist()) == [0.0, 1.0]


def test_training_learns_the_right_choice_alone(bench):
    found = bench.client(0)
    assert found.choices is None
    responses = [evaluation.text_of(bench.base.tokenizer, prompt_and_response(item)[1]) for item in found.items()]
    assert responses == [texts[right] for right, texts in map(unpacked_choices, bench.data.clients[0].pairs)]


# ---------------------------------------------------------------- noised counts

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
def classifier(base):
    return TrainingModel(move(attach(base, LoraSettings(rank=4))), memory_limit=2**30)


@pytest.fixture(scope="module")
def read(base):
    fragile = Fragile(base.tokenizer, RuntimeError(), FAILING)
    return partial(tokenize, tokenizer=fragile, label_names=LABELS, max_length=16)


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


def test_counts_are_those_of_plain_evaluation_and_each_record_moves_its_own_alone_by_one(classifier, data, read):
    whole = counts_of(classifier, data, read)
    assert whole[0] / NUM == evaluate(classifier, read(data)).accuracy
    assert whole.sum() == NUM
    for gone in range(NUM):
        rest = data.part([index for index in range(NUM) if index != gone])
        moved = whole - counts_of(classifier, rest, read)
        assert sorted(moved.tolist()) == [0.0, 1.0]
        assert torch.equal(moved, counts_of(classifier, data.part([gone]), read))


@pytest.mark.parametrize(
    "odd", [("a text that cannot be read", LABELS[0]), ("the", "a label that the run does not know"), ("", LABELS[0])]
)
def test_a_record_that_fails_adds_nothing_and_stops_no_other(classifier, data, read, odd):
    with_odd = TextData((*data.texts[:5], odd[0], *data.texts[5:]), (*data.labels[:5], odd[1], *data.labels[5:]))
    moved = counts_of(classifier, with_odd, read) - counts_of(classifier, data, read)
    assert float(torch.linalg.vector_norm(moved)) <= 1
    if odd[0]:
        assert moved.tolist() == [0.0, 0.0]
    assert counts_of(classifier, TextData((odd[0],), (odd[1],)), read).tolist() == moved.tolist()


def task_of(model, records: Records, draw: int = 0) -> UpdateTask:
    spec, source = UpdateSpec.counts(3.0), SeededSource(0, draw, "evaluation")
    sampler = spec.sampler(NUM, source)
    return UpdateTask(adapter=model.initial, data=records, spec=spec, round=1, sampler=sampler, noise=source)


def test_the_noise_of_a_release_is_that_of_its_event_and_of_no_other_scale(classifier, data, read, monkeypatch):
    monkeypatch.setattr(private_evaluation, "count", lambda *_: torch.tensor([20.0, 7.0], dtype=torch.float64))

    records = read(data)
    updates = [local_update(classifier, task_of(classifier, records, draw)) for draw in range(NUM_DRAWS)]
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


def test_counts_are_no_objective_under_other_bounds_nor_in_a_stack(classifier):
    """Their sensitivity is 1 by themselves: no clip norm makes it smaller, and no sampling hides them."""
    task = task_of(classifier, Records({"input_ids": ()}, torch.tensor([], dtype=torch.int64), pad_token_id=0))
    assert local_update(classifier, task).event == planned_event(EvaluationSpec(noise_multiplier=3.0))
    for change in ({"clip_norm": 0.1}, {"sampling_probability": 0.1}, {"local_steps": 2}, {"noise_on": "upload"}):
        with pytest.raises(ValueError, match="objective = counts"):
            local_update(classifier, replace(task, spec=replace(task.spec, **change)))
    with pytest.raises(ValueError, match="objective = 'counts'"):
        stacked_updates(classifier, [task])


def test_a_model_that_does_not_fit_is_refused_by_name(classifier):
    private_evaluation.check_fits(classifier, classifier.initial, {})
    name, tensor = next(iter(classifier.initial.items()))
    for adapter in (
        {key: value for key, value in classifier.initial.items() if key != name},
        classifier.initial | {name: tensor[:-1]},
        classifier.initial | {"another": tensor},
    ):
        with pytest.raises(ValueError, match=r"adapter: .* has shape"):
            private_evaluation.check_fits(classifier, adapter, {})


def test_a_rehearsal_refuses_a_model_whose_losses_are_no_numbers(classifier):
    """Its hits would be counted all the same: the likeliest class of NaN is the first."""
    synthetic = synthetic_records(classifier, max_length=16, num_labels=len(LABELS))
    adapter = dict(classifier.initial)
    assert private_evaluation.rehearse(classifier, adapter, {}, synthetic) > 0
    broken = {name: torch.full_like(tensor, 3e38) for name, tensor in adapter.items()}
    with pytest.raises(InputError, match=r"a bert model cannot train here \(its losses or gradients are NaN"):
        private_evaluation.rehearse(classifier, broken, {}, synthetic)
