"""The frozen base in bfloat16: what is trained stays float32, records stay apart, and gradients stay what they were."""

from functools import partial

import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.adapters import _base_formats as base_formats
from fedpriv.learning.adapters._arithmetic import Merged, Product
from fedpriv.learning.adapters._base_formats import base_dtype, frozen_base, restore_float32, to_bfloat16
from fedpriv.learning.training import _admission as admission
from fedpriv.learning.training._admission import _records_are_independent, in_format
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from tests.architectures import DECODERS, ENCODERS, TARGETS, random_base
from tests.marks import slow
from tests.tiny import move, random_records

# What no bfloat16 pass on a CPU can do: a Fourier transform, and experts' products, whose sizes depend on the records.
WITHOUT = {"fnet"}


def peft_model(kind, *, layers="all", trains="lora", normalize=False):
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = LoraSettings(rank=4, layers=layers, task=task, target_modules=TARGETS.get(kind, ()), trains=trains)
    return move(attach(random_base(kind, normalize=normalize), settings))


def build(model, **options):
    return partial(TrainingModel, model, memory_limit=2**22, max_length=40)(**options)


def in_bfloat16(kind, **options):
    model = peft_model(kind, **options)
    return in_format(model, "bfloat16", partial(build, model))


def records_for(kind):
    return random_records(16, classes=3 if kind in ENCODERS else 0, seed=0, vocabulary=50, shortest=4, longest=30)


def gradients(model, records, *, cached=False):
    def losses():
        return model.predictions(records.items(), cached=cached).losses

    found, values = per_sample_gradients(model.layers, losses)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1), values


def cases():
    kinds = [kind for kind in (*ENCODERS, *DECODERS) if kind not in WITHOUT and kind != "mixtral"]
    return [pytest.param(kind, marks=[] if kind == "bert" else pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", cases())
def test_gradients_are_those_of_float32_up_to_rounding(kind):
    records = records_for(kind)
    (expected, losses), (found, found_losses) = (
        gradients(model, records) for model in (build(peft_model(kind)), in_bfloat16(kind))
    )
    assert found.dtype == found_losses.dtype == torch.float32
    assert not torch.equal(found, expected), "the base did not compute in bfloat16"
    torch.testing.assert_close(found_losses, losses, rtol=0.02, atol=0.02)
    cosines = torch.nn.functional.cosine_similarity(found, expected)
    assert cosines.min() > 0.97


@pytest.mark.parametrize("cached", [False, True], ids=["whole model", "prefix cache"])
@pytest.mark.parametrize("kind", cases())
def test_records_that_share_passes_change_one_another_by_rounding_alone(kind, cached):
    model = in_bfloat16(kind, layers="last-1" if cached else "all")
    if cached and model.cache is None:
        pytest.skip(f"{kind} has no frozen prefix")
    assert _records_are_independent(model, cached=cached)


@pytest.mark.parametrize(
    "trains",
    ["lora", "head", *slow("lora-b", "lora-r", "weights")],
)
@pytest.mark.parametrize("normalize", [False, True], ids=["as it is", "normalised"])
def test_only_the_frozen_base_is_converted(trains, normalize):
    model = in_bfloat16("bert", trains=trains, normalize=normalize)
    frozen = frozen_base(model.peft_model)
    for name, parameter in model.peft_model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if name in frozen else torch.float32), name
    assert all(tensor.dtype == torch.float32 for tensor in model.initial.values())
    found, _ = gradients(model, records_for("bert"))
    assert found.dtype == torch.float32
    assert found.abs().sum() > 0


def test_what_a_head_reads_is_not_rounded_to_bfloat16():
    model = in_bfloat16("bert", normalize=True)
    records = records_for("bert")
    read = []
    model.layers[model.head].module.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model.logits(records.items(), cached=False)
    (features,) = read
    assert features.dtype == torch.float32
    assert not torch.equal(features, features.bfloat16().float())


def test_restoring_gives_the_same_bits_as_before():
    model = peft_model("bert")
    records = records_for("bert")
    expected, _ = gradients(build(model), records)
    attention = model.config._attn_implementation
    before = to_bfloat16(model)
    assert model.config._attn_implementation == "eager"
    restore_float32(model, before)
    assert base_dtype(model) == torch.float32
    assert model.config._attn_implementation == attention
    assert torch.equal(gradients(build(model), records)[0], expected)


def test_whatever_a_run_trains_one_file_serves(tmp_path, monkeypatch):
    """A coordinator chooses layers, targets and rules: each must not leave another copy of the base on a node."""
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path))
    monkeypatch.setattr(base_formats, "_LEAST_BYTES", 1)
    for trains, layers in (("lora", "all"), ("lora", "last-1"), ("lora-r", "1"), ("weights", "all"), ("head", "all")):
        to_bfloat16(peft_model("bert", layers=layers, trains=trains))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_that_computes_in_neither_is_left_to_others(monkeypatch):
    def fail(*_):
        raise RuntimeError("no pass")

    monkeypatch.setattr(admission, "_LEAST_WIDTH", 1)
    monkeypatch.setattr(admission, "_seconds_of_a_pass", fail)
    model = peft_model("bert")
    assert in_format(model, "auto", partial(build, model)).base_dtype == torch.float32


