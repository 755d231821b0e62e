"""`report.html` while a run or a sweep goes on: written after each step, it loads itself again until the end.

A page says when it was written and when the next is due, so that one whose writer has died does not look alive.
"""

import base64
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from math import isinf
from pathlib import Path
from typing import Any, cast

import pandas as pd

from fedpriv.files import replace_file
from fedpriv.privacy.accounting.views import View
from fedpriv.runs import RunFolder, RunStatus, files, resume_command, spent_on_view, status_of
from fedpriv.runs.figures import figures, format_bound, format_delta, format_epsilon
from fedpriv.runs.show import _plots
from fedpriv.runs.show._report_page import Panel, filled, panel, quality_panels
from fedpriv.runs.show._sweeps import STATES, read_sweep, sweep_table
from fedpriv.runs.show._terminal import clients_so_far, last_events, troubles
from fedpriv.runs.show._tracking import SHARE, Share
from fedpriv.texts import printable

log = logging.getLogger("fedpriv")

# What plots take at first, measured on two cores.
_FIRST_PLOTS_SECONDS = 0.5
# A page that has no successor for so long is overdue, or after thrice the longest step so far.
_PATIENCE_SECONDS = 60.0
# Between two looks of a browser.
_LEAST_SECONDS, _MOST_SECONDS = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a page.

    Attributes:
        written: seconds since the epoch.
        due: when the next one is written at the latest; 0 for the last page.
        every: seconds after which a browser looks for the next one.
        silence: seconds after `due` for which it goes on looking.
    """

    written: int
    due: int = 0
    every: int = 0
    silence: int = 0

    @property
    def script(self) -> str:
        """The page's script; a browser is told to run nothing else."""
        return (resources.files("fedpriv.runs.show") / "templates" / "reload.js").read_text(encoding="utf-8")

    @property
    def script_digest(self) -> str:
        """Its digest, for the page's Content-Security-Policy."""
        return base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()

    @staticmethod
    def text_of(moment: int) -> str:
        """A moment as people read it, in UTC."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


class PageWriter:
    """Keeps `report.html` of a run or a sweep up to date; what goes wrong here is logged once, and ends no run.

    Args:
        render: the page, given its time; see `RunPage` and `sweep_page`.
        silence: seconds for which a run may be silent.
    """

    def __init__(self, folder: Path, render: Callable[[Path, Timing], str], silence: float = 0.0) -> None:
        self._folder, self._render, self._silence = folder, render, silence
        self._share, self._longest, self._last = Share(), 0.0, time.monotonic()
        self._fails = False

    def update(self) -> None:
        """Write a page after a step, unless the last one is too recent."""
        now = time.monotonic()
        step, self._last = now - self._last, now
        self._longest = max(self._longest, step)
        if self._share.is_due:
            patience = max(_PATIENCE_SECONDS, 3 * self._longest, 2 * self._share.expected / SHARE)
            every = min(_MOST_SECONDS, max(_LEAST_SECONDS, step))
            written, silence = int(time.time()), int(max(self._silence, 9 * patience))
            self._write(Timing(written=written, due=written + int(patience), every=int(every), silence=silence))

    def end(self) -> None:
        """Write the last page."""
        self._write(Timing(written=int(time.time())))

    def _write(self, timing: Timing) -> None:
        if self._fails:
            return
        try:
            with self._share.spending():
                replace_file(self._folder / files.REPORT, self._render(self._folder, timing).encode(), mode=None)
        except Exception as error:  # a run of hours must not end by a page
            self._fails = True
            log.warning("%s: %s cannot be written; the run goes on (%s)", self._folder, files.REPORT, error)


@contextmanager
def kept_page(folder: Path, round_seconds: float) -> Iterator[Callable[[], None]]:
    """Keep the page of a run up to date: the block calls what it is given after each step.

    If the block fails, the last page says why. The report of a run that is finished is not written here.
    """
    page = RunPage()
    writer = PageWriter(folder, page, round_seconds)
    writer.update()
    try:
        yield writer.update
    except BaseException as error:
        page.reason = printable(" ".join(str(error).split())) or type(error).__name__
        writer.end()
        raise


class RunPage:
    """Renders the page of a run that goes on, or the `reason` of its end; plots stay as they were until drawn again."""

    def __init__(self) -> None:
        self._drawing, self._panels = Share(_FIRST_PLOTS_SECONDS), list[Panel]()
        self.reason = ""

    def __call__(self, path: Path, timing: Timing) -> str:
        """The page as HTML, all text from the folder escaped; InputError if it holds no run, or a file is damaged."""
        folder = RunFolder(path)
        status = status_of(folder)
        if self.reason and status.state == "running":
            status = _interrupted(folder, status)
        not_private = _not_private(folder)
        if self._drawing.is_due:
            with self._drawing.spending():
                self._panels = _panels(folder, status, "this run" if not_private else "with DP")
        return filled(
            "progress.html.j2",
            name=folder.name,
            timing=timing,
            status=status,
            reason=self.reason,
            not_private=not_private,
            figures=figures(folder, "terminal"),
            clients=clients_so_far(status, spent_on_view(folder)),
            troubles=troubles(status),
            events=last_events(status),
            panels=self._panels,
        )


def sweep_page(folder: Path, timing: Timing) -> str:
    """The page of a sweep as HTML; all text from the folder is escaped; InputError if the sweep's plan is damaged."""
    sweep = read_sweep(folder, now=time.time())
    counts, table = Counter(run.state for run in sweep.runs), sweep_table(sweep)
    pages = [f"{run.key}/{files.REPORT}" if (folder / run.key / files.REPORT).is_file() else "" for run in sweep.runs]
    return filled(
        "sweep.html.j2",
        name=sweep.title,
        folder=folder,
        timing=timing,
        counts=", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]),
        num_done=counts["finished"] + counts["failed"],
        spending=sweep.spending,
        spent=format_epsilon(sweep.spending.epsilon, sweep.spending.delta),
        table=table,
        rows=list(zip(pages, table.rows, strict=True)),
    )


