"""Small inputs of the commands: variants to deduplicate, a ledger, tables, scores."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fedpriv.learning.adapters import quiet_transformers
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Charge, Key
from fedpriv.privacy.ledger.ledger import Ledger
from tests.stores import described, uploads

ACCOUNT = ["account", "--noise-multiplier", "2", "--sampling-probability", "0.05", "--steps", "40", "--delta", "1e-5"]

STUDY = '''
"""Records of two classes; the model is a weight for each of 2,048 features."""

import numpy as np

from fedpriv.models.dedup.validation import PrivateRecords

RNG = np.random.default_rng(1)
TRUTH = RNG.normal(size=2048).astype(np.float32)
RECORDS = RNG.normal(size=(1500, 2048)).astype(np.float32)
LABELS = RECORDS @ TRUTH > 0


class Study:
    num_records, utility = len(LABELS), "accuracy"
    private = None

    def utilities(self, tensors, records):
        return ((RECORDS[records] @ tensors["weight"] > 0) == LABELS[records]).astype(float)

    def saliency(self, tensors, records):
        return {name: np.abs(value) for name, value in tensors.items()}


def evaluator():
    return Study()


def private():
    study = Study()
    study.private = PrivateRecords(data_set="validation", delta=1e-5)
    return study
'''


def write_study(folder: Path, rounds: Sequence[int] = (10, 12, 14), *, noiseless: bool = False) -> Path:
    """The module `study` and, under variants/, some rounds of a run; the last without noise if asked for."""
    (folder / "study.py").write_text(STUDY)
    truth = np.random.default_rng(1).normal(size=2048).astype(np.float32)
    rng = np.random.default_rng(2)
    for round_ in rounds:
        multiplier = 0.0 if noiseless and round_ == rounds[-1] else 1.5
        event = SubsampledGaussian(noise_multiplier=multiplier, sampling_probability=0.05)
        name, weight = f"round-{round_}", truth + rng.normal(size=2048).astype(np.float32) / round_
        history = History(name=name, ancestors=uploads(round_, run=f"r-{multiplier}", event=event))
        variant = described(name, utility=0.95, epsilon_bound=0.3, history=history)
        folders.write(folder / "variants" / name, variant, {"weight": weight})
    return folder


def charge(
    ledger: Ledger, data_set: str, *releases: Release, client: str = "0", run: str = "run", source: str = "secure"
) -> None:
    """Charge a release in each round of a run."""
    for round_, release in enumerate(releases, start=1):
        key = Key(run=run, client=client, round=round_, request="x")
        ledger.charge([Charge(key=key, data_set=data_set, release=release, noise_source=source)])


def write_ledger(path: Path, event: SubsampledGaussian) -> Path:
    """A ledger of two clients and two runs of two rounds each; the second run's noise was seeded for client 1."""
    releases = [Release(event=event, rho_bar=0.7)] * 2
    with Ledger(path) as ledger:
        for client, source in (("0", "secure"), ("1", "seeded")):
            data_set = ledger.register(client, 100, 1e-5).id
            charge(ledger, data_set, *releases, client=client, run="first")
            charge(ledger, data_set, *releases, client=client, run="second", source=source)
    return path


def write_plain_adapter(folder: Path, base: str, kind: str = "LORA") -> None:
    """An adapter as peft's `save_pretrained` leaves it, of the tiny causal model of `tests.chats`."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder.parents[1] / base)
        get_peft_model(model, config).save_pretrained(folder)
    values = json.loads((folder / "adapter_config.json").read_text())
    named = values | {"base_model_name_or_path": base, "peft_type": kind}
    (folder / "adapter_config.json").write_text(json.dumps(named))


def write_plain_table(path: Path) -> Path:
    """A CSV of two classes and one number that tells them apart."""
    rng = np.random.default_rng(0)
    labels = rng.random(600) < 0.3
    numbers = rng.normal(size=600) + 3 * labels
    rows = [f"{number:.4f},{'yes' if label else 'no'}" for number, label in zip(numbers, labels, strict=True)]
    path.write_text("x,label\n" + "\n".join(rows) + "\n")
    return path


def write_csv(path: Path, **columns: Sequence[object]) -> Path:
    """A CSV of columns of equal length."""
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


def write_begun_run(folder: Path) -> None:
    """One round without noise, whose model gave no number."""
    folder.mkdir()
    (folder / "config.toml").write_text("rounds = 5\n")
    (folder / "environment.json").write_text('{"version": 1}')
    epsilons = {"epsilon_local_max": ["inf"], "epsilon_rho_max": ["inf"], "epsilon_aggregate_max": [""]}
    epsilons |= {"epsilon_this_run_max": [""], "epsilon_before_max": [""]}
    numbers = {"test_accuracy": ["nan"], "bytes_up": [10], "bytes_down": [10], "seconds": ["nan"]}
    write_csv(folder / "rounds.csv", round=[1], **epsilons, **numbers)
    client = {"client": [0], "num_records": [50], "status": ["ok"], "detail": [""]}
    write_csv(folder / "clients.csv", round=[1], **client, epsilon_local=["inf"], delta=[1e-5])
