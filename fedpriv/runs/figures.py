"""The figures of a run, declared once for all pages that show them, and the way in which numbers become text.

What bounds a risk is rounded up, and no epsilon is shown without its delta.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, Literal, get_args

from fedpriv import texts
from fedpriv.runs._folder import RunFolder
from fedpriv.runs._rows import parse_epsilon
from fedpriv.runs._status import account_parts, status_of

INFINITY = "∞"
MISSING = "–"
_BY_CURVE = "epsilon_lower_f_dp"
Page = Literal["terminal", "closing", "report", "tracker", "card", "result"]
EVERY_PAGE: frozenset[Page] = frozenset(get_args(Page))


def format_bound(epsilon: float | str | None) -> str:
    """An epsilon rounded up to three figures, for a cell next to its delta; ∞ if there is no bound."""
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
    """An epsilon, or ∞, with its delta: `ε = 1.83 at δ = 1e-5`. An epsilon is never shown without one."""
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


def asked_first(view: str) -> tuple[str, ...]:
    """The names of all views, the one that a target or budget was set on first."""
    return (view, *(name for name in ("aggregate", "local", "rho") if name != view))


def told_first(view: str) -> tuple[str, ...]:
    """The views that lines tell of, the one that a target or budget was set on first: `rho` where it is that one."""
    return tuple(name for name in asked_first(view) if name != "rho" or view == "rho")


def best_baseline(summary: Mapping[str, Any]) -> tuple[str, float] | None:
    """The plain classifier that gets most right, by name, with its accuracy; None if none was trained."""
    named = {"linear probe": summary.get("probe_accuracy"), "TF-IDF": summary.get("tfidf_accuracy")}
    known = [(accuracy, name) for name, accuracy in named.items() if accuracy is not None]
    return max(known)[::-1] if known else None


def bought(summary: Mapping[str, Any]) -> tuple[float, str, str]:
    """The largest epsilon on the run's view, whose it is, and against whom it holds."""
    from fedpriv.privacy.accounting.views import readers_label  # deferred: it imports the accountants

    view, unit = summary["privacy_view"], summary["unit"]
    if view == "aggregate" and (summary["aggregate_objections"] or summary.get("epsilon_aggregate_max") is None):
        view = "local"
    against = {"local": "the server, which sees every upload", "rho": "the server, at the noise of DP-LoRA's Theorem 1"}
    whom = against.get(view) or f"{readers_label(summary.get('num_readers', 0))}, who learn sums alone"
    return parse_epsilon(summary[f"epsilon_{view}_max"]), f"one {unit}", whom


def _round_up(value: float, figures: int) -> str:
    """The value rounded up to at most so many figures, without trailing zeros: 0.05, 1e-5, 8.4e-6."""
    number = Decimal(repr(float(value)))
    last = Decimal(1).scaleb(number.adjusted() - figures + 1)
    rounded = number.quantize(last, rounding=ROUND_CEILING).normalize()
    return f"{rounded:f}" if rounded == 0 or -2 <= rounded.adjusted() < 6 else f"{rounded:e}"


def limit_of(target: float | None, budgets: Sequence[float]) -> tuple[str, float] | None:
    """A run's limit, by name and size: its target, else its smallest budget; None without either."""
    if target is not None:
        return "target", target
    return ("budget" if len(set(budgets)) == 1 else "smallest budget", min(budgets)) if budgets else None


ABOVE_TARGET = 3
"""The exit code of a run that cost more than its target."""


def above_target(summary: Mapping[str, Any]) -> str:
    """A line on a finished run that cost more than its target; empty if it did not, or had none."""
    target, view = summary.get("target_epsilon"), summary.get("privacy_view", "local")
    own = summary.get("epsilon_this_run_max")
    spent = own if own is not None else summary.get(f"epsilon_{view}_max")
    if not target or spent is None or float(spent) <= target * (1 + 1e-6):
        return ""
    again = summary.get("rounds_charged_again") or ()
    why = f": rounds {', '.join(map(str, again))} were charged again" if again else ""
    return f"epsilon {format_bound(spent)} is above target_epsilon = {target:g} on the {view} view{why}"


