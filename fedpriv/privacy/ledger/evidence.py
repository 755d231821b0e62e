"""Evidence: what it takes to compute a ledger's figures again without fedpriv, in one file.

A bundle is a zip of texts, the same to the byte for the same ledger: a manifest of SHA-256 digests, a program that
checks the rest, and a folder for each ledger with its entries, receipts, registrations and figures. It holds no record,
no text or label of one, no seed, and neither the secret nor the stored replies of the ledger.
docs/appendices/evidence.md describes each file and says who may see one: the entries of a node tell when the file with
its records changed.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.files import library_digest, write_new
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import VIEWS, PlannedView
from fedpriv.privacy.ledger import reader
from fedpriv.privacy.ledger.entries import DataSet, LedgerConnection
from fedpriv.privacy.ledger.head_file import EMPTY_CHAIN
from fedpriv.privacy.ledger.inclusion import InclusionProof, Sum, kept_in
from fedpriv.privacy.ledger.receipts import ReceiptLog
from fedpriv.privacy.ledger.statement import spending
from fedpriv.texts import VERSION, strict_json

FORMAT = 1
MANIFEST, PROGRAM = "manifest.json", "verify_evidence.py"

# What of a run's configuration decides its cost, and is public; labels, columns, files and seeds are not among it.
_SCHEDULE = (
    *("recipe", "train", "rank", "max_length", "rounds", "lora_rounds", "local_steps", "batch_size"),
    *("sampling_probability", "lora_sampling_probability", "num_clients", "clients_per_round", "min_clients"),
    *("client_weights", "aggregation", "optimizer", "clipping", "clip_norm", "mechanism", "mechanism_parameters"),
    *("noise_on", "noise_multiplier", "start_noise_multiplier", "lora_noise_multiplier", "target_epsilon", "delta"),
    *("evaluation_noise_multiplier", "budget_epsilon", "privacy_view", "secure_aggregation", "colluding_clients"),
    *("simulate",),
)
_ENVIRONMENT_OF_THE_MACHINE = {"fedpriv_file", "platform", "cpu_count", "gpu"}
_RISK = ("mu", "advantage", "tpr_at_fpr")
_FIGURES = (
    *("client", "data_set", "num_records", "delta", "unit", "rounds", "runs", "noise_source", "num_readers", "view"),
    *(f"epsilon_{view}" for view in VIEWS),
    *_RISK,
)
_PRINTED = (
    *("run_id", "privacy_view", "budget_epsilon", "delta_max", "holders_per_person"),
    *(f"epsilon_{view}_max" for view in VIEWS),
    *("unit", *_RISK),
)
_PRINTED_OF_CLIENTS = (
    *("client", *(f"epsilon_{view}" for view in VIEWS), "epsilon_local_this_run", "delta"),
    *("unit", *_RISK),
)

# The earliest time that a zip can hold.
_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A ledger, and what its folder says of how its releases were made.

    Attributes:
        receipts: logs of what nodes have signed, which may be missing.
        registrations: {client: what its node registered, with the version of that statement}.
        config, environment, summary: of a run; empty for a ledger alone.
        models: of a run {name: {file: SHA-256}}, of a node {SHA-256 of the folder: name}.
        inclusions: records of the rounds' sums, a run's of all leaves or a node's of its own; may be missing.
        coordinator: the public line that signs them; empty if there is none.
        policy: a node's limits, the file; None without any.
        budget: (epsilon, view) that a node enforces; None without one.
    """

    ledger: Path
    receipts: tuple[Path, ...] = ()
    registrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    inclusions: Path | None = None
    coordinator: str = ""
    policy: Path | None = None
    budget: tuple[float, PlannedView] | None = None


