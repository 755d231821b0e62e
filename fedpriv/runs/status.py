"""What a run is doing or did, read from its folder alone: no process is asked, and nothing is written."""

from __future__ import annotations

import csv
import io
import json
import shlex
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from fedpriv.errors import InputError
from fedpriv.reports.tables import parse_epsilon

State = Literal["running", "interrupted", "finished"]
SOUND = ("ok", "silent")
MAX_EVENTS = 8
# What a run writes while it goes on; its comparison follows the private rounds.
_SIGNS_OF_LIFE = ("rounds.csv", "clients.csv", "events.jsonl", "checkpoint", "checkpoint/round-*", "comparison/*.csv")


@dataclass(frozen=True, kw_only=True)
class ClientStatus:
    """What is known of one client.

    Attributes:
        client: the partition id.
        name: for display; empty where the folder does not say.
        num_records: N_k as registered.
        last_round: the last one that it was asked in; None before the first.
        status: how that ended, and `detail` what was wrong.
        status_counts: {status: in how many rounds}.
        epsilon_local: spent so far, earlier runs included, at `delta`; None before the first round, where only the
            ledger knows.
        retired: why it is asked no more; None where it may be.
    """

    client: int
    name: str
    num_records: int
    last_round: int | None
    status: str | None
    detail: str
    status_counts: Mapping[str, int]
    epsilon_local: float | None
    delta: float | None
    retired: str | None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run as its folder shows it.

    Attributes:
        seconds_since_change: since it last wrote its tables, a checkpoint or an event.
        round_seconds: silence of more than that counts as an interruption.
        resume_command: what lets an interrupted run go on; None where nothing is to be done or no checkpoint is there.
        num_rounds: rounds done; the test of the untrained model is none.
        num_rounds_planned: None where the configuration does not say.
        test_accuracy: after the last round; None before the first test.
        accountant: by which the epsilons were computed: rdp until the run is finished.
        epsilon_local_max, epsilon_rho_max, epsilon_aggregate_max: the largest of all clients at `delta_max`; None where
            nothing is known yet, and for `aggregate` where `aggregate_view_holds` is False.
        seconds: that the rounds took, or the whole run once it is finished.
        checkpoint_round: of the last checkpoint.
        num_unreadable_events: lines of events.jsonl that hold no event; one still being written does not count.
        events: the last ones.
    """

    run_dir: str
    run_id: str | None
    state: State
    engine: str
    seconds_since_change: float
    round_seconds: float
    resume_command: str | None
    stopped_early: str | None
    num_rounds: int
    num_rounds_planned: int | None
    test_accuracy: float | None
    accountant: str
    epsilon_local_max: float | None
    epsilon_rho_max: float | None
    epsilon_aggregate_max: float | None
    aggregate_view_holds: bool | None
    delta_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    checkpoint_round: int | None
    num_events: int
    num_unreadable_events: int
    events: tuple[Mapping[str, Any], ...]
    clients: tuple[ClientStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values under snake_case keys; infinities stay infinities."""
        retired = [{"client": c.client, "reason": c.retired} for c in self.clients if c.retired is not None]
        return asdict(self) | {"retired": retired}


