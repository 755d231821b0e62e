"""A base is found, read as its folder describes it, and named in a saved adapter as others know it.

An adapter names the digest of its base's weights and loads where these are found. A folder of sentence-transformers has
the pooling, length and prompt that it states; what is not read there is refused in one line.
"""

import hashlib
import io
import json
import runpy
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

import fedpriv.learning.adapters
from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import ApprovedModel, is_unchanged_model
from fedpriv.learning.adapters import LoraSettings, attach, check_model, load_base, model_digest, pooling, save
from fedpriv.learning.adapters import _locations as locations
from fedpriv.learning.adapters._base_models import load_tokenizer
from fedpriv.learning.adapters._locations import check_weights, public_name, weights_digests
from fedpriv.learning.data.records import check_max_length
from fedpriv.learning.training.workbench import load_frozen
from tests.tiny import BATCH, LABELS, move

HUB = "sentence-transformers/all-MiniLM-L6-v2"
MPNET = ("mpnet", "all-mpnet-base-v2", "sentence-transformers/all-mpnet-base-v2")


def test_a_base_is_called_what_others_call_it_and_never_by_a_path():
    expected = {
        "all-MiniLM-L6-v2": HUB,
        HUB: HUB,
        "SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "google-bert/bert-base-uncased": "google-bert/bert-base-uncased",
        "/home/anna/models/bert": "bert",
        "~anna/models/bert": "bert",
        "./models/bert": "bert",
        "models/small.gguf": "small.gguf",
        **dict.fromkeys(MPNET, MPNET[-1]),
    }
    assert {name: public_name(name) for name in expected} == expected


@pytest.fixture
def saved(base, tmp_path):
    model = move(attach(base, LoraSettings(rank=2)))
    save(model, base, tmp_path / "adapter", labels=LABELS)
    return model, tmp_path / "adapter"


def test_a_saved_adapter_names_no_folder_of_this_machine_and_has_labels_in_words(saved, tiny_bert):
    model, folder = saved
    for path in folder.glob("*.json"):
        assert str(tiny_bert.parent) not in path.read_text()
    convention = json.loads((folder / "fedpriv.json").read_text())
    assert convention["base_model"] == tiny_bert.name
    expected = hashlib.sha256((tiny_bert / "model.safetensors").read_bytes()).hexdigest()
    assert convention["base_weights"] == {"model.safetensors": expected}
    loaded = fedpriv.learning.adapters.load(str(tiny_bert), folder)
    assert loaded.config.id2label == dict(enumerate(LABELS))
    assert loaded.config.label2id == {label: index for index, label in enumerate(LABELS)}
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)


def test_other_weights_than_those_of_the_training_are_refused(saved, tiny_bert, tmp_path):
    _, folder = saved
    other = shutil.copytree(tiny_bert, tmp_path / tiny_bert.name)
    check_weights(str(other), weights_digests(str(tiny_bert)))
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="its weights are not those that this adapter was trained on"):
        fedpriv.learning.adapters.load(str(other), folder)


def test_an_adapter_of_another_origin_or_version_or_that_says_too_little_of_itself_is_refused(saved, tiny_bert):
    file = saved[1] / "fedpriv.json"
    convention = json.loads(file.read_text())
    damaged = r"fedpriv\.json: damaged; it needs pooling, one .* base_weights$"
    for key in ("base_model", "base_weights", "labels", "pooling"):
        file.write_text(json.dumps({k: v for k, v in convention.items() if k != key}))
        with pytest.raises(InputError, match=damaged):
            fedpriv.learning.adapters.load(str(tiny_bert), file.parent)
    file.write_text('{"version": 2}')
    with pytest.raises(InputError, match="version 2"):
        fedpriv.learning.adapters.load(str(tiny_bert), file.parent)
    file.unlink()
    with pytest.raises(InputError, match=r"fedpriv\.json: missing"):
        fedpriv.learning.adapters.load(str(tiny_bert), file.parent)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 90868376\n"


