"""Factors from public texts: whitened inputs, a logit for each column, leading directions, nothing of records."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, load_base, read, save
from fedpriv.learning.data.chat import ChatFormat
from fedpriv.learning.training import public_factors
from fedpriv.learning.training.public_factors import _public_records, leading_directions, readout_factors
from fedpriv.learning.training.workbench import Workbench
from server.observer import LogObserver
from simulations.engines import federation
from tests.chats import chat_model
from tests.marks import slow
from tests.tiny import move

ANSWERS = ("negative", "positive")
KEYS = {"prompt_column": "text", "response_column": "label", "answers": list(ANSWERS), "max_length": 60}
LAYER = "base_model.model.model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose logits differ by more than a few tenths, and whose states tell texts apart."""
    folder = chat_model(tmp_path_factory.mktemp("chat"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "norm" in name else 10)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def base(folder):
    return load_base(str(folder), task="CAUSAL_LM")


def settings(**changes) -> LoraSettings:
    values = {"trains": "lora-r", "task": "CAUSAL_LM", "target_modules": ("down_proj",), "layers": "last-1"}
    return LoraSettings(**values | changes)


@pytest.fixture(autouse=True, scope="module")
def few_prompts():
    """What is tested holds whatever the number of public prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public_factors, "_NUM_PROMPTS", 64)
        yield


def attached(base, **changes):
    """The model with an R between the factors for the answers, and these."""
    found = {}

    def factors(model):
        found.update(readout_factors(model, base.tokenizer, ChatFormat(), ANSWERS, max_length=60))
        return found

    return attach(base, settings(**changes), factors=factors), found


@pytest.fixture(scope="module")
def answering(folder):
    """A base, its model that nobody changes, and the factors."""
    base = load_base(str(folder), task="CAUSAL_LM")
    return base, *attached(base)


def test_the_tokens_that_r_moves_are_those_of_the_answers():
    assert public_factors.spoken_tokens([(7, 1), (8, 1)]) == [7, 8]
    assert public_factors.spoken_tokens([(5, 7, 1), (5, 8, 1), (6, 9, 1)]) == [5, 6, 7, 8, 9], "a common beginning"
    assert public_factors.spoken_tokens([(7, 1), (7, 8, 1)]) == [1, 7, 8], "one begins the other"


@pytest.mark.parametrize("places", [5, 40])
def test_the_inverse_root_is_that_of_the_second_moments_with_a_ridge(places):
    """Oracle: an eigendecomposition of the whole matrix, also where there are fewer places than inputs."""
    states = torch.randn(places, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states *= torch.arange(1, 13)
    second = states.T @ states / places
    values, vectors = torch.linalg.eigh(second + 0.03 * second.diagonal().mean() * torch.eye(12))
    torch.testing.assert_close(public_factors._inverse_root(states), (vectors * values.rsqrt()) @ vectors.T)


def test_a_whitens_what_the_layer_reads_on_public_prompts(answering):
    """Oracle: the layer's inputs found by a hook of the test's own, one record at a time."""
    base, model, found = answering
    seen = []
    hook = model.get_submodule(LAYER).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    states = []
    for row in _public_records(base.tokenizer, ChatFormat(), ANSWERS, 60):
        model(input_ids=torch.tensor([row["input_ids"]]))
        learned = [place for place, is_learned in enumerate(row["response_mask"]) if is_learned]
        states += [seen[-1][place - 1] for place in learned]
    hook.remove()
    (a,) = (a.double() for _, a in found.values())
    read_by_r = torch.stack(states).double() @ a.T
    torch.testing.assert_close(a, a.T, atol=1e-5, rtol=1e-5)
    eigenvalues = torch.linalg.eigvalsh(read_by_r.T @ read_by_r)
    before = torch.linalg.eigvalsh(torch.stack(states).T.double() @ torch.stack(states).double())
    assert eigenvalues[-1] / eigenvalues[len(eigenvalues) // 2] < 0.2 * before[-1] / before[len(before) // 2]


@pytest.mark.parametrize("scaling", [4.0, *slow(1.0)])
def test_a_unit_of_r_moves_its_own_answer_by_about_one(base, scaling):
    model, _found = attached(base, rank=2, alpha=2 * scaling)
    rows = _public_records(base.tokenizer, ChatFormat(), ANSWERS, 60)
    tokens = public_factors.spoken_tokens([row["input_ids"][row["response_mask"].index(1) :] for row in rows[:2]])
    layer = model.get_submodule(f"{LAYER}.lora_B.default.R")
    assert [parameter.shape for parameter in layer.parameters()] == [(len(tokens), 48)]

    def logits():
        with torch.no_grad():
            every = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows[:32]]
        places = [slice(row["response_mask"].index(1) - 1, -1) for row in rows[:32]]
        return torch.stack([each[place][:, tokens].mean(0) for each, place in zip(every, places, strict=True)])

    before, moved = logits(), []
    for column in range(len(tokens)):
        bias = torch.zeros(len(tokens)).index_fill(0, torch.tensor(column), 0.01)
        handle = layer.register_forward_hook(lambda _, __, output, bias=bias: output + bias)
        moved.append((logits() - before).mean(0) / 0.01)
        handle.remove()
    torch.testing.assert_close(torch.stack(moved), torch.eye(len(tokens)), atol=0.05, rtol=0)


def test_gradients_on_public_prompts_are_of_about_unit_length(answering):
    base, model, _found = answering
    inner = next(parameter for name, parameter in model.named_parameters() if ".R." in name)
    lengths = []
    for row in _public_records(base.tokenizer, ChatFormat(), ANSWERS, 60)[:50]:
        labels = [id_ if learned else -100 for id_, learned in zip(row["input_ids"], row["response_mask"], strict=True)]
        loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([labels])).loss
        lengths.append(float(torch.autograd.grad(loss, inner)[0].norm()))
    assert 0.3 < np.median(lengths) < 2


def test_what_is_saved_is_plain_lora_with_a_rank_of_as_many_as_tokens_decide(base, folder, tmp_path):
    model = move(attached(base)[0])
    ids = torch.tensor([[5, 9, 30, 41]])
    expected = model(input_ids=ids).logits
    save(model, base, tmp_path)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    assert plain.peft_config["default"].r == 5
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(load_base(str(folder), task="CAUSAL_LM").model(input_ids=ids).logits, expected)


LEADING = {"trains": "lora-b", "layers": "all", "rank": 3}


def directions(base, **changes):
    def rows(model):
        return leading_directions(model, base.tokenizer, max_length=60)

    return attach(base, settings(**LEADING | changes), rows=rows)


def test_rows_are_directions_in_which_inputs_are_largest_and_read_as_much_as_random_ones(base):
    """Oracle: the inputs on other random tokens, found by a hook, of which no other rows of this rank hold more."""
    seen, layer = [], base.model.get_submodule(LAYER.removeprefix("base_model.model."))
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 4:].flatten(0, 1)))
    tokens = torch.randint(0, len(base.tokenizer), (300, 60), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        base.model(input_ids=tokens)
    hook.remove()
    states = torch.cat(seen).double()
    model = directions(base)
    a = model.get_submodule(LAYER).lora_A["default"].weight.double()
    gram = a @ a.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-6 * float(gram.max()), rtol=0)
    unit = torch.nn.functional.normalize(a, dim=1)
    best = torch.linalg.svdvals(states)[:3].square().sum()
    assert (states @ unit.T).square().sum() > 0.95 * best
    random = attach(load_base(base.name, task="CAUSAL_LM"), settings(**LEADING | {"rank": 48}), seed=1)
    reads = (states @ random.get_submodule(LAYER).lora_A["default"].weight.double().T).square().mean()
    assert 0.5 < (states @ a.T).square().mean() / reads < 1.5


def test_factors_directions_and_the_untrained_function_are_the_same_wherever_they_are_made(answering, base, folder):
    """Also on another machine, whose rounding is another."""
    elsewhere = [load_base(str(folder), task="CAUSAL_LM") for _ in range(2)]
    for other in elsewhere:
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    _, _, factors = answering
    _, other_factors = attached(elsewhere[0])
    for one, two in zip(factors[LAYER], other_factors[LAYER], strict=True):
        assert (one - two).norm() < 1e-4 * one.norm()
    expected = base.model(input_ids=torch.tensor([[5, 9, 30]])).logits
    here = directions(base)
    torch.testing.assert_close(here(input_ids=torch.tensor([[5, 9, 30]])).logits, expected)
    assert [name for name, p in here.named_parameters() if p.requires_grad and "lora_B" not in name] == []
    torch.manual_seed(9)
    there = directions(elsewhere[1])
    one, two = (model.get_submodule(LAYER).lora_A["default"].weight for model in (here, there))
    assert (one - two).norm() < 1e-3 * one.norm()


@pytest.mark.parametrize(
    ("rank", "zeros", "message"),
    [(49, False, r"rank = 49: .* reads 48 directions"), (3, True, r"target_modules, layers: .* nothing but zeros")],
)
def test_layers_that_read_too_little_are_refused_by_name(base, rank, zeros, message):
    if zeros:
        with torch.no_grad():
            base.model.model.layers[1].mlp.up_proj.weight.zero_()
    with pytest.raises(InputError, match=message):
        directions(base, rank=rank)


def test_an_encoder_has_leading_directions_too(tiny_bert):
    base = load_base(str(tiny_bert), task="SEQ_CLS", num_labels=2)
    model = directions(base, task="SEQ_CLS", target_modules=("query",), rank=2)
    rows = [p for name, p in model.named_parameters() if "lora_A" in name]
    assert len(rows) == base.model.config.num_hidden_layers
    assert all(float(row.norm()) > 0 for row in rows)


def test_a_layer_that_moves_no_answer_is_refused_by_name(base, monkeypatch):
    monkeypatch.setattr(public_factors, "_NUM_SLOPES", 2)
    with torch.no_grad():
        base.model.model.norm.weight.zero_()
    with pytest.raises(InputError, match=r"target_modules, layers: .*down_proj does not move the answers' logits"):
        attached(base)


def test_answers_that_max_length_cuts_to_the_same_tokens_are_refused(base):
    model = attach(base, settings(), factors=lambda _: {})
    long = ("negative " * 50 + "pain", "negative " * 50 + "rash")
    with pytest.raises(InputError, match=r"answers = .*: the same tokens at max_length = 20; use more"):
        readout_factors(model, base.tokenizer, ChatFormat(), long, max_length=20)


def table(num: int) -> str:
    """Texts of two classes, each in words of its own; a random model's states hold little more than which words."""
    words = (("pain", "chest", "rash"), ("kind", "today", "cough"))
    rng, out = np.random.default_rng(1), io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["text", "label"])
    rows.writerows([" ".join(rng.choice(words[i % 2], 5)), ANSWERS[i % 2]] for i in range(num))
    return out.getvalue()


