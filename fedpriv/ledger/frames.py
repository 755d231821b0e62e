"""A ledger as data frames and text, for notebooks and scripts; each is read only once the chain is found intact."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from fedpriv.accounting.views import PlannedView
from fedpriv.ledger import entries, names, reader
from fedpriv.ledger import statement as statements


def entries_frame(path: str | Path) -> pd.DataFrame:
    """Every entry of a ledger in order, a row each, under the names of `fedpriv.ledger.entries.Entry`.

    Raises:
        LedgerError: the chain of hashes is broken, or the ledger lost entries or its head.
    """
    path = Path(path)
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        rows = [asdict(entry) for entry in entries.entries(db)]
    frame = pd.DataFrame(rows, columns=list(entries.COLUMNS)).set_index("number")
    whole, real = ("round", "num_records"), ("rho_bar", "aggregate_scale", "delta")
    return frame.astype(dict.fromkeys(whole, "Int64") | dict.fromkeys(real, float))


def spending_frame(
    path: str | Path,
    *,
    budget_epsilon: float | None = None,
    view: PlannedView = "local",
    run: str | Path | None = None,
) -> pd.DataFrame:
    """What each data set of a ledger has spent, a row each, as `fedpriv ledger show` has it.

    Args:
        path: of the ledger.
        budget_epsilon: > 0; adds `remaining_rounds`, the rounds like the last one that it still allows on the view.
        view: of the budget.
        run: a run's folder that knows the holders' names; by default the ledger's own folder.

    Raises:
        InputError: the run's folder knows no names.
        LedgerError: as for `entries_frame`.
    """
    path = Path(path)
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        known = names.known(db, path, Path(run) if run is not None else None)
        rows = statements.spending(db, names=known, budget_epsilon=budget_epsilon, view=view)
    return pd.DataFrame(rows)


def statement_text(path: str | Path, client: str, *, view: PlannedView = "local", run: str | Path | None = None) -> str:
    """The privacy statement of a client, one page of plain text for each of its data sets.

    Args:
        path: of the ledger.
        client: as the ledger knows it.
        view: `aggregate` also states what the releases cost where the server saw sums alone.
        run: a run's folder that knows the holders' names; by default the ledger's own folder.

    Raises:
        InputError: the ledger does not know the client, or the run's folder no names.
        LedgerError: as for `entries_frame`.
    """
    path = Path(path)
    with reader.reading(path) as db:
        known = names.known(db, path, Path(run) if run is not None else None)
        pages = statements.statement(db, path, client, names=known, view=view)
    return "\n\n".join(map(statements.render, pages))