def test_the_prefix_cache_takes_half_the_memory_and_gives_the_same_bits():
    records = records_for("bert")
    sizes = {}
    for wanted in ("float32", "bfloat16"):
        peft = peft_model("bert", layers="last-1")
        model = in_format(peft, wanted, partial(build, peft))
        whole, cached = (gradients(model, records, cached=flag)[0] for flag in (False, True))
        torch.testing.assert_close(cached, whole, atol=1e-5, rtol=0.05)
        sizes[wanted] = model.cache.bytes_in_memory
    assert sizes["float32"] == 2 * sizes["bfloat16"] > 0


def test_states_beyond_memory_go_to_a_file_and_come_back_the_same():
    records = records_for("bert")
    found = []
    for limit in (2**30, 1):
        peft = peft_model("bert", layers="last-1")
        model = in_format(peft, "bfloat16", partial(TrainingModel, peft, memory_limit=limit, max_length=40))
        found.append(gradients(model, records, cached=True)[0])
        assert (model.cache.bytes_in_memory == 0) == (limit == 1)
    assert torch.equal(*found)


def test_additions_too_small_for_bfloat16_show_on_average():
    model = in_bfloat16("bert")
    name = next(name for name in model.layers if ".lora_A." in name).split(".lora_A.")[0]
    layer = model.peft_model.get_submodule(name)
    before, width = layer.get_base_layer().weight.clone(), layer.in_features
    # A hundredth of what would be needed to change most of the weights.
    added = 2.0**-9 * before.float().abs().mean() / 100
    product = Product(torch.full((layer.out_features, 1), float(added)), torch.ones(1, width))
    merged: Merged = {name: product}
    model.merge(merged)
    moved = (layer.get_base_layer().weight.float() - before.float()).mean()
    assert moved == pytest.approx(float(added) * layer.scaling["default"], rel=0.5)
    model.merge({})
    assert torch.equal(layer.get_base_layer().weight, before)


def test_a_model_that_cannot_is_refused_by_name_or_stays_in_float32(monkeypatch):
    with pytest.raises(InputError, match=r"base_dtype = bfloat16: a fnet model .* use float32"):
        in_bfloat16("fnet")
    monkeypatch.setattr(admission, "_LEAST_WIDTH", 1)
    model = peft_model("fnet")
    records = records_for("fnet")
    assert in_format(model, "auto", partial(build, model)).base_dtype == torch.float32
    assert gradients(build(model), records)[0].abs().sum() > 0


@pytest.mark.parametrize(("share", "expected"), [(0.5, torch.bfloat16), (0.9, torch.float32)])
def test_auto_takes_bfloat16_only_where_it_saves_enough(monkeypatch, caplog, share, expected):
    monkeypatch.setattr(admission, "_LEAST_WIDTH", 1)
    times = {torch.float32: 1.0, torch.bfloat16: share}
    monkeypatch.setattr(admission, "_seconds_of_a_pass", lambda model, _build: times[base_dtype(model)])
    model = peft_model("bert")
    with caplog.at_level("INFO"):
        assert in_format(model, "auto", partial(build, model)).base_dtype == expected
    assert f"takes {share:.2f} of the time" in caplog.text


def test_auto_leaves_narrow_models_in_float32_without_timing(monkeypatch):
    monkeypatch.setattr(admission, "_seconds_of_a_pass", None)
    model = peft_model("bert")
    assert in_format(model, "auto", partial(build, model)).base_dtype == torch.float32
