"""The page of a run or a sweep while it goes on, in pieces, each from the folder alone.

The pages share style, filters and tables with the report. They can be read before there is anything to see:

>>> from pathlib import Path
>>> from fedpriv.runs.show._live_page import LivePage
>>> pieces = LivePage(Path("runs/tomorrow")).read()
>>> print(pieces["head"].strip(), "Nothing here yet" in pieces["notes"])
<h1>tomorrow</h1> True
"""

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
from typing import Any, cast

import pandas as pd

from fedpriv.accounting.views import View
from fedpriv.errors import InputError
from fedpriv.runs import (
    ClientStatus,
    RunFolder,
    files,
    is_alive,
    spent_on_view,
    status_of,
)
from fedpriv.runs.figures import figures, format_bound, format_delta, format_epsilon
from fedpriv.runs.show import _plots
from fedpriv.runs.show._report_page import Panel, panel, quality_panels, render, templates
from fedpriv.runs.show._sweeps import SweepRun, is_sweep, read_sweep
from fedpriv.runs.show._terminal import event_parts, state_of, trouble_of
from fedpriv.texts import holder_label, of_whom, what_is_counted

log = logging.getLogger("fedpriv")

# Of the pieces, in the order of the page.
_RUN_PIECES = ("head", "notes", "figures", "clients", "plots", "events")
_SWEEP_PIECES = ("head", "spending", "runs")
_PIECES = tuple(dict.fromkeys([*_RUN_PIECES, *_SWEEP_PIECES]))

# What a run writes, in its folder or one level below.
_WATCHED = ("*", f"{files.CHECKPOINTS}/*", f"{files.COMPARISON}/*")
_WATCHED_OF_A_SWEEP = ("*", f"*/{files.ROUNDS}", f"*/{files.SUMMARY}", f"*/{files.PRESENCE}")

# If there are more clients, only those in trouble are listed, and at most as many.
_MAX_CLIENTS = 200

_AGAINST: dict[View, str] = {
    "local": "against the server, which sees every upload",
    "rho": "by Theorem 1 of DP-LoRA",
    "aggregate": "against someone who sees the weighted sums alone",
}
_STATES = ("running", "waiting", "finished", "failed", "interrupted", "unknown")

# matplotlib's settings belong to the whole process.
_drawing = threading.Lock()


class LivePage:
    """The pieces of a folder's page, whatever the folder is by now; nothing that is in it, or is not, raises.

    The folder is read again only if it has changed.

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
                self._report = (seen, render(RunFolder(self._folder)))
            return self._report[1]

    def has_run(self, key: str) -> bool:
        """Whether the folder is that of a sweep with a run of this key."""
        return files.SWEEP_KEY.fullmatch(key) is not None and (self._folder / key).is_dir() and is_sweep(self._folder)

    def _read(self) -> dict[str, str]:
        try:
            if (self._folder / files.CONFIG).is_file():
                return _run_pieces(RunFolder(self._folder))
            if is_sweep(self._folder):
                return _sweep_pieces(self._folder, now=time.time())
            return self._note("Nothing here yet", "No run has begun in this folder. The page shows it once it does.")
        except (InputError, OSError) as error:
            # Also what a run is just writing; the next look may see it whole.
            return self._note("This folder cannot be read now", str(error).replace(str(self._folder), "the folder"))
        except Exception:  # anyone may have written the folder, and no content may end the page
            log.exception("%s: cannot be shown", self._folder)
            return self._note("This folder cannot be shown", "One of its files holds what no run writes.")

    def _note(self, title: str, text: str) -> dict[str, str]:
        return _rendered("note.html.j2", ("head", "notes"), name=self.title, title=title, text=text)

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
            return [is_alive(self._folder)]
        return [is_alive(path.parent) for path in sorted(self._folder.glob(f"*/{files.PRESENCE}"))]


def whole_page(**values: Any) -> str:
    """A whole page, with its first pieces in place."""
    return templates().get_template("page.html.j2").render(script=script(), **values)


@cache
def script() -> str:
    """The page's script; it is the same on every page, so a browser is told to run nothing else."""
    return (resources.files("fedpriv.runs.show") / "templates" / "live.js").read_text(encoding="utf-8")


def _rendered(template: str, names: Sequence[str], **values: Any) -> dict[str, str]:
    """{name: HTML} of a template's macros of these names, which see the values and escape them."""
    module = templates().get_template(template).make_module(values)
    return {name: str(getattr(module, name)()) for name in names}


