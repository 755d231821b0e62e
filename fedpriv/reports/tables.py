"""Numbers as text, for the terminal and the page. Bounds on privacy loss are rounded up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any

from fedpriv.runs.rows import parse_epsilon
from fedpriv.texts import holder_label

if TYPE_CHECKING:
    import pandas as pd

INFINITY = "∞"
MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A caption, column headers and rows of text; every row has one cell for each header."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def format_bound(epsilon: float | str | None) -> str:
    """An epsilon rounded up to three figures, for a cell beside its delta; ∞ if there is no bound."""
    bound = parse_epsilon(epsilon)
    if math.isinf(bound):
        return INFINITY
    if 0 < bound < 0.001 or bound >= 1e6:
        return _round_up(bound, figures=2)
    num_decimals = 3 if bound < 1 else 2 if bound < 10 else 1 if bound < 100 else 0
    return str(Decimal(repr(bound)).quantize(Decimal(1).scaleb(-num_decimals), rounding=ROUND_CEILING))


def format_delta(delta: float | None) -> str:
    """A delta rounded up to two figures, such as `1e-5`; a dash if there is none."""
    return MISSING if delta is None or not math.isfinite(delta) else _round_up(delta, figures=2)


def format_epsilon(epsilon: float | str | None, delta: float | None) -> str:
    """An epsilon with its delta: `ε = 1.83 at δ = 1e-5`. An epsilon is never shown without one.

    Args:
        epsilon: >= 0; None, NaN and "inf" are shown as ∞.
        delta: in (0, 1).
    """
    return f"ε = {format_bound(epsilon)} at δ = {format_delta(delta)}"


def format_bytes(num_bytes: float | None) -> str:
    """A size in decimal units: `512 B`, `1.23 MB` (1 MB = 1,000,000 bytes)."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return MISSING
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    # 999.5 kB would be rounded to 1e+03 kB, so it is shown as 1 MB.
    while abs(size) >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.4g} {units[0]}" if abs(size) >= 999.5 else f"{size:.3g} {units[0]}"


def format_percent(share: float | None) -> str:
    """A share in [0, 1] as a percentage with one decimal; a dash if it was not measured."""
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:.1f}%"


def format_accuracy(summary: Mapping[str, Any]) -> str:
    """A run's accuracy with four decimals and its standard error; a dash if unknown.

    One that was read from noised counts has its interval in place of the standard error.
    """
    accuracy, interval = summary["accuracy"], summary.get("accuracy_interval")
    error = summary.get("accuracy_standard_error")
    text = MISSING if accuracy is None else f"{accuracy:.4f}" if error is None else f"{accuracy:.4f} ± {error:.4f}"
    return text if interval is None else f"{text}, 95% interval {interval[0]:.4f} to {interval[1]:.4f}"


def format_number(value: float | None) -> str:
    """A plain quantity with three figures, such as a loss; a dash if it was not measured."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3g}"


def format_seconds(seconds: float | None) -> str:
    """A duration: `8.2 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_range(values: pd.Series) -> str:
    """`0.04` if all values are equal, else `0.03 to 0.05`; missing values are ignored."""
    present = values.dropna()
    if present.empty:
        return MISSING
    low, high = f"{present.min():.4g}", f"{present.max():.4g}"
    return low if low == high else f"{low} to {high}"


def asked_first(view: str) -> tuple[str, ...]:
    """The names of all views, the one that a target or budget was set on first."""
    return (view, *(name for name in ("aggregate", "local", "rho") if name != view))


def client_table(clients: Iterable[Mapping[str, Any]], accountant: str, *, view: str) -> Table:
    """What each client sent and spent: the final figures of `summary.json`, a row per client.

    Args:
        clients: entries with client, num_records, rounds, epsilon_local, epsilon_rho, delta, bytes_up and
            bytes_down; with epsilon_aggregate, if that view holds for all of them.
        accountant: the one that computed the epsilons, such as `pld`; it is named in the caption.
        view: that was asked for, which comes first.
    """
    clients = list(clients)
    has_aggregate = bool(clients) and all(client.get("epsilon_aggregate") is not None for client in clients)
    views = [name for name in asked_first(view) if name != "aggregate" or has_aggregate]
    # Shorter than `aggregate`, so that 80 columns hold the table.
    epsilons = ("ε sum" if name == "aggregate" else f"ε {name}" for name in views)
    headers = ("client", "records", "rounds", *epsilons, "δ", "sent", "received")
    rows = tuple(
        (
            holder_label(client["client"], client.get("name")),
            f"{client['num_records']:,}",
            str(client["rounds"]),
            *(format_bound(client[f"epsilon_{name}"]) for name in views),
            format_delta(client["delta"]),
            format_bytes(client["bytes_up"]),
            format_bytes(client["bytes_down"]),
        )
        for client in clients
    )
    return Table(caption=f"Per client, final figures ({accountant}), ε at the row's δ", headers=headers, rows=rows)


def recurrence_table(clusters: Iterable[Mapping[str, Any]] | None) -> Table | None:
    """The clusters of clients whose variants recur, a row per cluster; None if they were not compared.

    Args:
        clusters: entries with clients, recurrence, k and largest_difference.
    """
    if clusters is None:
        return None
    rows = tuple(
        (
            ", ".join(cluster["clients"]),
            str(cluster["recurrence"]),
            str(cluster["k"]) if cluster["k"] >= 2 else f"{cluster['k']}, no claim",
            format_number(cluster["largest_difference"]),
        )
        for cluster in clusters
    )
    headers = ("clients", "recurrence", "k of their mean", "largest difference")
    return Table(caption="Clusters in which every two variants are near each other", headers=headers, rows=rows)


def series_table(frame: pd.DataFrame, caption: str, format_value: Callable[[float], str]) -> Table:
    """The numbers of a plot: a row per round, a column per line."""
    headers = (str(frame.index.name), *map(str, frame.columns))
    rows = tuple(
        (f"{index:g}", *map(format_value, values))
        for index, values in zip(frame.index, frame.to_numpy(float), strict=True)
    )
    return Table(caption=caption, headers=headers, rows=rows)


def _round_up(value: float, figures: int) -> str:
    """The value rounded up to at most so many figures, without trailing zeros: 0.05, 1e-5, 8.4e-6."""
    number = Decimal(repr(float(value)))
    last = Decimal(1).scaleb(number.adjusted() - figures + 1)
    rounded = number.quantize(last, rounding=ROUND_CEILING).normalize()
    return f"{rounded:f}" if rounded == 0 or -2 <= rounded.adjusted() < 6 else f"{rounded:e}"
