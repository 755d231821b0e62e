"""A finished sweep as Python sees it: its tables as data frames, its runs, and what all of them cost.

The tables are one tidy row per run, and a pivot of its metric's mean over seeds. The cost of all runs together bounds
the cost of picking the best of them.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from fedpriv.config import Fact, RunConfig
from fedpriv.errors import InputError
from fedpriv.files import replaced_file
from fedpriv.learning.data.federated import holdings
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import Event, group
from fedpriv.privacy.accounting.many_clients import cost_of_person
from fedpriv.privacy.ledger import reader
from fedpriv.runs import LANGUAGE_KEYS, files
from fedpriv.runs.figures import format_epsilon
from fedpriv.runs.files import LEDGER, read_config
from fedpriv.runs.show import Run, open_run, page_part
from simulations.sweeps.plan import Sweep, metric_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FinishedSweep:
    """The runs of a sweep side by side.

    Attributes:
        folder: of the sweep; each run has a folder in it.
        title: as the plots have it.
        plots: the paths of the plots, as PNG; each has an SVG too.
        spending: what all runs cost together, on the `local` view, unfinished attempts included. This, and not a run's
            own epsilon, covers choosing the best of them.
        errors: {name of a run's folder: why the run failed}.
        is_finished: whether every run that was asked for is finished.
    """

    folder: Path
    title: str
    plots: tuple[Path, ...]
    spending: SweepSpending
    errors: Mapping[str, str]
    is_finished: bool
    _table: pd.DataFrame = field()
    _pivot: pd.DataFrame | None = field()
    _figures: Callable[[], Mapping[str, Figure]] = field()

    @property
    def table(self) -> pd.DataFrame:
        """One row per run: the keys that vary, `status` (`done`, `failed`, `not run`), figures, `folder`, `error`."""
        return self._table.copy()

    @property
    def pivot(self) -> pd.DataFrame | None:
        """The metric's mean, its standard deviation over seeds and the number of runs, by the first two keys that vary.

        None if only the seed varies, or no run is finished.
        """
        return None if self._pivot is None else self._pivot.copy()

    def plot(self, name: str = "") -> Figure:
        """A figure of the sweep, which a notebook shows and `savefig` writes; by default the first of `plots`.

        Args:
            name: of a plot, such as `accuracy-against-epsilon`.

        Raises:
            InputError: there is no such plot, or no run was tested.
        """
        figures = self._figures()
        if (name or next(iter(figures), "")) not in figures:
            raise InputError(f"plot = {name!r}: must be one of {', '.join(figures) or 'none, since no run was tested'}")
        return figures[name or next(iter(figures))]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The finished runs, in the order of the table."""
        folders = [self.folder / str(name) for name in self._table["folder"]]
        return tuple(open_run(folder) for folder in folders if files.is_finished(folder))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder.name!r}: {self._outcome()})"

    def _repr_html_(self) -> str:
        """The pivot, or the table where there is none, for notebooks; text from files is escaped."""
        shown = self._pivot if self._pivot is not None else self._table
        failed = "".join(f"<p>failed {html.escape(key)}: {html.escape(why)}</p>" for key, why in self.errors.items())
        return page_part(
            self.title,
            f"<p>{html.escape(self._outcome())}</p>{shown.to_html(border=0, float_format='{:.4g}'.format)}{failed}",
        )

    def _outcome(self) -> str:
        done = int((self._table["status"] == "done").sum())
        spent = format_epsilon(self.spending.epsilon, self.spending.delta if self.spending.num_runs else None)
        return f"{done} of {len(self._table)} runs finished, together {spent}"


# Of them, a run that was not tested has chance alone.
_ACCURACIES = ("accuracy", "accuracy_initial", "accuracy_non_private", "chance_accuracy")
# What older runs of a sweep that is continued do not have.
_QUALITY = (
    *("accuracy_standard_error", "macro_f1", "majority_accuracy", "probe_accuracy", "tfidf_accuracy"),
    *LANGUAGE_KEYS,
)
_FIGURES = (
    *_ACCURACIES,
    *("epsilon_local_max", "epsilon_rho_max", "delta_max", "noise_source", "private", "num_clients", "num_rounds"),
    *("bytes_up", "bytes_down", "seconds"),
)


def tidy(sweep: Sweep, out: Path, errors: Mapping[str, str], spent: SweepSpending) -> pd.DataFrame:
    """One row per run: the varied keys, how it ended, its figures, and what the whole sweep spent.

    Args:
        sweep: the plan.
        out: the sweep's folder.
        errors: {run's key: why it failed}.
        spent: the cost of all runs together, the same in every row.
    """
    rows = []
    for run in sweep.runs:
        folder = out / run.key
        # A list becomes a text: only then can runs be grouped by it, and told apart in every format.
        row: dict[str, Any] = {
            key: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            for key, value in run.varied.items()
        }
        if files.is_finished(folder):
            summary = files.read_values(folder / files.SUMMARY)
            resolved = files.read_values(folder / files.CONFIG)
            row |= {"status": "done", **{name: summary[name] for name in _FIGURES}}
            row |= {name: summary.get(name) for name in _QUALITY} | {"num_warnings": len(summary.get("warnings", ()))}
            row |= {"noise_multiplier": resolved["noise_multiplier"], "batch_size": resolved["batch_size"]}
        else:
            row["status"] = "failed" if run.key in errors else "not run"
        row |= {"epsilon_sum": spent.epsilon, "delta_sum": spent.delta, "num_runs_in_sum": spent.num_runs}
        row |= {"folder": run.key, "error": errors.get(run.key, "")}
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.astype({name: float for name in (*_ACCURACIES, *_QUALITY) if name in frame})