def test_a_user_who_names_answers_and_columns_gets_a_model_that_answers(folder, tmp_path):
    """Beside the commoner answer, and the model before."""
    (tmp_path / "texts.csv").write_text(table(300))
    keys = KEYS | {"model": str(folder), "data": str(tmp_path / "texts.csv"), "public_data": True, "delta": 1e-3}
    keys |= {"seed": 0, "num_clients": 3, "partition": "iid", "target_epsilon": 8, "rounds": 12, "evaluate_every": 10}
    keys |= {"generated_answers": 0, "comparison": False, "memory_limit_mb": 8}
    config = parse(keys)
    assert config.prompt_template == "{}\n\nAnswer with one of: negative, positive."
    assert (config.aggregation, config.factors, config.learning_rate) == ("fed-sb", "answers", "auto")
    federation.run(parse({**keys, "out": str(tmp_path / "run")}), LogObserver())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] > max(summary["majority_accuracy"], summary["accuracy_initial"]) + 0.2


def test_the_base_may_be_in_4_bits(folder, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the extra quantized is not installed")
    (tmp_path / "texts.csv").write_text(table(20))
    wide = Path(shutil.copytree(folder, tmp_path / "wide"))
    shape = AutoConfig.from_pretrained(folder, hidden_size=64, intermediate_size=128)
    AutoModelForCausalLM.from_config(shape).save_pretrained(wide)
    keys = KEYS | {"model": str(wide), "data": str(tmp_path / "texts.csv"), "simulate": True, "num_clients": 1}
    factors = [Workbench(parse(keys | {"base_dtype": each})).model._frozen_factors for each in ("nf4", "float32")]
    assert all(tensor.isfinite().all() for tensor in factors[0].values())
    assert [tensor.shape for tensor in factors[0].values()] == [tensor.shape for tensor in factors[1].values()]


def test_the_start_is_a_function_of_public_keys_alone(folder, tmp_path):
    """Attack: what is sent before any charge must not tell whose records a node holds."""
    starts = []
    for number, kind in enumerate(("flu", "a rash")):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"text,label\n{kind},negative\n{kind} today,positive\n")
        bench = Workbench(parse(KEYS | {"model": str(folder), "data": str(path), "simulate": True, "num_clients": 1}))
        starts.append({**bench.initial, **dict(bench.model._frozen_factors), **read(bench.model.peft_model)})
    assert all(torch.equal(tensor, starts[1][name]) for name, tensor in starts[0].items())


@pytest.mark.parametrize("shape", [(40, 9), (9, 40)])
def test_principal_directions_are_the_singular_vectors_and_as_many_as_asked(shape):
    states = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    states[1:] *= torch.linspace(0.1, 3, shape[1])
    values, directions = public_factors._principal(states, 4)
    _, singular, right = torch.linalg.svd(states, full_matrices=False)
    torch.testing.assert_close(values, singular[:4] ** 2 / shape[0])
    torch.testing.assert_close((directions * right[:4]).sum(1).abs(), torch.ones(4, dtype=torch.float64))
    values, directions = public_factors._principal(states[:, :2] @ states[:2], 4)  # of two directions alone
    assert values[2:].abs().max() < 1e-12 * values[0]
    torch.testing.assert_close(directions @ directions.T, torch.eye(4, dtype=torch.float64))
