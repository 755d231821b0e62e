"""Language models that answer, private and not, over seeds, epsilons, deltas and ranks: results/language_models.md.

    make llm
    python -m simulations.studies.language_models run|tables [--data FOLDER] [--only 'TASK/*']

SmolLM2-135M-Instruct learns to choose between answers, where the configuration names columns, `answers` and epsilon
alone, and to answer medical questions freely. The private runs are compared with the same runs without noise, and with
what a tutorial of peft would do with all records in one place. The grids are those of the DP-LoRA paper: epsilon at
delta 1e-5, delta at epsilon 2, and ranks at epsilon 8. Its other data sets, with one seed, are in language_models.toml,
of which those `by MiniLM` train that encoder. Lines whose `software` names a `gpu` ran on a part of one, all others on
two CPU cores with bfloat16 instructions.

The data folder holds what `fedpriv reproduce data` makes, sst2_train.csv.gz and medquad.csv.gz among it. The base is
read from a GGUF file of 4 bits a weight and computed in bfloat16. A seed decides the clients' records, the noise and,
for MedQuAD and SST-2, the test records, which all cells of a seed share.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedpriv import config as configuration
from fedpriv.config import RunConfig
from simulations.engines import federation
from simulations.studies import corpora
from simulations.studies.federations import SilentObserver
from simulations.studies.harness import (
    Estimate,
    Line,
    Results,
    bare,
    difference,
    errors,
    fill,
    parser,
    run_missing,
    shown,
    table,
    with_target,
)
from simulations.studies.plain_lora import PlainTraining
from simulations.studies.plain_lora import configured as plain_configured
from simulations.studies.plain_lora import measure as plain_measure

DELTA = 1e-5
SEEDS = (0, 1, 2)
PRIVATE, PLAIN = "private", "AdamW in one place"
REVIEWS, MESSAGES, ANSWERS, GRID = "film reviews", "hospital messages", "medical answers", "medical answers, 150 a site"

# The paper's grids; without a rank it is the recipe's, which the grid of epsilon has.
# By name: that of the recipe, and the paper's own, which trains and averages A and B.
RULES = {"FFA-LoRA": None, "DP-LoRA": "dp-lora"}
EPSILONS, DELTAS, RANKS = (2.0, 4.0, 6.0, 8.0, 10.0), (1e-2, 1e-3, 1e-4, 1e-5, 1e-6), (1, None, 16)

_CONFIGS = Path(__file__).parents[1] / "configs"
TASKS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

# What a private run must gain on an untrained model, by epsilon.
_GAINS = {8.0: 0.06, 2.0: 0.04}
# By how much its perplexity may exceed that of the same run without noise.
_MOST_LOST = 0.3

# Seeds of the grids, where the page says nothing else.
_USUAL = 2

# Of a run's summary, where it has them.
_KEPT = (
    "accuracy", "accuracy_initial", "accuracy_standard_error", "majority_accuracy", "perplexity", "perplexity_initial",
    "log_perplexity_change", "log_perplexity_change_standard_error", "epsilon_local_max", "delta_max", "num_clients",
    "num_rounds", "seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LanguageCell:
    """One training.

    Attributes:
        task: the records, and what is asked.
        method: a private federation, or LoRA on all records in one place.
        epsilon: of every client on the local view; None without noise.
        delta: of the same.
        rule: by which uploads are combined; None leaves it to the recipe.
        rank: of LoRA; None leaves it to the recipe.
        seed: of the records, the noise and the order.
    """

    task: str
    method: str = PRIVATE
    epsilon: float | None = None
    delta: float = DELTA
    rule: str | None = None
    rank: int | None = None
    seed: int = 0

    @property
    def key(self) -> str:
        """Unique among the cells."""
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        parts = (self.task, self.method, epsilon, f"{self.delta:g}", str(self.rank or "by recipe"), str(self.seed))
        return "/".join((*parts, self.rule) if self.rule else parts)


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[LanguageCell]:
    """All cells, each once; those that share records and model are neighbours."""
    yield from dict.fromkeys(_in_order(seeds))


def _in_order(seeds: Sequence[int]) -> Iterator[LanguageCell]:
    for seed in seeds:
        for task in (REVIEWS, MESSAGES):
            yield from (LanguageCell(task=task, epsilon=epsilon, seed=seed) for epsilon in (8.0, 2.0))
            if seed == seeds[0]:
                yield LanguageCell(task=task, seed=seed)
                yield LanguageCell(task=task, method=PLAIN, seed=seed)
        yield from (LanguageCell(task=ANSWERS, epsilon=epsilon, seed=seed) for epsilon in (8.0, None))
    yield LanguageCell(task=ANSWERS, method=PLAIN)
    for rule in RULES.values():
        for seed in seeds:
            yield from _grid(seed, rule)

    yield from _points()


def _points() -> Iterator[LanguageCell]:
    """The cells of the DP-LoRA paper's data sets, each once."""
    for task, told in TASKS.items():
        for epsilon, delta, rank in told.get("points", ()):
            yield LanguageCell(task=task, epsilon=epsilon or None, delta=delta, rank=rank or None)


