"""A run's variants: kept, described by what they descend from, deduplicated, shown, and within their bounds."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import load, write
from fedpriv.learning.adapters._arithmetic import factors_of, non_lora_tensors
from fedpriv.learning.aggregation.rules import RULES
from fedpriv.learning.data.records import collate
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.planning import cost_of
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants import folders, stored_in
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs._writer import RunWriter
from fedpriv.runs.show._report_page import write_report
from server import registry
from tests import architectures
from tests.cli.command_line import as_json, fedpriv
from tests.marks import slow
from tests.server.parts import run, summary

# With small blocks there are many of them; a bound of a twentieth is two of the 48 test records.
KEPT = {"variant_rounds": [1, 2], "dedup_block_size": 16, "dedup_utility_bound": 0.5, "rounds": 3}


def kept_run(values, out: Path, **changes) -> Path:
    return run({**values, **KEPT}, out, **changes)


@pytest.fixture(scope="module")
def deduplicated(small_run, tmp_path_factory) -> Path:
    return kept_run(small_run, tmp_path_factory.mktemp("runs") / "run", dedup="drd")


def described(folder: Path) -> dict[str, folders.Described]:
    return {path.parent.name: folders.read(path.parent) for path in folder.glob("variants/*/variant.json")}


def test_a_variant_descends_from_the_charges_that_made_it_and_costs_what_the_ledger_says(deduplicated):
    """A global model from all of them so far, and a client's from its own of the last round."""
    found = described(deduplicated)
    assert set(found) == {"global", "round-1", "round-2", "client-0", "client-1", "client-2"}
    registrations = json.loads((deduplicated / "registrations.json").read_text())
    data_sets = {int(client): fields["data_set"] for client, fields in registrations.items()}

    def ancestors(name: str) -> set[tuple[str, int]]:
        return {(upload.data_set, upload.round) for upload in found[name].history.ancestors}

    for name, last in (("round-1", 1), ("round-2", 2), ("global", 3)):
        assert ancestors(name) == {(id_, t) for id_ in data_sets.values() for t in range(1, last + 1)}
    for client, id_ in data_sets.items():
        assert ancestors(f"client-{client}") == ancestors("round-2") | {(id_, 3)}
    cost = cost_of([found["global"]])
    assert cost.guarantee.epsilon == pytest.approx(summary(deduplicated)["epsilon_local_max"], rel=1e-9)
    with Ledger(deduplicated / "ledger.sqlite") as ledger:
        for each in cost.by_data_set:
            events = [release.event for id_ in each.data_sets for release in ledger.releases(id_)]
            assert each.epsilons["provenance"] == pytest.approx(epsilon_of(events, each.delta).epsilon, rel=1e-9)


