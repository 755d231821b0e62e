"""A finished run as one self-contained HTML page: what it achieved, and what it cost every data holder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedpriv.files import replace_file
from fedpriv.privacy.accounting.views import View, readers_label
from fedpriv.runs import RunFolder, account_parts, files, parse_epsilon
from fedpriv.runs.figures import (
    audit_bound,
    audit_curve_bound,
    counts_next_tokens,
    figures,
    format_bound,
    format_bytes,
    format_delta,
    format_epsilon,
    format_number,
    format_percent,
    format_seconds,
    risk_figures,
    risk_sentences,
    why_not_private,
)
from fedpriv.runs.show import _plots
from fedpriv.runs.show import _tables as tables
from fedpriv.runs.show._tables import Stored, TextTable, accuracies_to_beat


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A plot, what it shows in words, and its numbers as a table."""

    title: str
    note: str
    svg: Markup
    table: TextTable


def write_report(run_dir: Path, stored: Stored | None = None) -> Path:
    """Write `report.html` into the folder of a finished run, from the files in it, and return its path.

    The page loads no script, font, picture or style from elsewhere. The same folder gives the same bytes. The file is
    written atomically; an older report stays until the new one is complete.

    Args:
        run_dir: holds config.toml, environment.json, rounds.csv, clients.csv, summary.json and, after a
            comparison run, comparison/ with rounds.csv and summary.json.

    Raises:
        InputError: one line that names the missing or wrong file, column or key, and what would be right.
    """
    page = render(RunFolder(run_dir), stored)
    path = run_dir / files.REPORT
    replace_file(path, page.encode(), mode=None)
    return path


def render(
    run: RunFolder,
    stored: Stored | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> str:
    """The page of a finished run as HTML. All text from the run is escaped; only the plots are markup.

    Args:
        config, environment: that the page tells; None for all that the folder holds.

    Raises:
        InputError: the run is not finished, or its folder is damaged.
    """
    summary = run.checked().summary
    audit = summary.get("audit")
    accountant = "pld" if summary["accountant"] == "pld" else f"{summary['accountant']}, an upper bound"
    config = run.config if config is None else config
    environment = run.environment if environment is None else environment
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            name=run.name,
            timing=None,
            run=run,
            summary=summary,
            tiles=figures(run, "report"),
            why_not_private=why_not_private(run),
            accountant=accountant,
            interval=summary.get("accuracy_interval"),
            accuracies=tables.accuracy_table(summary),
            joining=tables.joining_table(summary),
            confusion=tables.confusion_table(summary),
            next_tokens=counts_next_tokens(summary),
            responses=tables.language_table(summary),
            changes=tables.changes(summary),
            samples=tables.sample_table(run.samples, private=summary["private"]),
            epsilon_local=format_epsilon(summary["epsilon_local_max"], summary["delta_max"]),
            epsilon_aggregate=_epsilon_aggregate(summary),
            sums=_sums(run),
            readers=_readers(summary),
            earlier=_earlier_runs(summary),
            retired={str(c.get("name", c["client"])): c["rounds"] for c in summary["clients"] if c["retired"]},
            epsilon_rho=format_epsilon(summary["epsilon_rho_max"], summary["delta_max"]),
            risk=risk_sentences(summary),
            risk_figures=risk_figures(summary),
            risk_panel=_risk_panel(summary),
            audit=audit,
            audit_bound=audit_bound(audit),
            audit_curve_bound=audit_curve_bound(audit),
            audit_claim=format_epsilon(audit["claimed_epsilon"], audit["delta"]) if audit else None,
            recurring=tables.recurrence_table((summary.get("integral") or {}).get("clusters")),
            stored=stored,
            stored_answers=tables.stored_answer_table(run.stored_answers) if stored else None,
            spread=tables.spread_table(summary["clients"], view=summary["privacy_view"]),
            clients=tables.client_table(
                summary["clients"], accountant, view=summary["privacy_view"], unit=summary.get("unit")
            ),
            charged=_charged(run),
            failures=_failures(run),
            panels=[*_first_of_each(_quality_panels(run), _epsilon_panels(run)), *_traffic_panels(run)],
            settings={"Configuration": _texts(config), "Environment": _texts(environment)},
        )
    )


