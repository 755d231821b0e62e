"""The pieces of a run's page, from its folder alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import pandas as pd

from fedpriv.accounting.views import View
from fedpriv.live.templating import rendered
from fedpriv.reports import plots, series, tables
from fedpriv.reports.page import Panel, panel
from fedpriv.reports.status_display import event_parts, state_of, trouble_of
from fedpriv.runs import files
from fedpriv.runs.rows import ClientRow, RoundRow, parse_epsilon, read_rows
from fedpriv.runs.status import ClientStatus, RunStatus, read_status
from fedpriv.texts import holder_label

# Beyond them only those in trouble are listed, and then as many.
MAX_CLIENTS = 200
# Of the pieces, in the order of the page.
NAMES = ("head", "notes", "figures", "clients", "plots", "events")

_AGAINST: dict[View, str] = {
    "local": "against the server, which sees every upload",
    "rho": "by Theorem 1 of DP-LoRA",
    "aggregate": "against someone who sees the weighted sums alone",
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client's row.

    Attributes:
        known: what the folder says of it.
        epsilon: spent on the run's view; None before its first round.
        limit: its budget, or else the run's target; None without.
    """

    known: ClientStatus
    epsilon: float | None
    limit: float | None

    @property
    def label(self) -> str:
        """By its name, as elsewhere, or its number."""
        return holder_label(self.known.client, self.known.name).removeprefix("client ")

    @property
    def state(self) -> str:
        """Why it is not asked, or how its last round ended."""
        return state_of(self.known)

    @property
    def trouble(self) -> str:
        """What is wrong with it; empty if nothing is, or it is not known what."""
        return trouble_of(self.known) if self.known.is_troubled else ""

    @property
    def share(self) -> float | None:
        """Of its limit that is spent, at most 1; None without a limit."""
        if self.limit is None or self.epsilon is None:
            return None
        return min(1.0, self.epsilon / self.limit)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its page shows it.

    Attributes:
        view: the one that budgets and target apply to.
        limit_name: `budget`, `target`, or empty.
        comparison_rounds: of the run without noise; None before it begins.
    """

    name: str
    status: RunStatus
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    view: View
    limit_name: str
    clients: tuple[Client, ...]
    rounds: pd.DataFrame
    client_rows: pd.DataFrame
    comparison_rounds: pd.DataFrame | None


def pieces(run_dir: Path, *, now: float) -> dict[str, str]:
    """{name: HTML} of the pieces of a run's page; all text from the folder is escaped.

    Args:
        run_dir: of a run, which may be writing to it.
        now: seconds since the epoch.

    Raises:
        InputError: the folder holds no run, or one of its files is damaged.
    """
    run = read(run_dir, now=now)
    status = run.status
    listed = _listed(run.clients)
    return rendered(
        "run.html.j2",
        NAMES,
        run=run,
        status=status,
        changed=now - status.seconds_since_change,
        doing=_doing(run),
        why_not_private=_why_not_private(run),
        epsilon=_largest(run),
        against=_AGAINST[run.view],
        listed=listed,
        num_unlisted=len(run.clients) - len(listed),
        panels=_panels(run),
        last_events=[event_parts(event) for event in reversed(status.events)],
        bound=tables.format_bound,
        delta=tables.format_delta,
    )


def read(run_dir: Path, *, now: float) -> Run:
    """The run in the folder.

    Raises:
        InputError: the folder holds no run, or one of its files is damaged.
    """
    status = read_status(run_dir, now=now)
    config = files.read_values(run_dir / files.CONFIG)
    summary = files.read_values(run_dir / files.SUMMARY, optional=True)
    view = cast(View, config.get("privacy_view") if config.get("privacy_view") in get_args(View) else "local")
    rows = _table(run_dir / files.CLIENTS, ClientRow, ("round", "client", "status", f"epsilon_{view}"))
    limit_name, limits = _limits(config)
    return Run(
        name=run_dir.resolve().name,
        status=status,
        config=config,
        summary=summary,
        view=view,
        limit_name=limit_name,
        clients=tuple(
            Client(known=client, epsilon=epsilon, limit=limits[client.client] if len(limits) > 1 else limits[0])
            for client, epsilon in zip(status.clients, _spent(status, rows, summary, view), strict=True)
        ),
        rounds=_rounds(run_dir),
        client_rows=rows,
        comparison_rounds=_rounds(comparison) if (comparison := run_dir / files.COMPARISON).is_dir() else None,
    )


def _rounds(folder: Path) -> pd.DataFrame:
    columns = ("round", "test_accuracy", "test_loss", "test_perplexity")
    return _table(folder / files.ROUNDS, RoundRow, columns)


def _table(path: Path, kind: type[RoundRow | ClientRow], columns: Sequence[str]) -> pd.DataFrame:
    """The whole rows of a table; None becomes NaN."""
    frame = pd.DataFrame(read_rows(path, kind, columns) if path.is_file() else [], columns=list(columns))
    text = {"status"}
    return frame.astype({name: float for name in columns if name not in text and name not in ("round", "client")})


def _limits(config: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """What the limits are, and one for all clients or one for each."""
    if budgets := config.get("budget_epsilon"):
        return "budget", [float(budget) for budget in budgets]
    if target := config.get("target_epsilon"):
        return "target", [float(target)]
    return "", [None]


def _spent(status: RunStatus, rows: pd.DataFrame, summary: Mapping[str, Any], view: View) -> list[float | None]:
    """What each client has spent on a view: the final figure, or else that of its last row."""
    column = f"epsilon_{view}"
    final = {entry["client"]: parse_epsilon(entry.get(column)) for entry in summary.get("clients", ())}
    last = dict(zip(rows["client"], rows[column], strict=True))
    return [
        final.get(client.client, parse_epsilon(last[client.client]) if client.client in last else None)
        for client in status.clients
    ]


def _largest(run: Run) -> str:
    """The largest epsilon on the run's view, with its delta."""
    spent = [client.epsilon for client in run.clients if client.epsilon is not None]
    return tables.format_epsilon(max(spent), run.status.delta_max) if spent else tables.MISSING


