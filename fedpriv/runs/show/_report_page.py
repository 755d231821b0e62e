"""A finished run as one self-contained HTML page: what it achieved, and what it cost every data holder."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from fedpriv.files import replace_file, replaced_file
from fedpriv.privacy.accounting.views import View, readers_label
from fedpriv.privacy.ledger.statement import adjacency_of
from fedpriv.runs import RunFolder, account_parts, files, parse_epsilon
from fedpriv.runs.figures import (
    MISSING,
    audit_bound,
    audit_curve_bound,
    bought,
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
    told_first,
    why_not_private,
)
from fedpriv.runs.show import _plots
from fedpriv.runs.show import _tables as tables
from fedpriv.runs.show._tables import Stored, TextTable, accuracies_to_beat
from fedpriv.runs.show._tracker import without_folders
from fedpriv.texts import holder_label, percent_up


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
    return filled(
        "report.html.j2",
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
        readers=readers_label(summary.get("num_readers", 0)),
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
        panels=_panels(run, folded=False),
        folded=_panels(run, folded=True),
        paper=paper_of(run),
        settings={"Configuration": _texts(config), "Environment": _texts(environment)},
    )


def filled(template: str, **values: Any) -> str:
    """The page that a template of this package makes of values, all of which it escapes."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    """The templates of this package, with the page's filters."""
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


def _panels(run: RunFolder, *, folded: bool) -> list[Panel]:
    """The plots, begun by what the run reached and what that cost; or those of `rho`, which stand in a fold."""
    views = told_first(run.summary["privacy_view"])
    if folded:
        return [] if "rho" in views else _epsilon_panels(run, ["rho"])
    quality, cost = _quality_panels(run), _epsilon_panels(run, views)
    return [*quality[:1], *cost[:1], *quality[1:], *cost[1:], *_label_panels(run), *_traffic_panels(run)]


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
        figure = _plots.loss_figure(frame)
        if column == "test_accuracy":
            figure = _plots.accuracy_figure(frame, accuracies_to_beat(summary))
        panels.append(panel(title, said, figure, frame, format_value, column.removeprefix("test_")))
    return panels


def _evaluation_panel(run: RunFolder, name: str) -> Panel:
    evaluated = _plots.evaluation_lines(run.summary, name)
    note = (
        "Of the final model, on records that the holders set aside; the bar is the 95% interval, which covers the "
        "noise of their counts."
    )
    accuracy, *interval = map(format_percent, evaluated.iloc[0])
    said = f"Accuracy after round {evaluated.index[0]:g}: {accuracy}, 95% interval {' to '.join(interval)}."
    figure = _plots.evaluation_figure(evaluated, accuracies_to_beat(run.summary))
    return panel("Private evaluation", note, figure, evaluated, format_percent, "evaluation", said)


def _epsilon_panels(run: RunFolder, views: Sequence[str]) -> list[Panel]:
    """The upper bounds that were kept round by round, with the final figure where it is less."""
    delta = f"at its δ (at most {format_delta(run.summary['delta_max'])})"
    panels = []
    against = {"local": "against the server", "rho": "at the noise of DP-LoRA's Theorem 1"}
    if _epsilon_aggregate(run.summary):
        against["aggregate"] = f"against {readers_label(run.summary.get('num_readers', 0))}, who learn sums alone"
    for view in (cast("View", view) for view in views if view in against):
        spent, final = final_epsilon_lines(run, view)
        title = f"ε so far, {view} view (upper bounds)"
        note = f"Per client, {against[view]}, {delta}; kept live by rdp, so never too small."
        for epsilon in final.values():
            note += f" The final figure, by {run.summary['accountant']}, is at most {format_bound(epsilon)}."
        figure = _plots.epsilon_figure(spent, final)
        panels.append(panel(title, note, figure, spent, format_bound, f"epsilon-{view}"))
    return panels


def final_epsilon_lines(run: RunFolder, view: View) -> tuple[pd.DataFrame, dict[str, float]]:
    """Each client's upper bounds by round, and {name: epsilon} of the largest final figure, if it is finite."""
    final = parse_epsilon(run.summary[f"epsilon_{view}_max"])
    lines = _plots.epsilon_lines(run.clients, run.rounds, view)
    return lines, {"final": final} if 0 < final < math.inf else {}


def _label_panels(run: RunFolder) -> list[Panel]:
    """The labels of each client's records; none where the summary does not tell, as of records that are private."""
    frame = label_frame(run.summary)
    if frame is None:
        return []
    title, said = "Labels of each client", "Labels of each client, as shares of its records."
    figure, note = _plots.label_figure(frame), "Shares of its training records."
    return [panel(title, note, figure, frame, lambda value: f"{value:,.0f}", "labels", said)]


def label_frame(summary: Mapping[str, Any]) -> pd.DataFrame | None:
    """The number of records of each label, a row for each client; None if the summary does not tell."""
    clients = [client for client in summary["clients"] if client.get("num_by_label")]
    if not clients or len(clients) > _plots.MOST_BARS:
        return None
    names = pd.Index([holder_label(each["client"], each.get("name")) for each in clients], name="client")
    return pd.DataFrame([each["num_by_label"] for each in clients], index=names, columns=summary["labels"], dtype=float)


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
    told = ", ".join(f"{percent_up(found)} at {100 * float(share):.3g}%" for share, found in points.items())
    said = f"The share found at most, by the share wrongly accused: {told}."
    return panel(
        "Found by an attacker", note, _plots.trade_off_figure(frame, points), frame, format_percent, "risk", said
    )


