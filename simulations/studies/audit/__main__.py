"""Audits of this project's own guarantees.

    python -m simulations.studies.audit run|tables [--out results/studies/audit] [--only local,views,...]

`run` makes the audits, one JSON line each, and skips those that are there. `tables` writes results/audit.md and its
plots. `run --only broken` makes the self-check: what each detector says of mechanisms broken on purpose.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from simulations.studies.audit import coverage, full_model, membership_runs, self_check, tables, white_box_runs
from simulations.studies.dedup.cells import append, lines

Run = tuple[str, Callable[[], dict[str, Any]]]
KINDS = ("coverage", "broken", "views", "clients", "local", "membership", "full-model")


def main() -> None:
    """Do one step of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "tables"))
    parser.add_argument("--out", type=Path, default=Path("results/studies/audit"))
    parser.add_argument("--page", type=Path, default=Path("results/audit.md"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS))
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only if name not in KINDS]:
        parser.error(f"only = {unknown[0]}: known are {', '.join(KINDS)}")
    torch.set_num_threads(1)
    if arguments.step == "tables":
        tables.write(arguments.page, lines(arguments.out / "runs.jsonl"))
        return
    path = arguments.out / "runs.jsonl"
    done = {line["key"] for line in lines(path)}
    for kind in arguments.only:
        for key, make in runs(kind, arguments.page.parent):
            if key not in done:
                line = {"key": key, **make()}
                append(path, line)
                print(key, flush=True)


def runs(kind: str, plots: Path) -> Iterator[Run]:
    """(key, function that makes the line) of every audit of a kind."""
    if kind == "local":
        yield from white_box_runs.local_runs()
    elif kind == "views":
        yield from white_box_runs.view_runs()
    elif kind == "clients":
        yield from white_box_runs.client_runs()
    elif kind == "coverage":
        for epsilon in (0.5, 1.0, 4.0):
            for num in (100, 1000):
                key = f"randomised response | {epsilon:g} | {num}"
                yield key, functools.partial(coverage.randomised_response, epsilon, num, 0)
        for epsilon in (1.0, 4.0):
            yield f"graded | {epsilon:g}", functools.partial(coverage.graded, epsilon, 5000, 0)
        for mu, num, size in ((0.925, 500, 40), (0.925, 1000, 500), (0.25, 1000, 200)):
            yield f"gaussian | {mu} | {num} | {size}", functools.partial(coverage.gaussian, mu, num, size, 0)
    elif kind == "broken":
        for case in self_check.cases():
            yield f"broken | {case.name}", functools.partial(self_check.run, case)
    elif kind == "membership":
        for condition in membership_runs.CONDITIONS:
            plot = plots / f"audit-roc-{condition.replace(' ', '-')}.png"
            key = f"membership | {condition}"
            yield key, functools.partial(membership_runs.membership_run, condition, plot)
    else:
        for condition in full_model.CONDITIONS:
            yield f"full model | {condition}", functools.partial(full_model.full_model_run, condition)


if __name__ == "__main__":
    main()
