"""Figure 1: how far the blocks of one model are from those of another, in its place and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist

from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from simulations.studies.dedup.report.results import DedupResults, section
from simulations.studies.dedup.scenarios import BLOCK_SIZE, SCENARIOS, Model, Scenario
from simulations.studies.harness import Line, run_missing

NEAR = 0.1  # standard deviations of a model's values


@dataclass(frozen=True)
class PairCell:
    """Two models of one architecture."""

    one: Model
    other: Model

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return f"{self.one.name} {self.other.name}"


_QNLI, _SST2 = SCENARIOS["A1"].models, SCENARIOS["A2"].models
# As in the paper: epsilon 1 and 2 on the same records, and epsilon 1 and 0.4 on different ones.
PAIRS = (PairCell(_QNLI[0], _QNLI[1]), PairCell(_QNLI[0], _SST2[1]))


def compare_all(out: Path, scenarios: Sequence[Scenario]) -> None:
    """Compare the pairs whose models are in these scenarios and that have no line in `pairs.jsonl` yet."""
    known = {model for scenario in scenarios for model in scenario.all_models}
    chosen = [pair for pair in PAIRS if {pair.one, pair.other} <= known]
    tell = "correlation {0[correlation]:.4f}, nearest in its own place {0[own_place]:.1%}".format
    run_missing(out / "pairs.jsonl", chosen, partial(_compared, out), tell)


def _compared(out: Path, cell: PairCell) -> Line:
    one, other = (folders.read_tensors(out / "models" / model.name) for model in (cell.one, cell.other))
    layout = layout_of(one, BLOCK_SIZE)
    rows, others = (layout.to_blocks(tensors)[0] for tensors in (one, other))
    apart = cdist(rows, others)
    nearest = apart.argmin(axis=1)
    values, their = (np.concatenate([each[name].ravel() for name in sorted(one)]) for each in (one, other))
    return {
        "correlation": float(np.corrcoef(values, their)[0, 1]),
        "near": float((np.abs(values - their) < NEAR * values.std()).mean()),
        "own_place": float((nearest == np.arange(len(nearest))).mean()),
        "distance": float(np.median(apart.diagonal())),
        "distance_elsewhere": float(np.median(apart[~np.eye(len(apart), dtype=bool)])),
        "nearest": nearest.tolist(),
    }


def compared(results: DedupResults) -> str:
    """The pairs of models, weight by weight and block by block."""
    told = [
        f"- {line['key'].replace(' ', ' and ')}: correlation {line['correlation']:.4f}; {line['near']:.1%} of the "
        f"weights differ by less than {NEAR} standard deviations; {line['own_place']:.1%} of the blocks have their "
        f"nearest in their own place, at a median distance of {line['distance']:.3f}, elsewhere "
        f"{line['distance_elsewhere']:.3f}."
        for line in results.pairs
    ]
    return section("Two models, block by block (Figure 1)", "\n".join(told)) if told else ""
