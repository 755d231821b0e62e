"""Attacks on what a federation publishes: membership from a model in each form it may take, and what a server answers.

The shadow models are trained on the same pool. An attack that finds little in a model trained without noise is too weak
to say anything of the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.config import parse
from fedpriv.learning.adapters import Adapter, as_tensor, difference, lora, norm
from fedpriv.learning.aggregation import weighted_average, weights_by_size
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import PoissonSampler
from fedpriv.learning.training.canaries import audited
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.learning.training.workbench import Workbench, workbench
from fedpriv.methods.audit import calibrated_scores, lira_scores, loss_scores, membership, plot_roc, rmia_scores
from fedpriv.methods.audit.black_box import record_losses
from fedpriv.models.dedup import DedupSettings, deduplicate
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.serving.requests import EngineLimits, Failed, Generate, Piece
from fedpriv.models.serving.scheduler import Scheduler
from fedpriv.models.serving.sources import find, load
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting import noise_multiplier_for
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import Event, group
from fedpriv.privacy.accounting.law import Array
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.benchmarks.serving import answer_all
from simulations.engines import federation
from simulations.studies.audit.harness import update_spec
from simulations.studies.federations import SilentObserver
from simulations.studies.harness import Line

DELTA = 1e-5
CLAIMS: dict[str, float | None] = {"no noise": None, "epsilon 8": 8.0, "epsilon 1": 1.0}

CLIENTS, POOL, SHADOWS = 3, 150, 8
CORPORA: dict[str, dict[str, Any]] = {
    "embedded": {"max_length": 16},
    "SST-2": {
        "data": "sst2_train.csv.gz", "test_data": "sst2_dev.csv.gz", "public_data": True, "partition": "iid",
        "num_clients": CLIENTS, "max_records": CLIENTS * POOL, "max_length": 32,
    },
}  # fmt: skip
BLOCK_SIZE, UTILITY_BOUND = 256, 0.1


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A trained federation.

    Attributes:
        model: the final global adapter.
        uploads: of the last round, one for each client.
        charged: the total charge of the first client.
    """

    model: Adapter
    uploads: tuple[Adapter, ...]
    charged: tuple[Event, ...]


def train(
    model: TrainingModel, federations: Sequence[Sequence[Records]], num_registered: int, spec: UpdateSpec
) -> list[Federation]:
    """Train federations side by side, each from the model's initial adapter.

    Args:
        model: shared by all.
        federations: the clients' records of each.
        num_registered: N_k of every client, whatever number of records it has.
        spec: of every update.
    """
    adapters: list[Adapter] = [model.initial] * len(federations)
    last: list[list[ClientUpdate]] = []
    charged: list[list[Event]] = [[] for _ in federations]
    for round_ in range(1, spec.num_rounds + 1):
        tasks = [
            UpdateTask(
                adapter=adapters[place],
                data=records,
                spec=spec,
                round=round_,
                sampler=PoissonSampler(
                    num_registered=num_registered,
                    expected_batch_size=spec.batch_size,
                    source=SeededSource(place, client, round_, "inclusion"),
                ),
                noise=SeededSource(place, client, round_, "noise"),
            )
            for place, clients in enumerate(federations)
            for client, records in enumerate(clients)
        ]
        updates = iter(execute_stacked(model, tasks))
        last = [[_upload(next(updates)) for _ in clients] for clients in federations]
        for place, uploads in enumerate(last):
            weights = weights_by_size(dict.fromkeys(range(len(uploads)), num_registered))
            adapters[place] = weighted_average([upload.adapter for upload in uploads], list(weights.values()))
            charged[place].append(uploads[0].event)
    return [
        Federation(model=adapter, uploads=tuple(upload.adapter for upload in uploads), charged=group(events))
        for adapter, uploads, events in zip(adapters, last, charged, strict=True)
    ]


def _upload(update: ClientUpdate | Exception) -> ClientUpdate:
    if isinstance(update, Exception):
        raise update
    return update


