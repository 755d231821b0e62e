"""Templates of the live pages, which share style, filters and tables with the report."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args

import pandas as pd
from jinja2 import ChoiceLoader, Environment, PackageLoader

from fedpriv.accounting.views import View
from fedpriv.errors import InputError
from fedpriv.names import holder_label
from fedpriv.runs import files, presence
from fedpriv.runs.folder import read_run
from fedpriv.runs.rows import ClientRow, RoundRow, parse_epsilon, read_rows
from fedpriv.runs.show import _plots, tables
from fedpriv.runs.show.report_page import Panel, panel, render, templates
from fedpriv.runs.show.terminal import event_parts, state_of, trouble_of
from fedpriv.runs.status import ClientStatus, RunStatus, read_status
from fedpriv.runs.sweeps import KEY, SweepRun, is_sweep, read_sweep


def rendered(template: str, names: Sequence[str], **values: Any) -> dict[str, str]:
    """{name: HTML} of a template's macros of these names, which see the values and escape them."""
    module = _environment().get_template(template).make_module(values)
    return {name: str(getattr(module, name)()) for name in names}


def whole_page(**values: Any) -> str:
    """A whole page, with its first pieces in place."""
    return _environment().get_template("page.html.j2").render(script=script(), **values)


@cache
def script() -> str:
    """The page's script; it is the same on every page, so a browser is told to run nothing else."""
    return (resources.files("fedpriv.runs.show") / "templates" / "live.js").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return templates()


log = logging.getLogger("fedpriv")

_PIECES = tuple(dict.fromkeys([*_RUN_PIECES, *_SWEEP_PIECES]))

# What a run writes, in its folder or one level below.
_WATCHED = ("*", f"{files.CHECKPOINTS}/*", f"{files.COMPARISON}/*")
_WATCHED_OF_A_SWEEP = ("*", f"*/{files.ROUNDS}", f"*/{files.SUMMARY}", f"*/{files.PRESENCE}")

# matplotlib's settings belong to the whole process.
_drawing = threading.Lock()


class LivePage:
    """The pieces of a folder's page, whatever the folder is by now; nothing that is in it, or is not, raises.

    Args:
        folder: of a run or a sweep, which may not be there yet.

    Attributes:
        title: the folder's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.title = folder.absolute().name
        self._seen: object = None
        self._pieces: dict[str, str] = {}
        self._report: tuple[object, str] | None = None

    def read(self) -> dict[str, str]:
        """{name: HTML} of all pieces; those that this folder has none of are empty."""
        with _drawing:
            seen = self._signature()
            if seen != self._seen:
                self._pieces, self._seen = dict.fromkeys(_PIECES, "") | self._read(), seen
            return self._pieces

    def report(self) -> str:
        """The report of a finished run, made from its tables.

        Raises:
            InputError: the run is not finished, or its folder is damaged.
        """
        with _drawing:
            seen = self._signature()
            if self._report is None or self._report[0] != seen:
                self._report = (seen, render(read_run(self._folder)))
            return self._report[1]

    def has_run(self, key: str) -> bool:
        """Whether the folder is that of a sweep with a run of this key."""
        return KEY.fullmatch(key) is not None and (self._folder / key).is_dir() and is_sweep(self._folder)

    def _read(self) -> dict[str, str]:
        now = time.time()
        try:
            if (self._folder / files.CONFIG).is_file():
                return run_pieces(self._folder, now=now)
            if is_sweep(self._folder):
                return sweep_pieces(self._folder, now=now)
            return self._note("Nothing here yet", "No run has begun in this folder. The page shows it once it does.")
        except (InputError, OSError) as error:
            # Also what a run is just writing; the next look may see it whole.
            return self._note("This folder cannot be read now", str(error).replace(str(self._folder), "the folder"))
        except Exception:  # what is in the folder is anybody's, and must not end the page
            log.exception("%s: cannot be shown", self._folder)
            return self._note("This folder cannot be shown", "One of its files holds what no run writes.")

    def _note(self, title: str, text: str) -> dict[str, str]:
        return rendered("note.html.j2", ("head", "notes"), name=self.title, title=title, text=text)

    def _signature(self) -> object:
        """Changes whenever the page would."""
        patterns = _WATCHED if (self._folder / files.CONFIG).is_file() else _WATCHED_OF_A_SWEEP
        found, newest = [], 0.0
        for path in (path for pattern in patterns for path in self._folder.glob(pattern)):
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
            newest = max(newest, stat.st_mtime)
        # A silent folder changes its state by itself, too.
        return sorted(found), self._lives(), int((time.time() - newest) // 60)

    def _lives(self) -> list[bool | None]:
        if (self._folder / files.CONFIG).is_file():
            return [presence.is_alive(self._folder)]
        return [presence.is_alive(path.parent) for path in sorted(self._folder.glob(f"*/{files.PRESENCE}"))]


# Beyond them only those in trouble are listed, and then as many.
_MAX_CLIENTS = 200
# Of the pieces, in the order of the page.
_RUN_PIECES = ("head", "notes", "figures", "clients", "plots", "events")

_AGAINST: dict[View, str] = {
    "local": "against the server, which sees every upload",
    "rho": "by Theorem 1 of DP-LoRA",
    "aggregate": "against someone who sees the weighted sums alone",
}


@dataclass(frozen=True, kw_only=True)
class _ClientLine:
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
class _RunPage:
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
    clients: tuple[_ClientLine, ...]
    rounds: pd.DataFrame
    client_rows: pd.DataFrame
    comparison_rounds: pd.DataFrame | None


def run_pieces(run_dir: Path, *, now: float) -> dict[str, str]:
    """{name: HTML} of the pieces of a run's page; all text from the folder is escaped.

    Args:
        run_dir: of a run, which may be writing to it.
        now: seconds since the epoch.

    Raises:
        InputError: the folder holds no run, or one of its files is damaged.
    """
    run = _read_page(run_dir, now=now)
    status = run.status
    listed = _listed(run.clients)
    return rendered(
        "run.html.j2",
        _RUN_PIECES,
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


def _read_page(run_dir: Path, *, now: float) -> _RunPage:
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
    return _RunPage(
        name=run_dir.resolve().name,
        status=status,
        config=config,
        summary=summary,
        view=view,
        limit_name=limit_name,
        clients=tuple(
            _ClientLine(known=client, epsilon=epsilon, limit=limits[client.client] if len(limits) > 1 else limits[0])
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


def _largest(run: _RunPage) -> str:
    """The largest epsilon on the run's view, with its delta."""
    spent = [client.epsilon for client in run.clients if client.epsilon is not None]
    return tables.format_epsilon(max(spent), run.status.delta_max) if spent else tables.MISSING


