"""Accuracy and bytes of the aggregation rules: results/aggregation.md.

    python -m simulations.studies.aggregation run|tables [--data FOLDER]

`run` runs the sweeps `aggregation*.toml` of simulations/configs/sweeps and keeps a line of each run; `tables` makes the
page's tables. FOLDER holds medquad.csv.gz, sst2_train.csv.gz and sst2_dev.csv.gz. A run trains MiniLM at delta 1e-5
with the operating system's noise, so repeated runs differ. Embedded: five hospitals. MedQuAD: nine sites. SST-2: ten
clients, unevenly by label.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from simulations.studies.federations import run_sweep
from simulations.studies.harness import Estimate, Line, fill, lines, parser, shown, table

DEFAULT, PAPER, WEIGHTS, RANKS, CODECS, MEDQUAD, SST2 = (
    f"aggregation{part}" for part in ("", "-paper", "-weights", "-ranks", "-codecs", "-medquad", "-sst2")
)
FILES = {
    MEDQUAD: {"data": "medquad.csv.gz"},
    SST2: {"data": "sst2_train.csv.gz", "test_data": "sst2_dev.csv.gz"},
}
"""{sweep: its keys that name files of the data folder}."""

PLOTS = {
    PAPER: ("accuracy-against-epsilon.png", "aggregation-accuracy.png"),
    WEIGHTS: ("bytes-against-accuracy.png", "aggregation-weights-bytes.png"),
}
"""{sweep: a plot in its folder, and the plot's name on the page}."""


def run(runs: Path, out: Path, data: Path, folder: Path) -> None:
    """Run every sweep that has runs without a line, and copy the plots of those into a folder."""
    for name in (DEFAULT, PAPER, WEIGHTS, RANKS, CODECS, MEDQUAD, SST2):
        run_sweep(name, runs, out, {key: str(data / file) for key, file in FILES.get(name, {}).items()})
    for name, (drawn, shown_as) in PLOTS.items():
        if (out / name / drawn).is_file():
            shutil.copy(out / name / drawn, folder / shown_as)


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    found = lines(runs)
    noises = ("epsilon 2", "epsilon 8", "no noise")
    paper = _rules(found, PAPER), _rules(found, WEIGHTS)
    blocks = {
        "default": table(("rule", *noises[:2], "MB up", "MB down"), _rows(found, DEFAULT, _rules(found, DEFAULT), 2)),
        "paper": table(
            ("rule", *noises, "MB up", "MB down"),
            (*_rows(found, PAPER, paper[0], 3), *_rows(found, WEIGHTS, paper[1], 3, ", full weights")),
        ),
        "variants": table(("epsilon 8", "accuracy", "MB up"), _variants(found)),
        "real": table(("rule", "MedQuAD", "MB down", "SST-2", "MB down"), _real(found)),
    }
    fill(page, blocks)


def _rules(found: Sequence[Line], sweep: str) -> list[str]:
    return list(dict.fromkeys(line["cell"]["aggregation"] for line in found if line["sweep"] == sweep))


def _noise(cell: Line) -> float | None:
    """The epsilon that a run aims at; None without noise."""
    return None if cell.get("noise_multiplier") == 0 else cell["target_epsilon"]


def _rows(
    found: Sequence[Line], sweep: str, rules: Sequence[str], num_noises: int, suffix: str = ""
) -> Iterator[Sequence[str]]:
    """Accuracies by noise, and the bytes of all messages of a run, for each rule."""
    for rule in rules:
        own = [line for line in found if line["sweep"] == sweep and line["cell"]["aggregation"] == rule]
        by_noise = [[line for line in own if _noise(line["cell"]) == noise] for noise in (2, 8, None)[:num_noises]]
        accuracies = ("" if not each else shown(_accuracy(each)) for each in by_noise)
        yield f"`{rule}`{suffix}", *accuracies, _megabytes(own, "bytes_up"), _megabytes(own, "bytes_down")


def _accuracy(found: Sequence[Line]) -> Estimate | None:
    return Estimate.of(line["accuracy"] for line in found)


def _megabytes(found: Sequence[Line], figure: str) -> str:
    return f"{mean(line[figure] for line in found) / 1e6:.2f}" if found else ""


def _variants(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Ranks, and codecs of uploads, at epsilon 8."""
    of_paper = [line for line in found if line["sweep"] == PAPER and _noise(line["cell"]) == 8]
    for rule in _rules(found, RANKS):
        own = [line for line in found if line["sweep"] == RANKS and line["cell"]["aggregation"] == rule]
        for line in sorted(own, key=lambda line: int(line["cell"]["rank"])):
            yield _row(f"`{rule}`, rank {line['cell']['rank']}", [line])
    for name, own in _by("upload_codec", [line for line in found if line["sweep"] == CODECS]).items():
        yield _row(f"`dp-lora`, rank 8, `{name}`", own)
    yield _row("`dp-lora`, rank 8, `float32`", [line for line in of_paper if line["cell"]["aggregation"] == "dp-lora"])


def _by(key: str, found: Sequence[Line]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(str(line["cell"][key]), []).append(line)
    return groups


def _row(name: str, found: Sequence[Line]) -> Sequence[str]:
    return name, shown(_accuracy(found)), _megabytes(found, "bytes_up")


def _real(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Accuracies and bytes on the two corpora, and what the untrained model has."""
    groups = [_by("aggregation", [line for line in found if line["sweep"] == sweep]) for sweep in (MEDQUAD, SST2)]
    for rule in groups[0]:
        cells = ((shown(_accuracy(own := each.get(rule, []))), _megabytes(own, "bytes_down")) for each in groups)
        yield f"`{rule}`", *(value for pair in cells for value in pair)
    firsts = [next((line for line in found if line["sweep"] == sweep), None) for sweep in (MEDQUAD, SST2)]
    for name, figure in (("untrained", "accuracy_initial"), ("largest class", "majority_accuracy")):
        values = (f"{line[figure]:.3f}" if line else "" for line in firsts)
        yield name, *(cell for value in values for cell in (value, ""))


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "aggregation").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
    else:
        run(arguments.runs, arguments.out, arguments.data, arguments.page.parent)


if __name__ == "__main__":
    main()