def read_status(run_dir: Path, *, now: float) -> RunStatus:
    """The status of the run that the folder holds.

    Args:
        run_dir: of the run; it may be written at this moment.
        now: seconds since the epoch.

    Raises:
        InputError: one line: the folder holds no run, or one of its files is damaged.
    """
    for name in ("config.toml", "rounds.csv", "clients.csv"):
        if not (run_dir / name).is_file():
            raise InputError(f"{run_dir}: holds no run, {name} is missing; give the folder that a run writes")
    config = _parsed(run_dir / "config.toml", tomllib.loads)
    summary = _parsed(run_dir / "summary.json", json.loads, optional=True)
    registrations = _parsed(run_dir / "registrations.json", json.loads, optional=True)
    checkpoint_round, checkpoint = _last_checkpoint(run_dir)
    rounds, rows = _read_table(run_dir / "rounds.csv", _ROUND), _read_table(run_dir / "clients.csv", _CLIENT)
    try:
        clients = _clients(rows, registrations.values() or checkpoint.get("registrations", ()), summary, checkpoint)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{run_dir}: what it says of its clients is damaged ({error!r})") from None
    round_seconds, engine = float(config.get("round_seconds", 3600.0)), str(config.get("engine", ""))
    silence = max(0.0, now - _last_change(run_dir))
    state: State = "finished" if summary else "running" if silence <= round_seconds else "interrupted"
    resumable = state == "interrupted" and checkpoint_round is not None
    events, num_events, num_unreadable = _read_events(run_dir / "events.jsonl")
    return RunStatus(
        run_dir=str(run_dir),
        run_id=summary.get("run_id") or checkpoint.get("run"),
        state=state,
        engine=engine,
        seconds_since_change=silence,
        round_seconds=round_seconds,
        resume_command=_resume_command(run_dir, engine) if resumable else None,
        stopped_early=summary.get("stopped_early"),
        num_rounds=rounds[-1]["round"] if rounds else 0,
        num_rounds_planned=config.get("rounds"),
        test_accuracy=rounds[-1]["test_accuracy"] if rounds else None,
        **(_spent_in_all(summary) if summary else _spent_so_far(rounds, clients)),
        bytes_up=sum(row["bytes_up"] for row in rounds),
        bytes_down=sum(row["bytes_down"] for row in rounds),
        seconds=float(summary.get("seconds") or sum(row["seconds"] for row in rounds)),
        checkpoint_round=checkpoint_round,
        num_events=num_events,
        num_unreadable_events=num_unreadable,
        events=events,
        clients=clients,
    )


def _resume_command(run_dir: Path, engine: str) -> str:
    place = str(run_dir.absolute())
    if engine == "flower":
        return f"python -m server.deploy run COORDINATOR -c {shlex.quote(f'resume={place}')}"
    return f"python -m simulations run --resume {shlex.quote(place)}"


def _last_change(run_dir: Path) -> float:
    """When the run last wrote something, in seconds since the epoch."""
    times = []
    for path in (path for pattern in _SIGNS_OF_LIFE for path in run_dir.glob(pattern)):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # an older checkpoint was dropped in the meantime
            continue
    return max(times, default=0.0)


