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

NOISES = (2, 8, None)
"""The epsilons of tables; None is without noise."""

PLOTS = {
    PAPER: ("accuracy-against-epsilon.png", "aggregation-accuracy.png"),
    WEIGHTS: ("bytes-against-accuracy.png", "aggregation-weights-bytes.png"),
}
"""{sweep: a plot in its folder, and the plot's name on the page}."""


def run(runs: Path, out: Path, data: Path, folder: Path, only: Sequence[str] = ()) -> None:
    """Run every sweep that has runs without a line, and copy the plots of those into a folder."""
    for name in (DEFAULT, PAPER, WEIGHTS, RANKS, CODECS, MEDQUAD, SST2):
        files = FILES.get(name, {})
        if absent := [file for file in files.values() if not (data / file).is_file()]:
            print(f"{name}: skipped: data = {data}: holds no {absent[0]}", flush=True)
            continue
        run_sweep(name, runs, out, {key: str(data / file) for key, file in files.items()}, only=only)
    for name, (drawn, shown_as) in PLOTS.items():
        if (out / name / drawn).is_file():
            shutil.copy(out / name / drawn, folder / shown_as)


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    found = lines(runs)
    epsilons, sizes = ("epsilon 2", "epsilon 8"), ("MB up", "MB down")
    paper = (*_rows(found, PAPER, NOISES), *_rows(found, WEIGHTS, NOISES, ", full weights"))
    blocks = {
        "default": table(("rule", *epsilons, *sizes), _rows(found, DEFAULT, NOISES[:2])),
        "paper": table(("rule", *epsilons, "no noise", *sizes), paper),
        "variants": table(("epsilon 8", "accuracy", "MB up"), _variants(found)),
        "real": table(("rule", "MedQuAD", "MB down", "SST-2", "MB down"), _real(found)),
    }
    fill(page, blocks)


def _of(found: Sequence[Line], sweep: str) -> list[Line]:
    return [line for line in found if line["sweep"] == sweep]


def _noise(cell: Line) -> float | None:
    """The epsilon that a run aims at; None without noise."""
    return None if cell.get("noise_multiplier") == 0 else cell["target_epsilon"]


def _rows(
    found: Sequence[Line], sweep: str, noises: Sequence[float | None], suffix: str = ""
) -> Iterator[Sequence[str]]:
    """Accuracies by noise, and the bytes of all messages of a run, for each rule."""
    for rule, own in _by("aggregation", _of(found, sweep)).items():
        by_noise = [[line for line in own if _noise(line["cell"]) == noise] for noise in noises]
        accuracies = ("" if not each else shown(_accuracy(each)) for each in by_noise)
        yield f"`{rule}`{suffix}", *accuracies, _megabytes(own, "bytes_up"), _megabytes(own, "bytes_down")


def _accuracy(found: Sequence[Line]) -> Estimate | None:
    return Estimate.of(line["accuracy"] for line in found)


def _megabytes(found: Sequence[Line], figure: str) -> str:
    return f"{mean(line[figure] for line in found) / 1e6:.2f}" if found else ""


def _variants(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Ranks, and codecs of uploads, at epsilon 8."""
    for line in _of(found, RANKS):
        yield _row(f"`{line['cell']['aggregation']}`, rank {line['cell']['rank']}", [line])
    own_of_paper = _by("aggregation", _of(found, PAPER)).get("dp-lora", [])
    plain = [line for line in own_of_paper if _noise(line["cell"]) == 8]
    for name, own in {**_by("upload_codec", _of(found, CODECS)), "float32": plain}.items():
        yield _row(f"`dp-lora`, rank 8, `{name}`", own)


def _by(key: str, found: Sequence[Line]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(str(line["cell"][key]), []).append(line)
    return groups


def _row(name: str, found: Sequence[Line]) -> Sequence[str]:
    return name, shown(_accuracy(found)), _megabytes(found, "bytes_up")


def _real(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Accuracies and bytes on the two corpora, and what the untrained model has."""
    groups = [_by("aggregation", _of(found, sweep)) for sweep in (MEDQUAD, SST2)]
    for rule in groups[0]:
        cells = ((shown(_accuracy(own := each.get(rule, []))), _megabytes(own, "bytes_down")) for each in groups)
        yield f"`{rule}`", *(value for pair in cells for value in pair)
    firsts = [next(iter(_of(found, sweep)), None) for sweep in (MEDQUAD, SST2)]
    for name, figure in (("untrained", "accuracy_initial"), ("largest class", "majority_accuracy")):
        values = (f"{line[figure]:.3f}" if line else "" for line in firsts)
        yield name, *(cell for value in values for cell in (value, ""))


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "aggregation").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
    else:
        run(arguments.runs, arguments.out, arguments.data, arguments.page.parent, arguments.only)


if __name__ == "__main__":
    main()
