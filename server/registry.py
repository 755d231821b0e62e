"""The variants of a run: kept as peft adapters, described by the uploads that they descend from, and deduplicated."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.adapter_variants import AdapterEvaluator
from fedpriv.adapters import lora
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.aggregation.global_model import GlobalModel
from fedpriv.config import RunConfig
from fedpriv.dedup import pipeline, variants
from fedpriv.dedup.composition import History, Upload, client_ancestors, global_ancestors, uploads_of
from fedpriv.dedup.planning import Settings
from fedpriv.dedup.store import Store
from fedpriv.dedup.variants import Described
from fedpriv.ledger.ledger import Ledger
from fedpriv.protocol import Registration
from fedpriv.runs import files
from fedpriv.runs.writer import RunWriter
from fedpriv.training.workbench import Workbench
from server import recurrence
from server.summary import Outcome

log = logging.getLogger("flwr")

FINAL = "global"
RECURRING = "integral-mean"


def uploads_in(ledger: Ledger, run: str, registrations: Iterable[Registration]) -> list[Upload]:
    """Everything that the run was charged for, as the server sees it: whatever was charged may have been uploaded."""
    return [
        upload
        for registration in registrations
        for upload in uploads_of(registration.data_set, ledger.releases_of(registration.data_set, run))
    ]


def keep_round(bench: Workbench, folder: RunWriter, round_: int, model: GlobalModel) -> None:
    """Keep the global model after a round as a variant."""
    _save(bench, folder.variant(f"round-{round_}"), model.adapter, model.merged)


def keep(
    config: RunConfig,
    bench: Workbench,
    folder: RunWriter,
    outcome: Outcome,
    registrations: Iterable[Registration],
    uploads: Iterable[Upload],
) -> None:
    """Keep the final global model and the clients' last uploads as variants, and describe all that were kept.

    Args:
        config: of the run; says which variants it keeps.
        bench: of the run.
        folder: where they are kept.
        outcome: of the private rounds.
        registrations: of the clients.
        uploads: all of the run.
    """
    uploads, strategy = list(uploads), outcome.strategy
    by_client = {registration.client: registration for registration in registrations}
    deltas = {r.data_set: strategy.books.accounts.deltas[r.client] for r in by_client.values()}
    _save(bench, folder.variant(FINAL), strategy.model.adapter, strategy.model.merged)
    accuracies = {row.round: row.test_accuracy for row in outcome.rows}
    last = outcome.rows[-1].round
    rounds = {FINAL: last, **{f"round-{n}": n for n in config.variant_rounds if n <= last}}
    for name, round_ in rounds.items():
        ancestors = global_ancestors(uploads, outcome.run_id, round_)
        _describe(config, folder.variant(name), History(name=name, ancestors=ancestors), deltas, accuracies[round_])
    if not config.variant_clients:
        return
    # A client's upload that counted in no round is no variant of it.
    of = {row.client: row.round for row in outcome.client_rows if row.status == "ok"}
    for client, (adapter, merged) in sorted(strategy.uploads.items()):
        path = folder.variant(f"client-{client}")
        _save(bench, path, adapter, merged)
        ancestors = client_ancestors(uploads, outcome.run_id, of[client], by_client[client].data_set)
        _describe(config, path, History(name=path.name, ancestors=ancestors), deltas, None)


def keep_recurring(
    config: RunConfig,
    bench: Workbench,
    folder: RunWriter,
    outcome: Outcome,
    registrations: Iterable[Registration],
    uploads: Iterable[Upload],
) -> dict[str, Any] | None:
    """Keep the mean of the most recurrent variants of the last round as a variant; what the summary says of them."""
    found = recurrence.recurring(config, outcome)
    if found:
        # All started from one model; what that had gained is in the mean as well.
        client = int(found[0].clients[0].removeprefix("client-"))
        path = folder.variant(RECURRING)
        _save(bench, path, found[0].mean, outcome.strategy.uploads[client][1])
        ancestors = global_ancestors(uploads, outcome.run_id, outcome.rows[-1].round)
        deltas = {r.data_set: outcome.strategy.books.accounts.deltas[r.client] for r in registrations}
        _describe(config, path, History(name=path.name, ancestors=ancestors), deltas, None)
    return recurrence.as_summary(config, found, RECURRING)


def deduplicate(config: RunConfig, bench: Workbench, folder: RunWriter) -> None:
    """Store the run's variants by the blocks that they share, validated on the server's test set."""
    path = folder.path / files.STORE
    shutil.rmtree(path, ignore_errors=True)  # of an interrupted attempt
    found = [variants.read(file.parent) for file in sorted((folder.path / files.VARIANTS).glob(f"*/{variants.FILE}"))]
    settings = Settings(algorithm=config.dedup, block_size=config.dedup_block_size, fairness="outcome")
    with Store(path) as store:
        outcomes = pipeline.deduplicate(
            found,
            lambda name: variants.read_tensors(folder.variant(name)),
            AdapterEvaluator(bench, num_records=config.dedup_records, seed=config.seed),
            store,
            settings,
        )
        log.info("%s variants in %s of %s bytes", len(outcomes), store.bytes_stored, store.bytes_logical)
        folder.journal.write(
            "deduplicated",
            num_variants=len(outcomes),
            bytes_stored=store.bytes_stored,
            bytes_logical=store.bytes_logical,
            num_validations=sum(outcome.num_validations for outcome in outcomes),
        )


def _save(bench: Workbench, path: Path, adapter: Adapter, merged: Merged) -> None:
    labels = bench.data.label_names
    lora.save(bench.model.peft_model, bench.base, path, adapter=adapter, merged=merged, labels=labels)


def _describe(
    config: RunConfig, path: Path, history: History, deltas: Mapping[str, float], accuracy: float | None
) -> None:
    described = Described(
        name=path.name,
        architecture=f"{config.model} {_shapes_digest(variants.read_tensors(path))}",
        utility=accuracy,
        epsilon_bound=config.dedup_epsilon_bound,
        utility_bound=config.dedup_utility_bound,
        deltas={id_: deltas[id_] for id_ in sorted(history.data_sets)},
        history=history,
        tags=frozenset({config.model, config.data}),
    )
    variants.describe(path, described)


def _shapes_digest(tensors: Mapping[str, NDArray[np.generic]]) -> str:
    """Adapters of one model whose ranks differ share no blocks."""
    shapes = {name: tensors[name].shape for name in sorted(tensors)}
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