def _spent_in_all(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The final figures; JSON's null is infinity, or a view that does not hold."""
    holds = not summary.get("aggregate_objections")
    return {
        "accountant": summary.get("accountant", "pld"),
        "epsilon_local_max": parse_epsilon(summary.get("epsilon_local_max")),
        "epsilon_rho_max": parse_epsilon(summary.get("epsilon_rho_max")),
        "epsilon_aggregate_max": parse_epsilon(summary.get("epsilon_aggregate_max")) if holds else None,
        "aggregate_view_holds": holds,
        "delta_max": summary.get("delta_max"),
    }


def _spent_so_far(rounds: Sequence[Mapping[str, Any]], clients: Iterable[ClientStatus]) -> dict[str, Any]:
    """The figures after the last round."""
    views = ("epsilon_local_max", "epsilon_rho_max", "epsilon_aggregate_max")
    return {
        "accountant": "rdp",
        **{view: rounds[-1][view] if rounds else None for view in views},
        "aggregate_view_holds": rounds[-1]["epsilon_aggregate_max"] is not None if rounds else None,
        "delta_max": max((client.delta for client in clients if client.delta is not None), default=None),
    }


def _clients(
    rows: Iterable[Mapping[str, Any]],
    registrations: Iterable[Mapping[str, Any]],
    summary: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
) -> tuple[ClientStatus, ...]:
    """All clients that took part or registered, by partition id."""
    last: dict[int, Mapping[str, Any]] = {}
    counts: dict[int, Counter[str]] = {}
    for row in rows:
        last[row["client"]] = row
        counts.setdefault(row["client"], Counter())[row["status"]] += 1
    known = {entry["client"]: entry for entry in registrations}
    known |= {entry["client"]: known.get(entry["client"], {}) | entry for entry in summary.get("clients", ())}
    retired = {int(client): reason for client, reason in checkpoint.get("retired", {}).items()}
    retired |= {client: row["detail"] for client, row in last.items() if row["status"] == "retired"}
    retired |= {client: entry["retired"] for client, entry in known.items() if entry.get("retired")}
    return tuple(
        _client(client, known.get(client, {}), last.get(client, {}), counts.get(client, {}), retired.get(client))
        for client in sorted(known.keys() | last.keys())
    )


def _client(
    client: int,
    known: Mapping[str, Any],
    last: Mapping[str, Any],
    status_counts: Mapping[str, int],
    retired: str | None,
) -> ClientStatus:
    """A client from its entry in the summary or among the registrations, and its last row."""
    final = parse_epsilon(known["epsilon_local"]) if "epsilon_local" in known else None
    return ClientStatus(
        client=client,
        name=str(known.get("name", "")),
        num_records=known["num_records"] if known else last["num_records"],
        last_round=last.get("round"),
        status=last.get("status"),
        detail=last.get("detail", ""),
        status_counts=dict(status_counts),
        epsilon_local=final if final is not None else last.get("epsilon_local"),
        delta=known.get("delta", last.get("delta")),
        retired=retired,
    )


def _last_checkpoint(run_dir: Path) -> tuple[int | None, Mapping[str, Any]]:
    """The round of the last checkpoint, and what it says; nothing where it cannot be read, which resuming will tell."""
    found = sorted(path for path in (run_dir / "checkpoint").glob("round-[0-9]*") if path.name[6:].isdigit())
    if not found:
        return None, {}
    try:
        state = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    return int(found[-1].name[6:]), state if isinstance(state, dict) else {}


def _read_events(path: Path) -> tuple[tuple[Mapping[str, Any], ...], int, int]:
    """The last events, how many there are, and how many lines are none."""
    last: deque[Mapping[str, Any]] = deque(maxlen=MAX_EVENTS)
    num_events = num_unreadable = 0
    if not path.is_file():
        return (), 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # is being written, or was when the run died
                break
            event = _event(line)
            if event is None:
                num_unreadable += 1
            else:
                num_events += 1
                last.append(event)
    return tuple(last), num_events, num_unreadable


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line: an object of plain values with a time and a name; else None."""
    try:
        event = json.loads(line)
        datetime.fromisoformat(event["time"])
    except (ValueError, KeyError, TypeError):
        return None
    plain = isinstance(event.get("event"), str) and not any(isinstance(v, (list, dict)) for v in event.values())
    return event if plain else None


def _parsed(path: Path, loads: Callable[[str], Any], *, optional: bool = False) -> dict[str, Any]:
    """The keys and values of a file; none where it may be missing and is."""
    if optional and not path.exists():
        return {}
    try:
        values = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid {path.suffix[1:]} ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold keys and values, holds a {type(values).__name__}")
    return values


def _none_if_empty(text: str) -> float | None:
    return parse_epsilon(text) if text else None


_ROUND: Mapping[str, Callable[[str], Any]] = {
    "round": int,
    "test_accuracy": float,
    "epsilon_local_max": parse_epsilon,
    "epsilon_rho_max": parse_epsilon,
    "epsilon_aggregate_max": _none_if_empty,
    "bytes_up": int,
    "bytes_down": int,
    "seconds": float,
}
_CLIENT: Mapping[str, Callable[[str], Any]] = {
    "round": int,
    "client": int,
    "num_records": int,
    "status": str,
    "detail": str,
    "epsilon_local": parse_epsilon,
    "delta": float,
}


def _read_table(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> list[dict[str, Any]]:
    """The rows of a table whose line is whole; the last may be being written."""
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    rows = []
    for row in reader:
        try:
            rows.append({column: read(row[column]) for column, read in columns.items()})
        except KeyError as error:
            raise InputError(f"{path}: column {error.args[0]} is missing; a run of this version writes it") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: line {reader.line_num} is damaged ({error})") from None
    return rows


def is_troubled(client: ClientStatus) -> bool:
    """Whether somebody should look at the client: it retired, or its last reply was not sound."""
    return client.retired is not None or (client.status is not None and client.status not in SOUND)
