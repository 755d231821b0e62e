"""Accuracy and bytes of the aggregation rules: results/aggregation.md.

    python -m simulations.studies.aggregation run|tables [--data FOLDER]

`run` runs the sweeps `aggregation*.toml` of simulations/configs/sweeps and keeps a line of each run; `tables` makes the
page's tables. FOLDER holds medquad.csv.gz, sst2_train.csv.gz and sst2_dev.csv.gz. A run trains MiniLM at delta 1e-5
with the operating system's noise, so repeated runs differ. Embedded: five hospitals. MedQuAD: nine sites. SST-2: ten
clients, unevenly by label.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from simulations.studies.federations import SWEEPS, run_sweep
from simulations.studies.harness import Estimate, Line, bare, errors, fill, lines, parser, shown, table

NAMES = sorted(path.stem for path in SWEEPS.glob("aggregation*.toml"))
DEFAULT, ALGORITHM, CODECS, GRIDS, MEDQUAD, PER_SAMPLE, RANKS, SST2, WEIGHTS = NAMES
FILES = {
    MEDQUAD: {"data": "medquad.csv.gz"},
    SST2: {"data": "sst2_train.csv.gz", "test_data": "sst2_dev.csv.gz"},
}
"""{sweep: its keys that name files of the data folder}."""

NOISES = (2, 8, None)
"""The epsilons of tables; None is without noise."""

# (epsilon, delta): the paper's score of BERT on MedQuAD, in its Tables 17 and 15; None is without privacy.
_BERT = {
    (2, 1e-5): 53.2, (4, 1e-5): 63.6, (6, 1e-5): 68.8, (8, 1e-5): 60.3, (10, 1e-5): 68.9, (None, 1e-5): 69.1,
    (2, 1e-2): 65.3, (2, 1e-3): 65.4, (2, 1e-4): 64.3, (2, 1e-6): 62.9,
}  # fmt: skip

PLOTS = {
    PER_SAMPLE: ("accuracy-against-epsilon.png", "aggregation-accuracy.png"),
    WEIGHTS: ("bytes-against-accuracy.png", "aggregation-weights-bytes.png"),
}
"""{sweep: a plot in its folder, and the plot's name on the page}."""


def run(runs: Path, out: Path, data: Path, folder: Path, only: Sequence[str] = ()) -> None:
    """Run every sweep that has runs without a line, and copy the plots of those into a folder."""
    for name in NAMES:
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
    rules = (*_rows(found, PER_SAMPLE, NOISES), *_rows(found, WEIGHTS, NOISES, ", full weights"))
    blocks = {
        "default": table(("rule", *epsilons, *sizes), _rows(found, DEFAULT, NOISES[:2])),
        "per-sample": table(("rule", *epsilons, "no noise", *sizes), rules),
        "variants": table(("epsilon 8", "accuracy", "MB up"), _variants(found)),
        "algorithm": table(("change", "local epsilon", "z", "accuracy", "untrained", "MB up"), _changes(found)),
        "grids": _grids(found),
        "real": table(("rule", "MedQuAD", "MB down", "SST-2", "MB down"), _real(found)),
    }
    fill(page, blocks)


def _of(found: Sequence[Line], sweep: str) -> list[Line]:
    return [line for line in found if line["sweep"] == sweep]


def _at(found: Sequence[Line], rule: str, noise: float | None, delta: float = 1e-5) -> list[Line]:
    """The runs of a rule, each sample clipped, at this epsilon and delta."""
    of_rule = [line for line in (*_of(found, PER_SAMPLE), *_of(found, GRIDS)) if line["cell"]["aggregation"] == rule]
    return [line for line in of_rule if _noise(line["cell"]) == noise and line["delta_max"] == delta]


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
    plain = _at(found, "dp-lora", 8)
    for name, own in {**_by("upload_codec", _of(found, CODECS)), "float32": plain}.items():
        yield _row(f"`dp-lora`, rank 8, `{name}`", own)


def _changes(found: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Algorithm 1, and what each of the next settings has that the one before has not."""
    before: Mapping[str, Any] = {}
    settings = _by(None, sorted(_of(found, ALGORITHM), key=lambda line: -line["cell"]["rank"]))  # Algorithm 1 first
    for own in settings.values():
        cell = own[0]["cell"]
        new = {key: value for key, value in cell.items() if key != "target_epsilon" and before.get(key, value) != value}
        before = cell
        name = ", ".join(f"`{key} = {value}`" for key, value in new.items()) or "Algorithm 1 with Table 2"
        yield _step(name, own)
    if settings and (plain := _at(found, "dp-lora", 2)):
        yield _step("`recipe = per-sample`: 10 rounds of 3 steps, B = 64, weights by records", plain)


def _step(name: str, own: Sequence[Line]) -> Sequence[str]:
    epsilon, z = (max(line[figure] for line in own) for figure in ("epsilon_local_max", "noise_multiplier"))
    initial = Estimate.of(line["accuracy_initial"] for line in own)
    return name, f"{epsilon:.2f}", f"{z:.3g}", shown(_accuracy(own)), bare(initial), _megabytes(own, "bytes_up")


def _grids(found: Sequence[Line]) -> str:
    """Accuracy by epsilon and by delta, of the paper's rule and of the one that freezes A, under the paper's scores."""
    known: list[Estimate | None] = []

    def accuracy(*point: Any) -> str:
        known.append(_accuracy(_at(found, *point)))
        return bare(known[-1]) or "not run"

    tables = []
    for is_first, given in ((True, "epsilon, at delta 1e-05"), (False, "delta, at epsilon 2")):
        points = [each for each in _BERT if (each[1] == 1e-5) == is_first]
        named = [("not private" if e is None else f"{e}") if is_first else f"{delta:g}" for e, delta in points]
        rows = [(f"`{rule}`", *(accuracy(rule, *each) for each in points)) for rule in ("dp-lora", "ffa-lora")]
        tables.append(table((given, *named), [("paper: BERT", *(_BERT[each] for each in points)), *rows]))
    return "\n\n".join((*tables, errors(known)))


def _by(key: str | None, found: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines by a key of their cells; None stands for all but the seed."""
    groups: dict[str, list[Line]] = {}
    for line in found:
        groups.setdefault(str(line["cell"][key] if key else {**line["cell"], "seed": 0}), []).append(line)
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