def _grid(seed: int, rule: str | None) -> Iterator[LanguageCell]:
    grid = partial(LanguageCell, task=GRID, seed=seed, rule=rule)
    yield grid()
    yield from (grid(epsilon=epsilon) for epsilon in EPSILONS)
    yield from (grid(epsilon=2.0, delta=delta) for delta in DELTAS)
    yield from (grid(epsilon=8.0, rank=rank) for rank in RANKS)


def values_of(cell: LanguageCell, data: Path, written: Path) -> dict[str, Any]:
    """The configuration's keys for the cell's records and model, as a user would give them.

    Args:
        cell: to be run.
        data: folder of the public files.
        written: folder for records that are made here.
    """
    if cell.task == MESSAGES:
        where = corpora.keys("embedded", cell.seed, data=data, folder=written, validation=False, pooled=False)
        named = {"prompt_column": "text", "response_column": "label", "answers": where["labels"]}
        return where | named | {"model": "SmolLM2-135M-Instruct", "base_dtype": "bfloat16"}
    own = {name: value for name, value in TASKS[cell.task].items() if name not in ("file", "points")}
    found = configuration.read(_CONFIGS / TASKS[cell.task]["file"]) if "file" in TASKS[cell.task] else {}
    kept = {key: value for key, value in found.items() if key not in ("title", "runs", "target_epsilon")}
    return kept | own | {name: str(data / own[name]) for name in ("data", "test_data") if name in own}


def configured(cell: LanguageCell, values: Mapping[str, Any], out: Path) -> RunConfig:
    """The configuration of a private cell."""
    given: dict[str, Any] = {
        **values,
        **{"seed": cell.seed, "simulate": True, "comparison": False, "baselines": False, "generated_answers": 0},
        **{"delta": cell.delta, "evaluate_every": 1000, "out": str(out)},
    }
    given |= {key: value for key, value in (("aggregation", cell.rule), ("rank", cell.rank)) if value}
    none = {"noise_multiplier": 0.0, "target_epsilon": ""}
    return configuration.parse(given | ({"target_epsilon": cell.epsilon} if cell.epsilon else none))


def run(cell: LanguageCell, data: Path, written: Path) -> Line:
    """The figures of a cell, for its line."""
    values = values_of(cell, data, written)
    if cell.method == PLAIN:
        config = plain_configured(values | {"seed": cell.seed, "generated_answers": 0}, weights=False)
        return plain_measure(config, PlainTraining(rate=1e-3, batch=16, epochs=1))
    observer = SilentObserver()
    with tempfile.TemporaryDirectory(prefix="fedpriv-study-") as folder:
        federation.run(configured(cell, values, Path(folder) / "run"), observer)
    return {name: observer.summary[name] for name in _KEPT if observer.summary[name] is not None} | observer.noise


def _by_seed(results: Results, cell: LanguageCell, figure: str) -> dict[int, float]:
    return results.by_seed(cell, SEEDS, figure=figure)


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    results = Results.read(runs)
    blocks = {
        "choices": _choices(results),
        "answers": _answers(results),
        "grid": _grids(results),
        "data-sets": _data_sets(results),
    }
    fill(page, blocks)
    print(results.missing(cells(), lambda cell: (cell.task, cell.method)))