def _why_not_private(run: _RunPage) -> str | None:
    """Why nobody is protected, as far as that is known before the end."""
    if run.summary.get("private") is False or run.config.get("simulate"):
        return "its noise and sampling are seeded, or no noise bounds what an upload reveals"
    if any(client.epsilon is not None and math.isinf(client.epsilon) for client in run.clients):
        return "no noise bounds what an upload reveals: ε is infinite"
    return None


def _doing(run: _RunPage) -> str:
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


def _listed(clients: tuple[_ClientLine, ...]) -> list[_ClientLine]:
    """All clients, or only those in trouble if there are many."""
    if len(clients) <= _MAX_CLIENTS:
        return list(clients)
    return [client for client in clients if client.known.is_troubled][:_MAX_CLIENTS]


def _panels(run: _RunPage) -> list[Panel]:
    """The plots of what there is by now."""
    found = []
    if len(run.client_rows):
        found.append(_epsilon_panel(run))
    note = "On the server's own test set; round 0 is the untrained model."
    for column, title, draw, format_value in (
        ("test_accuracy", "Test accuracy", None, tables.format_percent),
        ("test_perplexity", "Test perplexity", _plots.loss_plot, tables.format_number),
        ("test_loss", "Test loss", _plots.loss_plot, tables.format_number),
    ):
        if run.rounds[column].isna().all():
            continue
        label = "this run" if _why_not_private(run) else "with DP"
        compared = run.comparison_rounds
        frame = _plots.compared_lines(
            run.rounds, compared if compared is not None and len(compared) else None, column, label
        )
        svg = (
            draw(frame, title=title, name=column.removeprefix("test_"))
            if draw is not None
            else _plots.accuracy_plot(frame, references=_references(run.summary))
        )
        found.append(panel(title, note, svg, frame, format_value))
    return found


def _references(summary: Mapping[str, Any]) -> dict[str, float]:
    """What an accuracy has to beat, once the run is finished."""
    named = {"largest class": summary.get("majority_accuracy"), "linear probe": summary.get("probe_accuracy")}
    return {name: accuracy for name, accuracy in named.items() if accuracy is not None}


def _epsilon_panel(run: _RunPage) -> Panel:
    frame = _plots.epsilon_lines(run.client_rows, run.rounds, run.view)
    title = f"ε so far, {run.view} view"
    common = {client.limit for client in run.clients if client.limit is not None}
    limits = {run.limit_name: min(common)} if len(common) == 1 else {}
    svg = _plots.epsilon_plot(frame, title=title, name=f"epsilon-{run.view}", limits=limits)
    delta = tables.format_delta(run.status.delta_max)
    note = f"Per client, {_AGAINST[run.view]}, at its δ (at most {delta}), after each round; by rdp."
    return panel(title, note, svg, frame, tables.format_bound)


# Of the pieces, in the order of the page.
_SWEEP_PIECES = ("head", "spending", "runs")

_STATES = ("running", "waiting", "finished", "failed", "interrupted", "unknown")


def sweep_pieces(folder: Path, *, now: float) -> dict[str, str]:
    """{name: HTML} of the pieces of a sweep's page; all text from the folder is escaped.

    Args:
        folder: of a sweep, whose runs may be writing to it.
        now: seconds since the epoch.

    Raises:
        InputError: the sweep's plan is damaged.
    """
    sweep = read_sweep(folder, now=now)
    counts = Counter(run.state for run in sweep.runs)
    return rendered(
        "sweep.html.j2",
        _SWEEP_PIECES,
        sweep=sweep,
        counts=", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]),
        num_done=counts["finished"] + counts["failed"],
        all_runs=[(name_of(run), run) for run in sweep.runs],
        has_perplexity=any(run.perplexity is not None for run in sweep.runs),
        spent=tables.format_epsilon(sweep.spending.epsilon, sweep.spending.delta),
        bound=tables.format_bound,
        delta=tables.format_delta,
    )


def name_of(run: SweepRun) -> str:
    """What sets a run apart from the others."""
    return ", ".join(f"{key} {value}" for key, value in run.varied.items() if value is not None) or run.key
