"""Audits of this project's own guarantees.

    python -m simulations.studies.audit run|tables [--data FOLDER] [--kinds local,views,...]

`run` makes the audits, one JSON line each, and skips those that are there. `tables` writes results/audit.md and its
plots. `run --kinds broken` makes the self-check: what each detector says of mechanisms broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from simulations.studies.audit import black_box, published, self_check, tables, vault, white_box
from simulations.studies.harness import Line, lines, listed, parser, run_missing

RUNS: Mapping[str, Callable[..., Line]] = {
    "local": white_box.local_run,
    "views": white_box.view_run,
    "clients": white_box.client_run,
    "randomised response": self_check.randomised_response,
    "graded": self_check.graded,
    "gaussian": self_check.gaussian,
    "broken": self_check.broken_run,
    "full model": black_box.full_model_run,
    "vault": vault.vault_run,
    "repeated": black_box.repeated_run,
}
KINDS = (
    "coverage", "broken", "views", "clients", "local", "membership", "extraction", "full-model", "language-models",
    "vault", "repeated",
)  # fmt: skip


@dataclass(frozen=True)
class AuditCell:
    """One audit: its kind and the arguments of the function that makes it."""

    run: str
    values: tuple[str | float, ...]

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return " | ".join((self.run, *(each if isinstance(each, str) else f"{each:g}" for each in self.values)))


def cells(kind: str) -> Iterator[AuditCell]:
    """All audits of a kind, one of `KINDS`."""
    seeds = range(white_box.SEEDS)
    if kind == "local":
        values = product(white_box.SCHEDULES, white_box.CLAIMS, white_box.CANARIES, seeds)
        yield from (AuditCell("local", each) for each in values)
    elif kind == "views":
        yield from (AuditCell("views", each) for each in product(white_box.SCHEDULES, seeds))
    elif kind == "clients":
        yield from (AuditCell("clients", each) for each in product(white_box.CLAIMS, seeds))
    elif kind == "coverage":
        yield from (AuditCell("randomised response", each) for each in product((0.5, 1.0, 4.0), (100, 1000)))
        yield from (AuditCell("graded", (epsilon,)) for epsilon in (1.0, 4.0))
        yield from (AuditCell("gaussian", each) for each in ((0.925, 500, 40), (0.925, 1000, 500), (0.25, 1000, 200)))
    elif kind == "broken":
        yield from (AuditCell("broken", (case.name,)) for case in self_check.cases())
    elif kind == "vault":
        yield from (AuditCell("vault", (observer, 0)) for observer in vault.OBSERVERS)
    elif kind == "repeated":
        yield AuditCell("repeated", (black_box.REPEATED,))
    elif kind == "membership":
        yield from (AuditCell("membership", each) for each in product(published.CORPORA, published.CLAIMS))
    elif kind == "extraction":
        yield from (AuditCell("extraction", (condition,)) for condition in published.CLAIMS)
    elif kind == "language-models":
        conditions = product(black_box.LANGUAGE_CLAIMS, black_box.LANGUAGE_SEEDS)
        yield from (AuditCell("language models", each) for each in conditions)
    else:
        yield from (AuditCell("full model", (condition,)) for condition in black_box.FULL_MODEL_NOISE)


def measure(plots: Path, data: Path, cell: AuditCell) -> Line:
    """The results of one audit; a membership attack draws its ROC curves into the folder of plots."""
    if cell.run == "membership":
        corpus, condition = map(str, cell.values)
        plot = plots / f"audit-roc-{corpus}-{condition}.png".replace(" ", "-")
        return published.membership_run(data, corpus, condition, plot)
    if cell.run == "extraction":
        return published.extraction_run(data, *map(str, cell.values))
    if cell.run == "language models":
        name, seed = cell.values
        return black_box.language_model_run(data, str(name), int(seed))
    return RUNS[cell.run](*cell.values)


def main() -> None:
    """Do one step of the study."""
    own = parser(__doc__, "audit")
    own.add_argument("--kinds", type=listed(","), default=list(KINDS))
    arguments = own.parse_args()
    if unknown := [name for name in arguments.kinds if name not in KINDS]:
        own.error(f"kinds = {unknown[0]}: known are {', '.join(KINDS)}")
    torch.set_num_threads(1)
    if arguments.step == "tables":
        tables.write(arguments.page, lines(arguments.runs))
        return
    chosen = [cell for kind in arguments.kinds for cell in cells(kind)]
    measured = partial(measure, arguments.page.parent, arguments.data)
    which = {"until": arguments.until, "only": arguments.only}
    run_missing(arguments.runs, chosen, measured, lambda line: line["kind"], **which)


if __name__ == "__main__":
    main()