def test_the_store_holds_every_variant_within_its_bounds_by_an_independent_look(deduplicated, small_run):
    found = described(deduplicated)
    bench = workbench(parse({**small_run, **KEPT}))
    num_replaced = 0
    with Store(deduplicated / "store", read_only=True) as store:
        assert set(store.names) == set(found)
        assert not store.verify()
        for name, variant in found.items():
            outcome = store.manifest(name).provenance["outcome"]
            num_replaced += outcome["num_replaced"]
            # Not by the evaluator that validated: as peft loads the restored file, on a model of its own.
            folder = deduplicated.parent / "restored" / name
            shutil.copytree(deduplicated / "variants" / name, folder, dirs_exist_ok=True)
            restored = {key: torch.from_numpy(value.copy()) for key, value in store.tensors(name).items()}
            save_file(restored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            everyone = np.arange(len(bench.test))
            proven_on = proof_records(len(everyone)) if outcome["num_replaced"] else everyone
            proof = bench.test.part(proven_on.tolist())
            paths = deduplicated / "variants" / name, folder
            accuracies = [correct_of(small_run, path, proof) / len(proof) for path in paths]
            assert accuracies == pytest.approx([outcome["utility_before"], outcome["utility_after"]])
            if outcome["num_replaced"]:
                assert accuracies[0] - accuracies[1] <= outcome["loss_limit"] <= outcome["bound"]
            consulted = [variant, *(found[base] for base in outcome["bases"])]
            union = {upload for each in consulted for upload in each.history.ancestors}
            by_hand = max(
                epsilon_of([u.event for u in union if u.data_set == id_], delta).epsilon
                for id_, delta in variant.deltas.items()
            )
            assert outcome["epsilon_after"] == pytest.approx(by_hand, rel=1e-9)
            assert outcome["epsilon_after"] <= outcome["epsilon_before"] + variant.epsilon_bound
    assert num_replaced > 0, "nothing was shared, the test would be blind"
    page = (deduplicated / "report.html").read_text()
    shown = ("Stored variants", "round-1", "client-2", "the base once, an adapter for each", "a whole model for each")
    assert all(text in page for text in shown)


def correct_of(values, folder: Path, test) -> int:
    loaded = load(str(values["model"]), folder)
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(".modules_to_save." in name or "lora_" in name)
    return round(evaluate(TrainingModel(loaded, memory_limit=2**30, prefix_cache=False), test).accuracy * len(test))


@pytest.mark.parametrize("rule", [*slow("dp-lora"), "fed-sb"])
def test_a_run_stores_without_loss_what_nothing_validates(small_run, tmp_path, rule):
    folder = kept_run(small_run, tmp_path / "run", dedup="lossless", aggregation=rule)
    with Store(folder / "store", read_only=True) as store:
        assert store.names == sorted(described(folder))
        for name in store.names:
            given = folders.read_tensors(folder / "variants" / name)
            restored = {key: values.tobytes() for key, values in store.tensors(name).items()}
            assert restored == {key: values.tobytes() for key, values in given.items()}
    stored, page = stored_in(folder), (folder / "report.html").read_text()
    assert stored.lossless
    assert all(outcome["epsilon_before"] == outcome["epsilon_after"] for outcome in stored.outcomes)
    for text in ("are in <code>store/</code> without loss", "its own values", "the base once, a store without loss"):
        assert text in page
    assert "blocks" not in page[page.index("Stored variants") : page.index("What 6 variants take")]


def test_without_deduplication_the_command_line_does_it_later(small_run, tmp_path):
    folder = kept_run(small_run, tmp_path / "run", variant_clients=False)
    assert not (folder / "store").exists()
    assert set(described(folder)) == {"global", "round-1", "round-2"}
    options = ["--block-size", "16", "-o", "min_batch=2", "--fairness", "outcome"]
    done = as_json("dedup", "run", folder / "variants", folder / "store", *options)
    assert {outcome["name"] for outcome in done["variants"]} == {"global", "round-1", "round-2"}
    assert "Stored variants" in write_report(folder, stored_in(folder)).read_text()


# The evaluator refuses fed-sb by name: tests/simulations/test_rules.py.
@pytest.mark.parametrize("rule", ["flora", *slow(*sorted(set(RULES) - {"flora", "fed-sb"}))])
def test_the_evaluator_sees_what_the_server_saw_and_leaves_the_model_as_it_was(small_run, tmp_path, rule):
    changes = {"noise_multiplier": 0.0, "aggregation": rule, "relevance_threshold": 0.0, "batch_size": 16}
    folder = kept_run(small_run, tmp_path / "run", **changes)
    evaluator = AdapterEvaluator.of_run(folder)
    evaluator.model.merge({})  # the run has left in it what aggregation added
    before = {name: tensor.clone() for name, tensor in evaluator.model.peft_model.state_dict().items()}
    accuracy = pd.read_csv(folder / "rounds.csv").test_accuracy
    for name, round_ in (("global", 3), ("round-2", 2)):
        tensors = folders.read_tensors(folder / "variants" / name)
        everyone = np.arange(evaluator.num_records)
        assert evaluator.utilities(tensors, everyone).mean() == pytest.approx(accuracy[round_])
        saliency = evaluator.saliency(tensors, everyone)
        assert {key: value.shape for key, value in saliency.items()} == {k: v.shape for k, v in tensors.items()}
        assert sum(value.sum() for value in saliency.values()) > 0
    after = evaluator.model.peft_model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_evaluators_saliency_is_the_gradient_of_the_mean_loss(deduplicated):
    evaluator, name = AdapterEvaluator.of_run(deduplicated), "base_model.model.classifier.bias"
    tensors = folders.read_tensors(deduplicated / "variants" / "global")

    def loss(step: float) -> float:
        moved = {**tensors, name: tensors[name] + step * np.eye(len(tensors[name]), dtype=np.float32)[0]}
        with evaluator._with_adapter(moved):
            return evaluate(evaluator.model, evaluator._test).loss

    slope = abs(loss(0.01) - loss(-0.01)) / 0.02
    assert evaluator.saliency(tensors, np.arange(evaluator.num_records))[name][0] == pytest.approx(slope, rel=0.02)


def test_a_resumed_run_keeps_its_store_unless_variants_are_others(deduplicated, small_run, tmp_path, monkeypatch):
    folder = shutil.copytree(deduplicated, tmp_path / "run")
    config = parse({**small_run, **KEPT, "dedup": "drd", "out": str(folder)})
    whole = manifests(folder)
    counted: list[str] = []
    found = AdapterEvaluator.utilities
    monkeypatch.setattr(AdapterEvaluator, "utilities", lambda self, *of: counted.append("") or found(self, *of))

    def repeated() -> int:
        counted.clear()
        registry.deduplicate(config, workbench(config), RunWriter(folder))
        return len(counted)

    assert repeated() == 0, "all is stored already"
    last = next(name for name, manifest in whole.items() if manifest["bases"])
    with Store(folder / "store") as store:
        store.remove(last)
    assert 0 < repeated() <= 1 + whole[last]["outcome"]["num_validations"] * 2
    assert manifests(folder) == whole
    path = folder / "variants" / "round-1"
    folders.describe(path, dataclasses.replace(folders.read(path), utility_bound=0.0))
    assert repeated() > len(whole)
    assert manifests(folder) != whole


def manifests(folder: Path) -> dict[str, dict]:
    with Store(folder / "store", read_only=True) as store:
        return {name: dict(store.manifest(name).provenance) for name in store.names}


def test_the_command_fits_its_blocks_to_a_small_model_and_validates_on_as_many_records_as_asked(deduplicated, tmp_path):
    command = ["dedup", "run", deduplicated / "variants", tmp_path / "store", "--validation-records", "10"]
    found = as_json(*command)
    assert {outcome["num_records"] for outcome in found["variants"]} == {10}
    assert min(outcome["num_blocks"] for outcome in found["variants"]) > 0
    assert as_json(*command) == found, "all is stored already"
    assert "from other settings" in fedpriv(*command, "--seed", "7", code=2)[1]


def test_a_part_of_the_test_set_serves_for_validation(small_run, tmp_path):
    folder = kept_run(small_run, tmp_path / "run", dedup="dred", dedup_records=20, variant_clients=False)
    with Store(folder / "store", read_only=True) as store:
        outcomes = [store.manifest(name).provenance["outcome"] for name in store.names]
    for outcome in outcomes:
        assert outcome["num_records"] == (20 if outcome["loss_limit"] is None else len(proof_records(20)))


def test_rounds_that_the_run_does_not_have_are_refused(small_run):
    with pytest.raises(InputError, match=r"variant_rounds = \[4\]: the run has 2 rounds"):
        parse({**small_run, "variant_rounds": [4]})


def test_the_mean_of_what_recurs_is_a_variant_of_all_uploads_that_were_compared(small_run, tmp_path):
    folder = run(small_run, tmp_path / "run", integral_epsilon=1000.0)
    found = summary(folder)["integral"]
    (cluster,) = found["clusters"]
    assert cluster["clients"] == ["client-0", "client-1", "client-2"]
    assert cluster["recurrence"] == cluster["k"] == 3
    adapters = [load_file(folder / "variants" / name / "adapter_model.safetensors") for name in cluster["clients"]]
    mean = load_file(folder / "variants" / found["mean"] / "adapter_model.safetensors")
    for layer, (b, a) in factors_of(mean).items():
        products = torch.stack([factors_of(each)[layer][0] @ factors_of(each)[layer][1] for each in adapters])
        torch.testing.assert_close(b @ a, products.mean(dim=0), atol=1e-5, rtol=1e-4)
    for name, tensor in non_lora_tensors(mean).items():
        torch.testing.assert_close(tensor, torch.stack([each[name] for each in adapters]).mean(dim=0))
    config = json.loads((folder / "variants" / found["mean"] / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == pytest.approx(16 / 4), "the products count as in training"
    mean, last = (folders.read(folder / "variants" / name) for name in (found["mean"], "global"))
    assert mean.history.ancestors == last.history.ancestors
    page = (folder / "report.html").read_text()
    assert "Variants that recur" in page
    assert "This is not differential privacy" in " ".join(page.split())


def test_where_nothing_recurs_every_client_is_alone_and_no_claim_is_made(small_run, tmp_path):
    folder = run(small_run, tmp_path / "run", integral_epsilon=0.0, rounds=1)
    found = summary(folder)["integral"]
    assert [cluster["recurrence"] for cluster in found["clusters"]] == [1, 1, 1]
    assert {cluster["k"] for cluster in found["clusters"]} == {1}
    assert "1, no claim" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secure_aggregation": True, "min_clients": 3, "local_steps": 1}, "it compares single uploads"),
        ({"aggregation": "ffa-lora"}, ".* aggregation = ffa-lora uploads one factor alone"),
        ({"aggregation": "fed-sb"}, ".* aggregation = fed-sb uploads one factor alone"),
    ],
)
def test_uploads_that_nobody_may_see_or_that_hold_one_factor_are_not_compared(small_run, changes, message):
    with pytest.raises(InputError, match=f"integral_epsilon: {message}"):
        parse({**small_run, **changes, "integral_epsilon": 0.1})


@pytest.fixture(scope="module", params=[*slow("roberta"), "distilbert"])
def replaced_head(request, table, tiny_bert, tmp_path_factory):
    """The configuration and the folder of a run of the recipe `fedpriv` on an encoder whose head is replaced."""
    folder = tmp_path_factory.mktemp(request.param)
    model = architectures.save(architectures.random_model(request.param), folder / "model", tokenizer_of=tiny_bert)
    values = {"model": str(model), "data": str(table), "client_column": "site", "rounds": 8, "lora_rounds": 2}
    values |= {"dedup": "drd", "dedup_block_size": 16, "variant_rounds": [7], "target_epsilon": 100.0, "delta": 1e-5}
    values |= {"simulate": True, "comparison": False}
    return parse(values), run(values, folder / "run")


def test_it_learns_with_adapter_and_head_and_the_saved_adapter_gives_its_logits_and_accuracy(replaced_head):
    config, folder = replaced_head
    found, saved = summary(folder), folder / "variants" / "global"
    assert found["accuracy"] > found["majority_accuracy"] + 0.3
    assert found["adapters_moved"], found["unmoved_tensors"]
    bench = workbench(config)
    write(bench.model.peft_model, load_file(saved / "adapter_model.safetensors"))
    batch = collate(bench.test.items())
    labels = batch.pop("labels")
    with torch.no_grad():
        loaded = load(config.model, saved)(**batch).logits
        assert torch.equal(loaded, bench.model.peft_model(**batch).logits)
    assert float((loaded.argmax(dim=1) == labels).float().mean()) == pytest.approx(found["accuracy"])


def test_variants_are_validated_and_restored_with_the_same_head(replaced_head):
    _, folder = replaced_head
    evaluator = AdapterEvaluator.of_run(folder)
    before = load_file(folder / "variants" / "global" / "adapter_model.safetensors")
    everyone = np.arange(evaluator.num_records)
    accuracy = evaluator.utilities({name: tensor.numpy() for name, tensor in before.items()}, everyone).mean()
    assert accuracy == pytest.approx(summary(folder)["accuracy"])
    with Store(folder / "store", read_only=True) as store:
        assert {"global", "round-7", "client-0"} <= set(store.names)
        restored = {name: np.array(array) for name, array in store.tensors("global").items()}
        outcome = store.manifest("global").provenance["outcome"]
    proof = proof_records(len(everyone)) if outcome["num_replaced"] else everyone
    assert evaluator.utilities(restored, proof).mean() == pytest.approx(outcome["utility_after"])
    assert (evaluator.saliency(restored, everyone)["base_model.model.classifier.weight"] > 0).any()
