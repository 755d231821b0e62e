"""A base in 4 bits: gradients are exact for it, records stay apart, and whatever it cannot do is said in one line."""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("bitsandbytes", reason="the extra quantized is not installed")

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.adapters import _base_formats as base_formats
from fedpriv.learning.adapters._arithmetic import Product
from fedpriv.learning.adapters._base_formats import is_quantised, quantise
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import collate
from fedpriv.learning.training._admission import _records_are_independent, in_format
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from fedpriv.learning.training.workbench import load_model
from server.observer import LogObserver
from simulations.engines import federation
from tests import architectures
from tests.architectures import ENCODERS, random_base
from tests.learning.training.test_per_sample import assert_equal_to_loop, forward_losses, left_padded, looped_gradients
from tests.tiny import move, random_records

CPU = torch.device("cpu")
# Whole blocks of 64 values.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def peft_model(kind, *, in_nf4=True, layers="all"):
    base = random_base(kind, **SIZES)
    if in_nf4:
        quantise(kind, base.model, CPU)
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    return move(attach(base, LoraSettings(rank=4, layers=layers, task=task)))


def training_model(kind, **options):
    model = peft_model(kind, **options)
    return in_format(model, "nf4", partial(TrainingModel, model, memory_limit=2**23, max_length=40))


def records_for(kind, num=6):
    return random_records(num, classes=3 if kind in ENCODERS else 0, vocabulary=50, shortest=4, longest=30)


def gradients(model, records, *, cached=False):
    found, _ = per_sample_gradients(model.layers, lambda: model.predictions(records.items(), cached=cached).losses)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("num", [1, 6])
def test_causal_gradients_equal_the_loop(num, padding):
    batch = collate(records_for("llama", num).items())
    assert_equal_to_loop(peft_model("llama"), left_padded(batch) if padding == "left" else batch)


def test_encoder_gradients_equal_the_loop():
    assert_equal_to_loop(peft_model("bert"), collate(records_for("bert").items()))


def assert_left_equals_right(model, batch):
    """Single records that transformers pads on the left have the gradients of a batch that is padded on the right."""
    found, _ = per_sample_gradients(
        TrainingModel(model, memory_limit=2**30).layers, lambda: forward_losses(model, batch)
    )
    expected = looped_gradients(model, left_padded(batch))
    for name in found:
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], atol=2e-5 * max(1.0, scale), rtol=1e-3, msg=name)


@pytest.mark.parametrize("in_nf4", [False, True], ids=["float32", "nf4"])
def test_the_side_of_the_padding_does_not_matter(in_nf4):
    batch = collate(records_for("llama").items())
    assert not batch["attention_mask"].all()
    assert_left_equals_right(peft_model("llama", in_nf4=in_nf4), batch)