def write_evidence(path: Path, sources: Mapping[str, Exhibit]) -> dict[str, Any]:
    """Write a bundle, and return its path, its SHA-256, and the head of each ledger in it.

    Args:
        path: of the bundle, a new file.
        sources: {name of the folder in the bundle: ledger}.

    Raises:
        InputError: there is no ledger, or the file exists.
        LedgerError: a chain is broken, or a ledger lost entries or its head.
    """
    if not sources:
        raise InputError("evidence: there is no ledger to show; give a run, a sweep with finished runs, or a ledger")
    program = Path(__file__).with_name(PROGRAM).read_bytes()
    files, heads = {PROGRAM: program}, {}
    for name, source in sources.items():
        part = _part(source)
        heads[name] = json.loads(part["about.json"])["head"]["digest"]
        files |= {f"{name}/{file}": content for file, content in part.items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    files[MANIFEST] = _json({"format": FORMAT, "files": digests})
    content = _zipped(files)
    write_new(path, content, mode=0o600)
    return {"bundle": str(path), "sha256": hashlib.sha256(content).hexdigest(), "heads": heads}


def _part(source: Exhibit) -> dict[str, bytes]:
    """{name of a file: its content} of one ledger."""
    with reader.reading(source.ledger) as db:
        last = reader.verify_with_head(db, source.ledger)
        entries = list(db.entries())[: last.number if last else 0]
        view = source.budget[1] if source.budget else reader.limit_of(db, source.ledger)[0]
        limit = source.budget[0] if source.budget else None
        rows = [_row(db, row, source.budget) for row in spending(db, budget_epsilon=limit, view=view)]
    runs = {entry.run for entry in entries if entry.run}
    policy = {"policy.toml": source.policy.read_bytes()} if source.policy and source.policy.is_file() else {}
    about = {
        "head": {"number": last.number if last else 0, "digest": last.digest if last else EMPTY_CHAIN},
        "software": {"fedpriv": VERSION, "digest": library_digest()},
        "environment": {key: v for key, v in source.environment.items() if key not in _ENVIRONMENT_OF_THE_MACHINE},
        "schedule": {key: source.config[key] for key in _SCHEDULE if key in source.config},
        "models": dict(source.models),
        "coordinator": source.coordinator,
        "policy": {name: hashlib.sha256(content).hexdigest() for name, content in policy.items()},
    }
    kept = (each for path in source.receipts for each in ReceiptLog(path).read())
    known = {row["data_set"] for row in rows}  # a log of several runs has more
    receipts = [r for r in kept if source.budget or (r.data_set in known and (r.run in runs or not r.run))]
    return policy | {
        "about.json": _json(about),
        "entries.jsonl": _lines(asdict(entry) for entry in entries),
        "receipts.jsonl": _lines(json.loads(receipt.text()) for receipt in receipts),
        "inclusions.jsonl": _lines(_inclusions(source)),
        "registrations.json": _json(source.registrations),
        "figures.json": _json({"data_sets": rows, "printed": _printed(source.summary)}),
    }


def _inclusions(source: Exhibit) -> Iterator[dict[str, Any]]:
    """The records of sums, of each round the last, with the tree as far as it is known."""
    file = source.inclusions
    kept: list[Sum | InclusionProof] = [*kept_in(file, Sum), *kept_in(file, InclusionProof)] if file else []
    for made in {(each.record.run, each.record.round): each for each in kept}.values():
        yield {"record": asdict(made.record), "tree": made.tree}


def _row(db: LedgerConnection, row: Mapping[str, Any], budget: tuple[float, PlannedView] | None) -> dict[str, Any]:
    """The figures that a ledger shows of a data set, with those by rdp and the share of a budget that is used."""
    data_set = db.data_set(row["data_set"])
    if data_set is None:
        raise InputError(f"data set {row['data_set']}: is not registered")
    releases = db.releases(data_set.id)
    by_rdp = {
        view: epsilon_of([release.charged_on(view) for release in releases], data_set.delta, "rdp").epsilon
        for view in VIEWS
        if row[f"epsilon_{view}"] is not None
    }
    shown = {name: row[name] for name in _FIGURES if name in row}
    return shown | {"rdp": by_rdp, "budget": None if budget is None else _budget(db, data_set, *budget)}


def _budget(db: LedgerConnection, data_set: DataSet, epsilon: float, view: PlannedView) -> dict[str, Any]:
    """A node's budget, and the share of it that its rule counts as used; nothing where no rule was needed yet."""
    rule = filters.rule_of(db.bounds(data_set.id))
    history = [release.charged_on(view) for release in db.releases(data_set.id)]
    used = 0.0 if rule is None else rule.used(history, epsilon=epsilon, delta=data_set.delta_for_releases)
    return {"epsilon": epsilon, "view": view, "used": used, "left": max(0.0, 1 - used)}


def _printed(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures of a run's summary that a ledger can confirm; None without a run."""
    if not summary:
        return None
    clients = [{name: client.get(name) for name in _PRINTED_OF_CLIENTS} for client in summary["clients"]]
    is_bound = summary["accountant"] != "pld"
    return {name: summary.get(name) for name in _PRINTED} | {"upper_bound_only": is_bound, "clients": clients}


def _json(value: Mapping[str, Any]) -> bytes:
    return f"{strict_json(value, indent=2)}\n".encode()


def _lines(objects: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(each, sort_keys=True)}\n" for each in objects).encode()


def _zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip whose bytes depend on the files alone."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in _ordered(files):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o644 << 16, 3
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _ordered(files: Mapping[str, bytes]) -> Iterator[str]:
    """The names of the files, with those that a person opens first before the others."""
    yield from (MANIFEST, PROGRAM)
    yield from sorted(name for name in files if name not in (MANIFEST, PROGRAM))
