"""No record's loss depends on others, on the batch size or on padding; sliced logits give those of whole ones."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records, collate
from fedpriv.learning.training import _passes
from fedpriv.learning.training._passes import IGNORED, Footprint, places_of, predictions, sliced_predictions
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import per_sample_gradients
from tests.architectures import random_base
from tests.tiny import move, random_records


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


def looped(model: TrainingModel, records: Records) -> tuple[list[float], dict[str, torch.Tensor]]:
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
    expected, slow = looped(model, records)
    torch.testing.assert_close(losses, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    for name, gradients in slow.items():
        assert gradients.abs().max() > 0
        torch.testing.assert_close(fast[name], gradients, atol=2e-6, rtol=1e-4)
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
