"""A model runs on a node once its operator has approved these very files; one that brings code is never approved."""

import json
import shutil
from pathlib import Path

import pytest

from clients.deploy.admission import approve_model
from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import approved_model, is_unchanged_model, read_models
from tests.clients.deploy.conftest import kit


@pytest.fixture
def vault(make_node):
    return make_node().vault


@pytest.fixture
def model(tiny_bert, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "tiny"))


def test_a_folder_is_approved_by_its_path_and_its_digest(vault, model):
    said = kit("approve-model", vault.folder, model)
    approval = approve_model(vault, str(model))
    assert not approval.is_new
    assert approval.num_bytes == sum(file.stat().st_size for file in model.rglob("*"))
    (known,) = read_models(vault.models)
    assert known == approval.model
    assert f"{model} is approved: digest {known.digest}, " in said
    assert known.name == known.folder == str(model)
    assert approved_model(known.digest, (known,)) == known
    assert is_unchanged_model(known)


def test_a_name_stands_for_other_files_only_on_demand(vault, model):
    first = approve_model(vault, str(model), name="ours").model
    (model / "vocab.txt").open("a").write("more\n")
    assert not is_unchanged_model(first)
    with pytest.raises(InputError, match=r"model = 'ours': is approved with other files, .* --replace"):
        approve_model(vault, str(model), name="ours")
    assert read_models(vault.models) == (first,)
    second = approve_model(vault, str(model), name="ours", replace_old=True).model
    assert read_models(vault.models) == (second,)
    assert second.digest != first.digest
    other = approve_model(vault, str(model), name="another").model
    assert read_models(vault.models) == (second, other)


@pytest.mark.parametrize("spoil", ["code", "auto_map", "tokenizer", "pickle", "no config"])
def test_code_pickles_and_halves_of_models_are_refused(vault, model, spoil):
    config = json.loads((model / "config.json").read_text())
    if spoil == "code":
        (model / "sub").mkdir()
        (model / "sub" / "modeling.py").write_text("")
    elif spoil == "auto_map":
        (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling.Mine"}}))
    elif spoil == "tokenizer":
        (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
    elif spoil == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    else:
        (model / "config.json").unlink()
    with pytest.raises(InputError, match="model = "):
        approve_model(vault, str(model))
    assert read_models(vault.models) == ()


def test_the_bundled_encoder_is_found_by_its_name_and_any_other_without_the_hub_is_one_line(vault, monkeypatch):
    known = approve_model(vault, "all-MiniLM-L6-v2").model
    assert known.name == "all-MiniLM-L6-v2"
    assert (Path(known.folder) / "model.safetensors").is_file()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="model = 'nobody/has-this': neither a folder nor a model") as caught:
        approve_model(vault, "nobody/has-this")
    assert "\n" not in str(caught.value)
