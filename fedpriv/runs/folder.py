"""Reads and checks the folder of a finished run, before any of it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedpriv.dedup.store import Store
from fedpriv.errors import InputError
from fedpriv.runs import files, rows
from fedpriv.runs.rows import ClientRow, RoundRow, Sample, column_types, parse_epsilon

# The columns that a report needs; what they hold is declared with the rows.
ROUND_COLUMNS = (
    "round",
    "num_selected",
    "num_replies",
    "num_failures",
    "test_accuracy",
    "test_loss",
    "bytes_up",
    "bytes_down",
)
CLIENT_COLUMNS = (
    "round",
    "client",
    "status",
    "sampling_probability",
    "noise_multiplier",
    "effective_noise_multiplier",
    "steps",
    "rho_bar",
    "epsilon_local",
    "epsilon_rho",
)
# Runs of earlier versions lack it.
OPTIONAL_CLIENT_COLUMNS = ("epsilon_aggregate",)
COMPARISON_COLUMNS = ("round", "test_accuracy", "test_loss")
# Runs of earlier versions lack it, and classifiers have none.
OPTIONAL_ROUND_COLUMNS = ("test_perplexity",)
CLIENT_KEYS = (
    "client",
    "num_records",
    "rounds",
    "earlier_runs",
    "epsilon_local",
    "epsilon_local_this_run",
    "epsilon_rho",
    "retired",
    "delta",
    "bytes_up",
    "bytes_down",
)
COUNTS = ("num_clients", "num_rounds", "bytes_up", "bytes_down", "seconds")
ACCURACIES = ("accuracy", "accuracy_initial", "accuracy_non_private", "chance_accuracy")
FIGURES_OF_QUALITY = (
    *("majority_accuracy", "accuracy_standard_error", "macro_f1"),
    *("probe_accuracy", "tfidf_accuracy"),
)
QUALITY_KEYS = (*FIGURES_OF_QUALITY, "confusion_matrix", "labels", "baselines", "warnings")
# Of language models; null for others.
LANGUAGE_KEYS = (
    *("perplexity", "perplexity_initial", "perplexity_non_private"),
    *("log_perplexity_change", "log_perplexity_change_standard_error"),
    *("rouge_l", "rouge_l_initial", "rouge_l_non_private", "rouge_l_standard_error"),
    *("rouge_l_change", "rouge_l_change_standard_error", "num_generated"),
)
NULLABLE = (*ACCURACIES, *FIGURES_OF_QUALITY, *LANGUAGE_KEYS, "delta", "delta_max")
FLAGS = ("private", "adapters_moved")
LEDGER_KEYS = ("privacy_view", "budget_epsilon", "stopped_early", "aggregate_objections", "ledger_head")
SUMMARY_KEYS = (*ACCURACIES, *COUNTS, *FLAGS, *LEDGER_KEYS, "epsilon_local_max", "epsilon_rho_max", "delta_max")
WORDS = {"noise_source": ("secure", "seeded"), "accountant": ("pld", "rdp"), "unit": ("record", "client")}


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run: its settings, its rounds, what each client spent, and its comparison run, if any."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rounds: pd.DataFrame
    clients: pd.DataFrame
    summary: Mapping[str, Any]
    stored: StoredVariants | None
    comparison_rounds: pd.DataFrame | None
    comparison_summary: Mapping[str, Any] | None
    rows: tuple[Sample, ...]


def read_run(run_dir: Path) -> FinishedRun:
    """The run in the folder.

    Raises:
        InputError: one line that names the missing or wrong file, column or key, and what would be right.
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: no such folder; give the folder that a finished run wrote")
    comparison = run_dir / files.COMPARISON
    compared = comparison.is_dir()
    return FinishedRun(
        name=run_dir.resolve().name,
        summary=_read_summary(run_dir / files.SUMMARY),
        config=files.read_values(run_dir / files.CONFIG),
        environment=files.read_values(run_dir / files.ENVIRONMENT),
        rounds=_read_table(run_dir / files.ROUNDS, RoundRow, ROUND_COLUMNS, OPTIONAL_ROUND_COLUMNS),
        clients=_read_table(run_dir / files.CLIENTS, ClientRow, CLIENT_COLUMNS, OPTIONAL_CLIENT_COLUMNS),
        stored=read_stored(run_dir),
        comparison_rounds=_read_comparison_rounds(comparison / files.ROUNDS) if compared else None,
        comparison_summary=_read_comparison(comparison / files.SUMMARY) if compared else None,
        samples=rows.read_samples(run_dir / files.SAMPLES),
    )


