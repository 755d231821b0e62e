"""A run's accuracy beside what needs no federation, and its confusion matrix: for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpriv.runs.show.spending import views_text
from fedpriv.runs.show.tables import TextTable, asked_first, format_accuracy, format_delta

# A larger matrix cannot be read; summary.json has it.
MOST_CLASSES = 20


def accuracy_table(summary: Mapping[str, Any]) -> TextTable:
    """The accuracies of a run and of what it has to beat, the run itself first; what was not computed has no row.

    Args:
        summary: of a run, with the keys of `fedpriv.runs.reader.QUALITY_KEYS`.
    """
    view = summary["privacy_view"]
    spent = views_text({name: summary.get(f"epsilon_{name}_max") for name in asked_first(view)}, view)
    cost = f"ε {spent}, δ {format_delta(summary['delta_max'])}"
    others = (
        ("without noise", "accuracy_non_private", "z = 0, clipping kept"),
        ("linear probe", "probe_accuracy", _trained_on(summary)),
        ("TF-IDF", "tfidf_accuracy", _trained_on(summary)),
        ("largest class", "majority_accuracy", "always guessing it"),
        ("untrained", "accuracy_initial", ""),
    )
    rows = [
        ("private" if summary["private"] else "this run", format_accuracy(summary), _macro_f1(summary), cost),
        *((name, f"{summary[key]:.4f}", "", note) for name, key, note in others if summary[key] is not None),
    ]
    return TextTable(caption="Accuracies on one test set", headers=("", "accuracy", "macro F1", ""), rows=tuple(rows))


def _macro_f1(summary: Mapping[str, Any]) -> str:
    return "" if summary["macro_f1"] is None else f"{summary['macro_f1']:.4f}"


def _trained_on(summary: Mapping[str, Any]) -> str:
    """What the baselines were trained on, in a few words."""
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
    """A confusion matrix to be shown.

    Attributes:
        labels: the classes.
        rows: a row for each true class: its name, its number of records, and for each predicted class the number and
            the share of the row, in [0, 1].
    """

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
