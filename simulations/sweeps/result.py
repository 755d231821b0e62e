"""A finished sweep as Python sees it: its tables as data frames, its runs, and what all of them cost."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fedpriv.runs import files
from fedpriv.runs.figures import format_epsilon
from fedpriv.runs.show.result import Run, open_run, page_part
from simulations.sweeps.spending import Total


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FinishedSweep:
    """The runs of a sweep side by side.

    Attributes:
        folder: of the sweep; each run has a folder in it.
        title: as the plots have it.
        plots: the paths of the plots, as PNG; an SVG lies beside each.
        spending: what all runs cost together, on the `local` view, unfinished attempts included. This, and not a run's
            own epsilon, covers choosing the best of them.
        errors: {name of a run's folder: why the run failed}.
    """

    folder: Path
    title: str
    plots: tuple[Path, ...]
    spending: Total
    errors: Mapping[str, str]
    _table: pd.DataFrame = field()
    _pivot: pd.DataFrame | None = field()

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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The finished runs, in the order of the table."""
        folders = [self.folder / str(name) for name in self._table["folder"]]
        return tuple(open_run(folder) for folder in folders if files.is_finished(folder))

    @property
    def is_finished(self) -> bool:
        """Whether every run is finished."""
        return bool((self._table["status"] == "done").all())

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
