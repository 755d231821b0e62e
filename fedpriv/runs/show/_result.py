"""A finished run as Python sees it: its tables as data frames, its epsilons, and a short page for notebooks."""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.privacy.accounting.views import VIEWS, View
from fedpriv.privacy.ledger.statement import entries_frame
from fedpriv.runs import ClientRow, RoundRow, RunFolder, column_types, files, parse_epsilon
from fedpriv.runs.figures import MISSING, counts_next_tokens, figures, format_epsilon, format_percent
from fedpriv.runs.show._tables import TextTable, accuracies_to_beat, accuracy_table, client_table, language_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a report compares the run with: its row, and the end of its keys in the summary.
_BESIDE = (
    ("without noise", "{}_non_private"),
    ("each alone", "alone_{}"),
    ("linear probe", "probe_{}"),
    ("TF-IDF", "tfidf_{}"),
    ("largest class", "majority_{}"),
    ("untrained", "{}_initial"),
)
_METRICS = ("accuracy", "perplexity", "rouge_l")


class Report(pd.DataFrame):
    """A data frame that is shown whole: pandas would cut columns and notes to the width of a terminal."""

    _SHOWN: ClassVar[dict[str, Any]] = {"na_rep": "", "float_format": "{:.4g}".format}

    def __repr__(self) -> str:
        text: str = self.to_string(**self._SHOWN)
        return text

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            page: str = self.to_html(**self._SHOWN)
        return page


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """The folder of a finished run. Every frame is a copy, so that changing one changes nothing else."""

    folder: Path
    _read: RunFolder = field()

    @property
    def config(self) -> RunConfig:
        """The resolved configuration; InputError if another version wrote it, with keys that this one does not have."""
        return self._read.settings

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, with None for what a run of an earlier version lacks, and all other figures of the run."""
        others = {figure.key: figure.value for figure in figures(self._read, "result")}
        return copy.deepcopy(others | self._read.summary)

    @property
    def rounds(self) -> pd.DataFrame:
        """rounds.csv, a row per round; round 0 is the untrained model. Epsilons are cumulative, by rdp."""
        return _frame(self._read.round_rows(), RoundRow).set_index("round")

    @property
    def clients(self) -> pd.DataFrame:
        """The final figures of every client, a row each: what it has spent, sent and received.

        `epsilon_local_this_run` leaves out earlier runs on the same data set; all others count them.
        """
        frame = pd.DataFrame(self._read.summary["clients"]).set_index("client")
        for view in VIEWS:
            if (name := f"epsilon_{view}") in frame and (view != "aggregate" or frame[name].notna().all()):
                frame[name] = frame[name].map(parse_epsilon)
        return frame.dropna(axis="columns", how="all")

    @property
    def client_rounds(self) -> pd.DataFrame:
        """clients.csv, a row per client and round: what was sampled, charged and sent. Epsilons are by rdp."""
        return _frame(self._read.client_rows(), ClientRow)

    @property
    def ledger(self) -> pd.DataFrame:
        """The entries of the run's ledger, a row each; LedgerError if it is damaged, or lost entries or its head."""
        return entries_frame(self.folder / files.LEDGER)

    @property
    def delta(self) -> float | None:
        """The largest delta of any client, which an epsilon is never to be read without."""
        delta: float | None = self._read.summary["delta_max"]
        return delta

    @property
    def variants(self) -> dict[str, Path]:
        """{name: folder} of the adapters that the run kept; `global` is the final one."""
        found = sorted((self.folder / files.VARIANTS).glob("*/"))
        return {path.name: path for path in found if path.is_dir()}

    @property
    def page(self) -> Path:
        """The path of report.html."""
        return self.folder / files.REPORT

    def epsilon(self, view: View = "local") -> float:
        """The most that any client has spent on a view, at `delta`; infinite without noise.

        Args:
            view: `local` protects against the server, `rho` is that at the noise of DP-LoRA's Theorem 1, `aggregate`
                protects against who sees sums alone.

        Raises:
            InputError: the view is unknown, or does not hold for this run.
        """
        if view not in VIEWS:
            raise InputError(f"view = {view!r}: must be one of {', '.join(VIEWS)}")
        epsilon = self._read.summary.get(f"epsilon_{view}_max")
        if view == "aggregate" and epsilon is None:
            reasons = "; ".join(self._read.summary["aggregate_objections"]) or "not all uploads were summed unseen"
            raise InputError(f"view = 'aggregate': does not hold for this run: {reasons}")
        return parse_epsilon(epsilon)

    def report(self) -> Report:
        """The run's figures and those of what it has to beat, a row each; what was not measured has no column.

        The epsilons and their delta are the run's. `note` says what the others are, and what they cost.
        """
        summary = self._read.summary
        tables = [table for table in (language_table(summary), accuracy_table(summary)) if table is not None]
        notes = {row[0]: row[-1] for table in tables for row in table.rows}
        own = "private" if summary["private"] else "this run"
        rows = {own: {metric: summary[metric] for metric in (*_METRICS, "macro_f1")}}
        rows[own] |= {"accuracy_standard_error": summary["accuracy_standard_error"]}
        rows[own] |= {f"epsilon_{view}": self._shown(view) for view in VIEWS} | {"delta": self.delta}
        for name, key in _BESIDE:
            figures = {metric: summary.get(key.format(metric)) for metric in _METRICS}
            if any(value is not None for value in figures.values()):
                rows[name] = figures
        frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float).rename_axis("model")
        return Report(frame.dropna(axis="columns", how="all").assign(note=[notes.get(name, "") for name in rows]))

    def plot(self, what: str = "accuracy", *, view: View = "local") -> Figure:
        """A figure over rounds, which a notebook shows and `savefig` writes.

        Args:
            what: `accuracy`, `loss` or `perplexity` on the test set, or `epsilon` of every client.

        Raises:
            InputError: there is no such plot, or the run did not measure it.
        """
        from fedpriv.runs.show import _plots  # deferred: matplotlib takes a second to load

        folder = self._read
        if what == "epsilon":
            self.epsilon(view)  # which refuses a view that does not hold
            return _plots.coloured(_plots.epsilon_figure(_plots.epsilon_lines(folder.clients, folder.rounds, view)))
        column = f"test_{what}"
        if what not in ("accuracy", "loss", "perplexity"):
            raise InputError(f"plot = {what!r}: must be accuracy, loss, perplexity or epsilon")
        if column not in folder.rounds or folder.rounds[column].isna().all():
            raise InputError(f"plot = {what!r}: was not measured by this run")
        name = "with DP" if folder.summary["private"] else "this run"
        lines = _plots.compared_lines(folder.rounds, folder.comparison_rounds, column, name)
        if what != "accuracy":
            return _plots.coloured(_plots.loss_figure(lines))
        return _plots.coloured(_plots.accuracy_figure(lines, accuracies_to_beat(folder.summary)))

    def _shown(self, view: View) -> float:
        """The epsilon for a table: NaN where the view does not hold."""
        holds = view != "aggregate" or self._read.summary.get("epsilon_aggregate_max") is not None
        return self.epsilon(view) if holds else math.nan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._read.name!r}: {self._outcome()})"

    def _outcome(self) -> str:
        """The run in a few words."""
        summary = self._read.summary
        kind = "" if summary["private"] else "NOT PRIVATE, "
        reached = f"accuracy {format_percent(summary['accuracy'])}"
        if counts_next_tokens(summary):
            reached = f"perplexity {summary['perplexity']:.2f}"
        cost = f"{format_epsilon(summary['epsilon_local_max'], self.delta)} against the server"
        return f"{kind}{reached}, {cost}, {summary['num_clients']} clients, {summary['num_rounds']} rounds"

    def _repr_html_(self) -> str:
        """A short page for notebooks, light or dark as the notebook is; text from files is escaped."""
        summary = self._read.summary
        table = language_table(summary) if counts_next_tokens(summary) else accuracy_table(summary)
        spent = client_table(
            summary["clients"], summary["accountant"], view=summary["privacy_view"], unit=summary.get("unit")
        )
        warnings = "".join(f"<p><b>Warning:</b> {html.escape(line)}</p>" for line in summary["warnings"])
        body = f"<p>{html.escape(self._outcome())}</p>{warnings}{_html_table(table) if table else MISSING}"
        clients = f"<details><summary>{html.escape(spent.caption)}</summary>{_html_table(spent)}</details>"
        return page_part(f"Run {self._read.name}", body + clients)