def _run_pieces(folder: RunFolder) -> dict[str, str]:
    """{name: HTML} of the pieces of a run's page; all text from the folder is escaped.

    Raises:
        InputError: the folder holds no run, or one of its files is damaged.
    """
    status = status_of(folder)
    view = cast(View, status.privacy_view)
    limit_name, lines = _client_lines(folder)
    listed = lines if len(lines) <= _MAX_CLIENTS else [line for line in lines if line.known.is_troubled][:_MAX_CLIENTS]
    return _rendered(
        "run.html.j2",
        _RUN_PIECES,
        name=folder.name,
        status=status,
        view=view,
        changed=folder.now - status.seconds_since_change,
        doing=_doing(folder),
        why_not_private=_why_not_private(folder),
        tiles=figures(folder, "live"),
        against=_AGAINST[view],
        counted=what_is_counted(status.unit),
        of_whom=of_whom(status.unit),
        limit_name=limit_name,
        listed=listed,
        num_unlisted=len(lines) - len(listed),
        panels=_panels(folder, view, limit_name, lines),
        last_events=[event_parts(event) for event in reversed(status.events)],
        bound=format_bound,
        delta=format_delta,
    )


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
        """Its name, as elsewhere, or its number."""
        return holder_label(self.known.client, self.known.name).removeprefix("client ")

    @property
    def state(self) -> str:
        """One word for why it is not asked, or for how its last round ended."""
        return state_of(self.known)

    @property
    def trouble(self) -> str:
        """The reason of its trouble; empty without one, or if none is known."""
        return trouble_of(self.known) if self.known.is_troubled else ""

    @property
    def share(self) -> float | None:
        """The share of its limit that is spent, at most 1; None without a limit."""
        if self.limit is None or self.epsilon is None:
            return None
        return min(1.0, self.epsilon / self.limit)


def _client_lines(folder: RunFolder) -> tuple[str, list[_ClientLine]]:
    """The name of the clients' limits (`budget`, `target`, or empty), and the row of each client."""
    status, spent = status_of(folder), spent_on_view(folder)
    limits: Sequence[float | None] = status.budget_epsilon or [status.target_epsilon]
    lines = [
        _ClientLine(
            known=client,
            epsilon=spent[client.client],
            limit=limits[client.client] if len(limits) > 1 else limits[0],
        )
        for client in status.clients
    ]
    return "budget" if status.budget_epsilon else "target" if status.target_epsilon else "", lines


def _why_not_private(folder: RunFolder) -> str | None:
    """The reason why nobody is protected, as far as it is known before the end."""
    if folder.summary.get("private") is False or folder.config.get("simulate"):
        return "its noise and sampling are seeded, or no noise bounds what an upload reveals"
    if any(epsilon is not None and math.isinf(epsilon) for epsilon in spent_on_view(folder).values()):
        return "no noise bounds what an upload reveals: ε is infinite"
    return None


def _doing(folder: RunFolder) -> str:
    """The run's activity, in a few words."""
    status = status_of(folder)
    if status.state == "finished":
        return "finished"
    if folder.comparison is not None:
        done = max(0, len(_rounds(folder.comparison)) - 1)
        return f"the same rounds without noise, for comparison: {done} of {status.num_rounds_planned or '?'}"
    if status.num_rounds_planned is not None and status.num_rounds >= status.num_rounds_planned:
        return "all rounds are done; results are being written"
    return f"round {status.num_rounds + 1}" if status.state == "running" else f"after round {status.num_rounds}"


def _panels(folder: RunFolder, view: View, limit_name: str, lines: Sequence[_ClientLine]) -> list[Panel]:
    """The plots of what there is by now."""
    rounds, compared = _rounds(folder), _rounds(folder.comparison) if folder.comparison else None
    columns = ("round", "client", "status", f"epsilon_{view}")
    rows = _frame(folder.client_rows(columns), columns)
    found = []
    if len(rows):
        common = {line.limit for line in lines if line.limit is not None}
        title, limits = f"ε so far, {view} view", {limit_name: min(common)} if len(common) == 1 else {}
        delta = format_delta(status_of(folder).delta_max)
        note = f"Per client, {_AGAINST[view]}, at its δ (at most {delta}), after each round; by rdp."
        frame = _plots.epsilon_lines(rows, rounds, view)
        svg = _plots.epsilon_plot(frame, title=title, name=f"epsilon-{view}", limits=limits)
        found.append(panel(title, note, svg, frame, format_bound))
    name = "this run" if _why_not_private(folder) else "with DP"
    return found + quality_panels(rounds, compared, name, folder.summary)


def _rounds(folder: RunFolder) -> pd.DataFrame:
    """The whole rows of rounds.csv that the plots need; none before it is there."""
    columns = ("round", "test_accuracy", "test_loss", "test_perplexity")
    return _frame(folder.round_rows(columns) if (folder.path / files.ROUNDS).is_file() else [], columns)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table; None becomes NaN."""
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: float for name in columns if name not in ("round", "client", "status")})


def _sweep_pieces(folder: Path, *, now: float) -> dict[str, str]:
    """{name: HTML} of the pieces of a sweep's page; all text from the folder is escaped.

    Args:
        folder: of a sweep, whose runs may be writing to it.
        now: seconds since the epoch.

    Raises:
        InputError: the sweep's plan is damaged.
    """
    sweep = read_sweep(folder, now=now)
    counts = Counter(run.state for run in sweep.runs)
    return _rendered(
        "sweep.html.j2",
        _SWEEP_PIECES,
        sweep=sweep,
        counts=", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]),
        num_done=counts["finished"] + counts["failed"],
        all_runs=[(_name_of(run), run) for run in sweep.runs],
        has_perplexity=any(run.perplexity is not None for run in sweep.runs),
        spent=format_epsilon(sweep.spending.epsilon, sweep.spending.delta),
        bound=format_bound,
        delta=format_delta,
    )


def _name_of(run: SweepRun) -> str:
    """The settings that set a run apart from the others."""
    return ", ".join(f"{key} {value}" for key, value in run.varied.items() if value is not None) or run.key
