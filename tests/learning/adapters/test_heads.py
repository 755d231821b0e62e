"""A classifier of any model: one linear layer reads a pooled vector of one length, and a saved adapter keeps it so.

A checkpoint's own head gives its answers under the names that its configuration has, in whatever order data have.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import fedpriv.learning.adapters
from fedpriv.config import ON_NODES, parse, to_toml
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach, freeze, load_base, pooling, read, save
from fedpriv.learning.data import DataSource
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from fedpriv.learning.training.workbench import Workbench
from fedpriv.models.publishing import saved
from fedpriv.models.publishing.export import export
from fedpriv.models.variants import folders
from tests import architectures
from tests.architectures import random_base, random_model
from tests.learning.training.test_per_sample import looped
from tests.marks import slow
from tests.served import ask_classes, described, serving
from tests.tiny import BATCH, LABELS, move, random_records

PAGE = Path(__file__).parents[3] / "docs" / "base_models.md"
# {architecture: what is trained} of the page's table of encoders.
TABLE = dict(re.findall(r"^\| `([\w-]+)` \| (\w.*?) \|", PAGE.read_text(), re.M))
# Every day a linear head, one of several layers that is replaced, and an encoder whose layers are not trained.
EVERY_DAY = ("bert", "roberta", "albert")
ENCODERS = [*EVERY_DAY, *slow(*(kind for kind in TABLE if kind not in EVERY_DAY))]
DECODERS = ("gpt2", "llama")


def classifier(kind):
    if kind not in DECODERS:
        return random_model(kind).eval()
    config = AutoConfig.for_model(kind, **architectures.DECODERS[kind] | {"num_labels": 3})
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.fixture
def folder(kind, tmp_path, tiny_bert):
    """A classifier's checkpoint."""
    return architectures.save(classifier(kind), tmp_path / kind, tokenizer_of=tiny_bert)


def load_unit(folder):
    return load_base(str(folder), task="SEQ_CLS", num_labels=3, normalize=True)


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_head_is_one_linear_layer_of_zeros_that_reads_the_mean_of_the_real_tokens_states_at_unit_length(folder):
    base = load_unit(folder)
    name, head = pooling.linear_head(base.model)
    assert base.new_modules == (name,) == ("classifier",)
    assert (head.in_features, head.out_features) == (32, 3)
    assert not any(parameter.any() for parameter in head.parameters())
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    encoder = AutoModel.from_pretrained(folder).eval()
    expected = []
    for tokens, length in zip(BATCH["input_ids"], BATCH["attention_mask"].sum(dim=1), strict=True):
        states = encoder(input_ids=tokens[:length].unsqueeze(0)).last_hidden_state[0]
        mean = states.mean(dim=0)
        expected.append(head.weight @ (mean / mean.norm() * pooling.STATE_SCALE) + head.bias)
    torch.testing.assert_close(base.model(**BATCH).logits, torch.stack(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert", *DECODERS])
def test_the_direction_is_that_of_the_state_without_normalisation_and_the_length_one_with_the_constant(folder):
    seen = []
    for normalize in (False, True):
        model = load_base(str(folder), task="SEQ_CLS", num_labels=3, normalize=normalize).model
        head = getattr(model, "classifier", None) or model.score
        head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(**BATCH)
    plain, unit = seen
    # Transformers computes a decoder's logits at every token, and takes the last.
    plain = plain if plain.dim() == 2 else plain[range(2), BATCH["attention_mask"].sum(dim=1) - 1]
    torch.testing.assert_close(unit, plain / plain.norm(dim=-1, keepdim=True) * pooling.STATE_SCALE)
    assert math.hypot(pooling.STATE_SCALE, pooling.BIAS_SCALE) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, math.nan])
def test_no_state_gives_a_longer_vector_or_an_infinite_gradient(value):
    states = torch.full((2, 8), value, dtype=torch.bfloat16, requires_grad=True)
    unit = pooling.unit_states(states)
    unit.sum().backward()
    if not math.isnan(value):
        assert (unit.norm(dim=1) <= pooling.STATE_SCALE * (1 + 1e-6)).all()
        assert torch.isfinite(states.grad).all()
    assert unit.dtype == torch.float32
    # Of states of any usual size, the gradient is that of the formula.
    states = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = states.float().requires_grad_(), states.clone().requires_grad_()
    (pooling.unit_states(one) ** 3).sum().backward()
    ((other / other.norm(dim=1, keepdim=True) * pooling.STATE_SCALE) ** 3).sum().backward()
    torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("convention", pooling.CONVENTIONS[1:])
def test_each_pooling_is_that_of_the_real_tokens_wherever_padding_is(convention):
    model = random_model("bert").eval()
    pooling.apply(model, convention)
    states = random_model("bert").eval().base_model(**BATCH).last_hidden_state
    kind = convention.removeprefix("unit-")
    expected = [
        {"mean": own.mean(dim=0), "max": own.amax(dim=0), "cls": own[0], "last": own[-1]}[kind]
        for own in (states[0], states[1, :3])
    ]
    expected = [each / each.norm() * pooling.STATE_SCALE if "unit" in convention else each for each in expected]
    found, _ = pooling.vectors(model, **BATCH)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-6, rtol=1e-5)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    left = pooling._pooled(states[:1], mask, kind)
    torch.testing.assert_close(left, pooling._pooled(states[:1, 2:], None, kind), atol=1e-6, rtol=1e-5)