def _interrupted(folder: RunFolder, status: RunStatus) -> RunStatus:
    """The status that a run has once the process that writes this is gone."""
    engine, model = status.engine, str(folder.config.get("model", ""))
    command = None if status.checkpoint_round is None else resume_command(folder.path, engine, model)
    return replace(status, state="interrupted", resume_command=command)


def _not_private(folder: RunFolder) -> str:
    """The reason why nobody is protected, as far as it is known before the end; empty for a private run."""
    if folder.config.get("simulate"):
        return "its noise and sampling are seeded"
    if any(epsilon is not None and isinf(epsilon) for epsilon in spent_on_view(folder).values()):
        return "no noise bounds what an upload reveals: ε is infinite"
    return ""


def _panels(folder: RunFolder, status: RunStatus, name: str) -> list[Panel]:
    """The plots of what there is by now."""
    rounds, view = _rounds(folder), cast("View", status.privacy_view)
    columns = ("round", "client", "status", f"epsilon_{view}")
    rows = _frame(folder.client_rows(columns), columns)
    compared = _rounds(folder.comparison) if folder.comparison else None
    found = quality_panels(rounds, compared, name, folder.summary)
    if len(rows):
        title = f"ε so far, {view} view (upper bounds)"
        note = f"Per client, at its δ (at most {format_delta(status.delta_max)}), by rdp, so never too small."
        lines = _plots.epsilon_lines(rows, rounds, view)
        limits = {status.target_epsilon} if status.target_epsilon else set(status.budget_epsilon)
        limit = {"target" if status.target_epsilon else "budget": limits.pop()} if len(limits) == 1 else {}
        figure = _plots.epsilon_figure(lines, limit)
        found.insert(0, panel(title, note, figure, lines, format_bound, f"epsilon-{view}"))
    return found


def _rounds(folder: RunFolder) -> pd.DataFrame:
    """The rows of rounds.csv that the plots need; none before it is there."""
    columns = ("round", "test_accuracy", "test_loss", "test_perplexity")
    return _frame(folder.round_rows(columns) if (folder.path / files.ROUNDS).is_file() else [], columns)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table; None becomes NaN."""
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: float for name in columns if name not in ("round", "client", "status")})