def _choices(results: Results) -> str:
    known = list[Estimate | None]()

    def both(figure: str, method: str = PRIVATE) -> list[str]:
        cells = (LanguageCell(task=task, method=method, epsilon=8.0 if method == PRIVATE else None) for task in tasks)
        found = [_estimate(results, cell, figure) for cell in cells]
        known.extend(found)
        return [text for each in found for text in (bare(each), "")]

    tasks = (REVIEWS, MESSAGES)
    rows = [("none, the commonest answer", *both("majority_accuracy")), ("none", *both("accuracy_initial"))]
    for epsilon in (2.0, 8.0, None):
        how = "private, without noise" if epsilon is None else f"private, local epsilon {epsilon:g}"
        cells = [LanguageCell(task=task, epsilon=epsilon) for task in tasks]
        known += [_estimate(results, cell, "accuracy") for cell in cells]
        rows.append((how, *_gained(results, cells)))
    rows.append((PLAIN, *_gained(results, [LanguageCell(task=task, method=PLAIN) for task in tasks])))
    rows.append(("TF-IDF in one place", *both("tfidf_accuracy", PLAIN)))
    headers = ("training", REVIEWS, "less untrained", MESSAGES, "less untrained")
    return f"{table(headers, rows)}\n\n{errors(known)}"


def _gained(results: Results, cells: Sequence[LanguageCell]) -> Iterator[str]:
    """For each cell its accuracy, and by how much that exceeds the untrained model's, with its target if it has one."""
    for cell in cells:
        yield bare(_estimate(results, cell, "accuracy"))
        gain = difference(_by_seed(results, cell, "accuracy"), _by_seed(results, cell, "accuracy_initial"))
        if cell.epsilon is None:
            yield shown(gain, sign=True)
        else:
            least = _GAINS[cell.epsilon]
            yield with_target(gain, f">= {least:g}", lambda found, least=least: found.mean >= least)  # type: ignore[misc]


def _answers(results: Results) -> str:
    private, noiseless = LanguageCell(task=ANSWERS, epsilon=8.0), LanguageCell(task=ANSWERS)
    rows: list[Sequence[str]] = [("none", shown(_estimate(results, private, "perplexity_initial")), "")]
    for how, cell in (
        ("private, local epsilon 8", private),
        ("the same without noise, clipping kept", noiseless),
        (f"A and B, {PLAIN}", LanguageCell(task=ANSWERS, method=PLAIN)),
    ):
        found = (_estimate(results, cell, figure) for figure in ("perplexity", "log_perplexity_change"))
        rows.append((how, *(shown(each, sign=bool(column)) for column, each in enumerate(found))))
    lost = difference(*(_by_seed(results, cell, "perplexity") for cell in (private, noiseless)))
    noise = with_target(lost, f"<= {_MOST_LOST:g}", lambda found: found.mean <= _MOST_LOST)
    headers = ("training", "perplexity of responses", "log perplexity less untrained")
    return f"{table(headers, rows)}\n\nPerplexity that the noise adds: {noise}."


# Scores of Tables 3 and 4 on MedQuAD, higher is better.
_PAPER_BY_EPSILON = {
    2.0: (66.5, 66.4), 4.0: (66.6, 57.1), 6.0: (67.3, 60.6), 8.0: (66.2, 59.8), 10.0: (69.7, 65.9), None: (73.1, 66.6)
}  # fmt: skip
_PAPER_BY_DELTA = {1e-2: (70.6, 65.3), 1e-3: (64.1, 65.4), 1e-4: (70.3, 64.3), 1e-6: (59.9, 62.9)}