def open_run(folder: str | Path) -> Run:
    """The finished run in a folder; else an InputError says what is wrong in it, and what would be right."""
    path = Path(folder).expanduser().absolute()
    return Run(folder=path, _read=RunFolder(path).checked())


def _frame(rows: Sequence[Mapping[str, Any]], kind: type[RoundRow | ClientRow]) -> pd.DataFrame:
    """A table of the run, with the columns that its version wrote; NaN stands for what was not measured."""
    frame, types = pd.DataFrame(rows), column_types(kind)
    return frame.astype({name: float for name in frame if types[str(name)] == "float | None"})


def page_part(title: str, body: str) -> str:
    """A titled part of a notebook's page, in the notebook's own colours; the body is HTML, escaped already."""
    frame = "border:1px solid;border-color:rgba(128,128,128,.5);border-radius:4px;padding:.2em 1em;overflow-x:auto"
    return f'<div style="{frame}"><p><b>{html.escape(title)}</b></p>{body}</div>'


def _html_table(table: TextTable) -> str:
    """A table of text as HTML: names left, figures right."""
    aligned = ["left", *["right"] * (len(table.headers) - 1)]

    def row(cells: tuple[str, ...], tag: str) -> str:
        inner = (
            f'<{tag} style="text-align:{side};padding:.1em .8em .1em 0">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, aligned, strict=True)
        )
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><thead>{row(table.headers, 'th')}</thead><tbody>{body}</tbody></table>"