def pointer(folder, name="model.safetensors"):
    (folder / name).write_bytes(POINTER)


def half(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def gptq(folder):
    settings = json.loads((folder / "config.json").read_text())
    packed = {**settings, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(packed))


def beside_its_adapter(folder):
    shutil.copy(folder / "config.json", folder / "adapter_config.json")
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pointer, "model.safetensors is a pointer of Git LFS to a file that is not here; .*`git lfs pull`"),
        (lambda folder: pointer(folder, "config.json"), "config.json is a pointer of Git LFS"),
        (half, r"model.safetensors is damaged or only a part \(.*\); fetch it again"),
        (gptq, r"config.json says that its weights are quantised \(gptq\); use the weights .* base_dtype = .nf4."),
        (beside_its_adapter, "adapter_config.json is that of an adapter; .*delete this file and adapter_model.safeten"),
    ],
    ids=["lfs", "lfs of config", "half", "gptq", "adapter"],
)
def test_a_folder_that_is_no_whole_model_is_one_line_with_its_file_and_its_cure(tiny_bert, tmp_path, damage, message):
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    check_model(str(folder))
    damage(folder)
    for look in (lambda: check_model(str(folder)), lambda: model_digest(folder)):
        with pytest.raises(InputError, match=message) as caught:
            look()
        assert "\n" not in str(caught.value)


def test_mpnet_has_three_names_and_one_folder_or_is_the_hubs(tmp_path, monkeypatch):
    monkeypatch.setattr(locations.sys, "prefix", str(tmp_path))
    for name in MPNET[:2]:
        with pytest.raises(InputError, match="is not here; run `make mpnet`"):
            locations.locate(name)
    assert locations.locate(MPNET[-1]) is None
    folder = tmp_path / "share" / "fedpriv" / "all-mpnet-base-v2"
    folder.mkdir(parents=True)
    assert {locations.locate(name) for name in MPNET} == {folder}


def test_parts_are_joined_in_order_checked_and_unpacked_whole(tmp_path):
    unpack = runpy.run_path(str(Path(__file__).parents[3] / ".ci" / "unpack_parts.py"))["unpack"]
    whole, out = io.BytesIO(), tmp_path / "share" / "model"
    with zipfile.ZipFile(whole, "w") as archive:
        for name in ("model/config.json", "model/1_Pooling/config.json", "model/desktop.ini"):
            archive.writestr(name, name * 100)
    content = whole.getvalue()
    for number in (2, 1):
        with zipfile.ZipFile(tmp_path / f"part_{number}.whl", "w") as wheel:
            wheel.writestr(f"part/input/model.zip.00{number}", content[:700] if number == 1 else content[700:])
            wheel.writestr("part/__init__.py", "raise ImportError")
    with pytest.raises(SystemExit, match=r"an archive with SHA-256 .*, not 00"):
        unpack(tmp_path, out, "00")
    assert not out.exists()
    unpack(tmp_path, out, hashlib.sha256(content).hexdigest())
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == ["1_Pooling/config.json", "config.json"]
    assert (out / "config.json").read_text() == "model/config.json" * 100


# ---------------------------------------------------------------- as its folder describes it

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


def test_the_prompt_is_that_of_classification_else_the_default_else_query(folder):
    """The test above has one of classification beside the default."""
    for prompts, default, first in (
        ({}, None, ""),
        ({"query": "query: ", "passage": "passage: "}, None, "query: "),
        ({"query": "", "document": ""}, None, ""),
        ({"default": "skin "}, "default", "skin "),
    ):
        write(folder, {PROMPTS: {"prompts": prompts, "default_prompt_name": default}})
        assert pooling.described(str(folder)).prompt == first


def test_lower_case_and_a_prompt_are_the_saved_tokenizers_own_and_leave_the_side_of_the_cut(folder, tmp_path):
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
