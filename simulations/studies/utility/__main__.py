"""Compare private models with what a user would do without a federation.

    python -m simulations.studies.utility run|tables [--data FOLDER] [--runs results/utility.jsonl]

`run` runs one federation for each cell of the study and keeps a line of each; cells that have one are not run again.
`tables` writes results/utility.md from the lines. The data folder holds sst2_train.csv.gz, sst2_dev.csv.gz,
medquad.csv.gz and adult.csv.gz; corpora that it lacks are skipped. Several processes may add to one file of runs if
their corpora differ; each has a folder of its own for `--out`.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch

from simulations.studies.utility import run, tables
from simulations.studies.utility.cells import SEEDS, cells
from simulations.studies.utility.corpora import CORPORA


def main() -> None:
    """Do one step of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "tables"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the public files")
    parser.add_argument("--runs", type=Path, default=Path("results/utility.jsonl"), help="a line for each cell")
    parser.add_argument("--out", type=Path, default=Path("results/studies/utility"), help="records and features")
    parser.add_argument("--page", type=Path, default=Path("results/utility.md"))
    parser.add_argument(
        "--corpora", type=lambda text: text.split(";"), default=list(CORPORA), help="names, separated by ;"
    )
    parser.add_argument(
        "--methods", type=lambda text: text.split(";"), default=[], help="by name, separated by ;; default all"
    )
    parser.add_argument("--epsilons", type=lambda text: text.split(","), default=[], help="or none; default all")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=SEEDS)
    parser.add_argument("--views", type=lambda text: text.split(","), default=["local", "sum"])
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.corpora if name not in CORPORA]:
        parser.error(f"corpora = {unknown[0]}: known are {', '.join(CORPORA)}")
    if arguments.step == "tables":
        tables.write(arguments.page, arguments.runs)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    chosen = [
        cell
        for cell in cells(arguments.seeds)
        if cell.corpus in arguments.corpora
        and cell.method in (arguments.methods or [cell.method])
        and cell.shown_epsilon in (arguments.epsilons or [cell.shown_epsilon])
        and cell.view in arguments.views
    ]
    until = time.time() + 60 * arguments.minutes if arguments.minutes is not None else None
    run.run_all(arguments.runs, arguments.out, arguments.data, chosen, until=until)


if __name__ == "__main__":
    main()
