"""Membership inference on records of the embedded corpus: a target run and its shadow runs, trained together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.audit import calibrated_scores, lira_scores, loss_scores, membership, plot_roc
from fedpriv.audit.black_box import record_losses
from fedpriv.config import parse
from fedpriv.data.records import Records
from fedpriv.training.workbench import Workbench
from simulations.studies.audit.federations import Holder, train
from simulations.studies.audit.harness import update_spec

DELTA = 1e-5
CLIENTS, POOL, SHADOWS = 3, 150, 8
ROUNDS, STEPS, BATCH = 3, 20, 50
# Noise multipliers: clipping alone, and one with a finite epsilon.
CONDITIONS = {"no noise": 0.0, "noise": 2.0}


def membership_run(condition: str, plot: Path) -> dict[str, Any]:
    """Train the target and its shadow models, attack the target three ways, and plot the ROC curves.

    Each federation includes every record of the pool with probability 1/2. The shadow models are trained on the same
    pool, the strongest setting for the attacker; the calibrated attack's reference is the mean of those without the
    record.
    """
    began = time.perf_counter()
    bench = Workbench(parse({"layers": "last-1", "max_length": 16, "simulate": True}))
    pools = [bench.client(client).part(range(POOL)) for client in range(CLIENTS)]
    coins = np.random.default_rng(31).random((1 + SHADOWS, CLIENTS, POOL)) < 0.5
    federations = [
        [Holder(records=_part(pools[client], run[client]), num_registered=POOL) for client in range(CLIENTS)]
        for run in coins
    ]
    spec = update_spec(
        noise_multiplier=CONDITIONS[condition],
        batch_size=BATCH,
        rounds=ROUNDS,
        local_steps=STEPS,
        optimizer="adamw",
        learning_rate=0.005,
    )
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
    }
    plot_roc(attacks, members[0], plot)
    results = {name: membership(scores, members[0]) for name, scores in attacks.items()}
    return {
        "kind": "membership",
        "condition": condition,
        "epsilon": epsilon_of(events, DELTA).epsilon if CONDITIONS[condition] else None,
        "num_members": int(members[0].sum()),
        "num_others": int((~members[0]).sum()),
        "loss_members": float(losses[0][members[0]].mean()),
        "loss_others": float(losses[0][~members[0]].mean()),
        "seconds": time.perf_counter() - began,
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