def _why_not_private(run: Run) -> str | None:
    """Why nobody is protected, as far as that is known before the end."""
    if run.summary.get("private") is False or run.config.get("simulate"):
        return "its noise and sampling are seeded, or no noise bounds what an upload reveals"
    if any(client.epsilon is not None and math.isinf(client.epsilon) for client in run.clients):
        return "no noise bounds what an upload reveals: ε is infinite"
    return None


def _doing(run: Run) -> str:
    """What the run is at."""
    status = run.status
    if status.state == "finished":
        return "finished"
    if run.comparison_rounds is not None:
        done = max(0, len(run.comparison_rounds) - 1)
        return f"the same rounds without noise, for comparison: {done} of {status.num_rounds_planned or '?'}"
    if status.num_rounds_planned is not None and status.num_rounds >= status.num_rounds_planned:
        return "all rounds are done; results are being written"
    return f"round {status.num_rounds + 1}" if status.state == "running" else f"after round {status.num_rounds}"


def _listed(clients: tuple[Client, ...]) -> list[Client]:
    """All clients, or only those in trouble if there are many."""
    if len(clients) <= MAX_CLIENTS:
        return list(clients)
    return [client for client in clients if client.known.is_troubled][:MAX_CLIENTS]


def _panels(run: Run) -> list[Panel]:
    """The plots of what there is by now."""
    found = []
    if len(run.client_rows):
        found.append(_epsilon_panel(run))
    note = "On the server's own test set; round 0 is the untrained model."
    for column, title, draw, format_value in (
        ("test_accuracy", "Test accuracy", None, tables.format_percent),
        ("test_perplexity", "Test perplexity", plots.loss_plot, tables.format_number),
        ("test_loss", "Test loss", plots.loss_plot, tables.format_number),
    ):
        if run.rounds[column].isna().all():
            continue
        label = "this run" if _why_not_private(run) else "with DP"
        compared = run.comparison_rounds
        frame = series.compared(run.rounds, compared if compared is not None and len(compared) else None, column, label)
        svg = (
            draw(frame, title=title, name=column.removeprefix("test_"))
            if draw is not None
            else plots.accuracy_plot(frame, references=_references(run.summary))
        )
        found.append(panel(title, note, svg, frame, format_value))
    return found


def _references(summary: Mapping[str, Any]) -> dict[str, float]:
    """What an accuracy has to beat, once the run is finished."""
    named = {"largest class": summary.get("majority_accuracy"), "linear probe": summary.get("probe_accuracy")}
    return {name: accuracy for name, accuracy in named.items() if accuracy is not None}


def _epsilon_panel(run: Run) -> Panel:
    frame = series.epsilon(run.client_rows, run.rounds, run.view)
    title = f"ε so far, {run.view} view"
    common = {client.limit for client in run.clients if client.limit is not None}
    limits = {run.limit_name: min(common)} if len(common) == 1 else {}
    svg = plots.epsilon_plot(frame, title=title, name=f"epsilon-{run.view}", limits=limits)
    delta = tables.format_delta(run.status.delta_max)
    note = f"Per client, {_AGAINST[run.view]}, at its δ (at most {delta}), after each round; by rdp."
    return panel(title, note, svg, frame, tables.format_bound)