def _traffic_panels(run: RunFolder) -> list[Panel]:
    """The bytes by round, where rounds differ: a line that is level says no more than the sum above."""
    traffic = _plots.traffic_lines(run.rounds)
    by_round = traffic[traffic.index > 0]
    if not len(by_round) or ((by_round.max() - by_round.min()) <= 0.01 * by_round.max()).all():
        return []
    titles = {
        "round": ("Bytes in each round", "All clients together.", by_round),
        "total": ("Bytes so far", "Summed over the rounds.", traffic.cumsum()),
    }
    return [
        panel(title, note, _plots.traffic_figure(frame), frame, format_bytes, f"bytes-{key}")
        for key, (title, note, frame) in titles.items()
    ]


def panel(
    title: str,
    note: str,
    figure: Figure,
    frame: pd.DataFrame,
    format_value: _plots.Format,
    name: str,
    said: str | None = None,
) -> Panel:
    """A plot of a table's lines, with the table; the note says in words what it shows.

    Args:
        name: unique on the page.
        said: to those who do not see the plot; None for where its lines end.
    """
    svg = _plots.to_svg(figure, name=name, description=said or _plots.describe(frame, title, format_value))
    table = tables.series_table(frame, f"{title}. {note}", format_value)
    return Panel(title=title, note=note, svg=Markup(svg), table=table)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text: strings unchanged, anything else as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A run in the words of a paper: the sentence to copy, its table in LaTeX, and what its error bars are."""

    sentence: str
    table: str
    bars: str


def paper_of(run: RunFolder) -> Paper:
    """The text of a finished run for a paper; unit, adjacency, view, accountant, delta and composed runs are in it."""
    summary, config = run.summary, run.config
    epsilon, whose, against = bought(summary)
    delta, unit = format_delta(summary["delta_max"]), summary["unit"]
    earlier = max((client["earlier_runs"] for client in summary["clients"]), default=0)
    composed = f"{earlier} earlier run{'s' * (earlier > 1)} on the same data" if earlier else "no earlier run"
    charged = _charged(run)
    kept = "" if not why_not_private(run) else " This run itself protects nobody, since its noise is known or absent."
    method = f"{config.get('aggregation', 'LoRA')} (rank {config['rank']})" if "rank" in config else "LoRA"
    sentence = (
        f"We fine-tuned {without_folders(config.get('model', 'a model'))} with {method} over "
        f"{summary['num_clients']} holders in "
        f"{summary['num_rounds']} rounds. What each holder released satisfies ({format_bound(epsilon)}, {delta})-"
        f"differential privacy for {whose}, where neighbouring data sets differ in "
        f"{adjacency_of(unit, summary.get('holders_per_person') or 1)}, against {against}. The "
        f"{summary.get('mechanism', 'gaussian')} mechanism (noise multiplier {charged['noise multiplier z']}, sampling "
        f"probability {charged['sampling probability q']}) was composed over all rounds by the {summary['accountant']} "
        f"accountant of dp-accounting {run.environment.get('dp-accounting', '')}, together with {composed}. The figure "
        f"is the largest over the holders; choosing this run among others is not in it.{kept}"
    )
    rows = [
        f"{_latex(name)} & {_latex(accuracy)} & {_latex(f1 or MISSING)} & {_latex(note)} \\\\"
        for name, accuracy, f1, note in tables.accuracy_table(summary).rows
    ]
    table = [r"\begin{tabular}{llll}", r"\toprule", r" & accuracy & macro F1 & \\", r"\midrule", *rows]
    error = summary.get("accuracy_standard_error")
    bars = "Accuracies have no error bars: no test set was at hand."
    if error is not None:
        bars = "Error bars are one standard error over the choice of the test records; other seeds differ by more."
    return Paper(sentence=sentence, table="\n".join([*table, r"\bottomrule", r"\end{tabular}"]), bars=bars)


def _latex(text: str) -> str:
    """The text as LaTeX sets it."""
    named = {"ε": r"$\varepsilon$", "δ": r"$\delta$", "±": r"$\pm$", "≤": r"$\leq$", MISSING: "--", "∞": r"$\infty$"}
    escaped = "".join(named.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)
    return re.sub(r"\b(\d+(?:\.\d+)?)e(-?\d+)\b", r"$\1 \\times 10^{\2}$", escaped)


def write_paper(run_dir: Path, out: Path) -> list[Path]:
    """Write `run.tex` and plots in PDF of a finished run for a paper into a folder, and return their paths."""
    run = RunFolder(run_dir).checked()
    paper, summary = paper_of(run), run.summary
    out.mkdir(parents=True, exist_ok=True)
    text = f"% {run.name}\n{_latex(paper.sentence)}\n\n{paper.table}\n\n% {paper.bars}\n"
    replace_file(out / "run.tex", text.encode(), mode=None)
    figures: dict[str, tuple[Any, str]] = {}
    if run.rounds["test_accuracy"].notna().any() and not counts_next_tokens(summary):
        lines = _plots.compared_lines(run.rounds, run.comparison_rounds, "test_accuracy", "with DP")
        bars = _plots.standard_errors(lines.iloc[:, 0], summary)
        figures["accuracy"] = _plots.accuracy_figure(lines, accuracies_to_beat(summary), bars), "test accuracy"
    for view in told_first(summary["privacy_view"]):
        if view != "aggregate" or _epsilon_aggregate(summary):
            spent, final = final_epsilon_lines(run, cast("View", view))
            figures[f"epsilon-{view}"] = _plots.epsilon_figure(spent, final), f"ε, {view} view (rdp, upper bound)"
    if (labels := label_frame(summary)) is not None:
        figures["labels"] = _plots.label_figure(labels), "share of records"
    written = [out / "run.tex"]
    for name, (figure, y_label) in figures.items():
        written.append(out / f"{name}.pdf")
        with replaced_file(written[-1]) as file:
            Path(file.name).write_bytes(_plots.to_pdf(figure, y_label))
    return written
