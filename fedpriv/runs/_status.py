"""The status of a run, from its folder alone: no process is asked, and nothing is written."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedpriv.config import OWN_MODEL
from fedpriv.errors import InputError, LedgerError
from fedpriv.runs import files
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._rows import USABLE, parse_epsilon

State = Literal["running", "interrupted", "unknown", "finished"]
# What a run writes until it ends; its comparison follows the private rounds.
_SIGNS_OF_LIFE = (
    *(files.ROUNDS, files.CLIENTS, files.EVENTS),
    *(files.CHECKPOINTS, f"{files.CHECKPOINTS}/*", f"{files.COMPARISON}/*.csv"),
)
# Clients whose charges are composed at each look at a run that goes on.
_MOST_COUNTED = 40
# The columns that a status is made of.
ROUND_COLUMNS = (
    *("round", "test_accuracy", "epsilon_local_max", "epsilon_rho_max", "epsilon_aggregate_max"),
    *("epsilon_this_run_max", "epsilon_before_max"),
    *("bytes_up", "bytes_down", "seconds"),
)
CLIENT_COLUMNS = ("round", "client", "num_records", "status", "detail", "epsilon_local", "delta")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientStatus:
    """The status of one client.

    Attributes:
        client: the partition id.
        name: for display; empty if the folder does not give one.
        num_records: N_k as registered.
        last_round: the last round that it was asked in; None before the first.
        status: how that round ended for it; `detail` says what was wrong.
        status_counts: {status: in how many rounds}.
        epsilon_local: spent so far, earlier runs included, at `delta`; None before the first round, when only the
            ledger knows.
        retired: why it is no longer asked; None if it may be.
        skipped: whether it is not asked, since its node stopped answering, until that registers again.
        doing: what it does in the round under way: `training`, `asked` something else, or `replied`; None if it is not
            asked in it, or there is none.
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
    skipped: bool
    doing: str | None

    @property
    def is_troubled(self) -> bool:
        """Whether someone should look at the client: it retired, is skipped, or its last reply was not usable."""
        return self.retired is not None or self.skipped or (self.status is not None and self.status not in USABLE)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run as its folder shows it.

    Attributes:
        state: `unknown` if the run was silent for `round_seconds` and only another machine could say whether it lives.
        is_alive: whether the process that runs the run lives; None if that cannot be told from here.
        unit: of which an epsilon protects one: `record`, `person` or `client`.
        seconds_since_change: since the run last wrote a table, a checkpoint or an event.
        round_seconds: where `is_alive` is None, a longer silence than this ends the belief that the run goes on.
        resume_command: resumes an interrupted run; None if the run goes on, is finished or left no checkpoint.
        num_rounds: finished rounds; round 0, the test of the untrained model, does not count.
        num_rounds_planned: None if the configuration does not say.
        test_accuracy: after the last round; None before the first test, or without one.
        accuracy_standard_error, majority_accuracy: of a finished run, if they are known.
        warnings: of a finished run: why it may be of no use.
        accountant: the one that computed the epsilons: rdp until the run is finished.
        privacy_view: the one that target and budgets apply to.
        target_epsilon: of the run; None without one.
        budget_epsilon: of all clients, or of each.
        epsilon_local_max, epsilon_rho_max, epsilon_aggregate_max: the largest over all clients at `delta_max`; None as
            long as nothing is known, and for `aggregate` if `aggregate_view_holds` is False.
        epsilon_this_run_max, epsilon_before_max: what this run has spent on the run's view, and what stood in the
            account before it; None where nothing did.
        seconds: what the rounds took, or the whole run once it is finished.
        num_unreadable_events: lines of events.jsonl that hold no event; one still being written does not count.
    """

    run_dir: str
    run_id: str | None
    state: State
    is_alive: bool | None
    engine: str
    unit: str
    seconds_since_change: float
    round_seconds: float
    resume_command: str | None
    stopped_early: str | None
    num_rounds: int
    num_rounds_planned: int | None
    test_accuracy: float | None
    accuracy_standard_error: float | None
    majority_accuracy: float | None
    warnings: tuple[str, ...]
    accountant: str
    privacy_view: str
    target_epsilon: float | None
    budget_epsilon: tuple[float, ...]
    epsilon_local_max: float | None
    epsilon_rho_max: float | None
    epsilon_aggregate_max: float | None
    epsilon_this_run_max: float | None
    epsilon_before_max: float | None
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


def status_of(folder: RunFolder) -> RunStatus:
    """The status of the run in the folder now; InputError if it holds no run, or one of its files is damaged."""
    return folder.once(_status_of)


def _status_of(folder: RunFolder) -> RunStatus:
    run_dir, alive, summary = folder.path, folder.is_alive, folder.summary  # a run that ends now was alive
    for name in (files.CONFIG, files.ROUNDS, files.CLIENTS):
        if not (run_dir / name).is_file():
            raise InputError(f"{run_dir}: holds no run, {name} is missing; give the folder that a run writes")
    files.check_version(run_dir)
    config, events = folder.config, folder.events
    checkpoint_round, checkpoint = folder.checkpoint
    rounds, rows = folder.round_rows(ROUND_COLUMNS), folder.client_rows(CLIENT_COLUMNS)
    begun, doing = folder.progress
    is_under_way = not summary and begun > (rounds[-1]["round"] if rounds else 0)
    charged = folder.once(_charged)
    try:
        entries = summary.get("clients", ()) if summary else folder.registrations.values()
        known = {entry["client"]: entry for entry in entries}
        clients = _clients(rows, known, checkpoint, charged, doing if is_under_way else {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{run_dir}: what it says about its clients is damaged ({error!r})") from None
    round_seconds, engine = float(config.get("round_seconds", 3600.0)), str(config.get("engine", ""))
    silence = max(0.0, folder.now - _last_change(run_dir))
    state: State = "finished" if summary else _state(run_dir, alive, is_silent=silence > round_seconds)
    resumable = state in ("interrupted", "unknown") and checkpoint_round is not None
    return RunStatus(
        run_dir=str(run_dir),
        run_id=summary.get("run_id") or checkpoint.get("run"),
        state=state,
        is_alive=alive,
        engine=engine,
        unit=_unit(config, summary),
        seconds_since_change=silence,
        round_seconds=round_seconds,
        resume_command=resume_command(run_dir, engine, str(config.get("model", ""))) if resumable else None,
        stopped_early=summary.get("stopped_early"),
        num_rounds=rounds[-1]["round"] if rounds else 0,
        num_rounds_planned=config.get("rounds"),
        test_accuracy=summary.get("accuracy", rounds[-1]["test_accuracy"] if rounds else None),
        accuracy_standard_error=summary.get("accuracy_standard_error"),
        majority_accuracy=summary.get("majority_accuracy"),
        warnings=tuple(summary.get("warnings", ())),
        **_limits(config, run_dir),
        **(_final_costs(summary) if summary else _costs_so_far(rounds, clients, charged)),
        bytes_up=sum(row["bytes_up"] for row in rounds),
        bytes_down=sum(row["bytes_down"] for row in rounds),
        seconds=float(summary.get("seconds") or sum(row["seconds"] for row in rounds)),
        checkpoint_round=checkpoint_round,
        num_events=events.num_events,
        num_unreadable_events=events.num_unreadable,
        events=events.last,
        clients=clients,
    )


def _unit(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    of_configuration = "client" if config.get("noise_on") == "upload" else config.get("unit", "record")
    return str(summary.get("unit", of_configuration))


def spent_on_view(folder: RunFolder) -> dict[int, float | None]:
    """{client: what it has spent on the run's view}: the final figure, or that of its last row; None before it."""
    return folder.once(_spent_on_view)


def _spent_on_view(folder: RunFolder) -> dict[int, float | None]:
    status = status_of(folder)
    column = f"epsilon_{status.privacy_view}"
    last = {row["client"]: row[column] for row in folder.client_rows(("client", column))}
    final = {entry["client"]: parse_epsilon(entry.get(column)) for entry in folder.summary.get("clients", ())}
    found = {
        each.client: final.get(each.client, parse_epsilon(last[each.client]) if each.client in last else None)
        for each in status.clients
    }
    for client, charged in folder.once(_charged).items():
        if column != "epsilon_aggregate" or found.get(client) is not None:
            found[client] = max(found.get(client) or 0.0, charged[status.privacy_view])
    return found


def _limits(config: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """The run's limits, and the view that they are on."""
    view, target = config.get("privacy_view", "local"), config.get("target_epsilon")
    try:
        return {
            "privacy_view": view if view in ("local", "rho", "aggregate") else "local",
            "target_epsilon": float(target) if target else None,
            "budget_epsilon": tuple(float(each) for each in config.get("budget_epsilon", ())),
        }
    except (TypeError, ValueError) as error:
        raise InputError(f"{run_dir / files.CONFIG}: damaged ({error})") from None


def _state(run_dir: Path, alive: bool | None, *, is_silent: bool) -> State:
    """The state of a run that is not finished."""
    if alive is None and is_silent:
        # A folder without it was copied, and its process is not its own.
        return "unknown" if (run_dir / files.PRESENCE).exists() else "interrupted"
    return "interrupted" if alive is False else "running"


def resume_command(run_dir: Path, engine: str, model: str = "") -> str:
    """The command line that resumes the run in a folder; the line of Python, for a model that a program gave.

    Args:
        engine: of the run; `flower` stands for a deployment.
    """
    path = str(run_dir.absolute())
    if model.startswith(OWN_MODEL):
        return f"fedpriv.run(resume={path!r}, model=..., data=...)"
    if engine == "flower":
        return f"fedpriv coordinator run COORDINATOR -c {shlex.quote(f'resume={path}')}"
    return f"fedpriv run --resume {shlex.quote(path)}"


def _last_change(run_dir: Path) -> float:
    """The time of the run's last write, in seconds since the epoch."""
    times = []
    for path in (path for pattern in _SIGNS_OF_LIFE for path in run_dir.glob(pattern)):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # an older checkpoint was deleted in the meantime
            continue
    return max(times, default=0.0)


def account_parts(summary: Mapping[str, Any]) -> tuple[float, float] | None:
    """The largest cost of this run, and of what stood in an account before it, on the run's view.

    None where nothing stood there.
    """
    keys = ("epsilon_this_run_max", "epsilon_before_max")
    if not all(key in summary for key in keys):
        return None
    this_run, before = (parse_epsilon(summary[key]) for key in keys)
    return this_run, before


def _final_costs(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The final figures; None for a view that does not hold."""
    holds = not summary.get("aggregate_objections")
    this_run, before = account_parts(summary) or (None, None)
    return {
        "accountant": summary.get("accountant", "pld"),
        "epsilon_local_max": parse_epsilon(summary.get("epsilon_local_max")),
        "epsilon_rho_max": parse_epsilon(summary.get("epsilon_rho_max")),
        "epsilon_aggregate_max": parse_epsilon(summary.get("epsilon_aggregate_max")) if holds else None,
        "epsilon_this_run_max": this_run,
        "epsilon_before_max": before,
        "aggregate_view_holds": holds,
        "delta_max": summary.get("delta_max"),
    }


def _charged(folder: RunFolder) -> dict[int, dict[str, float]]:
    """{client: {view: epsilon by rdp}} of what the ledger has charged, where that is ahead of the tables.

    A round's rows are written when it is over. So this counts before the first is, and in a run that was interrupted.
    Empty elsewhere, where the ledger is not here, and where there are too many clients to count at each look.
    """
    rows, run = folder.round_rows(("round",)), folder.checkpoint[1].get("run")
    path = Path(str(folder.config.get("ledger") or folder.path / files.LEDGER))
    last = rows[-1]["round"] if rows else 0
    if folder.summary or (last and folder.is_alive) or not path.is_file() or len(folder.registrations) > _MOST_COUNTED:
        return {}
    from fedpriv.privacy.accounting.accountants import epsilon_of  # deferred: few runs need it
    from fedpriv.privacy.ledger.reader import reading

    found, is_ahead = dict[int, dict[str, float]](), False
    try:
        with reading(path) as db:
            for entry in folder.registrations.values():
                if not ((data_set := db.data_set(entry["data_set"])) and (releases := db.releases(data_set.id))):
                    continue
                is_ahead |= any((key.round or 0) > last for key, _ in db.releases_of(data_set.id, str(run)))
                views = {"local": [each.event for each in releases], "rho": [each.seen_by("rho") for each in releases]}
                views["aggregate"] = [release.charged_on("aggregate") for release in releases]
                found[entry["client"]] = {
                    view: epsilon_of(events, data_set.delta, "rdp").epsilon for view, events in views.items()
                }
    except (LedgerError, KeyError, TypeError, ValueError):  # the tables are all that can be shown
        return {}
    return found if is_ahead else {}


def _costs_so_far(
    rounds: Sequence[Mapping[str, Any]], clients: Iterable[ClientStatus], charged: Mapping[int, Mapping[str, float]]
) -> dict[str, Any]:
    """The figures after the last round, or of what is charged beyond it."""

    def largest(view: str) -> float | None:
        known = rounds[-1][f"epsilon_{view}_max"] if rounds else None
        if known is None and (rounds or not charged):
            return None
        return max([known or 0.0, *(each[view] for each in charged.values())])

    return {
        "accountant": "rdp",
        **{f"epsilon_{view}_max": largest(view) for view in ("local", "rho", "aggregate")},
        **{part: rounds[-1].get(part) if rounds else None for part in ("epsilon_this_run_max", "epsilon_before_max")},
        "aggregate_view_holds": rounds[-1]["epsilon_aggregate_max"] is not None if rounds else None,
        "delta_max": max((client.delta for client in clients if client.delta is not None), default=None),
    }


def _clients(
    rows: Iterable[Mapping[str, Any]],
    known: Mapping[int, Mapping[str, Any]],
    checkpoint: Mapping[str, Any],
    charged: Mapping[int, Mapping[str, float]],
    doing: Mapping[int, str],
) -> tuple[ClientStatus, ...]:
    """All clients that took part or registered, by partition id."""
    last: dict[int, Mapping[str, Any]] = {}
    counts: dict[int, dict[str, int]] = {}
    for row in rows:
        last[row["client"]] = row
        of_client = counts.setdefault(row["client"], {})
        of_client[row["status"]] = of_client.get(row["status"], 0) + 1
    retired = {int(client): reason for client, reason in checkpoint.get("retired", {}).items()}
    retired |= {client: row["detail"] for client, row in last.items() if row["status"] == "retired"}
    retired |= {client: entry["retired"] for client, entry in known.items() if entry.get("retired")}
    skipped, nothing = set(checkpoint.get("skipped", ())), dict[str, Any]()
    return tuple(
        _client(
            client,
            known.get(client, nothing),
            last.get(client, nothing),
            charged.get(client, {}).get("local"),
            status_counts=counts.get(client, nothing),
            retired=retired.get(client),
            skipped=client in skipped,
            doing=doing.get(client),
        )
        for client in sorted(known.keys() | last.keys())
    )


def _client(
    client: int, known: Mapping[str, Any], last: Mapping[str, Any], charged: float | None, **rest: Any
) -> ClientStatus:
    """A client from its entry in the summary or among the registrations, its last row, and what its ledger charged."""
    spent = parse_epsilon(known["epsilon_local"]) if "epsilon_local" in known else None
    spent = last.get("epsilon_local") if spent is None else spent
    return ClientStatus(
        client=client,
        name=str(known.get("name", "")),
        num_records=known["num_records"] if known else last["num_records"],
        last_round=last.get("round"),
        status=last.get("status"),
        detail=last.get("detail", ""),
        epsilon_local=spent if charged is None else max(spent or 0.0, charged),
        delta=known.get("delta", last.get("delta")),
        **rest,
    )
