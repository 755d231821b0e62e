"""The lines of a run's files: rows of its tables, events of its journal, samples of its models' answers.

Every column of a table is declared once, in `RoundRow` and `ClientRow`, by which it is written and read.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fedpriv.errors import InputError

USABLE = ("ok", "silent")
"""The statuses of a reply that the round can use."""

MAX_EVENTS = 8


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """A row of rounds.csv; round 0 is the untrained model.

    `num_late` counts replies to earlier rounds that arrived during this one. Epsilons are cumulative, include earlier
    runs on the same data sets, and come from the rdp accountant, on the run's `privacy_view` bounded by what
    `Books.epsilon_so_far` knows to be kept; `aggregate` is None where that view does not hold.
    `this_run` and `before` split the figure on the run's view into what this run has spent and what stood in the
    account before it; they are None where nothing stood there. So
    are accuracy, loss and perplexity where the server has no test set, and the perplexity of a classifier.
    """

    round: int
    num_selected: int
    num_replies: int
    num_silent: int
    num_failures: int
    num_late: int
    num_retired: int
    test_accuracy: float | None
    test_loss: float | None
    test_perplexity: float | None = None
    epsilon_local_max: float
    epsilon_rho_max: float
    epsilon_aggregate_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    epsilon_this_run_max: float | None = None
    epsilon_before_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """A row of clients.csv: what one client did in one round, and what it has spent by then, computed by rdp.

    `status` is `ok`, `silent`, `malformed`, `refused`, `retired`, `failed` or `no reply`, and `detail` says what was
    wrong; or `left out`: the client dropped out of a secure sum before it was asked, and was not charged. Bytes are
    those of the serialised messages. `seconds` runs from when the instruction was sent to when the reply was created.
    """

    round: int
    client: int
    num_records: int
    status: str
    detail: str
    sampling_probability: float
    noise_multiplier: float
    effective_noise_multiplier: float
    steps: int
    weight: float
    rho_bar: float
    epsilon_local: float
    epsilon_rho: float
    epsilon_aggregate: float | None
    delta: float
    bytes_up: int
    bytes_down: int
    seconds: float


def column_types(kind: type[RoundRow | ClientRow]) -> dict[str, str]:
    """{column: its type as it is declared}, in the order of the file."""
    return {field.name: str(field.type) for field in fields(kind)}


def read_rows(
    path: Path, kind: type[RoundRow | ClientRow], columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """`parse_rows` of a table's file."""
    with path.open(newline="", encoding="utf-8") as file:
        return parse_rows(file.read(), path, kind, columns)


def parse_rows(
    text: str, path: Path, kind: type[RoundRow | ClientRow], columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The whole rows of a table, as {needed column: value}; InputError if damaged, but the last may be half written."""
    types = column_types(kind)
    needed = {name: types[name] for name in (types if columns is None else columns)}
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    rows = []
    for row in reader:
        try:
            rows.append({name: _parse_cell(name, type_, row[name]) for name, type_ in needed.items()})
        except KeyError as error:
            raise InputError(f"{path}: column {error.args[0]} is missing; a run of this version writes it") from None
        except ValueError as error:
            raise InputError(f"{path}: line {reader.line_num} is damaged ({error})") from None
    return rows


def parse_epsilon(value: object) -> float:
    """The epsilon that a record holds, infinite for "inf", NaN and a missing one; ValueError for what is none."""
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"epsilon = {value!r}: must be a number >= 0, null or inf")
    epsilon = float(value)
    if epsilon < 0:
        raise ValueError(f"epsilon = {value!r}: must be >= 0")
    return math.inf if math.isnan(epsilon) else epsilon


def _parse_cell(name: str, type_: str, text: str | None) -> Any:
    if text is None:
        raise ValueError(f"{name}: the line ends before it")
    if type_ == "str":
        return text
    if type_ == "int":
        return int(text)
    if type_ == "float | None" and not text:
        return None
    return parse_epsilon(text) if name.startswith("epsilon_") else float(text)


@dataclass(frozen=True, kw_only=True)
class Events:
    """The last events of a journal, at most MAX_EVENTS, how many there are, and how many lines hold none."""

    last: tuple[Mapping[str, Any], ...]
    num_events: int
    num_unreadable: int


def read_events(path: Path) -> Events:
    """The events of events.jsonl; none if the file is missing."""
    last: deque[Mapping[str, Any]] = deque(maxlen=MAX_EVENTS)
    num_events = num_unreadable = 0
    if not path.is_file():
        return Events(last=(), num_events=0, num_unreadable=0)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # still being written, or cut off when the run died
                break
            event = _parse_event(line)
            if event is None:
                num_unreadable += 1
            else:
                num_events += 1
                last.append(event)
    return Events(last=tuple(last), num_events=num_events, num_unreadable=num_unreadable)


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """The event on a line, which is an object of plain values with a time and a name; else None."""
    try:
        event = json.loads(line)
        datetime.fromisoformat(event["time"])
    except (ValueError, KeyError, TypeError):
        return None
    plain = isinstance(event.get("event"), str) and not any(isinstance(v, (list, dict)) for v in event.values())
    return event if plain else None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt of the server's test set with its answers, as text.

    Attributes:
        prompt: as the models read it, without special tokens.
        reference: the test set's own response.
        untrained, private: answers of the model before and after the run.
        non_private: that of the comparison run; None without one.
    """

    prompt: str
    reference: str
    untrained: str
    private: str
    non_private: str | None


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """A prompt, without special tokens, with a variant's answers before and after deduplication, as text."""

    variant: str
    prompt: str
    reference: str
    before: str
    after: str


Answers = TypeVar("Answers", Sample, StoredAnswer)


def read_answers(path: Path, kind: type[Answers]) -> tuple[Answers, ...]:
    """The prompts with answers in a file of a run, none if there is no file; InputError names a damaged line."""
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_parse_answers(path, number, line, kind) for number, line in enumerate(lines, start=1))


def _parse_answers(path: Path, number: int, line: str, kind: type[Answers]) -> Answers:
    names = [field.name for field in fields(kind)]
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.keys() != set(names):
        raise InputError(f"{path}: line {number} is damaged; it must hold {', '.join(names)}")
    for name, value in values.items():
        if not isinstance(value, str) and not (value is None and name == "non_private"):
            raise InputError(f"{path}: line {number}: {name} = {value!r}: must be text")
    return kind(**values)
