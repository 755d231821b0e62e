"""The data of each plot, which is also shown as a table: the index is the round, and each column is a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedpriv.accounting.views import View

# More lines than this cannot be told apart, and are replaced by quantiles over the clients.
MAX_LINES = 8


def compared(rounds: pd.DataFrame, comparison: pd.DataFrame | None, column: str, name: str) -> pd.DataFrame:
    """A column of `rounds.csv` over the rounds, beside that of the comparison run if there is one.

    Args:
        rounds: round and the column; if a round is written twice (a resumed run), its last row counts.
        comparison: the same of the run with z = 0, or None.
        column: such as `test_accuracy`.
        name: the label of the run itself, such as `with DP`.
    """
    lines = {name: _by_round(rounds)[column]}
    if comparison is not None:
        lines["without noise"] = _by_round(comparison)[column]
    return pd.DataFrame(lines).rename_axis("round")


def evaluated(summary: Mapping[str, Any], name: str) -> pd.DataFrame:
    """The accuracy that was read from the holders' noised counts after the last round, with its interval; one row.

    Args:
        summary: accuracy, which may be None, accuracy_interval and num_rounds.
        name: the label of the run, such as `with DP`.
    """
    low, high = summary["accuracy_interval"]
    accuracy = math.nan if summary["accuracy"] is None else summary["accuracy"]
    row = {name: [accuracy], "low": [low], "high": [high]}
    return pd.DataFrame(row, index=pd.Index([summary["num_rounds"]], name="round"), dtype=float)


def epsilon(clients: pd.DataFrame, rounds: pd.DataFrame, view: View) -> pd.DataFrame:
    """Each client's cumulative epsilon after each round.

    A client's epsilon stays the same in rounds that it misses. A missing epsilon of a successful reply counts as
    infinite.

    Args:
        clients: round, client, status and epsilon_<view>; one row per client and round.
        rounds: round, which becomes the index.
        view: see `fedpriv.accounting.views`.

    Returns:
        A column per client; beyond MAX_LINES clients the highest, the 90% and 10% quantiles and the median.
    """
    spent = clients[f"epsilon_{view}"]
    spent = spent.mask(spent.isna() & (clients["status"] == "ok"), math.inf)
    cumulative = (
        clients.assign(spent=spent)
        .groupby(["round", "client"])["spent"]
        .max()
        .unstack("client")
        .reindex(_by_round(rounds).index)
        .ffill()
        .fillna(0.0)
    )
    if cumulative.shape[1] > MAX_LINES:
        cumulative = _quantiles(cumulative)
    else:
        cumulative.columns = pd.Index([f"{client:g}" for client in cumulative.columns])
    return cumulative.rename_axis("round")


def traffic(rounds: pd.DataFrame) -> pd.DataFrame:
    """The bytes that all clients together sent and received in each round."""
    sent = _by_round(rounds)[["bytes_up", "bytes_down"]].fillna(0.0)
    return sent.rename(columns={"bytes_up": "sent", "bytes_down": "received"}).rename_axis("round")


def merge_equal(frame: pd.DataFrame) -> dict[tuple[str, ...], pd.Series]:
    """The distinct lines of a frame, each with the names of all columns that are equal to it, in column order."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name in frame.columns:
        values = frame[name].astype(float).fillna(-math.inf)
        groups.setdefault(tuple(values), []).append(name)
    return {tuple(names): frame[names[0]] for names in groups.values()}


def _by_round(rounds: pd.DataFrame) -> pd.DataFrame:
    return rounds.drop_duplicates("round", keep="last").set_index("round").sort_index()


def _quantiles(cumulative: pd.DataFrame) -> pd.DataFrame:
    # `higher` picks a client's own value: never below the quantile, and infinity does not become NaN.
    def at(share: float) -> pd.Series:
        return cumulative.quantile(share, axis=1, interpolation="higher")

    return pd.DataFrame({"highest": at(1.0), "90%": at(0.9), "median": at(0.5), "10%": at(0.1)})