def test_what_has_no_such_head_is_refused_by_name():
    with pytest.raises(ValueError, match="pooling = 'unit-median': must be one of model, mean, cls, max, last, unit-"):
        pooling.apply(random_model("bert"), "unit-median")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60, "num_labels": 3}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bart", **sizes))
    with pytest.raises(InputError, match=r"model = 'bart': it is an encoder with a decoder.*recipe = per-sample"):
        freeze("bart", model, None, task="SEQ_CLS", normalize=True)


def test_layers_that_a_pass_calls_twice_train_a_head_alone():
    base = random_base("albert", normalize=True, num_hidden_layers=2)
    model = TrainingModel(move(attach(base, LoraSettings(rank=2))), memory_limit=2**30)
    with pytest.raises(ValueError, match="called twice in one forward pass"):
        per_sample_gradients(model.layers, lambda: model.logits(random_records(2).items(), cached=False)[0].sum(dim=1))
    with pytest.raises(InputError, match=r"layers = 'last-1': not in model 'albert'; use layers = all"):
        attach(random_base("albert", num_hidden_layers=2), LoraSettings(rank=2, layers="last-1"))


@pytest.mark.parametrize("kind", ["roberta", *slow("distilbert", "modernbert")])
def test_a_head_that_replaces_another_is_zeros_and_draws_no_random_number_and_the_other_recipe_keeps_the_other(kind):
    model, base = random_model(kind).eval(), random_base(kind)
    assert torch.equal(base.model(**BATCH).logits, model(**BATCH).logits)
    assert (base.pooling, base.new_modules) == ("model", ())
    before = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)  # memory that nobody initialises holds NaN
    try:
        pooling.apply(model, "unit-mean")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, torch.zeros_like(p)) for p in pooling.linear_head(model)[1].parameters())


@pytest.mark.parametrize("kind", ENCODERS)
def test_per_sample_gradients_of_head_and_lora_are_autograds_one_by_one(kind):
    trains = "lora" if TABLE[kind] == "LoRA, head" else "head"
    settings = LoraSettings(rank=2, trains=trains)
    model = TrainingModel(move(attach(random_base(kind, normalize=True), settings)), memory_limit=2**30)
    items = random_records(6).items()

    def losses(items=items):
        return model.predictions(items, cached=False).losses

    found, _ = per_sample_gradients(model.layers, losses)
    expected = looped(model.peft_model, losses, [[item] for item in items])
    assert found.keys() == expected.keys()
    for name, gradients in expected.items():
        assert gradients.flatten(1).any(dim=1).all(), name
        torch.testing.assert_close(found[name], gradients, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_head_on_kept_features_gives_what_the_whole_model_gives(kind):
    settings = LoraSettings(rank=2, trains="head")
    model = TrainingModel(move(attach(random_base(kind, normalize=True), settings)), memory_limit=2**30)
    assert model.head is not None
    assert model.features is not None
    records = random_records(30, longest=30)
    whole, _ = model.logits(records.items(), cached=False)
    kept, _ = model.evaluation_logits(records, range(30))
    torch.testing.assert_close(kept, whole, atol=1e-5, rtol=1e-4)
    assert model.features.bytes_in_memory == 30 * 32 * 4


SAVED = ["bert", *DECODERS, "roberta", *slow(*(kind for kind in architectures.REPLACED_HEADS if kind != "roberta"))]


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_adapter_gives_the_same_logits_in_every_way_it_can_be_loaded(folder, tmp_path, kind):
    base, directory = load_unit(folder), tmp_path / "adapter"
    model = attach(base, LoraSettings(rank=2))
    heads = {name: tensor for name, tensor in read(model).items() if "lora" not in name}
    assert heads
    assert not any(tensor.any() for tensor in heads.values()), "a new head starts at zero"
    expected = move(model)(**BATCH).logits
    assert expected.any()
    save(model, base, directory, labels=("x", "y", "z"))

    plain, by_peft = (AutoModelForSequenceClassification.from_pretrained(folder).eval() for _ in range(2))
    if kind in ("roberta", "distilbert"):
        with pytest.raises(KeyError, match="weight"):  # for the model's own head
            PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(folder), directory)
    pooling.apply(by_peft, base.pooling)
    for loaded in (
        fedpriv.learning.adapters.load(str(folder), directory),
        fedpriv.learning.adapters.load(load_unit(folder), directory),
        fedpriv.learning.adapters.load(plain, directory),
        PeftModel.from_pretrained(by_peft, directory).eval(),
    ):
        assert torch.equal(loaded(**BATCH).logits, expected)
    with pytest.raises(InputError, match="pooling = unit-"):
        fedpriv.learning.adapters.load(load_base(str(folder), task="SEQ_CLS", num_labels=3), directory)


