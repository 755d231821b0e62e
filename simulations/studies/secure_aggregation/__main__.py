"""Compare secure sums with uploads that the server sees, and with one holder of all records.

    python -m simulations.studies.secure_aggregation run --data FOLDER [--minutes M]
    python -m simulations.studies.secure_aggregation tables

`run` runs one federation for each cell of the study and keeps a line of each; cells that have one are not run again.
`tables` prints the tables of results/secure_aggregation.md and draws its plot. The data folder holds
sst2_train.csv.gz, sst2_dev.csv.gz and medquad.csv.gz; cells whose files it lacks are skipped.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch

from simulations.studies.secure_aggregation import tables
from simulations.studies.secure_aggregation.cells import CORPORA, METHODS, cells, run_all


def main() -> None:
    """Do one step of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("run", "tables"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the public files")
    parser.add_argument(
        "--runs", type=Path, default=Path("results/secure_aggregation.jsonl"), help="a line for each cell"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/studies/secure_aggregation"), help="records, features"
    )
    parser.add_argument("--utility", type=Path, default=Path("results/utility.jsonl"), help="lines of that study")
    parser.add_argument("--plot", type=Path, default=Path("results/secure-aggregation-colluders.png"))
    parser.add_argument("--corpora", type=lambda text: text.split(";"), default=list(CORPORA), help="separated by ;")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments = parser.parse_args()
    if arguments.step == "tables":
        tables.show(arguments.runs, arguments.utility, arguments.plot)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    chosen = [cell for cell in cells() if cell.corpus in arguments.corpora and cell.method in arguments.methods]
    until = time.time() + 60 * arguments.minutes if arguments.minutes is not None else None
    run_all(arguments.runs, arguments.out, arguments.data, chosen, until=until)


if __name__ == "__main__":
    main()