def of_this_run(parts: tuple[float, float], limit: tuple[str, float] | None) -> tuple[str, tuple[str, float] | None]:
    """The spending of this run and what stood in a shared account before it, and the limit that is left for their sum.

    A target is what one run may spend, so it stands with that; a budget bounds the account.

    Args:
        parts: what this run has spent, and what stood in the account before it.
        limit: as `limit_of` has it.
    """
    of, left = (f" of {limit[0]} {limit[1]:.4g}", None) if limit and limit[0] == "target" else ("", limit)
    this_run, before = map(format_bound, parts)
    return f"{this_run}{of} in this run, {before} in the account before it", left


def _closing_line(summary: Mapping[str, Any]) -> str:
    """One line that says what a finished run has spent, first on the view that was asked for."""
    view = summary["privacy_view"]
    epsilons = {name: summary.get(f"epsilon_{name}_max") for name in told_first(view)}
    others = ", ".join(f"{name} {format_bound(e)}" for name, e in epsilons.items() if name != view and e is not None)
    limit, own = limit_of(summary.get("target_epsilon"), summary["budget_epsilon"]), ""
    if parts := account_parts(summary):
        own, limit = of_this_run(parts, limit)
        own = f"{own}: "
    of = f", {limit[0]} {limit[1]:.4g}" if limit else ""
    return (
        f"ε {own}{format_bound(epsilons[view])}{texts.of_whom(summary.get('unit'))} on the {view} view{of}; by "
        f"{summary['accountant']}, at δ {format_delta(summary['delta_max'])}{f'; {others}' if others else ''}"
    )


def audit_bound(audit: Mapping[str, Any] | None) -> str | None:
    """An audit's lower bound of epsilon; None without an audit."""
    if not audit:
        return None
    return f"ε = {_rounded_down(audit['epsilon_lower'])} at δ = {format_delta(audit['delta'])}"


def audit_curve_bound(audit: Mapping[str, Any] | None) -> str | None:
    """The bound that holds against the accountant's whole curve alone; None if the audit has none."""
    return f"ε = {_rounded_down(audit[_BY_CURVE])}" if audit and _BY_CURVE in audit else None


def _audit_line(audit: Mapping[str, Any]) -> str:
    """One line that compares what an audit found with what the run claims."""
    claim = audit["claimed_epsilon"]
    # Not all audits have a bound by f-DP, and none of earlier versions.
    by_curve = f", ≥ {_rounded_down(audit[_BY_CURVE])} by f-DP" if _BY_CURVE in audit else ""
    claimed = MISSING if claim is None else format_bound(claim)
    verdict = f"this refutes the claim of ε = {claimed}" if audit["refuted"] else f"the claim of ε = {claimed} stands"
    return (
        f"ε ≥ {_rounded_down(audit['epsilon_lower'])} at δ = {format_delta(audit['delta'])}{by_curve}, "
        f"with {audit['confidence']:.0%} confidence: "
        f"{audit['num_correct']} of {audit['num_guesses']} guesses about {audit['num_canaries']} canaries "
        f"({audit['kind']}) were right; {verdict}"
    )


def _rounded_down(epsilon: float | None) -> str:
    """A lower bound is rounded down, where every other figure is rounded up; None stands for infinity."""
    return "∞" if epsilon is None else f"{math.floor(100 * epsilon) / 100:.2f}"


def counts_next_tokens(summary: Mapping[str, Any]) -> bool:
    """Whether the run's accuracy is no more than the share of next tokens that a language model finds."""
    return summary["perplexity"] is not None and summary["confusion_matrix"] is None


