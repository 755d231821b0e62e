"""Black-box audits of small federations: membership of records, and canaries in runs of the real models."""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting import SubsampledGaussian, noise_multiplier_for
from fedpriv.accounting.accountants import epsilon_of
from fedpriv.accounting.events import Event, group
from fedpriv.adapters import Adapter, lora
from fedpriv.aggregation import weighted_average, weights_by_size
from fedpriv.audit import (
    audit_power,
    calibrated_scores,
    lira_scores,
    loss_scores,
    membership,
    one_run_audit,
    plot_roc,
    rmia_scores,
)
from fedpriv.audit.black_box import audit_run, record_losses
from fedpriv.audit.canaries import CanaryPlan, audited, audited_client
from fedpriv.config import parse
from fedpriv.data.records import Records
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import PoissonSampler
from fedpriv.training.evaluation import evaluate
from fedpriv.training.local_update import ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel
from fedpriv.training.stacked import execute_stacked
from fedpriv.training.workbench import Workbench, workbench
from server import checkpoint
from simulations.engines import federation
from simulations.studies.audit.harness import update_spec
from simulations.studies.federations import SilentObserver
from simulations.studies.harness import Line
from simulations.tiny_bert import make_tiny_bert

DELTA = 1e-5

CLIENTS, POOL, SHADOWS = 3, 150, 8
MEMBERSHIP_CLAIMS: dict[str, float | None] = {"no noise": None, "epsilon 8": 8.0, "epsilon 1": 1.0}

FULL_MODEL_NOISE = {"no noise": 0.0, "the default run's noise": 1.88}
NUM_GUESSES = 40
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
# Canaries of each of the five clients.
PLAN = CanaryPlan(kind="tokens", num=60, num_tokens=16)


@dataclass(frozen=True, kw_only=True)
class PoolHolder:
    """A client of one federation: its records, and N_k, which need not equal their number."""

    records: Records
    num_registered: int


def train(
    model: TrainingModel, federations: Sequence[Sequence[PoolHolder]], spec: UpdateSpec, *, seed: int
) -> tuple[list[Adapter], tuple[Event, ...]]:
    """The final global adapter of each federation, and the total charge of the first client of the first one.

    Args:
        model: shared by all; every federation starts from its initial adapter.
        federations: the clients of each.
        spec: of every update.
        seed: of inclusion and noise.
    """
    adapters: list[Adapter] = [model.initial] * len(federations)
    charged: list[Event] = []
    for round_ in range(1, spec.num_rounds + 1):
        tasks = [
            UpdateTask(
                adapter=adapters[place],
                data=holder.records,
                spec=spec,
                round=round_,
                sampler=PoissonSampler(
                    num_registered=holder.num_registered,
                    expected_batch_size=spec.batch_size,
                    source=SeededSource(seed, place, client, round_, "inclusion"),
                ),
                noise=SeededSource(seed, place, client, round_, "noise"),
            )
            for place, holders in enumerate(federations)
            for client, holder in enumerate(holders)
        ]
        updates = iter(execute_stacked(model, tasks))
        for place, holders in enumerate(federations):
            uploads = [_upload(next(updates)) for _ in holders]
            weights = weights_by_size({client: holder.num_registered for client, holder in enumerate(holders)})
            adapters[place] = weighted_average([upload.adapter for upload in uploads], list(weights.values()))
            if place == 0:
                charged.append(uploads[0].event)
    return adapters, group(charged)


def _upload(update: ClientUpdate | Exception) -> ClientUpdate:
    if isinstance(update, Exception):
        raise update
    return update


