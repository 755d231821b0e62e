"""How a language model answers, before and after a run, as tables: for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.runs.samples import Sample
from fedpriv.runs.show.tables import MISSING, TextTable, format_bound, format_delta, format_number

# samples.jsonl has all of them.
MOST_SAMPLES = 10


def counts_next_tokens(summary: Mapping[str, Any]) -> bool:
    """Whether the run's accuracy is no more than the share of next tokens that a language model finds."""
    return summary["perplexity"] is not None and summary["confusion_matrix"] is None


def language_table(summary: Mapping[str, Any]) -> TextTable | None:
    """Perplexity and ROUGE-L of the models of a run, the private one first; None if neither was measured.

    Args:
        summary: of a run, with the keys of `fedpriv.runs.reader.LANGUAGE_KEYS`.
    """
    if summary["perplexity"] is None and summary["rouge_l"] is None:
        return None
    view = summary["privacy_view"]
    spent = f"ε {format_bound(summary[f'epsilon_{view}_max'])} {view}, δ {format_delta(summary['delta_max'])}"
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
    """What the run changed against the untrained model, with standard errors of the paired differences, a line each."""
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
    """The first samples, a row each; None without any.

    Args:
        samples: of a run.
        private: whether the run was, by which its own answers are called.
    """
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


def _name(private: bool) -> str:
    return "private" if private else "this run"


def _perplexity(value: float | None) -> str:
    return MISSING if value is None else format_number(value) if value >= 1000 else f"{value:.2f}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
