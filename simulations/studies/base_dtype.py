"""The accuracy that a frozen base in bfloat16 costs: the same seeded federations in both formats.

    python -m simulations.studies.base_dtype --data FOLDER [--seeds 0,1,2] [--corpora "embedded;SST-2 iid"]

The default recipe at local epsilon 8, where noise hides least, on corpora of the study of utility. A seed decides
split, records and noise, so the two runs of a seed differ by the format alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

from simulations.engines import federation
from simulations.studies.utility.cells import NAMED, RECIPE, SEEDS, Cell
from simulations.studies.utility.run import SilentObserver, configuration

FORMATS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def measure(corpus: str, seed: int, data: Path, base_dtype: Literal["float32", "bfloat16"]) -> dict[str, float]:
    """Accuracy and seconds of one run.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    cell = Cell(corpus=corpus, method=RECIPE, epsilon=8.0, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(cell, Path(folder), data, Path(folder) / "run")
        observer, started = SilentObserver(), time.perf_counter()
        federation.run(replace(config, base_dtype=base_dtype), observer)
        return {"accuracy": observer.summary["accuracy"], "seconds": time.perf_counter() - started}


def shown(values: Sequence[float]) -> str:
    """The mean over seeds, and its standard error."""
    error = f" +- {stdev(values) / sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{error}"


def main() -> None:
    """Print a line for each pair of runs, and a JSON line for each corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public files")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--corpora", default=";".join(NAMED[:-1]), help="names, separated by semicolons")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for corpus in arguments.corpora.split(";"):
        pairs = []
        for seed in map(int, arguments.seeds.split(",")):
            pairs.append({name: measure(corpus, seed, arguments.data, name) for name in FORMATS})
            print(f"{corpus}, seed {seed}: {json.dumps(pairs[-1])}", flush=True)
        found: dict[str, list[float]] = {name: [pair[name]["accuracy"] for pair in pairs] for name in FORMATS}
        found["bfloat16 less float32"] = [b - a for a, b in zip(*found.values(), strict=True)]
        print(json.dumps({"corpus": corpus, **{name: shown(values) for name, values in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
