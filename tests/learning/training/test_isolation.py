"""A record that fails counts as a zero gradient; it never decides whether others count, nor what they count.

Neither does a response that is empty or cut away: of prompts with responses, what is learned alone has a gradient.
"""

import dataclasses
import json
import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records, check_max_length, collate, tokenize
from fedpriv.learning.data.text import TextData
from fedpriv.learning.training import workbench
from fedpriv.learning.training.canaries import random_token_canaries
from fedpriv.learning.training.local_update import ClientUpdate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.rehearsal import synthetic_records
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.chats import chat_model, chat_tokenizer
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
def test_a_holder_alone_is_told_whether_any_record_had_a_gradient(encoder, make_records, caplog, alone, changes):
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
    (told,) = (line for line in caplog.messages if "noise alone" in line)
    assert told == "round 1: 1 of 4 updates are noise alone: no record had a gradient"


# ---------------------------------------------------------------- prompts with responses

ROWS = [{"q": f"What is flu {'rash ' * i}?", "a": f"A {'viral ' * (i % 5)}disease."} for i in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def bench(folder, tmp_path):
    def build(rows=ROWS, **changes) -> Workbench:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {"prompt_column": "q", "response_column": "a", "data": str(path), "test_data": str(path)}
        keys |= {"model": str(folder), "num_clients": 1, "sampling_probability": 0.5, "max_length": 60}
        keys |= {"public_data": True, "base_dtype": "float32", "device": "cpu", "memory_limit_mb": 8}
        return Workbench(parse({**keys, **changes}))

    return build


def chat(*contents):
    """A record of user and assistant turns, alternating."""
    return {"m": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def test_a_response_that_is_empty_or_cut_away_is_drawn_and_has_no_gradient(bench):
    rows = [chat(row["q"], row["a"]) for row in ROWS]
    rows = [*rows[:5], chat("flu", " "), *rows[5:], chat(*["flu"] * 20)]
    made = bench(rows, prompt_column="", response_column="", messages_column="m")
    records = made.client(0)
    assert records.unusable is not None
    broken = torch.nonzero(records.unusable).flatten().tolist()
    assert len(broken) == 2
    (found,) = update(made.model, records)
    rest = without(without(records, broken[1]), broken[0])
    assert torch.equal(found, *update(made.model, rest))
    assert not torch.equal(found, *update(made.model, without(rest, 0)))


def test_what_is_learned_is_in_one_piece_at_the_end_and_runs_with_other_prompts_do_not_share_it(bench):
    made = bench()
    records = made.client(0)
    for ids, mask in zip(records.features["input_ids"], records.features[RESPONSE_MASK], strict=True):
        assert mask.diff().clamp_min(0).sum() == 1
        assert int(mask[-1]) == 1
        assert len(ids) == len(mask)
    others = {"system_prompt": "You are kind.", "prompt_template": "a {}", "max_records": 3, "response_column": "q"}
    for key, value in others.items():
        assert workbench._key(made.config, None) != workbench._key(replace(made.config, **{key: value}), None)


@pytest.mark.parametrize("rows", [ROWS, [{"q": "flu", "a": ""}] * 4])
def test_every_set_of_records_has_the_same_features(bench, rows):
    made = bench(rows)
    assert made.features == ("input_ids", RESPONSE_MASK)
    for records in (made.client(0), made.tokenize(made.data.test), made.no_records):
        assert tuple(records.features) == made.features


def test_a_nodes_log_says_how_many_records_are_cut_or_cannot_be_learned_from(bench, caplog):
    rows = [*ROWS, {"q": "flu", "a": "rash " * 99}, {"q": "rash " * 99, "a": "flu"}, {"q": "flu", "a": ""}]
    with caplog.at_level(logging.WARNING):
        bench(rows).client(0)
    assert "client 0: 1 of 14 records have nothing to train on" in caplog.text
    assert "client 0: 1 of 14 records are cut to 60 tokens" in caplog.text
    assert "client 0: 1 of 14 records fill all 60 tokens, so their prompts may be cut" in caplog.text


def test_a_model_without_a_template_or_too_little_room_is_refused_before_records_are_read(bench, folder, tmp_path):
    with pytest.raises(InputError, match="max_length = 9: must be at least"):
        bench(max_length=9)
    bare = chat_model(tmp_path / "bare")
    chat_tokenizer(None).save_pretrained(bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InputError, match="has no chat template"):
        bench(model=str(bare))


def test_a_test_set_without_a_response_is_refused_in_one_line(bench, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps({"q": "flu", "a": " "}) + "\n")
    with pytest.raises(InputError, match=r"^test_data: none of the 1 test records can be learned from"):
        bench(test_data=str(path)).test  # noqa: B018


def test_synthetic_records_are_learned_whole_and_of_canaries_the_last_token(bench):
    made = bench()
    synthetic = synthetic_records(made.model, max_length=60, num_labels=0, features=made.features)
    plan = {"num": 3, "num_labels": 0, "vocabulary": 100, "num_tokens": 8}
    canaries = random_token_canaries(made.client(0), **plan, source=SeededSource("test"))
    pairs = zip(synthetic.features["input_ids"], synthetic.features[RESPONSE_MASK], strict=True)
    assert all(torch.equal(mask, torch.ones_like(ids)) for ids, mask in pairs)
    assert [mask.tolist() for mask in canaries.features[RESPONSE_MASK]] == [[0] * 7 + [1]] * 3
    assert len({int(row[-1]) for row in canaries.features["input_ids"]}) == 3