def why_not_private(run: RunFolder) -> list[str]:
    """The reasons why a run protects nobody; empty for a private run."""
    reasons, delta = [], run.summary["delta_max"]
    if run.summary["noise_source"] != "secure":
        reasons.append("its noise came from a seeded generator: anyone who knows the seed can subtract the noise")
    if (as_published := run.summary.get("epsilon_as_published_max")) is not None:
        reasons.append(
            f"{run.summary.get('caveat') or 'its noise was accounted for without proof'}; the resulting figure, "
            f"{format_epsilon(as_published, delta)}, is no privacy guarantee; what is proven of this noise is "
            f"{format_epsilon(run.summary.get('epsilon_sound_max') or INFINITY, delta)}"
        )
    elif format_bound(run.summary["epsilon_local_max"]) == INFINITY:
        reasons.append("no noise bounds what an upload reveals: ε is infinite")
    if not run.summary["private"] and not reasons:
        reasons.append("the run is marked as not private")
    return reasons


@dataclass(frozen=True)
class Figure:
    """A figure of a run.

    Attributes:
        key: its name in Python, and in trackers after `final/`.
        label: its name for people; a function of the folder where it depends on the run.
        read: its value; None if this run has none, or none yet.
        on: the pages that show it: `fedpriv status` and a report before the end, the closing table, the report, the
            trackers (of finished runs, and numbers alone), the model card (of the run's final model) and `Run.summary`.
        is_wide: whether a tile needs room for a sentence.
    """

    key: str
    label: str | Callable[[RunFolder], str]
    read: Callable[[RunFolder], Any]
    text: Callable[[Any], str] = str
    _: KW_ONLY
    on: Set[Page] = EVERY_PAGE
    applies: Callable[[RunFolder], bool] = lambda folder: True
    is_alarming: Callable[[RunFolder], bool] = lambda folder: False
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class ShownFigure:
    """A figure as a page shows it; the attributes are those of `Figure`."""

    key: str
    label: str
    value: Any
    text: str
    is_alarming: bool
    is_wide: bool


def figures(folder: RunFolder, page: Page) -> tuple[ShownFigure, ...]:
    """The figures that a page shows of a run, in order; InputError if a file of one is missing or damaged."""
    return tuple(
        ShownFigure(
            key=figure.key,
            label=figure.label if isinstance(figure.label, str) else figure.label(folder),
            value=value,
            text=figure.text(value),
            is_alarming=figure.is_alarming(folder),
            is_wide=figure.is_wide,
        )
        for figure in FIGURES
        if page in figure.on and figure.applies(folder)
        if (value := figure.read(folder)) is not None
    )


def _measured(page: Page, key: str, label: str | Callable[[RunFolder], str], **options: Any) -> Figure:
    """An entry of summary.json in the words of the report or the model card.

    The report shows perplexities of a run whose accuracy counts next tokens, and accuracies of any other.
    """
    of_language = key.startswith("perplexity")
    if page == "report":
        options = {"applies": lambda f: counts_next_tokens(f.summary) == of_language} | options
    text = _four_digits if page == "card" else format_number if of_language else format_percent
    read = _accuracy_without_noise if key == "accuracy_non_private" else lambda f: f.summary.get(key)
    return Figure(key, label, read, text, on={page}, **options)


