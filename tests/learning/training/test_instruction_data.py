"""Training on prompts with responses: only what is learned has a gradient, and a record without it still counts."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.training import workbench
from fedpriv.learning.training.canaries import random_token_canaries
from fedpriv.learning.training.rehearsal import synthetic_records
from fedpriv.learning.training.workbench import Workbench
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.chats import chat_model, chat_tokenizer
from tests.learning.training.test_isolation import update, without

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
    canaries = random_token_canaries(
        made.client(0), num=3, num_labels=0, vocabulary=100, num_tokens=8, source=SeededSource("test")
    )
    pairs = zip(synthetic.features["input_ids"], synthetic.features[RESPONSE_MASK], strict=True)
    assert all(torch.equal(mask, torch.ones_like(ids)) for ids, mask in pairs)
    assert [mask.tolist() for mask in canaries.features[RESPONSE_MASK]] == [[0] * 7 + [1]] * 3
    assert len({int(row[-1]) for row in canaries.features["input_ids"]}) == 3
