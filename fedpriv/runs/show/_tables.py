"""Tables of text, for the terminal and the report: clients, accuracies, answers, stored variants and spending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedpriv.runs import Sample, StoredAnswer, account_parts, figures
from fedpriv.texts import holder_label, of_whom, what_is_counted

if TYPE_CHECKING:
    import pandas as pd


# A table of more clients helps nobody; all of them are in summary.json.
_MOST_LISTED, _LISTED_OF_MANY = 200, 50

_QUANTILES = {"least": 0.0, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1.0}

# A larger matrix cannot be read; summary.json has it.
MOST_CLASSES = 20

# samples.jsonl has all of them.
MOST_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A caption, column headers and rows of text; every row has one cell for each header."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Stored(Protocol):
    """The deduplicated variants of a run, as `fedpriv.models.variants.stored_in` reads them."""

    @property
    def lossless(self) -> bool:
        """Whether all are stored without loss."""

    @property
    def num_validations(self) -> int:
        """The number of validations, over all variants."""

    def variant_table(self) -> TextTable:
        """A row for each variant, before and after deduplication."""

    def size_table(self, base_bytes: int | None) -> TextTable:
        """The bytes of all variants in each way of storing them."""


ReadStored = Callable[[Path], Stored | None]
"""Reads the deduplicated variants of a run's folder; None without any."""


def nothing_stored(run_dir: Path) -> None:
    """There are no deduplicated variants."""


def format_range(values: pd.Series) -> str:
    """`0.04` if all values are equal, else `0.03 to 0.05`; missing values are ignored."""
    present = values.dropna()
    if present.empty:
        return figures.MISSING
    low, high = f"{present.min():.4g}", f"{present.max():.4g}"
    return low if low == high else f"{low} to {high}"


def client_table(
    clients: Iterable[Mapping[str, Any]], accountant: str, *, view: str, unit: str | None = None
) -> TextTable:
    """The final figures of each client, from `summary.json`: what it sent, received and spent.

    Of more than 200 clients they are those of the 50 that spent most on the view.

    Args:
        clients: entries with client, num_records, rounds, epsilon_local, epsilon_rho, delta, bytes_up and
            bytes_down; with epsilon_aggregate, if that view holds for all of them.
        accountant: the one that computed the epsilons, such as `pld`; it is named in the caption.
        view: that was asked for, which comes first.
        unit: that the epsilons protect, as in `summary.json`; None of an older run.
    """
    clients = list(clients)
    of_all = len(clients)
    has_aggregate = bool(clients) and all(client.get("epsilon_aggregate") is not None for client in clients)
    views = [name for name in figures.asked_first(view) if name != "aggregate" or has_aggregate]
    if of_all > _MOST_LISTED:
        # The sort is stable, so that of equal ones the first are listed.
        clients = sorted(clients, key=lambda client: -_figure_of(client, f"epsilon_{views[0]}"))[:_LISTED_OF_MANY]
    # Shorter than `aggregate`, so that 80 columns hold the table.
    epsilons = ("ε sum" if name == "aggregate" else f"ε {name}" for name in views)
    headers = ("client", what_is_counted(unit), "rounds", *epsilons, "δ", "sent", "received")
    rows = tuple(
        (
            holder_label(client["client"], client.get("name")),
            f"{client['num_records']:,}",
            str(client["rounds"]),
            *(figures.format_bound(client[f"epsilon_{name}"]) for name in views),
            figures.format_delta(client["delta"]),
            figures.format_bytes(client["bytes_up"]),
            figures.format_bytes(client["bytes_down"]),
        )
        for client in clients
    )
    whose = "Per client" if len(rows) == of_all else f"The {len(rows)} of {of_all:,} clients that spent most"
    caption = f"{whose}, final figures ({accountant}), ε{of_whom(unit)} at the row's δ"
    return TextTable(caption=caption, headers=headers, rows=rows)


def spread_table(clients: Sequence[Mapping[str, Any]], *, view: str) -> TextTable | None:
    """Quantiles over more clients than `client_table` lists, first of the view asked for; None for fewer."""
    if len(clients) <= _MOST_LISTED:
        return None
    rows = []
    for name, key, show in (
        ("rounds", "rounds", lambda value: f"{value:,.0f}"),
        *((f"ε {name}", f"epsilon_{name}", figures.format_bound) for name in figures.asked_first(view)),
        ("sent", "bytes_up", figures.format_bytes),
        ("received", "bytes_down", figures.format_bytes),
    ):
        values = sorted(_figure_of(client, key) for client in clients)
        if key == "epsilon_aggregate" and math.isinf(values[-1]):
            continue  # it does not hold for all
        found = (values[math.ceil(share * (len(values) - 1))] for share in _QUANTILES.values())
        rows.append((name, *map(show, found)))
    return TextTable(
        caption=f"Spread over all {len(clients):,} clients: shares of them have at most this",
        headers=("", *_QUANTILES),
        rows=tuple(rows),
    )


