"""A saved adapter names its base as others know it, with the digest of its weights, and loads where that is found."""

import hashlib
import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, save
from fedpriv.learning.adapters._locations import check_weights, public_name, weights_digests
from tests.tiny import BATCH, LABELS, move

HUB = "sentence-transformers/all-MiniLM-L6-v2"
COMMIT = "0" * 40


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


def test_no_file_of_an_adapter_names_a_folder_of_this_machine(saved, tiny_bert):
    _, folder = saved
    for path in folder.glob("*.json"):
        assert str(tiny_bert.parent) not in path.read_text()
    convention = json.loads((folder / "fedpriv.json").read_text())
    assert convention["base_model"] == tiny_bert.name
    expected = hashlib.sha256((tiny_bert / "model.safetensors").read_bytes()).hexdigest()
    assert convention["base_weights"] == {"model.safetensors": expected}


def test_a_loaded_adapter_has_labels_in_words(saved, tiny_bert):
    model, folder = saved
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


@pytest.mark.parametrize("key", ["base_model", "base_weights", "labels", "pooling"])
def test_an_adapter_that_says_too_little_of_itself_is_refused_in_one_line(saved, tiny_bert, key):
    _, folder = saved
    convention = json.loads((folder / "fedpriv.json").read_text())
    del convention[key]
    (folder / "fedpriv.json").write_text(json.dumps(convention))
    with pytest.raises(InputError, match=r"fedpriv\.json: damaged; it needs pooling, one of mean, .* base_weights$"):
        fedpriv.learning.adapters.load(str(tiny_bert), folder)


def test_peft_finds_the_base_by_its_hub_name_and_has_the_labels_of_the_file(saved, tiny_bert, tmp_path):
    _, folder = saved
    repository = tmp_path / "hub" / "models--sentence-transformers--tiny"
    shutil.copytree(tiny_bert, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "sentence-transformers/tiny"
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    labels = json.loads((folder / "fedpriv.json").read_text())["labels"]
    model = AutoPeftModelForSequenceClassification.from_pretrained(
        folder,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        cache_dir=tmp_path / "hub",
    )
    assert model.config.id2label == dict(enumerate(LABELS))
    trained = fedpriv.learning.adapters.load(str(tiny_bert), folder)
    head = "base_model.model.classifier.modules_to_save.default.weight"
    assert torch.equal(model.get_parameter(head), trained.get_parameter(head))