def membership_run(data: Path, corpus: str, condition: str, plot: Path) -> Line:
    """Train a federation and its shadow models, attack the global model four ways, and its other forms by LiRA.

    Each federation includes every record of the pool with probability 1/2. The calibrated attack's reference is the
    mean of those without the record.
    """
    keys = CORPORA[corpus]
    files: dict[str, Any] = {name: str(data / keys[name]) for name in ("data", "test_data") if name in keys}
    bench = Workbench(parse({"layers": "last-1", "simulate": True, **keys, **files}))
    pools = [bench.client(client).part(range(POOL)) for client in range(CLIENTS)]
    coins = np.random.default_rng(31).random((1 + SHADOWS, CLIENTS, POOL)) < 0.5
    federations = [[_part(pool, included) for pool, included in zip(pools, run, strict=True)] for run in coins]
    claim, batch_size, rounds, steps = CLAIMS[condition], 50, 3, 20
    noise = 0.0
    if claim is not None:
        noise = noise_multiplier_for(claim, DELTA, sampling_probability=batch_size / POOL, steps=rounds * steps)
    spec = update_spec(
        noise_multiplier=noise, batch_size=batch_size, rounds=rounds, local_steps=steps, optimizer="adamw",
        learning_rate=0.03,
    )  # fmt: skip
    trained = train(bench.model, federations, POOL, spec)
    judge = AdapterEvaluator(bench)
    forms = _forms(bench, judge, trained[0])

    members = coins.reshape(1 + SHADOWS, -1)
    usable = members[1:].any(axis=0) & ~members[1:].all(axis=0)
    members = members[:, usable]

    def losses_of(adapters: Sequence[Adapter]) -> Array:
        """The losses of each client's pool under an adapter."""
        losses = (record_losses(bench.model, *each) for each in zip(adapters, pools, strict=True))
        return np.concatenate(list(losses))[usable]

    def by_lira(adapters: Sequence[Adapter], shadows: Array) -> dict[str, Any]:
        return _attack(lira_scores(losses_of(adapters), shadows, members[1:]), members[0])

    target, *others = (losses_of([each.model] * CLIENTS) for each in trained)
    shadows, uploaded = np.stack(others), np.stack([losses_of(each.uploads) for each in trained[1:]])
    reference = np.where(members[1:], 0, shadows).sum(axis=0) / (~members[1:]).sum(axis=0)
    attacks = {
        "loss threshold": loss_scores(target),
        "calibrated": calibrated_scores(target, reference),
        "LiRA": lira_scores(target, shadows, members[1:]),
        "RMIA": rmia_scores(target, shadows),
    }
    plot_roc(attacks, members[0], plot)
    lora.write_parameters(bench.model.parameters, trained[0].model)
    return {
        "kind": "membership",
        "corpus": corpus,
        "condition": condition,
        "epsilon": epsilon_of(trained[0].charged, DELTA).epsilon if noise else None,
        "accuracy": evaluate(bench.model, bench.test).accuracy,
        "num_members": int(members[0].sum()),
        "num_others": int((~members[0]).sum()),
        "loss_members": float(target[members[0]].mean()),
        "loss_others": float(target[~members[0]].mean()),
        "attacks": {name: _attack(scores, members[0]) for name, scores in attacks.items()},
        "uploads": by_lira(trained[0].uploads, uploaded),
        "forms": {
            name: {**by_lira([adapter] * CLIENTS, shadows), "distance": distance}
            for name, (adapter, distance) in forms.items()
        },
    }


def _part(pool: Records, chosen: np.ndarray) -> Records:
    return pool.part(np.flatnonzero(chosen).tolist())


def _attack(scores: Array, members: np.ndarray) -> dict[str, Any]:
    found = membership(scores, members)
    return {
        "auc": [found.auc, found.auc_low, found.auc_high],
        "rates": [[r.false_positive_rate, r.true_positive_rate, r.low, r.high] for r in found.rates],
    }


