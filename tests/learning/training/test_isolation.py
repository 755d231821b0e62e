"""A record that fails counts as a zero gradient; it never decides whether others count, nor what they count."""

import dataclasses
import logging

import pytest
import torch
from transformers import AutoTokenizer

from fedpriv.errors import InputError
from fedpriv.learning.data.records import Records, check_max_length, collate, tokenize
from fedpriv.learning.data.text import TextData
from fedpriv.learning.training.local_update import ClientUpdate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.learning.training.test_sensitivity import Everyone, make_task
from tests.marks import slow

POISON = 14  # a token that the model below fails on
WITH_RECORD = f"secret token {POISON}"  # a log shows lines of code, and may show no message


def with_tokens(records: Records, index: int, tokens: list[int]) -> Records:
    column = list(records.features["input_ids"])
    column[index] = torch.tensor(tokens)
    return dataclasses.replace(records, features={"input_ids": tuple(column)})


def without(records: Records, index: int) -> Records:
    return records.part([i for i in range(len(records)) if i != index])


@pytest.fixture(params=["whole model", "prefix cache"])
def failing_model(request, encoder):
    """A model that fails on every pass with the poisoned token in a short record."""
    cached = request.param == "prefix cache"
    model = TrainingModel(encoder(layers="last-1"), memory_limit=2**30, prefix_cache=cached, alone=True)

    def fail(_module, args, kwargs):
        is_short = kwargs["attention_mask"].sum(dim=1) <= 3
        if bool(((args[0] == POISON).any(dim=1) & is_short).any()):
            raise RuntimeError(WITH_RECORD)

    model.peft_model.base_model.model.bert.register_forward_pre_hook(fail, with_kwargs=True)
    return model


def update(model: TrainingModel, *clients: Records, **changes) -> list[torch.Tensor]:
    """[client] The values of each update, without noise, so that it shows the sum of clipped gradients."""
    everyone = Everyone(num_registered=40, expected_batch_size=8, source=None)
    how = {"sampler": everyone, "local_steps": 1, "num_rounds": 1000, **changes}
    results = execute_stacked(model, [make_task(model, records, **how) for records in clients])
    assert all(isinstance(result, ClientUpdate) for result in results), results
    return [torch.cat([tensor.flatten() for tensor in result.adapter.values()]) for result in results]


def test_a_failing_record_is_a_zero_gradient_and_the_others_count_as_before(failing_model, make_records, caplog):
    records = make_records(12, vocabulary=POISON)
    poisoned = with_tokens(records, 5, [6, POISON, 7])
    with caplog.at_level(logging.WARNING):
        (found,) = update(failing_model, poisoned)
    (expected,) = update(failing_model, without(records, 5))
    assert torch.equal(found, expected)
    assert "counts as zero" in caplog.text
    assert "secret" not in caplog.text


def test_failing_records_of_one_client_leave_the_others_of_its_stack_alone(failing_model, make_records):
    one, other = make_records(12, vocabulary=POISON), make_records(12, vocabulary=POISON, seed=1)
    all_fail = Records({"input_ids": (torch.tensor([POISON]),) * 3}, torch.zeros(3, dtype=torch.int64), 0)
    for failing, rest in ((with_tokens(other, 0, [POISON]), without(other, 0)), (all_fail, make_records(0))):
        found, expected = (update(failing_model, one, each) for each in (failing, rest))
        assert all(map(torch.equal, found, expected))


def test_an_unusable_record_is_drawn_and_has_no_gradient(encoder, make_records):
    model, records = TrainingModel(encoder(layers="last-1"), memory_limit=2**30, alone=True), make_records(12)
    marked = dataclasses.replace(records, unusable=torch.arange(12) == 5)
    assert torch.equal(*update(model, marked), *update(model, without(records, 5)))
    assert marked.part([5, 6]).unusable.tolist() == [True, False]


@pytest.mark.parametrize("clipping", ["joint", "split", "per-tensor"])
def test_the_sum_with_a_record_differs_from_that_without_it_by_at_most_the_clip_norm(encoder, make_records, clipping):
    """Over all records, in the real update: the move of plain SGD is the sum."""
    model, records = TrainingModel(encoder(layers="last-1"), memory_limit=2**30), make_records(6)
    parts = {"joint": 1, "split": 3, "per-tensor": len(model.parameters)}[clipping]
    changes = {"clipping": clipping, "clip_norm": 1e-3, "learning_rate": 8.0}
    (full,) = update(model, records, **changes)
    for index in range(6):
        (rest,) = update(model, without(records, index), **changes)
        assert float((full.double() - rest.double()).norm()) <= 1e-3 * parts**0.5 + 1e-6


# ---------------------------------------------------------------- tokenising


@pytest.fixture(scope="module")
def tokenizer(tiny_bert):
    return AutoTokenizer.from_pretrained(tiny_bert)