@cache
def templates() -> Environment:
    """The templates of this package, with the page's filters; they escape all that they are given."""
    environment = Environment(
        loader=PackageLoader("fedpriv.runs.show"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "number": format_number,
        "percent": format_percent,
        "seconds": format_seconds,
        "capital": lambda text: (text[:1].upper() if text[:1].isascii() else text[:1]) + text[1:],
    }
    return environment


def _epsilon_aggregate(summary: Mapping[str, Any]) -> str | None:
    """The `aggregate` view's largest epsilon; None if the view does not hold."""
    if summary["aggregate_objections"] or "epsilon_aggregate_max" not in summary:
        return None
    return format_epsilon(summary["epsilon_aggregate_max"], summary["delta_max"])


def _readers(summary: Mapping[str, Any]) -> str:
    """The readers that the `aggregate` view protects against; earlier versions did not count them."""
    return readers_label(summary.get("num_readers", 0))


class _RunSums(NamedTuple):
    """The sums of a run under secure aggregation.

    Attributes:
        threshold: t; each client is charged as if only so many uploads had been in a sum.
        num_readers: so many others know their own noise, which is not counted; 0 for a run that did not count them.
        smallest: how many uploads the smallest sum had.
        without: {round: the clients that were in its terms and are not in its sum}, of rounds with any.
    """

    threshold: int
    num_readers: int
    smallest: int
    without: dict[int, str]


def _sums(run: RunFolder) -> _RunSums | None:
    """The run's sums; None without secure aggregation."""
    if not run.config.get("secure_aggregation"):
        return None
    names = {client["client"]: str(client.get("name", client["client"])) for client in run.summary["clients"]}
    missing = run.clients[run.clients["status"] != "ok"].groupby("round")["client"]
    return _RunSums(
        threshold=int(run.config["min_clients"]),
        num_readers=run.summary.get("num_readers") or 0,
        smallest=int(run.rounds.loc[run.rounds["round"] > 0, "num_replies"].min()),
        without={
            int(cast("int", round_)): ", ".join(names.get(client, str(client)) for client in clients)
            for round_, clients in missing
        },
    )


def _earlier_runs(summary: Mapping[str, Any]) -> str | None:
    """The earlier runs on the same data that the figures include, in words; None if there were none."""
    num_earlier = max((client["earlier_runs"] for client in summary["clients"]), default=0)
    if not num_earlier:
        return None
    alone = max((parse_epsilon(c["epsilon_local_this_run"]) for c in summary["clients"]), default=0.0)
    parts = account_parts(summary)
    before = f"; at most {format_bound(parts[1])} stood in an account before it" if parts else ""
    return (
        f"up to {num_earlier} earlier run{'s' if num_earlier != 1 else ''}; this run alone cost at most "
        f"{format_bound(alone)}{before}"
    )


def _charged(run: RunFolder) -> dict[str, str]:
    """The parameters that the accountant was given, as ranges over all clients and rounds."""
    names = {
        "noise_multiplier": "noise multiplier z",
        "effective_noise_multiplier": "effective noise multiplier",
        "sampling_probability": "sampling probability q",
        "steps": "noised steps per reply",
        "rho_bar": "ρ̄ of a round",
    }
    return {name: tables.format_range(run.clients[column]) for column, name in names.items()}


def _failures(run: RunFolder) -> dict[str, int]:
    failed = run.clients.loc[run.clients["status"] != "ok", "status"].fillna("unknown")
    return {str(status): int(count) for status, count in failed.value_counts().sort_index().items()}


def _first_of_each(quality: Sequence[Panel], cost: Sequence[Panel]) -> list[Panel]:
    """All panels, begun by what the run reached and what that cost."""
    return [*quality[:1], *cost[:1], *quality[1:], *cost[1:]]


def _quality_panels(run: RunFolder) -> list[Panel]:
    name = "this run" if why_not_private(run) else "with DP"
    if run.summary.get("accuracy_interval"):
        return [_evaluation_panel(run, name)]
    with_accuracy = not counts_next_tokens(run.summary)
    return quality_panels(run.rounds, run.comparison_rounds, name, run.summary, with_accuracy=with_accuracy)


def quality_panels(
    rounds: pd.DataFrame,
    comparison: pd.DataFrame | None,
    name: str,
    summary: Mapping[str, Any],
    *,
    with_accuracy: bool = True,
) -> list[Panel]:
    """The plots of accuracy, perplexity and loss on the server's test set, of those that were measured."""
    note = "On the server's own test set; round 0 is the untrained model."
    kinds: list[tuple[str, str, str, _plots.Format]] = [
        ("test_perplexity", "Test perplexity", note, format_number),
        ("test_loss", "Test loss", "On the same test set.", format_number),
    ]
    if with_accuracy:
        kinds.insert(0, ("test_accuracy", "Test accuracy", note, format_percent))
    panels = []
    for column, title, said, format_value in kinds:
        if column not in rounds or rounds[column].isna().all():
            continue
        compared = comparison if comparison is not None and len(comparison) and column in comparison else None
        frame = _plots.compared_lines(rounds, compared, column, name)
        if column == "test_accuracy":
            svg = _plots.accuracy_plot(frame, references=accuracies_to_beat(summary))
        else:
            svg = _plots.loss_plot(frame, title=title, name=column.removeprefix("test_"))
        panels.append(panel(title, said, svg, frame, format_value))
    return panels


def _evaluation_panel(run: RunFolder, name: str) -> Panel:
    evaluated = _plots.evaluation_lines(run.summary, name)
    note = (
        "Of the final model, on records that the holders set aside; the bar is the 95% interval, which covers the "
        "noise of their counts."
    )
    svg = _plots.evaluation_plot(evaluated, references=accuracies_to_beat(run.summary))
    return panel("Private evaluation", note, svg, evaluated, format_percent)


def _epsilon_panels(run: RunFolder) -> list[Panel]:
    delta = f"at its δ (at most {format_delta(run.summary['delta_max'])})"
    panels = []
    views: dict[View, str] = {"local": "against the server", "rho": "by Theorem 1 of DP-LoRA"}
    if _epsilon_aggregate(run.summary):
        views = {"aggregate": f"against {_readers(run.summary)}, who learn sums alone", **views}
    for view, against in views.items():
        spent = _plots.epsilon_lines(run.clients, run.rounds, view)
        title = f"ε so far, {view} view"
        note = f"Per client, {against}, {delta}; live figures by rdp. Each view has a scale of its own."
        svg = _plots.epsilon_plot(spent, title=title, name=f"epsilon-{view}")
        panels.append(panel(title, note, svg, spent, format_bound))
    return panels


def _risk_panel(summary: Mapping[str, Any]) -> Panel | None:
    """The curve of the largest shares found, and the audit's; None where the run has no curve, or nothing bounds it."""
    curve, audit = summary.get("trade_off"), summary.get("audit")
    if not curve or (min(curve["tpr"]) >= 1 and not audit):
        return None
    index = pd.Index(curve["fpr"], name="wrongly accused")
    frame = pd.DataFrame({"found at most": curve["tpr"]}, index=index, dtype=float)
    note = (
        f"At most, of any client, on the {summary['privacy_view']} view. Accusing at random finds as many as it "
        "accuses wrongly; both axes are logarithmic."
    )
    if audit and "roc" in audit:
        places = np.searchsorted(audit["roc"]["fpr"], frame.index, side="right") - 1
        frame["found by the audit"] = np.asarray(audit["roc"]["tpr"])[places]
        note += f" The audit found so many of {audit['num_canaries']} canaries, by the share of others that it accused."
    points = {share: float(found) for share, found in summary["tpr_at_fpr"].items()}
    svg = _plots.trade_off_plot(frame, points)
    return panel("Found by an attacker", note, svg, frame, format_percent)


def _traffic_panels(run: RunFolder) -> list[Panel]:
    traffic = _plots.traffic_lines(run.rounds)
    titles = {
        "round": ("Bytes in each round", "All clients together.", traffic[traffic.index > 0]),
        "total": ("Bytes so far", "Summed over the rounds.", traffic.cumsum()),
    }
    return [
        panel(title, note, _plots.traffic_plot(frame, title=title, name=f"bytes-{key}"), frame, format_bytes)
        for key, (title, note, frame) in titles.items()
    ]


def panel(title: str, note: str, svg: str, frame: pd.DataFrame, format_value: _plots.Format) -> Panel:
    """A plot of a table's lines, with the table; the note says in words what it shows."""
    table = tables.series_table(frame, f"{title}. {note}", format_value)
    return Panel(title=title, note=note, svg=Markup(svg), table=table)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text: strings unchanged, anything else as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in values.items()}
