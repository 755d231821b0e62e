"""The study's part of results/dedup.md, made from the lines of training and deduplication."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedpriv.dedup.block_pipeline import MINHASH_STEP
from fedpriv.errors import InputError
from simulations.studies.dedup.cells import ALGORITHMS, BLOCK_SIZES, CUTOFFS, MCTS_ITERATIONS, SVT_SEEDS, THRESHOLDS
from simulations.studies.dedup.lines import lines
from simulations.studies.dedup.scenarios import DELTA, SCENARIOS, Scenario

BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"
POINTS = 5.0

Line = Mapping[str, Any]


def write(page: Path, out: Path) -> None:
    """Rewrite the text between the two markers of a page, which is made if it is missing.

    Raises:
        InputError: the page has one marker without the other, or there are no results.
    """
    text = page.read_text() if page.is_file() else f"# Deduplicating model variants, measured\n\n{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InputError(f"{page}: must hold {BEGIN} and after it {END}, each once")
    models, runs = lines(out / "models.jsonl"), lines(out / "runs.jsonl")
    if not models or not runs:
        raise InputError(f"out = {str(out)!r}: holds no results; train and run come first")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    checked = out / "check.json"
    closing = _closing(models, runs, json.loads(checked.read_text()) if checked.is_file() else {})
    page.write_text(f"{before}\n{study(models, runs)}\n\n{closing}\n{after}")


def study(models: Sequence[Line], runs: Sequence[Line]) -> str:
    """All sections, markdown."""
    known = {model["name"]: model for model in models}
    here = [scenario for scenario in SCENARIOS.values() if any(_is(run, scenario) for run in runs)]
    sections = (
        _introduction(),
        _scenarios(here, known),
        _algorithms(here, runs),
        _claim(here, runs),
        _unseen(here, runs),
        _private(here, runs),
        _cutoffs(runs),
        _ablation(runs),
        _thresholds(here, runs),
        _bases(here, runs),
        _epsilons(here, runs),
    )
    return "\n\n".join(section for section in sections if section)


def _closing(models: Sequence[Line], runs: Sequence[Line], checked: Line) -> str:
    """The result of the independent check, and the running times."""
    result = (
        "{stores} stores, {violations} violations; of {private_targets} targets that were validated privately, "
        "{private_beyond} exceed their utility bound, which private validation guarantees only up to its noise.".format(
            **checked
        )
        if checked
        else "`check` has not run yet."
    )
    seconds = sum(model["seconds"] for model in models), sum(run["seconds"] for run in runs)
    return (
        "### Independent check, and running times\n\n"
        "`check` reassembles every variant from the store's rows, compares each block with those of the target and its "
        "bases, counts correct answers in a loop of its own, and composes the uploads named in the descriptions by "
        f"dp-accounting's `PLDAccountant`. {result}\n\n"
        f"Training {len(models)} models took {seconds[0]:.0f} s and the {len(runs)} cells {seconds[1]:.0f} s, with one "
        "thread each, and one to three processes at a time on 2 shared virtual cores."
    )


def _introduction() -> str:
    return f"""## Fully trained models: small networks under DP-SGD

```
python -m simulations.studies.dedup train     # the models, and a folder of variants for each scenario
python -m simulations.studies.dedup run       # every cell of the tables below
python -m simulations.studies.dedup check     # an independent check of every store
python -m simulations.studies.dedup tables    # this part of the page
```

Scikit-learn's digits (8x8 pixels), split once: 200 public records, 550 and 200 to train on, 600 to validate, 247 to
test. A vision transformer (three layers of width 64, patches of 4x4, 102,538 weights, blocks of 128) and a perceptron
(two hidden layers of 192, 51,466 weights, blocks of 64). All weights are trained by DP-SGD (40 steps, Poisson sampling
of 0.4 of the records, clip norm 1, mean of the last 20 iterates), each model separately from one start that was
trained on public records only. delta is {DELTA:g}. Sampling and noise are **seeded**, so that the study can be
repeated; the records are public, so nobody needs protection. Architectures, learning rates and public steps were
chosen by validation accuracy among about forty settings, before any deduplication. There is one training seed, so
differences of a few points between neighbouring rows mean little.