def _read_comparison_rounds(path: Path) -> pd.DataFrame:
    return _read_table(path, RoundRow, COMPARISON_COLUMNS, OPTIONAL_ROUND_COLUMNS)


def _read_table(
    path: Path, kind: type[RoundRow | ClientRow], columns: Sequence[str], optional: Sequence[str] = ()
) -> pd.DataFrame:
    """The columns of a CSV file, and the optional ones that it has, with numbers in all but the text columns."""
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise files.missing(path) from None
    except ValueError as error:
        raise InputError(f"{path}: not a CSV file with a header ({_one_line(error)})") from None
    types = column_types(kind)
    columns = [*columns, *(column for column in optional if column in table)]
    for column in columns:
        if column not in table:
            raise InputError(f"{path}: column {column} is missing; the file needs {', '.join(columns)}")
        if types[column] != "str":
            table[column] = _numbers(path, table[column])
    if kind is RoundRow and table.empty:
        raise InputError(f"{path}: holds no round; a finished run has at least round 0")
    return table[columns]


def _numbers(path: Path, column: pd.Series) -> pd.Series:
    try:
        numbers = pd.to_numeric(column)
    except ValueError as error:
        raise InputError(f"{path}: column {column.name} must hold numbers ({_one_line(error)})") from None
    if column.name in ("round", "client") and numbers.isna().any():
        raise InputError(f"{path}: column {column.name} must hold a whole number in every row")
    return numbers


def _read_summary(path: Path) -> dict[str, Any]:
    """The summary; of an older run, what it says about quality and answers is None, and it has no warnings."""
    summary = dict.fromkeys((*QUALITY_KEYS, *LANGUAGE_KEYS)) | {"warnings": []} | files.read_values(path)
    for key in (*SUMMARY_KEYS, *WORDS, "engine", "clients"):
        if key not in summary:
            raise InputError(f"{path}: key {key} is missing; a finished run writes it")
    for key, words in WORDS.items():
        # Unknown is refused: a word that the report cannot explain would leave its reader with a wrong guarantee.
        if not str(summary[key]).startswith(words):
            raise InputError(f"{path}: {key} = {summary[key]!r}: must be {' or '.join(words)}")
    for key in FLAGS:
        if not isinstance(summary[key], bool):
            raise InputError(f"{path}: {key} = {summary[key]!r}: must be true or false")
    _check_numbers(path, "", summary, (*ACCURACIES, *FIGURES_OF_QUALITY, *LANGUAGE_KEYS, *COUNTS, "delta_max"))
    _check_epsilons(path, "", summary, ("epsilon_local_max", "epsilon_rho_max"))
    _check_interval(path, summary.get("accuracy_interval"))
    _check_quality(path, summary)
    if not isinstance(summary["clients"], list):
        raise InputError(f"{path}: clients must be a list with one entry per client")
    for index, client in enumerate(summary["clients"]):
        _check_client(path, f"clients[{index}]", client)
    return summary


def _read_comparison(path: Path) -> dict[str, Any]:
    summary = files.read_values(path)
    if "accuracy" not in summary:
        raise InputError(f"{path}: key accuracy is missing; a finished comparison run writes it")
    _check_numbers(path, "", summary, ("accuracy",))
    return summary