def _forms(bench: Workbench, judge: AdapterEvaluator, trained: Federation) -> dict[str, tuple[Adapter, float]]:
    """{form: the global adapter in it, and its distance to the one as trained, in units of what training changed}.

    Deduplicated, its blocks are those of the clients' last uploads where accuracy on test records allows it.
    """
    given = {"global": trained.model, **{f"client-{n}": upload for n, upload in enumerate(trained.uploads)}}
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        where = Path(folder)
        for name, adapter in given.items():
            bench.save(where / name, adapter, {})
        tensors = {name: folders.read_tensors(where / name) for name in given}

        def stored(algorithm: str) -> Mapping[str, np.ndarray]:
            with Store(where / algorithm) as store:
                deduplicate(
                    [_described(name) for name in given],
                    tensors.__getitem__,
                    dict.fromkeys(given, judge),
                    store,
                    DedupSettings(algorithm=algorithm, block_size=BLOCK_SIZE, fairness="outcome"),
                )
                return store.tensors("global")

        found = {
            "deduplicated": stored("drd"),
            "float16": {name: values.astype(np.float16) for name, values in tensors["global"].items()},
        }
    names = {parameter.data_ptr(): name for name, parameter in bench.model.parameters.items()}
    own = {name: names[p.data_ptr()] for name, p in judge.parameters.items() if p.data_ptr() in names}
    adapters = {
        form: {own[name]: as_tensor(values).float() for name, values in each.items() if name in own}
        for form, each in found.items()
    }
    changed = norm(difference(trained.model, bench.initial))
    return {form: (each, norm(difference(each, trained.model)) / changed) for form, each in adapters.items()}


def _described(name: str) -> Described:
    """A variant that may share with all others: nothing is counted."""
    return Described(
        name=name,
        architecture="one",
        utility=None,
        epsilon_bound=0.0,
        utility_bound=UTILITY_BOUND,
        deltas={},
        history=History(name=name, ancestors=frozenset()),
    )


_CHAT: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct", "prompt_column": "question", "response_column": "answer", "public_data": True,
    "recipe": "per-sample", "partition": "iid", "num_clients": 1, "max_records": 60, "max_length": 40,
    "layers": "all", "rank": 8, "optimizer": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0, "batch_size": 20,
    "rounds": 4, "local_steps": 20, "delta": DELTA, "audit": "tokens", "audit_canaries": 40, "simulate": True,
    "comparison": False, "baselines": False, "generated_answers": 0, "evaluate_every": 1000, "test_fraction": 0.002,
}  # fmt: skip


def extraction_run(data: Path, condition: str) -> Line:
    """Train SmolLM2 on medical questions and canaries, and ask the served model to complete each canary, greedily.

    A canary is 23 random tokens and one as the response. Those left out show how often chance completes one.
    """
    claim = CLAIMS[condition]
    noise = {"noise_multiplier": 0.0} if claim is None else {"target_epsilon": claim}
    observer = SilentObserver()
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        out = Path(folder) / "run"
        config = parse({**_CHAT, **noise, "data": str(data / "medquad.csv.gz"), "out": str(out)})
        federation.run(config, observer)
        bench = workbench(config)
        client = audited(config, bench, 0)
        assert client is not None
        canaries = [tuple(tokens.tolist()) for tokens in client.canaries.features["input_ids"]]
        answers = _next_tokens(out, [tokens[:-1] for tokens in canaries])
    expected = [bench.base.tokenizer.decode([tokens[-1]]) for tokens in canaries]
    completed = np.array([answer == token for answer, token in zip(answers, expected, strict=True)])
    return {
        "kind": "extraction",
        "condition": condition,
        "epsilon": None if claim is None else observer.summary["audit"]["claimed_epsilon"],
        "num_included": int(client.included.sum()),
        "num_completed": int(completed[client.included].sum()),
        "num_left_out": int((~client.included).sum()),
        "num_completed_left_out": int(completed[~client.included].sum()),
    }


def _next_tokens(run: Path, prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """The most likely next token of each prompt, as the engine that serves the run gives it."""
    source = find(run)
    scheduler = Scheduler(source, load(source), EngineLimits())
    try:
        asked = [Generate(variant="global", prompt=each, max_new_tokens=1, num_alternatives=0) for each in prompts]
        answers = answer_all(scheduler, asked)
    finally:
        scheduler.close()
    if failed := [event for events in answers for event in events if isinstance(event, Failed)]:
        raise failed[0].error
    return [
        "".join(token.text for event in events if isinstance(event, Piece) for token in event.tokens)
        for events in answers
    ]