def _figure_of(client: Mapping[str, Any], key: str) -> float:
    """A figure of a client's entry; infinite where none is stated, as an epsilon then is."""
    return math.inf if client[key] is None else float(client[key])


def joining_table(summary: Mapping[str, Any]) -> TextTable | None:
    """The gain of a holder by joining: its own model's accuracy beside the federation's; None if no own one is known.

    Both are tested on the holder's own test records, or on all where nobody knows whose they are.
    """
    clients = [client for client in summary["clients"] if client.get("own_alone_accuracy") is not None]
    if clients:
        tested, whose, together = "own_alone_accuracy", "its own test records", "own_accuracy"
    else:
        clients = [client for client in summary["clients"] if client.get("alone_accuracy") is not None]
        tested, whose, together = "alone_accuracy", "all test records", ""
    rows = tuple(
        (
            holder_label(client["client"], client.get("name")),
            f"{client['num_records']:,}",
            *([f"{client['num_own_test_records']:,}"] if together else ()),
            figures.format_percent(client[tested]),
            figures.format_percent(client[together] if together else summary["accuracy"]),
        )
        for client in clients
    )
    counted = what_is_counted(summary.get("unit"))
    headers = ("client", counted, *(["tests"] if together else ()), "alone", "together")
    caption = f"A linear probe of each holder's own, without privacy, or this run: accuracy on {whose}"
    return TextTable(caption=caption, headers=headers, rows=rows) if rows else None


def recurrence_table(clusters: Iterable[Mapping[str, Any]] | None) -> TextTable | None:
    """The clusters of clients whose variants recur, a row per cluster; None if they were not compared."""
    if clusters is None:
        return None
    rows = tuple(
        (
            ", ".join(cluster["clients"]),
            str(cluster["recurrence"]),
            str(cluster["k"]) if cluster["k"] >= 2 else f"{cluster['k']}, no claim",
            figures.format_number(cluster["largest_difference"]),
        )
        for cluster in clusters
    )
    headers = ("clients", "recurrence", "k of their mean", "largest difference")
    return TextTable(caption="Clusters in which every two variants are near each other", headers=headers, rows=rows)


def series_table(frame: pd.DataFrame, caption: str, format_value: Callable[[float], str]) -> TextTable:
    """The numbers of a plot: a row per round, a column per line."""
    headers = (str(frame.index.name), *map(str, frame.columns))
    rows = tuple(
        (f"{index:g}" if isinstance(index, (int, float)) else str(index), *map(format_value, values))
        for index, values in zip(frame.index, frame.to_numpy(float), strict=True)
    )
    return TextTable(caption=caption, headers=headers, rows=rows)


def accuracy_table(summary: Mapping[str, Any]) -> TextTable:
    """The accuracies of a run and of what it has to beat, the run itself first; what was not computed has no row."""
    view = summary["privacy_view"]
    epsilons = {name: summary.get(f"epsilon_{name}_max") for name in figures.told_first(view)}
    spent = views_text(epsilons, view, parts=account_parts(summary))
    cost = f"ε {spent}, δ {figures.format_delta(summary['delta_max'])}"
    others = (
        ("without noise", "accuracy_non_private", "z = 0, clipping kept"),
        ("each alone", "alone_accuracy", _range_alone(summary)),
        ("linear probe", "probe_accuracy", _trained_on(summary)),
        ("TF-IDF", "tfidf_accuracy", _trained_on(summary)),
        ("largest class", "majority_accuracy", "always guessing it"),
        ("untrained", "accuracy_initial", ""),
    )
    macro_f1 = "" if summary["macro_f1"] is None else f"{summary['macro_f1']:.4f}"
    rows = [
        ("private" if summary["private"] else "this run", figures.format_accuracy(summary), macro_f1, cost),
        *((name, f"{summary[key]:.4f}", "", note) for name, key, note in others if summary[key] is not None),
    ]
    return TextTable(caption="Accuracies on one test set", headers=("", "accuracy", "macro F1", ""), rows=tuple(rows))


def _range_alone(summary: Mapping[str, Any]) -> str:
    """The range of the accuracies of the holders' own models, of which the row shows the mean."""
    low, high = (summary.get(f"alone_accuracy_{end}") for end in ("min", "max"))
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f} on own records"


def _trained_on(summary: Mapping[str, Any]) -> str:
    """The records that the baselines were trained on, in a few words."""
    baselines = summary["baselines"]
    if not baselines:
        return "no privacy"
    num, available = baselines["num_trained_on"], baselines["num_available"]
    if baselines["folds"]:
        return f"{baselines['folds']}-fold on {available:,} test records"
    records = f"{num:,} pooled" if num == available else f"{num:,} of {available:,}"
    return f"{records} records, no privacy"


@dataclass(frozen=True, kw_only=True)
class ConfusionTable:
    """A confusion matrix: each true class, its number of records, and number and share of each prediction."""

    labels: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[tuple[int, float], ...]], ...]


