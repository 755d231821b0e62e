"""The frozen base in bfloat16 or in 4 bits: gradients are exact for it, records stay apart, and the rest is float32."""

import stat
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.adapters import _base_formats as base_formats
from fedpriv.learning.adapters._arithmetic import Product
from fedpriv.learning.adapters._base_formats import base_dtype, quantise, to_bfloat16
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import collate
from fedpriv.learning.training import _admission as admission
from fedpriv.learning.training._admission import _records_are_independent, in_format
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from fedpriv.learning.training.workbench import load_model
from server.observer import LogObserver
from simulations.engines import federation
from tests import architectures
from tests.architectures import DECODERS, ENCODERS, TARGETS, random_base
from tests.learning.training.test_per_sample import assert_equal_to_loop, forward_losses, left_padded, looped_gradients
from tests.marks import slow
from tests.tiny import move, random_records

in_4_bits = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the extra quantized is not installed")
CPU = torch.device("cpu")
# Whole blocks of 64 values.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
# Other architectures take no bfloat16 pass on a CPU: a Fourier transform, experts whose sizes depend on the records.
KINDS = [
    pytest.param("bert"),
    *slow(*(kind for kind in (*ENCODERS, *DECODERS) if kind not in ("bert", "fnet", "mixtral"))),
]


def adapted(base, kind, *, layers="all", trains="lora"):
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = LoraSettings(rank=4, layers=layers, task=task, target_modules=TARGETS.get(kind, ()), trains=trains)
    return move(attach(base, settings))


def peft_model(kind, *, normalize=False, **options):
    return adapted(random_base(kind, normalize=normalize), kind, **options)


def of_blocks(kind, *, nf4=True, **options):
    """A model of whole blocks, in 4 bits unless told otherwise."""
    base = random_base(kind, **SIZES)
    if nf4:
        quantise(kind, base.model, CPU)
    return adapted(base, kind, **options)


def build(model, memory_limit=2**22, **options):
    return TrainingModel(model, memory_limit=memory_limit, max_length=40, **options)


def in_bfloat16(kind, *, memory_limit=2**22, **options):
    model = peft_model(kind, **options)
    return in_format(model, "bfloat16", partial(build, model, memory_limit))


def in_nf4(kind, **options):
    model = of_blocks(kind, **options)
    return in_format(model, "nf4", partial(build, model))


def records_for(kind, num=16):
    return random_records(num, classes=3 if kind in ENCODERS else 0, vocabulary=50, shortest=4, longest=30)


def gradients(model, records, *, cached=False):
    found, losses = per_sample_gradients(model.layers, lambda: model.predictions(records.items(), cached=cached).losses)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1), losses


# ---------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_float32_up_to_rounding(kind):
    records = records_for(kind)
    expected, losses = gradients(build(peft_model(kind)), records)
    found, found_losses = gradients(in_bfloat16(kind), records)
    assert found.dtype == found_losses.dtype == torch.float32
    assert not torch.equal(found, expected), "the base did not compute in bfloat16"
    torch.testing.assert_close(found_losses, losses, rtol=0.02, atol=0.02)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.97


@pytest.mark.parametrize("cached", [False, True], ids=["whole model", "prefix cache"])
@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        *[pytest.param(in_bfloat16, *kind.values, marks=kind.marks) for kind in KINDS],
        *[pytest.param(in_nf4, kind, marks=in_4_bits) for kind in ("bert", "llama")],
    ],
)
def test_records_that_share_passes_change_one_another_by_rounding_alone(convert, kind, cached):
    model = convert(kind, layers="last-1" if cached else "all")
    if cached and model.cache is None:
        pytest.skip(f"{kind} has no frozen prefix")
    assert _records_are_independent(model, cached=cached)


@pytest.mark.parametrize("trains", ["lora", *slow("head", "lora-b", "lora-r", "weights")])
@pytest.mark.parametrize("normalize", [True, *slow(False)])
def test_only_the_frozen_base_is_converted_and_what_a_head_reads_is_not_rounded(trains, normalize):
    model, records = in_bfloat16("bert", trains=trains, normalize=normalize), records_for("bert")
    frozen = base_formats.frozen_base(model.peft_model)
    for name, parameter in model.peft_model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if name in frozen else torch.float32), name
    assert all(tensor.dtype == torch.float32 for tensor in model.initial.values())
    read = []
    hook = model.layers[model.head].module.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model.logits(records.items(), cached=False)
    hook.remove()
    assert read[0].dtype == torch.float32
    assert not normalize or not torch.equal(read[0], read[0].bfloat16().float())
    found, _ = gradients(model, records)
    assert found.dtype == torch.float32
    assert found.abs().sum() > 0