class Fragile:
    """A tokenizer that fails on a text, like one with a pattern that only some texts match."""

    def __init__(self, inner, error, text="rash"):
        self.inner, self.error, self.text = inner, error, text
        self.pad_token_id = inner.pad_token_id

    def __call__(self, texts, pairs=None, **options):
        if any(self.text in text for text in texts):
            raise self.error
        return self.inner(texts, pairs, **options)


class Panic(BaseException):
    """Like a panic in a tokenizer's Rust code, which is no Exception."""


@pytest.mark.parametrize("error", [ValueError("rash"), Panic("rash")], ids=["exception", "panic"])
def test_a_text_on_which_the_tokenizer_fails_is_unusable_and_the_others_are_as_before(tokenizer, error):
    texts = ("the patient has pain", "a rash today", "cough")
    data = TextData(texts=texts, labels=("a", "b", "a"), pairs=None)
    whole = tokenize(data, tokenizer, label_names=("a", "b"), max_length=8)
    found = tokenize(data, Fragile(tokenizer, error), label_names=("a", "b"), max_length=8)
    assert found.unusable.tolist() == [False, True, False]
    assert whole.unusable is None
    for index in (0, 2):
        assert torch.equal(found.features["input_ids"][index], whole.features["input_ids"][index])


class Numbers:
    """A tokenizer of numbers."""

    pad_token_id = 7

    def __call__(self, texts, pairs=None, **_options):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_tokens_beyond_the_vocabulary_and_labels_outside_the_names_are_unusable_and_no_token_is_one_of_padding():
    data = TextData(texts=("3 9", "3 10", "5", "-1"), labels=("a", "a", "other", "a"), pairs=None)
    found = tokenize(data, Numbers(), label_names=("a",), max_length=8, vocabulary=10)
    assert found.unusable.tolist() == [False, True, True, True]
    assert len(found) == 4
    assert all(0 <= int(row.min()) <= int(row.max()) < 10 for row in found.features["input_ids"])
    assert found.labels.tolist() == [0, 0, 0, 0]
    wordless = tokenize(TextData(texts=("",), labels=("",), pairs=None), Numbers(), label_names=(), max_length=4)
    assert wordless.features["input_ids"][0].tolist() == [7]
    assert collate(wordless.items())["attention_mask"].tolist() == [[1]]


@pytest.mark.parametrize(("max_length", "pairs"), [(3, None), (8, ("pain in chest " * 9, ""))])
def test_every_record_is_cut_to_the_length_and_empty_texts_work(tokenizer, encoder, max_length, pairs):
    data = TextData(texts=("", "pain " * 600), labels=("a", "a"), pairs=pairs)
    records = tokenize(data, tokenizer, label_names=("a",), max_length=max_length)
    assert all(1 <= len(row) <= max_length for row in records.features["input_ids"])
    model = TrainingModel(encoder(layers="last-1"), memory_limit=2**30, max_length=max_length)
    assert torch.isfinite(model.logits(records.items(), cached=True)[0]).all()


def test_a_length_without_room_for_a_token_of_text_is_refused(tokenizer):
    check_max_length(tokenizer, 3, pairs=False)
    check_max_length(tokenizer, 5, pairs=True)
    for length, pairs in ((2, False), (1, False), (4, True)):
        with pytest.raises(InputError, match=f"max_length = {length}: must be at least"):
            check_max_length(tokenizer, length, pairs=pairs)


GRADIENTS = [{}, {"noise_on": "upload"}, {"clipping": "batch"}, {"trains": "head"}, {"max_records_per_person": 2}]


@pytest.mark.parametrize("changes", GRADIENTS)
@pytest.mark.parametrize("alone", [True, *slow(False)])
def test_an_update_says_to_its_holder_alone_whether_any_record_had_a_gradient(
    encoder, make_records, caplog, alone, changes
):
    model = TrainingModel(encoder(layers="last-1"), memory_limit=2**30, max_length=16, alone=alone)
    sound = dataclasses.replace(make_records(6), persons=tuple("aabbcc"))
    mute = dataclasses.replace(sound, unusable=torch.ones(6, dtype=torch.bool))
    mixed = dataclasses.replace(sound, unusable=torch.arange(6) > 0)
    sampler = PoissonSampler(num_registered=8, expected_batch_size=8, source=SeededSource(0))
    clients = (sound, mixed, mute, sound.part([]))
    tasks = [make_task(model, records, sampler=sampler, local_steps=2, **changes) for records in clients]
    with caplog.at_level(logging.WARNING):
        found = execute_stacked(model, tasks)
    assert [update.learned for update in found] == [True, True, False, None]
    assert [line for line in caplog.messages if "noise alone" in line] == [
        "round 1: 1 of 4 updates are noise alone: no record had a gradient"
    ]