def confusion_table(summary: Mapping[str, Any]) -> ConfusionTable | None:
    """The confusion matrix; None if there is none, or it has more classes than can be read."""
    confusion: Sequence[Sequence[int]] | None = summary["confusion_matrix"]
    if confusion is None or len(confusion) > MOST_CLASSES:
        return None
    labels = tuple(summary["labels"])
    rows = tuple(
        (label, total := sum(counts), tuple((count, count / max(total, 1)) for count in counts))
        for label, counts in zip(labels, confusion, strict=True)
    )
    return ConfusionTable(labels=labels, rows=rows)


def language_table(summary: Mapping[str, Any]) -> TextTable | None:
    """Perplexity and ROUGE-L of the models of a run, the private one first; None if neither was measured."""
    if summary["perplexity"] is None and summary["rouge_l"] is None:
        return None
    view = summary["privacy_view"]
    epsilon, delta = summary[f"epsilon_{view}_max"], summary["delta_max"]
    spent = f"ε {figures.format_bound(epsilon)} {view}, δ {figures.format_delta(delta)}"
    rows = [
        (
            _name(summary["private"]),
            _perplexity(summary["perplexity"]),
            _with_error(summary["rouge_l"], summary["rouge_l_standard_error"]),
            spent,
        ),
        *(
            (name, _perplexity(summary[f"perplexity_{key}"]), _with_error(summary[f"rouge_l_{key}"], None), note)
            for name, key, note in (
                ("without noise", "non_private", "z = 0, clipping kept"),
                ("untrained", "initial", ""),
            )
            if summary[f"perplexity_{key}"] is not None or summary[f"rouge_l_{key}"] is not None
        ),
    ]
    return TextTable(caption="Responses of the test set", headers=("", "perplexity", "ROUGE-L", ""), rows=tuple(rows))


def changes(summary: Mapping[str, Any]) -> list[str]:
    """The differences to the untrained model, with standard errors of the paired differences, a line each."""
    named = (
        ("log perplexity", "log_perplexity_change", "log_perplexity_change_standard_error"),
        ("ROUGE-L", "rouge_l_change", "rouge_l_change_standard_error"),
    )
    return [
        f"{name} {summary[key]:+.4f}" + ("" if summary[error] is None else f" ± {summary[error]:.4f}")
        for name, key, error in named
        if summary[key] is not None
    ]


def sample_table(samples: Sequence[Sample], *, private: bool) -> TextTable | None:
    """The first samples, a row each; None without any."""
    if not samples:
        return None
    compared = any(sample.non_private is not None for sample in samples)
    headers = ("prompt", "reference", "untrained", _name(private), *(["without noise"] if compared else []))
    rows = tuple(
        (s.prompt, s.reference, s.untrained, s.private, *([s.non_private or ""] if compared else []))
        for s in samples[:MOST_SAMPLES]
    )
    caption = f"The first {len(rows)} of {len(samples)} prompts with answers; samples.jsonl has all of them"
    return TextTable(caption=caption, headers=headers, rows=rows)


def stored_answer_table(answers: Sequence[StoredAnswer]) -> TextTable | None:
    """Prompts with a variant's answers before and after deduplication, a row each; None without any."""
    if not answers:
        return None
    headers = ("prompt", "reference", "as it was given", "as it is stored")
    rows = tuple((each.prompt, each.reference, each.before, each.after) for each in answers)
    caption = f"Answers of {answers[0].variant}, which may have lost most, to prompts by which nothing was chosen"
    return TextTable(caption=caption, headers=headers, rows=rows)


def _name(private: bool) -> str:
    return "private" if private else "this run"


def _perplexity(value: float | None) -> str:
    return figures.MISSING if value is None else figures.format_number(value) if value >= 1000 else f"{value:.2f}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return figures.MISSING
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def views_text(
    epsilons: Mapping[str, float | None],
    view: str,
    limit: tuple[str, float] | None = None,
    parts: tuple[float, float] | None = None,
) -> str:
    """The epsilons by view, such as `2.30 of 2.30 local, 5.09 rho`, first those of the parts of a shared account.

    Args:
        epsilons: {view: epsilon}; None where a view does not hold.
        view: that was asked for, which comes first, with the limit.
        limit: on that view, by name and size, if there is one.
        parts: what this run has spent on that view, and what stood in the account before it; None if nothing did.
    """
    own = ""
    if parts is not None:
        own, limit = figures.of_this_run(parts, limit)
        own = f"{own}: "
    of = "" if limit is None else f" of {limit[1]:.4g}"
    texts = [
        f"{figures.format_bound(epsilon)}{of if name == view else ''} {name}"
        for name in figures.told_first(view)
        if (epsilon := epsilons.get(name)) is not None
    ]
    return own + ", ".join(texts)


def accuracies_to_beat(summary: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies that a run has to beat, by name: chance only where the largest class is not known."""
    largest = summary.get("majority_accuracy")
    guess = {"chance": summary.get("chance_accuracy")} if largest is None else {"largest class": largest}
    named = {
        **guess,
        "each alone": summary.get("alone_accuracy"),
        **dict(filter(None, [figures.best_baseline(summary)])),
    }
    return {name: accuracy for name, accuracy in named.items() if accuracy is not None}