def _four_digits(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "unknown"


def _trained_label(name: str) -> Callable[[RunFolder], str]:
    return lambda folder: f"{name}{', this run' if why_not_private(folder) else ' with DP'}"


def _accuracy_without_noise(folder: RunFolder) -> float | None:
    accuracy: float | None = folder.summary["accuracy_non_private"]
    if accuracy is None and folder.comparison is not None:
        accuracy = folder.comparison.summary.get("accuracy")
    return accuracy


def _rounds(folder: RunFolder) -> str:
    status = status_of(folder)
    planned = "" if status.num_rounds_planned is None else f" of {status.num_rounds_planned}"
    return f"{status.num_rounds}{planned}, {format_seconds(status.seconds)}"


def _checkpoint(folder: RunFolder) -> str:
    round_ = status_of(folder).checkpoint_round
    return "none" if round_ is None else f"after round {round_}"


def _accuracy(folder: RunFolder) -> str:
    status = status_of(folder)
    error = "" if status.accuracy_standard_error is None else f" ± {format_percent(status.accuracy_standard_error)}"
    largest = "" if status.majority_accuracy is None else f", largest class {format_percent(status.majority_accuracy)}"
    return f"{format_percent(status.test_accuracy)}{error}{largest}"


def _epsilons(folder: RunFolder) -> str:
    """The largest epsilon by view, first the one that was asked for, with its target or budget."""
    run = status_of(folder)
    limit, own = limit_of(run.target_epsilon, run.budget_epsilon), ""
    if run.epsilon_this_run_max is not None and run.epsilon_before_max is not None:
        own, limit = of_this_run((run.epsilon_this_run_max, run.epsilon_before_max), limit)
        own = f"{own}: "
    epsilons = {"local": run.epsilon_local_max, "rho": run.epsilon_rho_max, "aggregate": run.epsilon_aggregate_max}
    texts = {name: f"{name} {MISSING if e is None else format_bound(e)}" for name, e in epsilons.items()}
    texts[run.privacy_view] += f" of {limit[0]} {limit[1]:g}" if limit else ""
    if run.aggregate_view_holds is False:
        texts["aggregate"] = "aggregate does not hold"
    return own + ", ".join(texts[name] for name in told_first(run.privacy_view))


def _delta(folder: RunFolder) -> str:
    run = status_of(folder)
    return f"{texts.of_whom(run.unit)} at δ = {format_delta(run.delta_max)}, by {run.accountant}".strip()


def _traffic(folder: RunFolder) -> str:
    return f"{format_bytes(status_of(folder).bytes_up)} up, {format_bytes(status_of(folder).bytes_down)} down"


def _is_compared_with_chance(folder: RunFolder) -> bool:
    return not counts_next_tokens(folder.summary) and folder.summary["majority_accuracy"] is None


def _spent(folder: RunFolder) -> str | None:
    summary = folder.summary
    if not summary:
        return None
    holds = not summary.get("aggregate_objections") and "epsilon_aggregate_max" in summary
    views = ("local", "rho", *(["aggregate"] if holds else []))
    return _closing_line(
        summary | {f"epsilon_{view}_max": parse_epsilon(summary[f"epsilon_{view}_max"]) for view in views}
    )


def risk_sentences(summary: Mapping[str, Any]) -> list[str]:
    """The risk on the run's view, and the meaning of delta; empty where the run does not say."""
    return texts.risk_in_words(summary, summary["delta_max"]) if summary.get("tpr_at_fpr") else []


def _risk(folder: RunFolder) -> str | None:
    """The risk on the run's view, in a line of a terminal, with the target."""
    summary = folder.summary
    if not summary.get("tpr_at_fpr"):
        return None
    target = f"; target {summary['target_risk']}" if summary.get("target_risk") else ""
    return f"{texts.risk_in_short(summary)}{target}"


def risk_figures(summary: Mapping[str, Any]) -> str | None:
    """The figures of the risk on the run's view, in a line; None where the run does not say."""
    return texts.risk_in_figures(summary) if summary.get("tpr_at_fpr") else None


def _charged_again(folder: RunFolder) -> str | None:
    """Why a run may have spent more than its target; None for one of which no round was charged again."""
    rounds = folder.summary.get("rounds_charged_again")
    if not rounds:
        return None
    named, which = ", ".join(map(str, rounds)), "rounds" if len(rounds) > 1 else "round"
    target, spent = folder.summary.get("target_epsilon"), status_of(folder)
    own = spent.epsilon_this_run_max
    if own is None:
        own = parse_epsilon(folder.summary.get(f"epsilon_{spent.privacy_view}_max"))
    above = ", which is why ε is above the target" if target is not None and own > target else ""
    return f"{which} {named} charged more than once: what an interrupted attempt released counts too{above}"


def _best_label(folder: RunFolder) -> str:
    name, _ = best_baseline(folder.summary) or ("none", 0.0)
    return f"best baseline: {name}, no privacy"


def _bought_label(folder: RunFolder) -> str:
    """Whose epsilon the report leads with, at which delta, and against whom."""
    _, whose, against = bought(folder.summary)
    seeded = ", had its noise been secret" if folder.summary["noise_source"] != "secure" else ""
    return f"ε of {whose} at δ = {format_delta(folder.summary['delta_max'])}, against {against}{seeded}"


def _alone(folder: RunFolder) -> str | None:
    """The accuracies of the holders' own models, the largest class beside them; None where none was trained."""
    summary = folder.summary
    if summary.get("alone_accuracy") is None:
        return None
    mean, low, high = (format_percent(summary[f"alone_accuracy{end}"]) for end in ("", "_min", "_max"))
    return f"{mean} on average, {low} to {high}; largest class {format_percent(summary['majority_accuracy'])}"


def _audit(folder: RunFolder) -> str | None:
    audit = folder.summary.get("audit")
    return _audit_line(audit | {"claimed_epsilon": parse_epsilon(audit["claimed_epsilon"])}) if audit else None


FIGURES: tuple[Figure, ...] = (
    Figure("rounds", "rounds", _rounds, on={"terminal"}),
    Figure("checkpoint", "checkpoint", _checkpoint, on={"terminal"}),
    Figure("accuracy", "accuracy", _accuracy, on={"terminal"}),
    Figure("epsilons", "largest ε", _epsilons, on={"terminal"}),
    Figure("delta_max", "", _delta, on={"terminal"}),
    Figure("bytes", "sent", _traffic, on={"terminal"}),
    Figure(
        "audit",
        "audit",
        _audit,
        on={"closing"},
        is_alarming=lambda folder: bool((folder.summary.get("audit") or {}).get("refuted")),
    ),
    Figure("spent", "spent", _spent, on={"closing"}),
    Figure("risk", "risk", _risk, on={"terminal", "closing"}),
    _measured("report", "perplexity", _trained_label("Perplexity")),
    _measured("report", "accuracy", _trained_label("Accuracy")),
    Figure("bought", _bought_label, lambda folder: bought(folder.summary)[0], format_bound, on={"report"}),
    Figure(
        "best_baseline",
        _best_label,
        lambda folder: best_baseline(folder.summary),
        lambda found: format_percent(found[1]),
        on={"report"},
    ),
    _measured("report", "perplexity_non_private", "Without noise (z = 0, still clipped)"),
    _measured("report", "perplexity_initial", "Untrained"),
    _measured("report", "accuracy_non_private", "Without noise (z = 0, still clipped)"),
    _measured("report", "majority_accuracy", "Largest class"),
    _measured("report", "accuracy_initial", "Untrained"),
    _measured("report", "chance_accuracy", "Chance", applies=_is_compared_with_chance),
    _measured("card", "accuracy", "accuracy"),
    _measured("card", "accuracy_initial", "accuracy before training"),
    _measured("card", "majority_accuracy", "accuracy of the largest class"),
    _measured("card", "macro_f1", "macro F1"),
    _measured("card", "perplexity", "perplexity"),
    _measured("card", "perplexity_initial", "perplexity before training"),
    _measured("card", "rouge_l", "ROUGE-L"),
    Figure("alone", "each holder alone", _alone, on={"terminal", "report", "card"}, is_wide=True),
    Figure("charged_again", "resumed", _charged_again, on={"terminal", "closing", "report"}, is_wide=True),
)
"""Every figure, in the order of the pages. A new one needs an entry here and nothing else: all pages will show it.

Entries that name pages are there because these pages say the same in other words or with other digits. All numbers of
summary.json are in trackers and in `Run.summary` in any case.
"""