def settings(frame: pd.DataFrame, sweep: Sweep) -> tuple[pd.DataFrame, list[str]]:
    """The table with the keys in which runs differ, other than the seed; several keys of privacy become one.

    That one is called `privacy`, with values such as `epsilon 2`, `z 1.5` or `no noise`.
    """
    keys = [key for key in sweep.keys if key != "seed"]
    private = [key for key in keys if key in RunConfig.keys_with(Fact.PRIVACY)]
    if len(private) < 2:
        return frame, keys
    keys = ["privacy" if key == private[0] else key for key in keys if key not in private[1:]]
    return frame.assign(privacy=[_privacy(row) for _, row in frame.iterrows()]), keys


def _privacy(row: Any) -> str:
    if row["noise_multiplier"] == 0:
        return "no noise"
    if pd.notna(target := row.get("target_epsilon")) and target:
        return f"epsilon {target:g}"
    if isinstance(schedule := row.get("noise_schedule"), str) and schedule:
        return f"z by round: {schedule}"
    return f"z {row['noise_multiplier']:.3g}"


def pivot(frame: pd.DataFrame, sweep: Sweep) -> pd.DataFrame | None:
    """The metric's mean, its standard deviation over seeds and the number of runs, by the first two settings.

    None if only the seed varies, or no run is done.
    """
    frame, keys = settings(frame, sweep)
    keys = keys[:2]
    done = frame[frame["status"] == "done"]
    if not keys or done.empty:
        return None
    cells = done.groupby(keys, dropna=False)[metric_of(sweep).name].agg(["mean", "std", "count"])
    # Unstacking gives a series only for an index of one level.
    return cast(pd.DataFrame, cells.unstack(keys[1])) if len(keys) == 2 else cells


def write_tables(frame: pd.DataFrame, pivoted: pd.DataFrame | None, out: Path) -> None:
    """sweep.csv, sweep.parquet and pivot.csv."""
    with replaced_file(out / "sweep.csv") as file:
        frame.to_csv(file, index=False)
    # A key may hold a number in one run and a list or nothing in another; Parquet needs one type per column.
    mixed = {name: str for name in frame.columns if frame[name].map(type).nunique() > 1 and frame[name].dtype == object}
    with replaced_file(out / "sweep.parquet") as file:
        frame.astype(mixed).to_parquet(file.name, index=False)
    if pivoted is not None:
        with replaced_file(out / "pivot.csv") as file:
            pivoted.to_csv(file)


@dataclass(frozen=True, kw_only=True)
class SweepSpending:
    """The sum of a sweep's ledgers, on the `local` view.

    Attributes:
        epsilon: the most that any record has spent over all runs; 0 without runs.
        delta: of that epsilon.
        num_runs: how many runs are counted, unfinished ones included.
    """

    epsilon: float
    delta: float
    num_runs: int


def total(folders: Sequence[Path]) -> SweepSpending:
    """The sum of the ledgers in the runs' folders.

    Runs in which no record changes its client are composed client by client and converted once, at each client's
    largest delta. Where runs distribute records differently, a record may belong to any client of another run: there
    the groups' largest epsilons and deltas add up (basic composition). Either way the sum bounds what each record has
    spent, in whichever runs it was set aside.

    Raises:
        LedgerError: a ledger is damaged, or lost entries or its head.
    """
    groups: defaultdict[tuple[object, ...], dict[str, tuple[list[Event], float]]] = defaultdict(dict)
    holders: defaultdict[tuple[object, ...], int] = defaultdict(lambda: 1)
    num_runs = 0
    for folder in folders:
        path = folder / LEDGER
        if not path.is_file():
            continue  # the run ended before its first charge
        num_runs += 1
        config = read_config(folder)
        held = holdings(config)
        clients, holders[held] = groups[held], max(holders[held], config.holders_per_person)
        with reader.reading(path) as db:
            reader.verify_with_head(db, path)
            for data_set in db.data_sets():
                events, delta = clients.get(data_set.client, ([], 0.0))
                events += [release.seen_by("local") for release in db.releases(data_set.id)]
                clients[data_set.client] = (events, max(delta, data_set.delta))
    costs = [_largest(list(clients.values()), holders[group]) for group, clients in groups.items()]
    return SweepSpending(
        epsilon=sum(epsilon for epsilon, _ in costs), delta=sum(delta for _, delta in costs), num_runs=num_runs
    )


def _largest(clients: Sequence[tuple[list[Event], float]], holders: int) -> tuple[float, float]:
    """The largest epsilon and the largest delta of any client; equal histories are computed once.

    Of a person at several clients, what the costliest of them cost together, at the smallest delta.
    """
    if holders > 1:
        delta = min(delta for _, delta in clients)
        return cost_of_person({i: events for i, (events, _) in enumerate(clients)}, holders, delta).epsilon, delta
    histories = {(frozenset(group(events)), delta) for events, delta in clients}
    return (
        max((epsilon_of(events, delta).epsilon for events, delta in histories), default=0.0),
        max((delta for _, delta in histories), default=0.0),
    )
