"""Deduplication of networks that were trained under differential privacy on texts and images.

    python -m simulations.studies.dedup [all|train|pairs|run|retrain|check|serve|tables ...]
        [--out results/studies/dedup] [--scenarios A1,B1] [--data ../shared/data] [--jobs 2]

`train` trains the models and writes a folder of variants for each scenario, `pairs` compares two models block by block,
`run` deduplicates them in every way of the study, one JSON line for each, `retrain` trains the targets of A1 to A5
again with the epsilons that they have then, `check` verifies every store by other means, `serve` measures loading and
inference in bounded memory, and `tables` keeps what it needs of their lines in results/dedup.jsonl, next to those of
other scenarios that are there, writes the study's part of results/dedup.md and its figures, and prints the tables that
the page leaves out; without a folder of results, from the kept lines. `all`, the default, does these one after another.
Results that are there are not computed again, so what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fedpriv.errors import InputError
from simulations.studies.dedup import check, pairs, run, serving, train
from simulations.studies.dedup.report import page, results
from simulations.studies.dedup.scenarios import SCENARIOS
from simulations.studies.harness import listed, parser

STEPS = ("train", "pairs", "run", "retrain", "check", "serve", "tables")


def main() -> None:
    """Do one step of the study, or all."""
    own = parser(__doc__)
    own.add_argument("step", choices=("all", *STEPS), nargs="*", default="all")
    own.add_argument("--out", type=Path, default=Path("results/studies/dedup"))
    own.add_argument("--lines", type=Path, default=Path("results/dedup.jsonl"), help="the kept lines")
    own.add_argument("--page", type=Path, help="by default beside the kept lines")
    own.add_argument("--scenarios", type=listed(","), default=list(SCENARIOS))
    own.add_argument("--data", type=Path, default=Path("../shared/data"), help="holds the texts that train encodes")
    own.add_argument("--only", action="append", default=[], help="pattern of the keys of cells of run; may be repeated")
    own.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="processes, one thread each")
    arguments = own.parse_args()
    if unknown := [name for name in arguments.scenarios if name not in SCENARIOS]:
        own.error(f"scenarios = {unknown[0]}: known are {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    try:
        for step in STEPS if "all" in arguments.step else arguments.step:
            if step == "check" and not check.check_all(arguments.out, jobs=arguments.jobs):
                sys.exit(1)
            _do(step, arguments)
    except InputError as error:
        own.error(str(error))


def _do(step: str, arguments: argparse.Namespace) -> None:
    out, chosen = arguments.out, [SCENARIOS[name] for name in arguments.scenarios]
    if step == "train":
        train.train_all(out, chosen, data=arguments.data, jobs=arguments.jobs)
    elif step == "pairs":
        pairs.compare_all(out, chosen)
    elif step == "run":
        run.run_all(out, chosen, jobs=arguments.jobs, only=arguments.only)
    elif step == "retrain" and {*arguments.scenarios} & {*train.SCENARIO_NAMES}:
        train.retrain_all(out, jobs=arguments.jobs)
    elif step == "serve":
        serving.serve_all(out, arguments.scenarios)
    elif step == "tables":
        if out.is_dir():
            results.keep(out, arguments.lines)
        page.write(arguments.page or arguments.lines.with_suffix(".md"), arguments.lines)


if __name__ == "__main__":
    main()
