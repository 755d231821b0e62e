"""`fedpriv dedup` on variants of a small linear model: plan, run, restore, verify, and one line for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedpriv.accounting.events import PureEpsilon, SubsampledGaussian
from fedpriv.dedup import variants
from fedpriv.dedup.composition import History, Upload
from fedpriv.dedup.variants import Described
from fedpriv.ledger.ledger import Ledger

FEDPRIV = Path(sys.executable).parent / "fedpriv"

STUDY = '''
"""Records of two classes; the model is a weight for each of 8,192 features."""

import numpy as np

from fedpriv.dedup.validation import PrivateRecords

RNG = np.random.default_rng(1)
TRUTH = RNG.normal(size=8192).astype(np.float32)
RECORDS = RNG.normal(size=(500, 8192)).astype(np.float32)
LABELS = RECORDS @ TRUTH > 0


class Study:
    num_records = len(LABELS)
    private = None

    def count_correct(self, tensors):
        return int(((RECORDS @ tensors["weight"] > 0) == LABELS).sum())

    def saliency(self, tensors):
        return {name: np.abs(value) for name, value in tensors.items()}


def evaluator():
    return Study()


def private():
    study = Study()
    study.private = PrivateRecords(data_set="validation", delta=1e-5)
    return study
'''


def fedpriv(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run([FEDPRIV, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `study` and, under variants/, three rounds of a run."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.py").write_text(STUDY)
    truth = np.random.default_rng(1).normal(size=8192).astype(np.float32)
    rng = np.random.default_rng(2)
    event = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.05)
    for round_ in (10, 12, 14):
        uploads = [Upload(data_set="clinic", run="r", round=n + 1, event=event) for n in range(round_)]
        weight = truth + rng.normal(size=8192).astype(np.float32) / round_
        described = Described(
            name=f"round-{round_}",
            architecture="linear",
            utility=0.95,
            epsilon_bound=0.3,
            utility_bound=0.05,
            deltas={"clinic": 1e-5},
            history=History(name=f"round-{round_}", ancestors=frozenset(uploads)),
        )
        variants.write(folder / "variants" / f"round-{round_}", described, {"weight": weight})
    return folder


def test_plan_run_restore_verify(study, tmp_path):
    planned = json.loads(fedpriv(study, "dedup", "plan", "variants", "--fairness", "outcome", "--json"))
    assert set(planned["targets"]) | set(planned["untouched"]) == {"round-10", "round-12", "round-14"}
    assert planned["targets"]
    store = str(tmp_path / "store")
    options = ["--evaluator", "study:evaluator", "--block-size", "128", "-o", "min_batch=1", "--fairness", "outcome"]
    done = json.loads(fedpriv(study, "dedup", "run", "variants", store, *options, "--json"))
    assert 0 < done["compression_ratio"] < 1
    assert done["num_validations"] > 0
    for outcome in done["variants"]:
        assert outcome["correct_before"] - outcome["correct_after"] <= 0.05 * 500
        assert outcome["epsilon_after"] <= outcome["epsilon_before"] + 0.3
    out = tmp_path / "round-14.safetensors"
    fedpriv(study, "dedup", "restore", store, "round-14", "--out", str(out))
    assert safetensors.numpy.load_file(out)["weight"].shape == (8192,)
    assert "3 variants, all sound" in fedpriv(study, "dedup", "verify", store)
    blocks = next((tmp_path / "store").glob("blocks.*.npy"))
    damaged = bytearray(blocks.read_bytes())
    damaged[-3] ^= 1
    blocks.write_bytes(damaged)
    assert "weight" in fedpriv(study, "dedup", "verify", store, code=1)


def test_private_records_are_charged_to_their_ledger_and_no_number_is_shown(study, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("clinic", 500, 1e-5, data_set="validation")
    options = ["--evaluator", "study:private", "--block-size", "128", "--fairness", "outcome", "--json"]
    options += ["--epsilon-bound", "5", "--validation-epsilon", "0.75", "--ledger", str(tmp_path / "ledger.sqlite")]
    done = json.loads(fedpriv(study, "dedup", "run", "variants", str(tmp_path / "store"), *options))
    targets = [outcome for outcome in done["variants"] if outcome["bases"]]
    assert targets
    assert {outcome["correct_before"] for outcome in done["variants"]} == {None}
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (release,) = ledger.releases("validation")
    assert release.event == PureEpsilon(epsilon=0.75, count=len(targets))
    other = ["--ledger", str(tmp_path / "other.sqlite"), "--validation-epsilon", "1"]
    Ledger(tmp_path / "other.sqlite").close()
    output = fedpriv(study, "dedup", "run", "variants", "s", "--evaluator", "study:private", *other, code=2)
    assert "no such data set of 500 records" in output
    assert not (study / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere"], "folder = 'nowhere': holds no variants"),
        (["plan", "variants", "--strategy", "best"], "strategy = 'best': must be one of single, multi, cross"),
        (["run", "variants", "s", "--evaluator", "study:evaluator", "--algorithm", "magic"], "known are drd, dred"),
        (
            ["run", "variants", "s", "--evaluator", "study:evaluator", "-o", "speed=3"],
            "option = 'speed': drd knows min_batch",
        ),
        (["run", "variants", "s", "--evaluator", "missing:evaluator"], "must be MODULE:FUNCTION"),
        (["run", "variants", "s", "--evaluator", "study:private"], "its records are private"),
        (["run", "variants", "s"], "is not the variants of a run; give an --evaluator"),
        (["run", "variants", "s", "--evaluator", "study:evaluator", "--validation-epsilon", "1"], "are public"),
        (["verify", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_and_no_store_appears(study, arguments, message):
    output = fedpriv(study, "dedup", *arguments, code=2)
    assert message in output
    assert len(output.strip().splitlines()) == 1
    assert not (study / "s").exists()
