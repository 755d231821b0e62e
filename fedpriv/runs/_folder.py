"""A run's folder as its readers see it: every file is read when it is first asked for, and once for each look.

>>> from fedpriv.runs import RunFolder
>>> RunFolder("runs/tomorrow").is_finished
False
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.runs import files
from fedpriv.runs._rows import (
    ClientRow,
    Events,
    RoundRow,
    Sample,
    StoredAnswer,
    column_types,
    parse_epsilon,
    parse_rows,
    read_answers,
    read_events,
)

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# The columns that a report needs; what they hold is declared with the rows.
ROUND_COLUMNS = (
    *("round", "num_selected", "num_replies", "num_failures", "test_accuracy", "test_loss"),
    *("test_perplexity", "bytes_up", "bytes_down"),
)
CLIENT_COLUMNS = (
    *("round", "client", "status", "sampling_probability", "noise_multiplier", "effective_noise_multiplier"),
    *("steps", "rho_bar", "epsilon_local", "epsilon_rho", "epsilon_aggregate"),
)
COMPARISON_COLUMNS = ("round", "test_accuracy", "test_loss")
_CLIENT_KEYS = (
    *("client", "num_records", "rounds", "earlier_runs", "epsilon_local", "epsilon_local_this_run", "epsilon_rho"),
    *("retired", "delta", "bytes_up", "bytes_down"),
)
# Of a registration: there may be very many, which a run that goes on reads at each look.
_REGISTERED_KEYS = ("client", "name", "num_records", "data_set")
_COUNTS = ("num_clients", "num_rounds", "bytes_up", "bytes_down", "seconds")
_ACCURACIES = ("accuracy", "accuracy_initial", "accuracy_non_private", "chance_accuracy")
_FIGURES_OF_QUALITY = (
    *("majority_accuracy", "accuracy_standard_error", "macro_f1"),
    *("probe_accuracy", "tfidf_accuracy"),
    *("alone_accuracy", "alone_accuracy_min", "alone_accuracy_max"),
)
QUALITY_KEYS = (*_FIGURES_OF_QUALITY, "confusion_matrix", "labels", "baselines", "warnings")
"""The keys of summary.json that say how good a run's answers are."""

LANGUAGE_KEYS = (
    *("perplexity", "perplexity_initial", "perplexity_non_private"),
    *("log_perplexity_change", "log_perplexity_change_standard_error"),
    *("rouge_l", "rouge_l_initial", "rouge_l_non_private", "rouge_l_standard_error"),
    *("rouge_l_change", "rouge_l_change_standard_error", "num_generated"),
)
"""The keys of summary.json that only a language model has; None for others."""

_NULLABLE = (*_ACCURACIES, *_FIGURES_OF_QUALITY, *LANGUAGE_KEYS, "delta", "delta_max")
_FLAGS = ("private", "adapters_moved")
_LEDGER_KEYS = ("privacy_view", "budget_epsilon", "stopped_early", "aggregate_objections", "ledger_head")
_EPSILONS = ("epsilon_local_max", "epsilon_rho_max")
_SUMMARY_KEYS = (
    *_ACCURACIES,
    *QUALITY_KEYS,
    *LANGUAGE_KEYS,
    *_COUNTS,
    *_FLAGS,
    *_LEDGER_KEYS,
    *_EPSILONS,
    "delta_max",
    "engine",
    "clients",
)
_WORDS = {"noise_source": ("secure", "seeded"), "accountant": ("pld", "rdp"), "unit": ("record", "person", "client")}


