"""The variants of a run: stored as peft adapters, described by the uploads that went into them, and deduplicated.

Clients' variants of the last round that recur stand with the run's epsilons: integral privacy in a federation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, StoreError
from fedpriv.files import remove_files
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.aggregation import GlobalModel
from fedpriv.learning.training.workbench import Workbench
from fedpriv.methods.integral.procedure import RecurringVariants, recurring_adapters
from fedpriv.models.dedup import pipeline
from fedpriv.models.dedup.adapter_variants import AdapterEvaluator
from fedpriv.models.dedup.pipeline import validation_digest
from fedpriv.models.dedup.planning import DedupSettings
from fedpriv.models.dedup.work import Evaluators
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History, Upload, uploads_of
from fedpriv.models.variants.folders import Described
from fedpriv.models.variants.store import Store
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs import RunWriter, files
from server.summary import SeriesOutcome

log = logging.getLogger("flwr")

FINAL = "global"
RECURRING = "integral-mean"


def uploads_in(ledger: Ledger, run: str, registrations: Iterable[Registration]) -> list[Upload]:
    """All uploads that the run was charged for: whatever was charged may have been uploaded."""
    charged: dict[str, list[tuple[Key, Release]]] = {}
    for key, release in ledger.releases_of(None, run):
        charged.setdefault(key.client, []).append((key, release))
    return [upload for r in registrations for upload in uploads_of(r.data_set, charged.get(str(r.client), ()))]


def keep_round(bench: Workbench, writer: RunWriter, round_: int, model: GlobalModel) -> None:
    """Store the global model after a round as a variant."""
    _save(bench, writer.variant(f"round-{round_}"), model.adapter, model.merged)


def keep(
    config: RunConfig,
    bench: Workbench,
    writer: RunWriter,
    outcome: SeriesOutcome,
    registrations: Iterable[Registration],
    uploads: Iterable[Upload],
) -> None:
    """Store the final global model and the clients' last uploads as variants, and describe all variants.

    Args:
        config: of the run; says which variants are stored.
        bench: of the run.
        writer: of the folder in which they are stored.
        outcome: of the private rounds.
        registrations: of the clients.
        uploads: all of the run.
    """
    uploads, strategy = list(uploads), outcome.strategy
    by_client = {registration.client: registration for registration in registrations}
    deltas = {r.data_set: strategy.books.accounts.deltas[r.client] for r in by_client.values()}
    _save(bench, writer.variant(FINAL), strategy.model.adapter, strategy.model.merged)
    accuracies = {row.round: row.test_accuracy for row in outcome.rows}
    last = outcome.rows[-1].round
    rounds = {FINAL: last, **{f"round-{n}": n for n in config.variant_rounds if n <= last}}
    for name, round_ in rounds.items():
        ancestors = global_ancestors(uploads, outcome.run_id, round_)
        _describe(config, writer.variant(name), ancestors, deltas, accuracies[round_])
    if not config.keeps_uploads_of(len(by_client)):
        return
    # The last round that used an upload of the client; an upload that no round used is not a variant.
    last_used = outcome.totals.last_used
    for client, (adapter, merged) in sorted(strategy.uploads.items()):
        path = writer.variant(f"client-{client}")
        _save(bench, path, adapter, merged)
        ancestors = client_ancestors(uploads, outcome.run_id, last_used[client], by_client[client].data_set)
        _describe(config, path, ancestors, deltas, None)


def keep_recurring(
    config: RunConfig,
    bench: Workbench,
    writer: RunWriter,
    outcome: SeriesOutcome,
    registrations: Iterable[Registration],
    uploads: Iterable[Upload],
) -> dict[str, Any] | None:
    """Store the mean of the most recurrent variants of the last round as a variant; returns the summary's entry."""
    clusters = _recurring(config, outcome)
    if clusters:
        # All were trained from one model, so what had been merged into that model belongs to the mean as well.
        client = int(clusters[0].clients[0].removeprefix("client-"))
        path = writer.variant(RECURRING)
        _save(bench, path, clusters[0].mean, outcome.strategy.uploads[client][1])
        ancestors = global_ancestors(uploads, outcome.run_id, outcome.rows[-1].round)
        deltas = {r.data_set: outcome.strategy.books.accounts.deltas[r.client] for r in registrations}
        _describe(config, path, ancestors, deltas, None)
    return _recurrence_summary(config, clusters, RECURRING)


