"""One run of the real model on the embedded corpus with text canaries, audited by its final model alone."""

from __future__ import annotations

import time
from typing import Any

from fedpriv.accounting.accountants import epsilon_of
from fedpriv.adapters import lora
from fedpriv.audit.black_box import CanaryPlan, audit_run, audited_client
from fedpriv.config import parse
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training.evaluation import evaluate
from fedpriv.training.workbench import Workbench
from simulations.studies.audit.federations import Holder, train
from simulations.studies.audit.harness import update_spec

DELTA = 1e-5
ROUNDS, STEPS, BATCH, GUESSES = 10, 3, 64, 40
# Canaries of each of the five clients.
PLAN = CanaryPlan(kind="tokens", num=60, num_tokens=16)
CONDITIONS = {"no noise": 0.0, "the default run's noise": 1.88}


def full_model_run(condition: str) -> dict[str, Any]:
    """Audit the default model and schedule with its last layer trained and 300 canaries in all."""
    began = time.perf_counter()
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
    spec = update_spec(
        noise_multiplier=CONDITIONS[condition], batch_size=BATCH, rounds=ROUNDS, local_steps=STEPS, learning_rate=0.5
    )
    holders = [Holder(records=client.records, num_registered=client.num_registered) for client in clients]
    order = sorted(range(len(holders)), key=lambda client: holders[client].num_registered)
    # The smallest client comes first: `train` returns its charge, and its epsilon is the largest.
    (final,), events = train(bench.model, [[holders[client] for client in order]], spec, seed=0)
    result = audit_run(bench.model, bench.initial, final, clients, num_guesses=GUESSES, delta=DELTA)
    lora.write_parameters(bench.model.parameters, final)
    return {
        "kind": "full model",
        "condition": condition,
        "epsilon": epsilon_of(events, DELTA).epsilon if CONDITIONS[condition] else None,
        "num_canaries": result.num_canaries,
        "num_guesses": result.num_guesses,
        "num_correct": result.num_correct,
        "epsilon_lower": result.epsilon_lower,
        "test_accuracy": evaluate(bench.model, bench.test).accuracy,
        "seconds": time.perf_counter() - began,
    }
