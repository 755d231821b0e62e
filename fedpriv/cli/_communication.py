"""`fedpriv communication`: what a federation would send, before anything is downloaded or trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli._command import Result, entries
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.plan.communication import PaperRow

MODEL_HELP = "gpt2, bert-base, llama-7b, chatglm2-6b, a folder with a config.json, or a model on the Hub."
PAPER_NOTES = (
    "All figures are parameters of one client's upload in one round; % are of all parameters.",
    "off: the formula L r 2n against the paper's figure; given: whether they differ by at most 5 %.",
    "> whole: the paper's figure exceeds that of sending the adapted matrices whole.",
    "ratio: whether the paper's overhead over its own origin gives the ratio that it prints.",
    "Adapted matrices assumed:",
)


def communication(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    rank: Annotated[int, typer.Option(help="r of LoRA, >= 1.")] = 8,
    targets: Annotated[
        list[str] | None, typer.Option(help="A linear layer to adapt; may be repeated. By default those of peft.")
    ] = None,
    clients: Annotated[int, typer.Option(help="K, all of which take part in every round, >= 1.")] = 5,
    rounds: Annotated[int, typer.Option(help="T, >= 1.")] = 50,
    bytes_per_value: Annotated[int, typer.Option(help="4 for float32, 2 for float16.")] = 4,
    compare_paper: Annotated[
        bool, typer.Option("--compare-paper", help="Also every line of the DP-LoRA paper's Tables 5, 18 and 19.")
    ] = False,
) -> Result:
    """Count what a federation with LoRA sends: exact parameters and bytes, and the paper's formula. Needs no weights.

    Counts A and B only: a classification head, which SEQ_CLS runs send too, and file formats come on top. Example:

    fedpriv communication --model llama-7b --rank 512 --targets q_proj --targets k_proj --targets v_proj
    """
    if model is None and not compare_paper:
        raise InputError("--model: name one, or give --compare-paper")
    from fedpriv.plan import communication as counting

    result: dict[str, Any] = {}
    if model is not None:
        shape = counting.model_shape(model)
        counted = counting.count(
            shape,
            rank=rank,
            targets=targets or (),
            num_clients=clients,
            num_rounds=rounds,
            bytes_per_value=bytes_per_value,
        )
        result = asdict(counted)
    rows = counting.compare_paper() if compare_paper else []
    lines = entries({name: _readable(value) for name, value in result.items()})
    paper_lines = _paper_table(rows) if rows else []
    values = result | ({"paper_rows": [asdict(row) for row in rows]} if rows else {})
    return Result(values, [*lines, *([""] if lines and paper_lines else []), *paper_lines])


def _readable(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _paper_table(rows: Sequence[PaperRow]) -> list[str]:
    """Lines of at most 120 columns."""
    head = ["table", "model", "method", "rank", "paper", "paper %", "exact", "exact %", "formula", "off", "given"]
    cells = [[*head, "> whole", "ratio"], *map(_paper_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in cells]
    given = [row.given_by_formula for row in rows if row.given_by_formula is not None]
    targets = {row.model: ", ".join(row.targets) for row in rows if row.targets}
    assumed = [f"  {model:<{max(map(len, targets))}}  {names}" for model, names in targets.items()]
    return [*table, "", f"{sum(given)} of {len(given)} figures are given by the formula.", *PAPER_NOTES, *assumed]


def _paper_cells(row: PaperRow) -> list[str]:
    def million(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:,.1f}M"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def word(value: bool | None, words: tuple[str, str]) -> str:
        return "" if value is None else words[value]

    return [
        str(row.table),
        row.model,
        row.method,
        str(row.rank or ""),
        million(row.paper_parameters),
        percent(row.paper_reduction_percent),
        million(row.exact_parameters),
        percent(row.exact_reduction_percent),
        million(row.formula_parameters),
        "" if row.relative_deviation is None else f"{row.relative_deviation:+.1%}",
        word(row.given_by_formula, ("no", "yes")),
        word(row.exceeds_adapted_matrices, ("", "yes")),
        word(row.ratio_contradicts_overhead, ("yes", "NO")),
    ]
