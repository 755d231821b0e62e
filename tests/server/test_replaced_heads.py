"""Runs of the recipe `fedpriv` on encoders whose head is replaced: they learn, and what they store loads again."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedpriv.learning.adapters
from fedpriv.config import parse
from fedpriv.learning.data.records import collate
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants.store import Store
from server.observer import LogObserver
from simulations.engines import federation
from tests import architectures
from tests.architectures import random_model

LITTLE_NOISE = {"target_epsilon": 100.0, "delta": 1e-5}


@pytest.fixture(scope="module", params=["roberta", "distilbert"])
def finished(request, table, tiny_bert, tmp_path_factory):
    """The configuration and the folder of such a run."""
    folder = tmp_path_factory.mktemp(request.param)
    model = architectures.save(random_model(request.param), folder / "model", tokenizer_of=tiny_bert)
    values = {"model": str(model), "data": str(table), "client_column": "site", "rounds": 12, "lora_rounds": 3}
    stored = {"dedup": "drd", "dedup_block_size": 16, "variant_rounds": [11], "out": str(folder / "run")}
    config = parse(values | stored | LITTLE_NOISE | {"simulate": True, "comparison": False})
    federation.run(config, LogObserver())
    return config, folder / "run"


def test_it_learns_with_adapter_and_head(finished):
    summary = json.loads((finished[1] / "summary.json").read_text())
    assert summary["accuracy"] > summary["majority_accuracy"] + 0.3
    assert summary["adapters_moved"], summary["unmoved_tensors"]


def test_the_saved_adapter_gives_the_runs_logits_and_accuracy(finished):
    config, folder = finished
    bench = workbench(config)
    tensors = load_file(folder / "variants" / "global" / "adapter_model.safetensors")
    fedpriv.learning.adapters.write(bench.model.peft_model, tensors)
    batch = collate(bench.test.items())
    labels = batch.pop("labels")
    with torch.no_grad():
        loaded = fedpriv.learning.adapters.load(config.model, folder / "variants" / "global")(**batch).logits
        assert torch.equal(loaded, bench.model.peft_model(**batch).logits)
    accuracy = float((loaded.argmax(dim=1) == labels).float().mean())
    assert accuracy == pytest.approx(json.loads((folder / "summary.json").read_text())["accuracy"])


def test_variants_are_validated_and_restored_with_the_same_head(finished):
    _, folder = finished
    evaluator = AdapterEvaluator.of_run(folder)
    before = load_file(folder / "variants" / "global" / "adapter_model.safetensors")
    summary = json.loads((folder / "summary.json").read_text())
    everyone = np.arange(evaluator.num_records)
    accuracy = evaluator.utilities({name: tensor.numpy() for name, tensor in before.items()}, everyone).mean()
    assert accuracy == pytest.approx(summary["accuracy"])
    with Store(folder / "store", read_only=True) as store:
        assert {"global", "round-11", "client-0"} <= set(store.names)
        restored = {name: np.array(array) for name, array in store.tensors("global").items()}
        outcome = store.manifest("global").provenance["outcome"]
    proof = proof_records(len(everyone)) if outcome["num_replaced"] else everyone
    assert evaluator.utilities(restored, proof).mean() == pytest.approx(outcome["utility_after"])
    assert (evaluator.saliency(restored, everyone)["base_model.model.classifier.weight"] > 0).any()