def test_restoring_gives_the_same_bits_as_before():
    model = peft_model("bert")
    records = records_for("bert")
    expected, _ = gradients(build(model), records)
    attention = model.config._attn_implementation
    before = to_bfloat16(model)
    assert model.config._attn_implementation == "eager"
    base_formats.restore_float32(model, before)
    assert base_dtype(model) == torch.float32
    assert model.config._attn_implementation == attention
    assert torch.equal(gradients(build(model), records)[0], expected)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where all processes of a user have one file of each model, however small."""
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base_formats, "_LEAST_BYTES", 1)
    return tmp_path / "cache"


def test_whatever_a_run_trains_one_file_serves(folder):
    """A coordinator chooses layers, targets and rules: each must not leave another copy of the base on a node."""
    for trains, layers in (("lora", "all"), ("lora", "last-1"), ("lora-r", "1"), ("weights", "all"), ("head", "all")):
        to_bfloat16(peft_model("bert", layers=layers, trains=trains))
    assert len(list(folder.iterdir())) == 1


def test_the_prefix_cache_takes_half_the_memory_and_gives_the_same_bits_from_a_file():
    records, plain = records_for("bert"), build(peft_model("bert", layers="last-1"))
    kept, in_file = (in_bfloat16("bert", layers="last-1", memory_limit=limit) for limit in (2**30, 1))
    whole = [gradients(model, records)[0] for model in (plain, kept)]
    cached = [gradients(model, records, cached=True)[0] for model in (plain, kept, in_file)]
    for found, expected in zip(cached, whole, strict=False):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.05)
    assert plain.cache.bytes_in_memory == 2 * kept.cache.bytes_in_memory > 0
    assert in_file.cache.bytes_in_memory == 0
    assert torch.equal(cached[1], cached[2])


def test_additions_too_small_for_bfloat16_show_on_average():
    model = in_bfloat16("bert")
    name = next(name for name in model.layers if ".lora_A." in name).split(".lora_A.")[0]
    layer = model.peft_model.get_submodule(name)
    before, width = layer.get_base_layer().weight.clone(), layer.in_features
    # A hundredth of what would be needed to change most of the weights.
    added = 2.0**-9 * before.float().abs().mean() / 100
    model.merge({name: Product(torch.full((layer.out_features, 1), float(added)), torch.ones(1, width))})
    moved = (layer.get_base_layer().weight.float() - before.float()).mean()
    assert moved == pytest.approx(float(added) * layer.scaling["default"], rel=0.5)
    model.merge({})
    assert torch.equal(layer.get_base_layer().weight, before)


def automatic(kind):
    model = peft_model(kind)
    return in_format(model, "auto", partial(build, model))


def test_a_model_that_cannot_is_refused_by_name_or_stays_in_float32(monkeypatch):
    with pytest.raises(InputError, match=r"base_dtype = bfloat16: a fnet model .* use float32"):
        in_bfloat16("fnet")
    monkeypatch.setattr(admission, "_LEAST_WIDTH", 1)
    model = automatic("fnet")
    assert model.base_dtype == torch.float32
    assert gradients(model, records_for("fnet"))[0].abs().sum() > 0


def fail(*_args):
    raise RuntimeError("no kernel\nsecond line")


def test_auto_takes_bfloat16_only_where_it_saves_enough(monkeypatch, caplog):
    monkeypatch.setattr(admission, "_seconds_of_a_pass", fail)
    assert automatic("bert").base_dtype == torch.float32, "a narrow model is not timed"
    monkeypatch.setattr(admission, "_LEAST_WIDTH", 1)
    assert automatic("bert").base_dtype == torch.float32, "one that computes in neither is left to others"
    for share, expected in ((0.5, torch.bfloat16), (0.9, torch.float32)):
        times = {torch.float32: 1.0, torch.bfloat16: share}
        monkeypatch.setattr(admission, "_seconds_of_a_pass", lambda model, _, times=times: times[base_dtype(model)])
        with caplog.at_level("INFO"):
            assert automatic("bert").base_dtype == expected
        assert f"takes {share:.2f} of the time" in caplog.text


# ---------------------------------------------------------------- 4 bits


@in_4_bits
@pytest.mark.parametrize(("kind", "num", "side"), [("bert", 6, "right"), ("llama", 6, "left"), ("llama", 1, "right")])
def test_gradients_in_4_bits_equal_the_loop(kind, num, side):
    batch = collate(records_for(kind, num).items())
    assert_equal_to_loop(of_blocks(kind), left_padded(batch) if side == "left" else batch)


@in_4_bits
@pytest.mark.parametrize("nf4", [False, True], ids=["float32", "nf4"])
def test_the_side_of_the_padding_does_not_matter(nf4):
    """Single records that transformers pads on the left have the gradients of a batch that is padded on the right."""
    model, batch = of_blocks("llama", nf4=nf4), collate(records_for("llama", 6).items())
    assert not batch["attention_mask"].all()
    found, _ = per_sample_gradients(build(model).layers, lambda: forward_losses(model, batch))
    expected = looped_gradients(model, left_padded(batch))
    for name in found:
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], atol=2e-5 * max(1.0, scale), rtol=1e-3, msg=name)


@in_4_bits
@pytest.mark.parametrize(("kind", "num_quantised"), [("llama", 14), ("bert", 13)])
def test_linear_layers_of_the_body_alone_are_quantised_and_it_is_the_same_model_up_to_four_bits(kind, num_quantised):
    """The 13th of bert is its pooler."""
    model, plain = in_nf4(kind), build(of_blocks(kind, nf4=False))
    in_bytes = [name for name, p in model.peft_model.named_parameters() if p.dtype == torch.uint8]
    assert len(in_bytes) == num_quantised
    assert not any(part in name for name in in_bytes for part in ("embed", "lm_head", "classifier", "lora_"))
    assert {p.dtype for name, p in model.peft_model.named_parameters() if name not in in_bytes} == {torch.float32}
    assert (model.base_dtype, model.base_dtype_name) == (torch.float32, "nf4")
    assert base_formats.is_quantised(model.peft_model)
    assert not base_formats.is_quantised(nn.Linear(2, 2))
    expected, found = (gradients(each, records_for(kind))[0] for each in (plain, model))
    assert 0.8 < torch.nn.functional.cosine_similarity(found, expected).mean() < 0.9999


@in_4_bits
def test_what_was_computed_before_does_not_matter():
    """A pass without gradients, which bitsandbytes may compute by another kernel, changes neither it nor the others."""
    records = records_for("llama", 6)
    model = in_nf4("llama", layers="last-1")
    expected, _ = gradients(model, records)
    before = {n: p.clone() for n, p in model.peft_model.named_parameters() if p.dtype == torch.uint8}
    with torch.no_grad():
        found, _ = model.logits(records.items(), cached=False)
    assert torch.equal(found, model.logits(records.items(), cached=False)[0].detach())
    weights = dict(model.peft_model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert torch.equal(gradients(model, records)[0], expected)
    torch.testing.assert_close(gradients(model, records, cached=True)[0], expected, atol=1e-5, rtol=1e-4)


@in_4_bits
def test_layers_of_broken_blocks_stay_as_they_are():
    model = random_base("llama", **(SIZES | {"intermediate_size": 96})).model
    quantise("llama", model, CPU)
    in_bytes = {name.split(".")[-2] for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert in_bytes == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


@in_4_bits
def test_a_checkpoint_in_bfloat16_is_quantised_as_it_is_and_a_run_of_it_says_its_format(small_run, tiny_bert, tmp_path):
    whole = architectures.random_model("llama", **SIZES).to(torch.bfloat16)
    folder = architectures.save(whole, tmp_path / "llama", tokenizer_of=tiny_bert)
    values = {"model": str(folder), "task": "CAUSAL_LM", "base_dtype": "nf4", "device": "cpu", "max_length": 16}
    _, model = load_model(RunConfig(**values), labels=())
    layer = model.peft_model.get_base_model().model.layers[0].mlp.up_proj
    exact = load_base(str(folder), task="CAUSAL_LM").model.model.layers[0].mlp.up_proj.weight
    from bitsandbytes.functional import dequantize_4bit

    error = dequantize_4bit(layer.weight, layer.weight.quant_state).float() - exact
    assert 0 < error.norm() / exact.norm() < 0.12
    assert {p.dtype for p in model.peft_model.parameters() if p.is_floating_point()} == {torch.float32}
    federation.run(RunConfig(**(small_run | values | {"rounds": 1}), out=str(tmp_path / "runs")), LogObserver())
    (written,) = tmp_path.rglob("config.toml")
    assert 'base_dtype = "nf4"' in written.read_text()


@in_4_bits
def test_nothing_is_added_to_weights_in_four_bits():
    model = in_nf4("llama")
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


@in_4_bits
def test_what_cannot_be_quantised_is_said_in_one_line(monkeypatch):
    with pytest.raises(InputError, match=r"base_dtype = nf4: model 'gpt2', a gpt2, has no linear layer whose"):
        quantise("gpt2", random_base("gpt2").model, CPU)
    monkeypatch.setattr("bitsandbytes.nn.Params4bit._quantize", fail)
    no_kernel = r"^base_dtype = nf4: bitsandbytes does not work on cpu here \(no kernel\)[^\n]*$"
    with pytest.raises(InputError, match=no_kernel):
        quantise("llama", random_base("llama", **SIZES).model, CPU)
    monkeypatch.setattr(base_formats.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"^base_dtype = nf4: needs bitsandbytes; [^\n]*$"):
        quantise("llama", random_base("llama", **SIZES).model, CPU)


# ---------------------------------------------------------------- one file for all processes of a user


@pytest.fixture
def weights():
    return {"a": torch.randn(300, 200).bfloat16(), "b": torch.randn(7).bfloat16()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_second_process_maps_the_first_ones_file_and_writing_to_it_changes_no_other(folder, weights):
    first, second = base_formats._shared(weights), base_formats._shared(weights)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for found in (first, second):
        assert_equal(found, weights)
        assert found["a"].data_ptr() != weights["a"].data_ptr()
    first["a"].zero_()
    for found in (second, base_formats._shared(weights)):
        assert_equal(found, weights)


@pytest.mark.slow
def test_pages_are_shared_between_processes(folder):
    """The proportional size of a mapping that two processes hold is half its size."""
    code = (
        "import sys, torch; from fedpriv.learning.adapters._base_formats import _shared\n"
        "held = _shared({'a': torch.arange(2**23, dtype=torch.float32).bfloat16()})\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "text = open('/proc/self/smaps').read().split('safetensors', 1)[1]\n"
        "fields = dict(line.split(':') for line in text.splitlines()[1:20] if ':' in line)\n"
        "print(fields['Rss'].split()[0], fields['Pss'].split()[0], flush=True); sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            resident, proportional = map(int, process.stdout.readline().split())
            assert resident >= 2**14
            assert proportional <= 0.6 * resident
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)


@pytest.mark.parametrize("damage", [b"", b"other", None])
def test_a_file_with_other_contents_is_not_used(folder, weights, damage, caplog):
    base_formats._shared(weights)
    (file,) = folder.iterdir()
    if damage is None:
        other = {name: tensor + 1 for name, tensor in weights.items()}
        base_formats._shared(other)
        (foreign,) = set(folder.iterdir()) - {file}
        file.write_bytes(foreign.read_bytes())
    else:
        file.write_bytes(damage)
    with caplog.at_level("INFO"):
        assert_equal(base_formats._shared(weights), weights)
    assert caplog.text


def test_where_no_file_pays_off_or_none_can_be_written_the_weights_stay_the_processs_own(folder, weights, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(base_formats, "_LEAST_BYTES", 2**20)
        assert_equal(base_formats._shared(weights), weights)
    assert not folder.exists(), "small models have no file"

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.link", full)
    assert_equal(base_formats._shared(weights), weights)
    assert not list(folder.iterdir()), "a full disk leaves nothing behind"
    folder.rmdir()
    folder.write_text("a file")
    assert_equal(base_formats._shared(weights), weights)