The scenarios are the paper's (Guan et al. 2025, Table 1). Its data sets have 60,000 records and more; in A2 and A3,
which have the smallest data sets here, all epsilons and epsilon bounds are five times the paper's. C.R. is the paper's
compression ratio: the number of distinct blocks after deduplication over that before, base included (section 5.1.3).
C.R. in bytes is the size of the store's files, including manifests, hashes and biases, over that of the models'
tensors (`Store.compression_ratio`); for models of half a megabyte the size of the manifests matters. Smaller is
better, and 1 / models is the least possible. One validation record is 0.0017 of accuracy."""


def _scenarios(here: Sequence[Scenario], known: Mapping[str, Line]) -> str:
    rows, below = [], []
    for scenario in here:
        models = [known[model.name] for model in scenario.models]
        num_below = sum(each["accuracy"]["validation"] < each["accuracy_start"]["validation"] for each in models)
        below.append(f"{scenario.name} {num_below} of {len(models)}")
        rows.append(
            (
                scenario.name,
                f"{scenario.models[0].architecture}, {scenario.models[0].task}, {scenario.models[0].split}"
                + (f" in {len(models)} disjoint parts" if scenario.models[0].part[1] > 1 else ""),
                ", ".join(f"{each['epsilon']:.4g}" for each in models),
                f"{scenario.epsilon_bound:g}",
                f"{scenario.utility_bound:.3f}",
                f"{models[0]['accuracy_start']['validation']:.3f}",
                ", ".join(f"{each['accuracy']['validation']:.3f}" for each in models),
                ", ".join(f"{each['accuracy']['test']:.3f}" for each in models),
                ", ".join(f"{each['accuracy_without_noise']['validation']:.3f}" for each in models),
            )
        )
    headers = (
        "", "model, task, data", "epsilons", "epsilon bound", "utility bound", "accuracy of the start",
        "of the models, validation", "test", "without noise, same schedule",
    )  # fmt: skip
    return (
        "### Scenarios (Table 1)\n\n"
        + _table(headers, rows)
        + "\n\nA2's base is A3's first model, trained on another task and other records. "
        "`mirrored` is the second task: mirror images of the digits. "
        f"Models less accurate than their public start: {', '.join(below)}. For these, noise cost more than so few "
        "records brought. Deduplication is applied to them in the same way."
    )


def _algorithms(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for name in ALGORITHMS:
        row = [f"`{name}`"]
        for scenario in here:
            cells = _of(runs, scenario, "algorithms", name)
            row.append(_cell(cells) if cells else "")
        rows.append(row)
    return (
        "### Search algorithms on public validation (Table 2)\n\n"
        "C.R. % (in bytes %), number of validations, largest accuracy drop on the validation records.\n\n"
        + _table(("", *(scenario.name for scenario in here)), rows)
        + "\n\n`-20` and `-30` are blocks per validation; `drd` and `dred` choose L by their rule. "
        "`all or nothing` replaces a whole model by its base or leaves it as it is; a C.R. of 100 means that no model "
        f"could be replaced. `mcts-20` ends after {MCTS_ITERATIONS} iterations. `mistique-20` treats weights as equal "
        f"that round to the same multiple of {MINHASH_STEP:g} standard deviations of a model's weights; with 0.02 and "
        "0.1, tried first, hardly any two blocks of A1 and B1 were similar."
    )


def _claim(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for scenario in here:
        for greedy in _of(runs, scenario, "algorithms", "greedy-20"):
            targets = [outcome for outcome in greedy["outcomes"] if outcome["bases"]]
            kept = 1 - sum(o["num_replaced"] for o in targets) / sum(o["num_blocks"] for o in targets)
            for name in ("drd", "dred"):
                for ours in _of(runs, scenario, "algorithms", name):
                    points = 100 * (ours["block_ratio"] - greedy["block_ratio"])
                    few = ours["num_validations"], greedy["num_validations"]
                    met = "yes" if few[0] < few[1] and points <= POINTS else "**no**"
                    rows.append(
                        (scenario.name, f"`{name}`", f"{few[0]} / {few[1]}", f"{points:+.1f}", met, f"{kept:.0%}")
                    )
    headers = (
        "", "", "validations / `greedy-20`'s", "C.R., difference in points", "met", "blocks that `greedy-20` keeps",
    )  # fmt: skip
    return (
        "### The claim: fewer validations than `greedy-20`, at a C.R. at most 5 points worse\n\n"
        + _table(headers, rows)
        + "\n\nThe more blocks must be kept, the more often a range fails and is halved, and each failure costs a "
        "validation."
    )


def _unseen(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for name in ("greedy-20", "drd", "dred"):
        row = [f"`{name}`"]
        for scenario in here:
            for run in _of(runs, scenario, "algorithms", name):
                names = list(_target_drops(run))
                validation, test = ([run["drops"][split][each] for each in names] for split in ("validation", "test"))
                num_beyond = sum(drop > scenario.utility_bound + 1e-9 for drop in test)
                row.append(f"{mean(validation):.4f}, {mean(test):.4f}, {num_beyond} of {len(test)}")
        rows.append(row)
    return (
        "### The drop on records that the search never saw\n\n"
        "Mean drop of the targets on the 600 validation records and on the 247 test records (one record is 0.0040), "
        "and how many targets exceed their bound on the latter. The bound is guaranteed for the validation records "
        "only.\n\n" + _table(("", *(scenario.name for scenario in here)), rows)
    )


def _private(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for name in ("greedy-20", "greedy-30", "drd", "dred"):
        row = [f"`{name}`"]
        for scenario in here:
            row.append(_private_cell(_of(runs, scenario, "private validation", name), scenario))
        rows.append(row)
    epsilons = ", ".join(f"{scenario.name} {scenario.validation_epsilon:g}" for scenario in here)
    return (
        "### Private validation by the Sparse Vector Technique (Table 3)\n\n"
        f"C.R. %, number of validations (means over {SVT_SEEDS} seeds of the noise), largest drop of all, and number "
        "of targets for which the utility bound really held. Cut-off 3, 600 records, epsilon of one run: "
        f"{epsilons}; with these, every target stays within its epsilon bound. Saliency is measured on the 200 public "
        "records, at no cost.\n\n" + _table(("", *(scenario.name for scenario in here)), rows)
    )


def _private_cell(cells: Sequence[Line], scenario: Scenario) -> str:
    if not cells:
        return ""
    within = [drop <= scenario.utility_bound + 1e-9 for run in cells for drop in _target_drops(run).values()]
    return (
        f"{_percent(cells, 'block_ratio')}, {mean(run['num_validations'] for run in cells):.0f}, "
        f"{max(map(_largest, cells)):.3f}, {sum(within)} of {len(within)}"
    )


def _cutoffs(runs: Sequence[Line]) -> str:
    rows = []
    for cutoff in CUTOFFS:
        cells = _of(runs, SCENARIOS["A4"], "cut-off", str(cutoff))
        if cells:
            rows.append(
                (
                    cutoff,
                    _percent(cells, "block_ratio"),
                    f"{max(map(_largest, cells)):.4f}",
                    f"{mean(run['num_validations'] for run in cells):.0f}",
                )
            )
    if not rows:
        return ""
    return f"### Cut-off of private validation, A4, `dred`, means over {SVT_SEEDS} seeds (Table 8)\n\n" + _table(
        ("cut-off", "C.R. %", "largest drop", "validations"), rows
    )


def _ablation(runs: Sequence[Line]) -> str:
    rows = []
    for name, table, values in (
        ("A4", "block size", BLOCK_SIZES),
        ("A1", "saliency", ("magnitude", "wanda", "fisher", "gradient")),
        ("A1", "aggregation", ("l1", "l2", "linf", "q75")),
        ("A1", "distance", ("l1", "l2", "cosine")),
    ):
        for value in values:
            cells = _of(runs, SCENARIOS[name], table, str(value))
            if cells:
                percents = _percent(cells, "block_ratio"), _percent(cells, "bytes_ratio")
                counts = cells[0]["num_validations"], f"{_largest(cells[0]):.4f}"
                rows.append((f"{name}, {table}", f"`{value}`", *percents, *counts))
    if not rows:
        return ""
    return "### Ablation, `dred` on public validation (Table 6)\n\n" + _table(
        ("", "value", "C.R. %", "C.R. in bytes %", "validations", "largest drop"), rows
    )


def _thresholds(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for scenario in here:
        by_threshold = [_of(runs, scenario, "threshold", str(threshold)) for threshold in THRESHOLDS]
        if any(by_threshold):
            ordered = _of(runs, scenario, "ordered utilities", "dred")
            rows.append(
                (
                    scenario.name,
                    *(_percent(each, "block_ratio") for each in by_threshold),
                    _percent(ordered, "block_ratio"),
                )
            )
    if not rows:
        return ""
    return (
        "### C.R. % by utility bound, `dred` (Table 7)\n\n"
        + _table(
            ("", *(f"{100 * threshold:.1f} points" for threshold in THRESHOLDS), "own bound, order of utilities kept"),
            rows,
        )
        + "\n\nIn the last column, accuracy may not fall below that of the next less accurate variant on the same "
        "data, which is the library's fairness rule. Everywhere else, as in the paper's experiments, all variants of "
        "a scenario declare the same utility, so that only the bound limits the drop."
    )


def _bases(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows = []
    for scenario in here:
        for strategy in ("single", "multi", "cross"):
            for run in _of(runs, scenario, "bases", strategy):
                risen = sum(outcome["epsilon_after"] - outcome["epsilon_before"] for outcome in run["outcomes"])
                num_targets = sum(bool(outcome["bases"]) for outcome in run["outcomes"])
                bound, drop = f"{run['cell']['epsilon_bound']:g}", f"{_largest(run):.4f}"
                rows.append(
                    (scenario.name, f"`{strategy}`", bound, num_targets, _percent([run], "block_ratio"),
                     run["num_validations"], drop, f"{risen:.2f}")
                )  # fmt: skip
    if not rows:
        return ""
    return (
        "### Base selection, `dred`, epsilon bounds relaxed to the sum of the first three epsilons (Figure 6)\n\n"
        + _table(
            ("", "strategy", "bound", "targets", "C.R. %", "validations", "largest drop", "total rise of epsilons"),
            rows,
        )
    )


def _epsilons(here: Sequence[Scenario], runs: Sequence[Line]) -> str:
    rows, num_beyond = [], 0
    for scenario in here:
        for run in _of(runs, scenario, "algorithms", "drd"):
            for outcome in (each for each in run["outcomes"] if each["bases"]):
                before, epsilons = outcome["epsilon_before"], outcome["epsilons"]
                values = (epsilons[method] for method in ("basic", "accountant", "provenance"))
                bound = before + scenario.epsilon_bound
                num_beyond += epsilons["basic"] > bound
                rows.append((scenario.name, *(f"{value:.3f}" for value in (before, *values, bound))))
    return (
        f"### What deduplicated variants cost, `drd`, by each composition at delta {DELTA:g}\n\n"
        + _table(("", "epsilon before", "`basic`", "`accountant`", "`provenance`", "own bound"), rows)
        + "\n\nThe models were trained separately and share no release, so here `provenance` equals `accountant`. By "
        f"`basic`, which splits one delta among the models, {num_beyond} of {len(rows)} targets would exceed their "
        "bounds."
    )


def _is(run: Line, scenario: Scenario) -> bool:
    return bool(run["cell"]["scenario"] == scenario.name)


def _of(runs: Iterable[Line], scenario: Scenario, table: str, row: str) -> list[Line]:
    wanted = (scenario.name, table, row)
    return [run for run in runs if (run["cell"]["scenario"], run["cell"]["table"], run["cell"]["row"]) == wanted]


def _cell(cells: Sequence[Line]) -> str:
    percents = _percent(cells, "block_ratio"), _percent(cells, "bytes_ratio")
    return f"{percents[0]} ({percents[1]}), {cells[0]['num_validations']}, {_largest(cells[0]):.4f}"


def _percent(cells: Sequence[Line], name: str) -> str:
    return f"{100 * mean(run[name] for run in cells):.1f}" if cells else ""


def _target_drops(run: Line) -> dict[str, float]:
    targets = [outcome["name"] for outcome in run["outcomes"] if outcome["bases"]]
    return {name: run["drops"]["validation"][name] for name in targets}


def _largest(run: Line) -> float:
    return max(_target_drops(run).values(), default=0.0)


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers), *body])