def deduplicate(config: RunConfig, bench: Workbench, writer: RunWriter) -> None:
    """Deduplicate the run's variants into its store, validated on the server's test set unless it is without loss.

    What an interrupted attempt stored stays if it was made of the same variants in the same way; else the store is
    made again.
    """
    store_path = writer.path / files.STORE
    described = [folders.read(path.parent) for path in sorted((writer.path / files.VARIANTS).glob(f"*/{folders.FILE}"))]
    settings = DedupSettings(algorithm=config.dedup, block_size=config.dedup_block_size, fairness="outcome")
    judge: AdapterEvaluator | None = None
    if config.validates_variants:
        judge = AdapterEvaluator(bench, num_records=config.dedup_records, seed=config.seed)
    evaluators: Evaluators = {each.name: judge for each in described} if judge else {}
    evaluation = judge.description if judge else ""

    def read(name: str) -> Mapping[str, NDArray[Any]]:
        return folders.read_tensors(writer.variant(name))

    goes_on = _is_same(store_path, described, read, settings, validation_digest(evaluators, None, evaluation))
    with Store(store_path, empty=not goes_on) as store:
        outcomes = pipeline.deduplicate(described, read, evaluators, store, settings, evaluation=evaluation)
        answers = judge.answers_side_by_side(outcomes, read, store.tensors) if judge else []
        writer.write_answers(answers, files.STORED_ANSWERS)
        log.info("%s variants in %s of %s bytes", len(outcomes), store.bytes_stored, store.bytes_logical)
        writer.journal.write(
            "deduplicated",
            num_variants=len(outcomes),
            bytes_stored=store.bytes_stored,
            bytes_logical=store.bytes_logical,
            num_validations=sum(outcome.num_validations for outcome in outcomes),
        )


def _is_same(
    path: Path,
    described: Sequence[Described],
    read: Callable[[str], Mapping[str, NDArray[Any]]],
    settings: DedupSettings,
    validation: str,
) -> bool:
    """Whether a store is what an interrupted attempt has made of these variants in this way, and sound."""
    if not path.exists():
        return True
    try:
        pipeline.check(described, read, path, settings, validation=validation)
        with Store(path, read_only=True) as store:
            strangers = sorted(set(store.names) - {each.name for each in described})
        if not strangers:
            return True
        reason = f"it holds {', '.join(strangers)}"
    except (InputError, StoreError) as error:
        reason = str(error)
    log.info("the store of an earlier attempt is made again: %s", reason)
    return False


def _save(bench: Workbench, path: Path, adapter: Adapter, merged: Merged) -> None:
    remove_files(path, [folders.FILE])  # of an interrupted attempt, whose tensors may have been others
    bench.save(path, adapter, merged)


def _describe(
    config: RunConfig,
    path: Path,
    ancestors: frozenset[Upload],
    deltas: Mapping[str, float],
    accuracy: float | None,
) -> None:
    history = History(name=path.name, ancestors=ancestors, holders=config.holders_per_person)
    described = Described(
        name=path.name,
        architecture=folders.architecture(config.model, folders.read_tensors(path)),
        utility=accuracy,
        epsilon_bound=config.dedup_epsilon_bound,
        utility_bound=config.dedup_utility_bound,
        deltas={id_: deltas[id_] for id_ in sorted(history.data_sets)},
        history=history,
        tags=frozenset({config.model, config.data}),
    )
    folders.describe(path, described)


def _recurring(config: RunConfig, outcome: SeriesOutcome) -> list[RecurringVariants]:
    """Clusters of the clients whose uploads the last round used, most recurrent first; none without a threshold.

    All uploads of a round were trained from one model, so they are compared by what they add to it.
    """
    if config.integral_epsilon is None:
        return []
    last = outcome.rows[-1].round
    clients = sorted(client for client, round_ in outcome.totals.last_used.items() if round_ == last)
    uploads = outcome.strategy.uploads
    adapters: dict[str, Adapter] = {f"client-{client}": uploads[client][0] for client in clients if client in uploads}
    if not adapters:
        return []
    return recurring_adapters(
        adapters, config.integral_epsilon, clustering="complete", scale=config.alpha / config.rank
    )


def _recurrence_summary(config: RunConfig, clusters: Iterable[RecurringVariants], mean: str) -> dict[str, Any] | None:
    """The entry for the run's summary; None without a threshold.

    Args:
        config: of the run.
        clusters: from `recurring`.
        mean: name of the variant that holds the mean of the first cluster.
    """
    if config.integral_epsilon is None:
        return None
    entries = [
        {
            "clients": list(cluster.clients),
            "recurrence": cluster.recurrence,
            "k": cluster.k,
            "largest_difference": cluster.largest_difference,
        }
        for cluster in clusters
    ]
    return {"epsilon": config.integral_epsilon, "mean": mean if entries else None, "clusters": entries}


def global_ancestors(
    uploads: Iterable[Upload], run: str, round_: int, warm_start: frozenset[Upload] = frozenset()
) -> frozenset[Upload]:
    """The ancestors of a run's global model after a round: all uploads up to it, and those of its warm start."""
    return warm_start | {upload for upload in uploads if upload.run == run and upload.round <= round_}


def client_ancestors(
    uploads: Iterable[Upload], run: str, round_: int, data_set: str, warm_start: frozenset[Upload] = frozenset()
) -> frozenset[Upload]:
    """The ancestors of a client's own variant of a round: all uploads of earlier rounds, and its own of this one."""
    of_run = [upload for upload in uploads if upload.run == run]
    own = {upload for upload in of_run if upload.round == round_ and upload.data_set == data_set}
    return warm_start | own | {upload for upload in of_run if upload.round < round_}