class RunFolder:
    """One look at a run's folder, whose run may be writing to it; for another look, make another.

    What cannot be read raises an InputError when it is first asked for: one line that names the file and what is
    wrong with it.

    Args:
        now: the moment of the look, in seconds since the epoch; None for this one.
    """

    def __init__(self, path: Path | str, *, now: float | None = None) -> None:
        self.path = Path(path)
        self.now = time.time() if now is None else now
        self._texts: dict[str, str] = {}
        self._known: dict[Callable[[RunFolder], Any], Any] = {}

    def once(self, derive: Callable[[RunFolder], T]) -> T:
        """The value that a function derives from this folder, computed at its first use."""
        if derive not in self._known:
            self._known[derive] = derive(self)
        value: T = self._known[derive]
        return value

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return files.is_finished(self.path)

    @cached_property
    def is_alive(self) -> bool | None:
        """Whether the process that runs the run lives; None if that cannot be told from here."""
        return files.is_alive(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of config.toml."""
        return files.read_values(self.path / files.CONFIG)

    @cached_property
    def settings(self) -> RunConfig:
        """The resolved configuration, whose keys must be those of this version."""
        return files.read_config(self.path)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The versions and the machine that made the run."""
        return files.read_values(self.path / files.ENVIRONMENT)

    @cached_property
    def registrations(self) -> dict[str, Any]:
        """{client: what a look at the run needs of its registration}; empty before anyone registered."""
        return files.read_values(self.path / files.REGISTRATIONS, optional=True, only=_REGISTERED_KEYS)

    @cached_property
    def progress(self) -> tuple[int, dict[int, str]]:
        """The round that was last begun, and what its clients do; 0 and nothing before, or if it cannot be read."""
        try:
            values = files.read_values(self.path / files.PROGRESS, optional=True)
            return int(values["round"]), {int(client): str(doing) for client, doing in values["clients"].items()}
        except (InputError, KeyError, TypeError, ValueError, AttributeError):
            return 0, {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The values of summary.json; empty before it is written."""
        return files.read_values(self.path / files.SUMMARY, optional=True)

    @cached_property
    def events(self) -> Events:
        """The last events of the journal."""
        return read_events(self.path / files.EVENTS)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Prompts of the test set with the models' answers; none before the end, or of a classifier."""
        return read_answers(self.path / files.SAMPLES, Sample)

    @cached_property
    def stored_answers(self) -> tuple[StoredAnswer, ...]:
        """Prompts with the answers of the variant that may have lost most by deduplication; none of a classifier."""
        return read_answers(self.path / files.STORED_ANSWERS, StoredAnswer)

    @cached_property
    def checkpoint(self) -> tuple[int | None, Mapping[str, Any]]:
        """The round of the last checkpoint and its state; an unreadable state counts as empty: resuming names it."""
        found = files.checkpoints(self.path)
        if not found:
            return None, {}
        try:
            state = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = {}
        return files.checkpoint_round(found[-1]), state if isinstance(state, dict) else {}

    @cached_property
    def comparison(self) -> RunFolder | None:
        """The same rounds without noise; None before they begin."""
        path = self.path / files.COMPARISON
        return RunFolder(path, now=self.now) if path.is_dir() else None

    def round_rows(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The whole rows of rounds.csv, as {column: value}; with all columns that are there, or these."""
        return self._rows(files.ROUNDS, RoundRow, columns)

    def client_rows(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The whole rows of clients.csv, likewise."""
        return self._rows(files.CLIENTS, ClientRow, columns)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A finished run's rounds.csv: the columns that a report needs, with numbers in all but the text columns."""
        return self._table(files.ROUNDS, RoundRow, ROUND_COLUMNS)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A finished run's clients.csv, likewise."""
        return self._table(files.CLIENTS, ClientRow, CLIENT_COLUMNS)

    @cached_property
    def comparison_rounds(self) -> pd.DataFrame | None:
        """rounds.csv of the comparison, likewise; None without one."""
        return self.comparison._table(files.ROUNDS, RoundRow, COMPARISON_COLUMNS) if self.comparison else None

    def checked(self) -> RunFolder:
        """This folder, once all that a report needs is there and right; else an InputError names what is not."""
        if not self.path.is_dir():
            raise InputError(f"{self.path}: no such folder; give the folder that a finished run wrote")
        if not self.is_finished:
            raise files.missing(self.path / files.SUMMARY)
        files.check_version(self.path)
        _check_summary(self.path / files.SUMMARY, self.summary)
        _ = self.config, self.environment, self.rounds, self.clients, self.samples
        if self.comparison is not None:
            _ = self.comparison_rounds
            _check_comparison(self.comparison)
        return self

    def _text(self, name: str) -> str:
        """A table's text, the same for all that is read of it."""
        if name not in self._texts:
            with (self.path / name).open(newline="", encoding="utf-8") as file:
                self._texts[name] = file.read()
        return self._texts[name]

    def _rows(self, name: str, kind: type[RoundRow | ClientRow], columns: Sequence[str] | None) -> list[dict[str, Any]]:
        return parse_rows(self._text(name), self.path / name, kind, columns)

    def _table(self, name: str, kind: type[RoundRow | ClientRow], columns: Sequence[str]) -> pd.DataFrame:
        import pandas as pd

        path = self.path / name
        try:
            table = pd.read_csv(io.StringIO(self._text(name), newline=""))
        except FileNotFoundError:
            raise files.missing(path) from None
        except ValueError as error:
            raise InputError(f"{path}: not a CSV file with a header ({_one_line(error)})") from None
        types = column_types(kind)
        for column in columns:
            if column not in table:
                raise InputError(f"{path}: column {column} is missing; the file needs {', '.join(columns)}")
            if types[column] != "str":
                table[column] = _numbers(path, table[column])
        if kind is RoundRow and table.empty:
            raise InputError(f"{path}: holds no round; a finished run has at least round 0")
        return table[list(columns)]


def _numbers(path: Path, column: pd.Series) -> pd.Series:
    import pandas as pd

    try:
        numbers = pd.to_numeric(column)
    except ValueError as error:
        raise InputError(f"{path}: column {column.name} must hold numbers ({_one_line(error)})") from None
    if column.name in ("round", "client") and numbers.isna().any():
        raise InputError(f"{path}: column {column.name} must hold a whole number in every row")
    return numbers


def _check_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Refuse the summary of a finished run that a report could not show, or would show wrongly."""
    for key in (*_SUMMARY_KEYS, *_WORDS):
        if key not in summary:
            raise InputError(f"{path}: key {key} is missing; a finished run writes it")
    for key, words in _WORDS.items():
        # Unknown is refused: a word that the report cannot explain would leave its reader with a wrong guarantee.
        if not str(summary[key]).startswith(words):
            raise InputError(f"{path}: {key} = {summary[key]!r}: must be {' or '.join(words)}")
    for key in _FLAGS:
        if not isinstance(summary[key], bool):
            raise InputError(f"{path}: {key} = {summary[key]!r}: must be true or false")
    _check_numbers(path, "", summary, (*_ACCURACIES, *_FIGURES_OF_QUALITY, *LANGUAGE_KEYS, *_COUNTS, "delta_max"))
    _check_epsilons(path, "", summary, _EPSILONS)
    _check_interval(path, summary.get("accuracy_interval"))
    _check_quality(path, summary)
    if not isinstance(summary["clients"], list):
        raise InputError(f"{path}: clients must be a list with one entry per client")
    for index, client in enumerate(summary["clients"]):
        _check_client(path, f"clients[{index}]", client)


def _check_comparison(folder: RunFolder) -> None:
    path = folder.path / files.SUMMARY
    if not folder.is_finished:
        raise files.missing(path)
    if "accuracy" not in folder.summary:
        raise InputError(f"{path}: key accuracy is missing; a finished comparison run writes it")
    _check_numbers(path, "", folder.summary, ("accuracy",))


def _check_client(path: Path, name: str, client: object) -> None:
    if not isinstance(client, dict) or not client.keys() >= set(_CLIENT_KEYS):
        raise InputError(f"{path}: {name} is incomplete; an entry needs {', '.join(_CLIENT_KEYS)}")
    _check_numbers(
        path, f"{name}.", client, ("num_records", "rounds", "earlier_runs", "delta", "bytes_up", "bytes_down")
    )
    _check_epsilons(path, f"{name}.", client, ("epsilon_local", "epsilon_local_this_run", "epsilon_rho"))


def _check_numbers(path: Path, prefix: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        value = values.get(key)
        absent = value is None and key in _NULLABLE
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