@pytest.mark.parametrize(
    "cached", [pytest.param(False, id="whole model"), pytest.param(True, id="prefix cache", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_records_that_share_passes_change_one_another_by_rounding_alone(kind, cached):
    model = training_model(kind, layers="last-1" if cached else "all")
    assert (model.cache is not None) == cached
    assert _records_are_independent(model, cached=cached)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_it_is_the_same_model_up_to_four_bits(kind):
    records = records_for(kind, 16)
    expected, found = (gradients(training_model(kind, in_nf4=flag), records) for flag in (False, True))
    cosines = torch.nn.functional.cosine_similarity(found, expected)
    assert 0.8 < cosines.mean() < 0.9999


def test_what_was_computed_before_does_not_matter():
    """A pass without gradients, which bitsandbytes may compute by another kernel, changes neither it nor the others."""
    records = records_for("llama")
    model = training_model("llama", layers="last-1")
    expected = gradients(model, records)
    before = {n: p.clone() for n, p in model.peft_model.named_parameters() if p.dtype == torch.uint8}
    with torch.no_grad():
        found, _ = model.logits(records.items(), cached=False)
    assert torch.equal(found, model.logits(records.items(), cached=False)[0].detach())
    weights = {n: p for n, p in model.peft_model.named_parameters() if p.dtype == torch.uint8}
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert torch.equal(gradients(model, records), expected)
    cached = gradients(model, records, cached=True)
    torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-4)


def test_only_linear_layers_of_the_body_are_quantised():
    for kind, num_quantised in (("llama", 14), ("bert", 12)):
        model = training_model(kind)
        in_bytes = [name for name, p in model.peft_model.named_parameters() if p.dtype == torch.uint8]
        assert len(in_bytes) == num_quantised + (kind == "bert"), "bert has a pooler"
        others = {p.dtype for name, p in model.peft_model.named_parameters() if name not in in_bytes}
        assert others == {torch.float32}
        assert not any(part in name for name in in_bytes for part in ("embed", "lm_head", "classifier", "lora_"))
        assert model.base_dtype == torch.float32
        assert model.base_dtype_name == "nf4"


def test_layers_of_broken_blocks_stay_as_they_are():
    model = random_base("llama", **(SIZES | {"intermediate_size": 96})).model
    quantise("llama", model, CPU)
    in_bytes = {name.split(".")[-2] for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert in_bytes == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


@pytest.fixture
def in_bfloat16(tiny_bert, tmp_path):
    """Folder of a tiny llama whose checkpoint is in bfloat16."""
    model = architectures.random_model("llama", **SIZES).to(torch.bfloat16)
    return architectures.save(model, tmp_path / "llama", tokenizer_of=tiny_bert)


def test_a_checkpoint_in_bfloat16_is_quantised_as_it_is_and_the_rest_becomes_float32(in_bfloat16):
    config = RunConfig(model=str(in_bfloat16), task="CAUSAL_LM", base_dtype="nf4", device="cpu")
    _, model = load_model(config, labels=())
    layer = model.peft_model.get_base_model().model.layers[0].mlp.up_proj
    exact = load_base(str(in_bfloat16), task="CAUSAL_LM").model.model.layers[0].mlp.up_proj.weight
    from bitsandbytes.functional import dequantize_4bit

    error = dequantize_4bit(layer.weight, layer.weight.quant_state).float() - exact
    assert 0 < error.norm() / exact.norm() < 0.12
    floats = [p for p in model.peft_model.parameters() if p.is_floating_point()]
    assert {p.dtype for p in floats} == {torch.float32}


def test_a_run_is_trained_and_says_its_format(small_run, in_bfloat16, tmp_path):
    model = {"model": str(in_bfloat16), "task": "CAUSAL_LM", "base_dtype": "nf4", "max_length": 16}
    federation.run(RunConfig(**(small_run | model), out=str(tmp_path / "runs")), LogObserver())
    (written,) = tmp_path.rglob("config.toml")
    assert 'base_dtype = "nf4"' in written.read_text()


def test_nothing_is_added_to_weights_in_four_bits():
    model = training_model("llama")
    name = next(name for name in model.layers if ".lora_A." in name).split(".lora_A.")[0]
    layer = model.peft_model.get_submodule(name)
    product = Product(torch.ones(layer.out_features, 1), torch.ones(1, layer.in_features))
    with pytest.raises(ValueError, match=r"merged: nothing can be added to weights in 4 bits"):
        model.merge({name: product})
    model.merge({})


def test_rules_that_touch_the_frozen_weights_are_refused():
    for name in RULES:
        if name in ("dp-lora", "ffa-lora", "rolora", "fedsvd"):
            RunConfig(base_dtype="nf4", aggregation=name)
        else:
            with pytest.raises(ValueError, match=f"base_dtype = nf4: aggregation = {name}"):
                RunConfig(base_dtype="nf4", aggregation=name)


def test_without_the_package_one_line_says_so(monkeypatch):
    monkeypatch.setattr(base_formats.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"^base_dtype = nf4: needs bitsandbytes; [^\n]*$"):
        quantise("llama", random_base("llama", **SIZES).model, CPU)


def test_a_bitsandbytes_that_does_not_work_here_is_said_in_one_line(monkeypatch):
    def fail(*_args):
        raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setattr("bitsandbytes.nn.Params4bit._quantize", fail)
    with pytest.raises(
        InputError, match=r"^base_dtype = nf4: bitsandbytes does not work on cpu here \(no kernel\)[^\n]*$"
    ):
        quantise("llama", random_base("llama", **SIZES).model, CPU)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(InputError, match=r"base_dtype = nf4: model 'gpt2', a gpt2, has no linear layer whose"):
        quantise("gpt2", random_base("gpt2").model, CPU)


def test_a_model_without_uint8_parameters_is_not_quantised():
    assert is_quantised(peft_model("llama"))
    assert not is_quantised(nn.Linear(2, 2))