def _grids(results: Results) -> str:
    """Perplexity by epsilon, by delta and by rank, each a column, the first two under the paper's scores."""
    cell, known = LanguageCell(task=GRID), list[Estimate | None]()
    models = ("paper: Llama-7B", "paper: ChatGLM-6B")

    def here(cells: Sequence[LanguageCell]) -> Iterator[Sequence[str]]:
        for name, rule in RULES.items():
            found = [_estimate(results, replace(cell, rule=rule), "perplexity") for cell in cells]
            known.extend(found)
            yield f"perplexity here, {name}", *(bare(each, usual=_USUAL) or "not run" for each in found)

    by_epsilon = [replace(cell, epsilon=each) for each in _PAPER_BY_EPSILON]
    by_delta = [replace(cell, epsilon=2.0, delta=each) for each in _PAPER_BY_DELTA]
    by_rank = [replace(cell, epsilon=8.0, rank=each) for each in RANKS]
    tables = [
        table((given, *names), [*(zip(models, *scores.values(), strict=True) if scores else ()), *here(cells)])
        for given, names, cells, scores in (
            ("epsilon, at delta 1e-05", map(_named_epsilon, _PAPER_BY_EPSILON), by_epsilon, _PAPER_BY_EPSILON),
            ("delta, at epsilon 2", (f"{each:g}" for each in _PAPER_BY_DELTA), by_delta, _PAPER_BY_DELTA),
            ("rank, at epsilon 8", (f"{rank or 4}" for rank in RANKS), by_rank, {}),
        )
    ]
    known.append(_estimate(results, cell, "perplexity_initial"))
    told = f"Untrained: {bare(known[-1], usual=_USUAL)}. {errors(known)}"
    return "\n\n".join((*tables, told, _steps(results)))


def _data_sets(results: Results) -> str:
    """The DP-LoRA paper's data sets: accuracy where there are answers, choices or labels, else perplexity."""
    rows = []
    for cell in _points():
        told = TASKS[cell.task]
        is_free = "prompt_column" in told and not told.keys() & {"answers", "choice_columns"}
        figures = ("perplexity_initial", "perplexity") if is_free else ("accuracy_initial", "accuracy")
        found = (bare(_estimate(results, cell, figure), usual=1) or "not run" for figure in figures)
        largest = "" if is_free else bare(_estimate(results, cell, "majority_accuracy"), usual=1)
        rows.append((cell.task, figures[1], _named_epsilon(cell.epsilon), f"{cell.delta:g}", *found, largest))
    return table(("data set", "", "epsilon", "delta", "untrained", "trained", "largest class"), rows)


def _named_epsilon(epsilon: float | None) -> str:
    return "not private" if epsilon is None else f"{epsilon:g}"


def _steps(results: Results) -> str:
    """The most by which perplexity rises from one epsilon, or delta, to the next larger one."""
    by_epsilon = [LanguageCell(task=GRID, epsilon=epsilon) for epsilon in (*EPSILONS, None)]
    by_delta = [LanguageCell(task=GRID, epsilon=EPSILONS[0], delta=delta) for delta in reversed(DELTAS)]
    largest = (
        f"Perplexity less that of the next smaller {name}: at most "
        f"{with_target(_largest_step(results, grid), '<= 2 standard errors', _is_no_rise)}."
        for name, grid in (("epsilon", by_epsilon), ("delta", by_delta))
    )
    return "\n".join(largest)


def _is_no_rise(step: Estimate) -> bool:
    return step.mean <= 2 * (step.standard_error or 0.0)


def _largest_step(results: Results, cells: Sequence[LanguageCell]) -> Estimate | None:
    """The largest of the differences of perplexity between each cell and the one before."""
    found = [_by_seed(results, cell, "perplexity") for cell in cells]
    steps = (difference(later, earlier) for earlier, later in pairwise(found))
    return max((step for step in steps if step), key=lambda step: step.mean, default=None)


def _estimate(results: Results, cell: LanguageCell, figure: str) -> Estimate | None:
    return Estimate.of(_by_seed(results, cell, figure).values())


def main() -> None:
    """Run the cells that have no line, or write the page."""
    arguments = parser(__doc__, "language_models").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    measure = partial(run, data=arguments.data, written=arguments.out)
    run_missing(arguments.runs, cells(), measure, _told, until=arguments.until, only=arguments.only)


def _told(line: Line) -> str:
    return ", ".join(f"{figure} {line[figure]:.4f}" for figure in ("accuracy", "perplexity") if figure in line)


if __name__ == "__main__":
    main()