def _check_client(path: Path, name: str, client: object) -> None:
    if not isinstance(client, dict) or not client.keys() >= set(CLIENT_KEYS):
        raise InputError(f"{path}: {name} is incomplete; an entry needs {', '.join(CLIENT_KEYS)}")
    _check_numbers(
        path, f"{name}.", client, ("num_records", "rounds", "earlier_runs", "delta", "bytes_up", "bytes_down")
    )
    _check_epsilons(path, f"{name}.", client, ("epsilon_local", "epsilon_local_this_run", "epsilon_rho"))


def _check_numbers(path: Path, prefix: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        value = values.get(key)
        absent = value is None and key in NULLABLE
        if isinstance(value, bool) or not (absent or isinstance(value, (int, float))):
            raise InputError(f"{path}: {prefix}{key} = {value!r}: must be a number")


def _check_interval(path: Path, interval: object) -> None:
    """Refuse anything but None or [low, high] within [0, 1]."""
    if interval is None:
        return
    ends = interval if isinstance(interval, list) and all(isinstance(end, (int, float)) for end in interval) else []
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= 1:
        raise InputError(f"{path}: accuracy_interval = {interval!r}: must be [low, high], both in [0, 1]")


def _check_quality(path: Path, summary: Mapping[str, Any]) -> None:
    """Refuse warnings that are no lines, and a confusion matrix that is none or has other classes than `labels`."""
    warnings, confusion = summary["warnings"], summary["confusion_matrix"]
    if not isinstance(warnings, list) or not all(isinstance(line, str) for line in warnings):
        raise InputError(f"{path}: warnings = {warnings!r}: must be a list of lines")
    if confusion is None:
        return
    labels = summary["labels"]
    num_classes = len(labels) if isinstance(labels, list) else 0
    rows = confusion if isinstance(confusion, list) else []
    square = len(rows) == num_classes and all(isinstance(row, list) and len(row) == num_classes for row in rows)
    if not num_classes or not square or not all(type(count) is int and count >= 0 for row in rows for count in row):
        raise InputError(f"{path}: confusion_matrix: must hold a row and a column of counts for each of the labels")


def _check_epsilons(path: Path, prefix: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        try:
            parse_epsilon(values[key])
        except ValueError:
            raise InputError(f"{path}: {prefix}{key} = {values[key]!r}: must be a number >= 0 or inf") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True, kw_only=True)
class StoredVariants:
    """The variants in a store.

    Attributes:
        outcomes: one for each variant: what deduplication did to it, under the names of `dedup.outcomes.Outcome`.
        bases: of a variant that is stored by a shared basis: `rank`, whether it has a `residual` of its own, and the
            `error` of what is restored; None for the others.
        bytes_stored: of all variants, each shared block once.
        bytes_logical: of all variants as plain files.
    """

    outcomes: tuple[Mapping[str, Any], ...]
    bases: tuple[Mapping[str, Any] | None, ...]
    bytes_stored: int
    bytes_logical: int

    @property
    def num_records(self) -> int:
        """The size of the validation set."""
        return int(self.outcomes[0]["num_records"])

    @property
    def by_basis(self) -> bool:
        """Whether a shared basis is what it was stored by, at least where that was accepted."""
        return any(self.bases)

    @property
    def num_validations(self) -> int:
        """How often a variant was validated, over all variants."""
        return sum(outcome["num_validations"] for outcome in self.outcomes)


def read_stored(run_dir: Path) -> StoredVariants | None:
    """What the run's store holds; None if there is none, or nothing in it comes from deduplication.

    Raises:
        StoreError: it is damaged or in use.
    """
    if not (run_dir / files.STORE).is_dir():
        return None
    with Store(run_dir / files.STORE, read_only=True) as store:
        found = [store.manifest(name).provenance for name in store.names]
        stored, logical = store.bytes_stored, store.bytes_logical
    found = [provenance for provenance in found if provenance.get("outcome")]
    if not found:
        return None
    return StoredVariants(
        outcomes=tuple(provenance["outcome"] for provenance in found),
        bases=tuple(provenance.get("basis") for provenance in found),
        bytes_stored=stored,
        bytes_logical=logical,
    )
