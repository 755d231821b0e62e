"""Audits of whole runs by canaries, black box."""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.config import parse
from fedpriv.learning.training.canaries import audited
from fedpriv.learning.training.workbench import workbench
from fedpriv.methods.audit import audit_power, calibrated_scores, one_run_audit
from fedpriv.methods.audit.black_box import record_losses
from fedpriv.privacy.accounting import SubsampledGaussian
from server import checkpoint
from simulations.engines import federation
from simulations.studies.federations import SilentObserver
from simulations.studies.harness import Line
from simulations.tiny_bert import make_tiny_bert

DELTA = 1e-5

FULL_MODEL_NOISE: dict[str, dict[str, float]] = {"no noise": {"noise_multiplier": 0.0}, "the default noise": {}}
REPEATED_CLAIM, REPEATED = 8.0, 100

LANGUAGE_CLAIMS: dict[str, float | None] = {"no noise": None, "8": 8.0, "4": 4.0}
LANGUAGE_SEEDS = range(3)
# One holder of 100 questions and 250 canaries, in full batches; float32, since bfloat16 rounds a part of what is found.
_LANGUAGE: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct", "base_dtype": "float32", "prompt_column": "question", "response_column": "answer",
    "public_data": True, "partition": "iid", "num_clients": 1, "max_records": 100, "max_length": 64,
    "target_modules": ["down_proj"], "clip_norm": 0.1, "learning_rate": 100.0, "rounds": 6, "sampling_probability": 1.0,
    "server_optimizer": "sgd", "server_learning_rate": 1.0, "delta": DELTA, "audit": "tokens", "audit_canaries": 250,
    "simulate": True, "comparison": False, "baselines": False, "generated_answers": 0, "evaluate_every": 1000,
    "test_fraction": 0.002,
}  # fmt: skip


def full_model_run(condition: str) -> Line:
    """Audit the default run with 60 canaries at each of its five clients."""
    keys = {"audit": "tokens", "audit_canaries": 60, "simulate": True, "comparison": False, "baselines": False}
    observer = SilentObserver()
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        run = {**keys, **FULL_MODEL_NOISE[condition], "out": str(Path(folder) / "run")}
        federation.run(parse(run), observer)
    found = observer.summary["audit"]
    figures = ("num_canaries", "num_guesses", "num_correct", "epsilon_lower", "epsilon_lower_f_dp")
    return {
        "kind": "full model",
        "condition": condition,
        "epsilon": found["claimed_epsilon"] if observer.noise["noise_multiplier"] else None,
        **{name: found[name] for name in figures},
        "auc": float(np.trapezoid(found["roc"]["tpr"], found["roc"]["fpr"])),
        "test_accuracy": observer.summary["accuracy"],
    }


def language_model_run(data: Path, condition: str, seed: int) -> Line:
    """Audit a run of SmolLM2 by its canaries, by their drop in loss alone, and by an ideal attacker."""
    claim = LANGUAGE_CLAIMS[condition]
    noise = {"noise_multiplier": 0.0} if claim is None else {"target_epsilon": claim}
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        out = Path(folder) / "run"
        config = parse({**_LANGUAGE, **noise, "data": str(data / "medquad.csv.gz"), "seed": seed, "out": str(out)})
        observer = SilentObserver()
        federation.run(config, observer)
        bench = workbench(config)
        final = checkpoint.read_last(out, bench.initial).model.adapter
    found = observer.summary["audit"]
    client = audited(config, bench, 0)
    assert client is not None
    before, after = (record_losses(bench.model, adapter, client.canaries) for adapter in (bench.initial, final))
    drop = one_run_audit(
        calibrated_scores(after, before), client.included, num_guesses=found["num_guesses"], delta=DELTA
    )
    figures = ("num_canaries", "num_guesses", "num_correct", "epsilon_lower", "epsilon_lower_f_dp")
    ideal: Line = {}
    if claim is not None:
        event = SubsampledGaussian(
            noise_multiplier=float(observer.noise["noise_multiplier"] or 0.0),
            sampling_probability=1.0,
            count=config.rounds,
        )
        power = audit_power([event], DELTA, found["num_canaries"])
        ideal = {"ideal": power.ideal, "ideal_f_dp": power.ideal_f_dp}
    return {
        "kind": "language models",
        "condition": condition,
        "seed": seed,
        "epsilon": claim,
        **{name: found[name] for name in figures},
        "drop_num_correct": drop.num_correct,
        "drop_epsilon_lower": drop.epsilon_lower,
        **ideal,
    }


def repeated_run(num_runs: int) -> Line:
    """Audits of so many runs of a tiny model, with seeds of their own: how often a bound exceeds the claim of 8."""
    bounds: dict[str, list[float]] = {"epsilon_lower": [], "epsilon_lower_f_dp": []}
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        where = Path(folder)
        words = tuple(f"word{number}" for number in range(500))
        _write_random_records(where / "records.csv", words)
        shared = {
            "model": str(make_tiny_bert(where / "tiny-bert", words)), "data": str(where / "records.csv"),
            "test_data": str(where / "records.csv"), "partition": "iid", "num_clients": 1, "recipe": "per-sample",
            "layers": "all", "rank": 4, "rounds": 4, "local_steps": 1, "sampling_probability": 1.0, "clip_norm": 0.1,
            "learning_rate": 1.0, "server_optimizer": "sgd", "server_learning_rate": 1.0, "delta": DELTA,
            "target_epsilon": REPEATED_CLAIM, "audit": "tokens", "audit_canaries": 60, "simulate": True,
            "comparison": False, "baselines": False, "evaluate_every": 10**6,
        }  # fmt: skip
        for seed in range(num_runs):
            observer = SilentObserver()
            federation.run(parse({**shared, "seed": seed, "out": str(where / f"run-{seed}")}), observer)
            for name, found in bounds.items():
                found.append(observer.summary["audit"][name])
    return {
        "kind": "repeated",
        "epsilon": REPEATED_CLAIM,
        "num_runs": num_runs,
        **{f"{name}_largest": max(found) for name, found in bounds.items()},
        **{f"{name}_mean": float(np.mean(found)) for name, found in bounds.items()},
        **{f"{name}_above": sum(each > REPEATED_CLAIM for each in found) for name, found in bounds.items()},
    }


def _write_random_records(path: Path, words: Sequence[str]) -> None:
    generator = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((" ".join(generator.choices(words, k=12)), "ab"[index % 2]) for index in range(60))
