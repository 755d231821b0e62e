"""Deduplication of networks that were trained under differential privacy on scikit-learn's digits.

    python -m simulations.studies.dedup train|run|check|tables [--out results/studies/dedup] [--scenarios A1,B1]

`train` trains the models and writes a folder of variants for each scenario, `run` deduplicates them in every way of
the study, one JSON line for each, `check` verifies every store by other means, and `tables` writes the study's part of
results/dedup.md. Results that are there are not computed again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fedpriv.errors import InputError
from simulations.studies.dedup import check, run, train
from simulations.studies.dedup.report import page
from simulations.studies.dedup.scenarios import SCENARIOS


def main() -> None:
    """Do one step of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "run", "check", "tables"))
    parser.add_argument("--out", type=Path, default=Path("results/studies/dedup"))
    parser.add_argument("--page", type=Path, default=Path("results/dedup.md"))
    parser.add_argument("--scenarios", type=lambda text: text.split(","), default=list(SCENARIOS))
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.scenarios if name not in SCENARIOS]:
        parser.error(f"scenarios = {unknown[0]}: known are {', '.join(SCENARIOS)}")
    torch.set_num_threads(1)
    chosen = [SCENARIOS[name] for name in arguments.scenarios]
    try:
        if arguments.step == "train":
            train.train_all(arguments.out, chosen)
        elif arguments.step == "run":
            run.run_all(arguments.out, chosen)
        elif arguments.step == "check":
            sys.exit(0 if check.check_all(arguments.out) else 1)
        else:
            page.write(arguments.page, arguments.out)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