@pytest.mark.parametrize("kind", ["bert", *DECODERS])
def test_a_head_alone_is_trained_while_a_and_b_are_saved_as_they_are(folder, tmp_path):
    base = load_unit(folder)
    model = move(attach(base, LoraSettings(rank=2, trains="head")))
    assert all("lora" not in name for name in read(model))
    training = TrainingModel(model, memory_limit=2**30)
    assert [type(layer.module) for layer in training.layers.values()] == [nn.Linear]
    save(model, base, tmp_path / "adapter", labels=("x", "y", "z"))
    loaded = fedpriv.learning.adapters.load(str(folder), tmp_path / "adapter")
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)
    factors = {name: p for name, p in loaded.named_parameters() if ".lora_" in name}
    assert all(bool(p.any()) == (".lora_A." in name) for name, p in factors.items())


# ---------------------------------------------------------------- a checkpoint's own head

OTHER = ("neurology", "Cardiology", "dermatology")
PLACES = [OTHER.index(name) for name in ("Cardiology", "dermatology", "neurology")]
TEXT = "the patient has a rash"


def checkpoint(folder, tiny_bert, kind, names=OTHER):
    model = classifier(kind)
    if kind == "gpt2":
        model.score.weight.data.mul_(30)
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: row for row, name in enumerate(names)}
    return architectures.save(model, folder, tokenizer_of=tiny_bert)


def logits(folder, **labels):
    return load_base(str(folder), task="SEQ_CLS", **labels).model(**BATCH).logits


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", *slow("distilbert")])
def test_its_rows_stand_in_the_order_of_the_labels(kind, tiny_bert, tmp_path):
    folder = checkpoint(tmp_path / kind, tiny_bert, kind)
    as_they_are = logits(folder, num_labels=3)
    assert (as_they_are.std(dim=1) > 1e-3).all(), "the check would be blind"
    assert torch.equal(logits(folder, labels=LABELS), as_they_are[:, PLACES])
    assert torch.equal(logits(folder, labels=OTHER), as_they_are)
    assert load_base(str(folder), task="SEQ_CLS", labels=LABELS).model.config.label2id["neurology"] == 2


def test_names_that_match_none_or_only_in_part_decide_nothing_silently(tiny_bert, tmp_path):
    for names in (("LABEL_0", "LABEL_1", "LABEL_2"), ("good", "bad", "neutral")):
        folder = checkpoint(tmp_path / names[0], tiny_bert, "bert", names)
        assert torch.equal(logits(folder, labels=LABELS), logits(folder, num_labels=3))
    partly = checkpoint(tmp_path / "partly", tiny_bert, "bert", ("neurology", "cardiology", "urology"))
    with pytest.raises(InputError, match=r"labels = cardiology, .*head for neurology, cardiology, urology, which"):
        logits(partly, labels=LABELS)
    assert load_base(str(partly), task="SEQ_CLS", labels=LABELS, normalize=True).new_modules == ("classifier",)
    assert load_base(str(partly), task="SEQ_CLS", labels=LABELS[:2]).new_modules == ("classifier",)
    assert load_base(str(partly), task="SEQ_CLS", num_labels=3).new_modules == ()
    for normalize in (False, True):
        other = load_base(str(partly), task="SEQ_CLS", num_labels=5, normalize=normalize)
        assert (other.new_modules, len(other.model.classifier.weight)) == (("classifier",), 5)


def test_every_door_gives_a_class_the_probability_that_the_checkpoint_gives_it(tiny_bert, table, tmp_path):
    folder = checkpoint(tmp_path / "base", tiny_bert, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXT, return_tensors="pt")
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = plain(**inputs).logits[0].softmax(dim=0)[PLACES]
    assert expected.std() > 0.01, "the check would be blind"

    def agrees(probabilities):
        torch.testing.assert_close(torch.as_tensor(probabilities), expected, atol=1e-6, rtol=0, check_dtype=False)

    shared = {"model": str(folder), "recipe": "per-sample", "layers": "last-1", "base_dtype": "float32"}
    simulated = Workbench(parse({**shared, "data": str(table), "client_column": "site", "max_length": 32}))
    of_node = {"data": ON_NODES, "labels": ",".join(LABELS), "num_clients": 2}
    on_node = Workbench(parse({**shared, **of_node, "test_data": str(table)}), DataSource(data=str(table)))
    for bench in (simulated, on_node):
        agrees(bench.model.peft_model(**inputs).logits[0].softmax(dim=0))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(simulated.config))
    simulated.save(run / "variants" / "global", simulated.initial, {})
    folders.describe(run / "variants" / "global", described(simulated.config, "global"))
    loaded = saved.load(saved.find(run))
    agrees(saved.classify(loaded, [TEXT])[0])
    with serving(run) as scheduler:
        assert scheduler.labels == LABELS
        agrees(ask_classes(scheduler, "global", [TEXT]).last().probabilities[0])
    assert export(loaded, tmp_path / "exported") == "transformers"
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert tuple(exported.config.id2label.values()) == LABELS
    agrees(exported(**inputs).logits[0].softmax(dim=0))