def membership_run(condition: str, plot: Path) -> Line:
    """Train the target and its shadow models, attack the target four ways, and plot the ROC curves.

    Each federation includes every record of the pool with probability 1/2. The shadow models are trained on the same
    pool, the strongest setting for the attacker; the calibrated attack's reference is the mean of those without the
    record.
    """
    bench = Workbench(parse({"layers": "last-1", "max_length": 16, "simulate": True}))
    pools = [bench.client(client).part(range(POOL)) for client in range(CLIENTS)]
    coins = np.random.default_rng(31).random((1 + SHADOWS, CLIENTS, POOL)) < 0.5
    federations = [
        [PoolHolder(records=_part(pools[client], run[client]), num_registered=POOL) for client in range(CLIENTS)]
        for run in coins
    ]
    claim, batch_size, rounds, steps = MEMBERSHIP_CLAIMS[condition], 50, 3, 20
    noise = 0.0
    if claim is not None:
        noise = noise_multiplier_for(claim, DELTA, sampling_probability=batch_size / POOL, steps=rounds * steps)
    spec = update_spec(
        noise_multiplier=noise, batch_size=batch_size, rounds=rounds, local_steps=steps, optimizer="adamw",
        learning_rate=0.03,
    )  # fmt: skip
    adapters, events = train(bench.model, federations, spec, seed=0)
    losses = np.stack(
        [np.concatenate([record_losses(bench.model, adapter, pool) for pool in pools]) for adapter in adapters]
    )
    members = coins.reshape(1 + SHADOWS, -1)
    usable = members[1:].any(axis=0) & ~members[1:].all(axis=0)
    losses, members = losses[:, usable], members[:, usable]
    reference = np.where(members[1:], 0, losses[1:]).sum(axis=0) / (~members[1:]).sum(axis=0)
    attacks = {
        "loss threshold": loss_scores(losses[0]),
        "calibrated": calibrated_scores(losses[0], reference),
        "LiRA": lira_scores(losses[0], losses[1:], members[1:]),
        "RMIA": rmia_scores(losses[0], losses[1:]),
    }
    plot_roc(attacks, members[0], plot)
    results = {name: membership(scores, members[0]) for name, scores in attacks.items()}
    return {
        "kind": "membership",
        "condition": condition,
        "epsilon": epsilon_of(events, DELTA).epsilon if noise else None,
        "num_members": int(members[0].sum()),
        "num_others": int((~members[0]).sum()),
        "loss_members": float(losses[0][members[0]].mean()),
        "loss_others": float(losses[0][~members[0]].mean()),
        "attacks": {
            name: {
                "auc": [result.auc, result.auc_low, result.auc_high],
                "rates": [[r.false_positive_rate, r.true_positive_rate, r.low, r.high] for r in result.rates],
            }
            for name, result in results.items()
        },
    }


def _part(pool: Records, chosen: np.ndarray) -> Records:
    return pool.part(np.flatnonzero(chosen).tolist())


def full_model_run(condition: str) -> Line:
    """Audit the default model and schedule with its last layer trained and 300 canaries in all."""
    bench = Workbench(parse({"layers": "last-1", "max_length": 32, "simulate": True}))
    labels = len(bench.data.label_names)
    clients = [
        audited_client(
            bench.client(client),
            PLAN,
            num_labels=labels,
            vocabulary=len(bench.base.tokenizer),
            canary_source=SeededSource("canaries", client),
            coins=SeededSource("coins", client),
        )
        for client in range(bench.num_clients)
    ]
    noise = FULL_MODEL_NOISE[condition]
    spec = update_spec(noise_multiplier=noise, batch_size=64, rounds=10, local_steps=3, learning_rate=0.5)
    holders = [PoolHolder(records=client.records, num_registered=client.num_registered) for client in clients]
    order = sorted(range(len(holders)), key=lambda client: holders[client].num_registered)
    # The smallest client comes first: `train` returns its charge, and its epsilon is the largest.
    (final,), events = train(bench.model, [[holders[client] for client in order]], spec, seed=0)
    result = audit_run(bench.model, bench.initial, final, clients, num_guesses=NUM_GUESSES, delta=DELTA)
    lora.write_parameters(bench.model.parameters, final)
    return {
        "kind": "full model",
        "condition": condition,
        "epsilon": epsilon_of(events, DELTA).epsilon if noise else None,
        "num_canaries": result.num_canaries,
        "num_guesses": result.num_guesses,
        "num_correct": result.num_correct,
        "epsilon_lower": result.epsilon_lower,
        "test_accuracy": evaluate(bench.model, bench.test).accuracy,
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
            "test_data": str(where / "records.csv"), "partition": "iid", "num_clients": 1, "recipe": "dp-lora-paper",
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
