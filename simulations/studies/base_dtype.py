"""The accuracy that a frozen base in bfloat16 costs: the same seeded federations in both formats.

    python -m simulations.studies.base_dtype --data FOLDER [--seeds 0,1,2] [--corpora "embedded;SST-2 6,000 iid"]

The default recipe at local epsilon 8, where noise hides least, on corpora of the study of utility. A seed decides
split, records and noise, so the two runs of a seed differ by the format alone. Each run is a line of
results/studies/base_dtype.jsonl; runs that have one are not repeated.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from simulations.studies._utility_cells import NAMED, RECIPE, SEEDS, UtilityCell, configuration
from simulations.studies.federations import federated
from simulations.studies.harness import Estimate, Line, Results, difference, listed, parser, run_missing, table

FORMATS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class FormatCell:
    """One run: a corpus by name, the format of its base, and its seed."""

    corpus: str
    base_dtype: Literal["float32", "bfloat16"]
    seed: int = 0

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"{self.corpus}/{self.base_dtype}/{self.seed}"


def measure(data: Path, cell: FormatCell) -> Line:
    """Accuracy, noise and seconds of one run.

    Raises:
        InputError: the data folder lacks the corpus.
    """
    run = UtilityCell(corpus=cell.corpus, method=RECIPE, epsilon=8.0, seed=cell.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(run, Path(folder), data, Path(folder) / "run")
        return federated(replace(config, base_dtype=cell.base_dtype))


def main() -> None:
    """Run what is missing, and print a table of both formats."""
    own = parser(__doc__)
    own.add_argument("--data", type=Path, required=True, help="folder of the public files")
    own.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    own.add_argument("--corpora", type=listed(";"), default=NAMED[:-1], help="names, separated by semicolons")
    own.add_argument("--out", type=Path, default=Path("results/studies/base_dtype.jsonl"), help="a line for each run")
    arguments = own.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    cells = [
        FormatCell(corpus=corpus, base_dtype=name, seed=seed)
        for corpus in arguments.corpora
        for seed in seeds
        for name in FORMATS
    ]
    run_missing(arguments.out, cells, partial(measure, arguments.data), lambda line: f"{line['accuracy']:.4f}")
    results, rows = Results.read(arguments.out), []
    for corpus in arguments.corpora:
        found = [results.by_seed(FormatCell(corpus=corpus, base_dtype=name), seeds) for name in FORMATS]
        estimates = (*(Estimate.of(each.values()) for each in found), difference(found[1], found[0]))
        rows.append((corpus, *(each.text(digits=4) if each else "" for each in estimates)))
    print(table(("corpus", *FORMATS, "bfloat16 less float32"), rows))


if __name__ == "__main__":
    main()
