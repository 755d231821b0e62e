"""A folder of sentence-transformers is read as it describes itself; what is not read there is refused in one line."""

import json
import shutil

import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import ApprovedModel, is_unchanged_model
from fedpriv.learning.adapters import load_base, model_digest, pooling
from fedpriv.learning.adapters._base_models import load_tokenizer
from fedpriv.learning.data.records import check_max_length
from fedpriv.learning.training.workbench import load_frozen

TYPE = "sentence_transformers.models."
MODULES = [
    {"idx": number, "name": str(number), "path": path, "type": TYPE + kind}
    for number, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
]
POOLING, LENGTH, PROMPTS = "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.fixture
def folder(tiny_bert, tmp_path):
    made = shutil.copytree(tiny_bert, tmp_path / "model")
    (made / "1_Pooling").mkdir()
    write(made, {"modules.json": MODULES, POOLING: {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}})
    return made


def write(folder, files):
    for name, values in files.items():
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_the_pooling_of_the_folder_is_that_of_its_library(folder, settings, kind):
    write(folder, {POOLING: {"word_embedding_dimension": 64, **settings}, LENGTH: {"max_seq_length": 9}})
    write(folder, {PROMPTS: {"prompts": {"classification": "a rash: ", "query": "b"}, "default_prompt_name": "query"}})
    base = load_base(str(folder), task="SEQ_CLS", num_labels=3, normalize=True)
    assert (base.pooling, base.longest) == (f"unit-{kind}", 9)
    text = "The patient has PAIN in the chest today and a rash on the skin"
    tokens = base.tokenizer(text, truncation=True, max_length=9, return_tensors="pt")
    found, _ = pooling.vectors(base.model, **tokens)
    expected = SentenceTransformer(str(folder), device="cpu").encode(text, prompt_name="classification")
    assert found[0].tolist() == pytest.approx((expected * pooling.STATE_SCALE).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("prompts", "first"),
    [
        ({}, ""),
        ({"query": "query: ", "passage": "passage: "}, "query: "),
        ({"query": "", "document": ""}, ""),
        ({"default": "skin "}, "skin "),
    ],
)
def test_the_prompt_is_that_of_classification_else_the_default_else_query(folder, prompts, first):
    write(folder, {PROMPTS: {"prompts": prompts, "default_prompt_name": "default" if "default" in prompts else None}})
    assert pooling.described(str(folder)).prompt == first


def test_lower_case_and_a_prompt_are_the_tokenizers_own_when_it_is_saved_and_leave_the_side_of_the_cut(
    folder, tmp_path
):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, {"tokenizer_config.json": {**settings, "truncation_side": "left"}})
    write(folder, {LENGTH: {"do_lower_case": True}, PROMPTS: {"prompts": {"query": "pain "}}})
    tokenizer = load_tokenizer(str(folder))
    tokenizer.save_pretrained(tmp_path / "saved")
    again, plain = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "saved", folder))
    assert again("A rash")["input_ids"] == tokenizer("A rash")["input_ids"] == plain("pain a rash")["input_ids"]
    cut = tokenizer("a rash today", truncation=True, max_length=4)["input_ids"]
    assert cut == plain("rash today")["input_ids"]


@pytest.mark.parametrize(("most", "pairs"), [(8, False), (15, True)])
def test_a_prompt_that_leaves_no_room_for_a_text_is_refused(folder, most, pairs):
    write(folder, {PROMPTS: {"prompts": {"query": "pain " * 6}}})
    tokenizer = load_tokenizer(str(folder))
    check_max_length(tokenizer, most + 1 + pairs, pairs=pairs)
    with pytest.raises(InputError, match=f"max_length = {most}: must be at least .* prompt"):
        check_max_length(tokenizer, most, pairs=pairs)


def test_every_file_that_decides_how_texts_are_read_is_in_the_digest_of_the_model(folder):
    write(folder, {LENGTH: {}, PROMPTS: {}})
    for file in ("modules.json", POOLING, LENGTH, PROMPTS, "tokenizer.json", "tokenizer_config.json"):
        model = ApprovedModel(name="own", folder=str(folder), digest=model_digest(folder))
        tokens = model_digest(folder, weights=False)
        assert is_unchanged_model(model)
        write(folder, {file: (folder / file).read_text() + " "})
        assert not is_unchanged_model(model)
        assert model_digest(folder, weights=False) != tokens, "kept tokens would be those of another reading"


def test_longer_records_than_its_texts_are_refused(folder):
    write(folder, {LENGTH: {"max_seq_length": 16}})
    config: RunConfig = parse({"model": str(folder), "max_length": 17})
    with pytest.raises(InputError, match=r"max_length = 17: model .* reads 16 tokens at most.*; use 16") as caught:
        load_frozen(config, config.model, task="SEQ_CLS", labels=("a", "b"), normalize=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("modules.json", "[", "modules.json is no JSON array"),
        ("modules.json", {}, "modules.json is no JSON array"),
        ("modules.json", "[" * 100_000, "modules.json is no JSON array"),
        ("modules.json", [*MODULES, {"path": "3_Dense", "type": TYPE + "Dense"}], "has .*Dense'; only Transformer"),
        ("modules.json", [{**MODULES[0], "type": "my_code.Transformer"}, MODULES[1]], "'my_code.Transformer'"),
        ("modules.json", [MODULES[0]], "only Transformer, Pooling and Normalize"),
        ("modules.json", [1, None], "only Transformer, Pooling and Normalize"),
        ("modules.json", [MODULES[0], {**MODULES[1], "path": "../1_Pooling"}], "its Pooling in one below"),
        ("modules.json", [{**MODULES[0], "path": "0_Transformer"}, MODULES[1]], "in the folder itself"),
        (POOLING, [], "is no JSON object"),
        (POOLING, {}, "one of mean, cls, max, last alone is read"),
        (POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "alone is read"),
        (POOLING, {"pooling_mode": ["mean", "max"]}, "alone is read"),
        (POOLING, {"pooling_mode": {"a": 1}}, "alone is read"),
        (POOLING, {"pooling_mode_mean_tokens": "yes"}, "alone is read"),
        (POOLING, {"pooling_mode_weightedmean_tokens": True}, r"has pooling \['weightedmean_tokens'\]"),
        *((LENGTH, {"max_seq_length": value}, "max_seq_length") for value in (0, -1, 10**9, True, "64", [], 1.5)),
        *((PROMPTS, {"prompts": {"query": value}}, "delete it") for value in ("a\nb", "\u2028", "x" * 2000, 3, ["a"])),
        (PROMPTS, {"prompts": 3}, "delete it"),
        (PROMPTS, {"prompts": ["query: "]}, "delete it"),
    ],
)
def test_a_value_that_no_such_folder_has_is_refused_in_one_short_line(folder, file, values, said):
    write(folder, {file: values})
    for load in (load_tokenizer, lambda name: load_base(name, task="SEQ_CLS", num_labels=2)):
        with pytest.raises(InputError, match=said) as caught:
            load(str(folder))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
