"""The accuracy that protecting whole persons costs, next to records and to group privacy: results/persons.md.

    python -m simulations.studies.persons run|tables [--data FOLDER] [--runs results/persons.jsonl]

Four ways to spend an epsilon on the same records and holders. `person`: the unit is the person. `record`: the same
epsilon protects one record, which is less. `group`: the unit is the record, at the epsilon that k records of one person
compose to the person's, k being the most that anyone has. `group, capped`: the same with at most `CAP` records of each
person at each holder. A person's vector is the clipped sum of its records' gradients. MedQuAD's persons are the
subjects of its questions: each dealt to one of five holders, or at up to four of the sources that hold them, where the
cap leaves a person up to ten records. A fifth of the subjects is for testing. All cells train the head of MiniLM for 40
rounds. The data folder holds medquad.csv.gz.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.learning.data import hospital
from simulations.studies.corpora import QUESTION_TYPES, TEST_FRACTION
from simulations.studies.federations import run_federations
from simulations.studies.harness import (
    Estimate,
    Results,
    bare,
    difference,
    errors,
    fill,
    parser,
    shown,
    table,
    with_target,
)

DELTA = 1e-5
SEEDS = (0, 1, 2)
EPSILONS = (2.0, 8.0)
CAP = 3
EMBEDDED, BY_FOCUS, BY_SOURCE = "embedded", "MedQuAD by focus", "MedQuAD by source"
PERSON, RECORD, GROUP, CAPPED = "person", "record", "group", "group, capped"
_OTHERS = (RECORD, GROUP, CAPPED)

SETTINGS = (EMBEDDED, BY_FOCUS, BY_SOURCE)

_NUM_CLIENTS = 5

# At up to so many sources is a subject of MedQuAD.
_HOLDERS = {BY_SOURCE: 4}


@dataclass(frozen=True, kw_only=True)
class PersonCell:
    """One federation.

    Attributes:
        setting: the records, and who holds them.
        method: one of the four.
        epsilon: of every person on the local view, or, with `record`, of every record.
        seed: of the split, the holders and the noise.
    """

    setting: str
    method: str
    epsilon: float
    seed: int = 0

    @property
    def corpus(self) -> str:
        """The corpus that the records are from."""
        return EMBEDDED if self.setting == EMBEDDED else "MedQuAD by source"

    @property
    def key(self) -> str:
        """Unique among the cells."""
        return "/".join((self.setting, self.method, f"{self.epsilon:g}", str(self.seed)))


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[PersonCell]:
    """All cells; those with the same features are neighbours."""
    for setting, seed, epsilon, method in product(SETTINGS, seeds, EPSILONS, (PERSON, *_OTHERS)):
        yield PersonCell(setting=setting, method=method, epsilon=epsilon, seed=seed)


def record_epsilon(epsilon: float, size: int) -> tuple[float, float]:
    """The (epsilon, delta) of one record from which those of a person with so many follow by group privacy.

    k records at (e, d) are a group at (k e, d (e^(k e) - 1) / (e^e - 1)).

    Source: Vadhan 2017, Lemma 2.2, with the sum of its geometric series.
    """
    own = epsilon / size
    return own, DELTA * math.expm1(own) / math.expm1(epsilon)


def frames(setting: str, data: Path, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training and test records with the columns text, label, client and person; no person is in both."""
    if setting == EMBEDDED:
        columns = ["text", "label", "client", "person"]
        rows = [[(m.text, m.department, m.hospital, m.patient) for m in part] for part in hospital.generate()]
        return pd.DataFrame(rows[0], columns=columns), pd.DataFrame(rows[1], columns=columns)
    read = pd.read_csv(data / "medquad.csv.gz", dtype=str).dropna(subset=["answer", "question_type", "focus"])
    read = read[read["question_type"].isin(QUESTION_TYPES)]
    names = {"text": "answer", "label": "question_type", "person": "focus", "client": "source"}
    chosen = pd.DataFrame({name: read[column] for name, column in names.items()})
    generator = np.random.default_rng(seed)
    persons = generator.permutation(sorted(chosen["person"].unique()))
    holder = dict(zip(persons, generator.integers(_NUM_CLIENTS, size=len(persons)), strict=True))
    if setting == BY_FOCUS:
        chosen["client"] = [f"site {holder[person]}" for person in chosen["person"]]
    is_test = chosen["person"].isin(persons[: round(TEST_FRACTION * len(persons))])
    return chosen[~is_test], chosen[is_test]


def capped(train: pd.DataFrame, most: int, seed: int) -> pd.DataFrame:
    """At most so many records of each person at a client, drawn with the seed."""
    shuffled = train.sample(frac=1.0, random_state=seed)
    return shuffled[shuffled.groupby(["client", "person"]).cumcount() < most].sort_index()


def configuration(cell: PersonCell, written: Path, data: Path, out: Path) -> RunConfig:
    """The configuration of a cell, whose records are written to a folder; see `run_federations`."""
    train, test = frames(cell.setting, data, cell.seed)
    if cell.method == CAPPED:
        train = capped(train, CAP, cell.seed)
    largest = int(train.groupby("person").size().max())
    epsilon, delta = record_epsilon(cell.epsilon, largest) if cell.method in (GROUP, CAPPED) else (cell.epsilon, DELTA)
    name = f"{cell.setting}-{cell.seed}{'-capped' * (cell.method == CAPPED)}".replace(" ", "-")
    written.mkdir(parents=True, exist_ok=True)
    paths = []
    for part, frame in (("train", train), ("test", test)):
        paths.append(written / f"{name}-{part}.csv")
        frame.to_csv(paths[-1], index=False)
    values: dict[str, Any] = {
        **{"data": str(paths[0]), "test_data": str(paths[1]), "client_column": "client", "public_data": True},
        **{"labels": sorted({*train["label"], *test["label"]}), "table_checks": "warn", "train": "head"},
        **{"evaluate_every": 1000, "prefix_cache": False, "comparison": False, "baselines": False, "simulate": True},
        **{"target_epsilon": epsilon, "delta": delta, "seed": cell.seed, "out": str(out)},
    }
    if cell.method == PERSON:
        values |= {"person_column": "person", "holders_per_person": _HOLDERS.get(cell.setting, 1)}
    return parse(values)


# {(method, epsilon): by how much `person` must be more accurate}; `record` has targets on the embedded corpus alone.
_LEAST = {(RECORD, 2.0): -0.05, (RECORD, 8.0): -0.03} | dict.fromkeys(((GROUP, 2.0), (CAPPED, 2.0)), 0.05)
_LEAST |= dict.fromkeys(((GROUP, 8.0), (CAPPED, 8.0)), 0.0)


def write(page: Path, runs: Path) -> None:
    """Write the page's tables from the lines in the study's file of runs."""
    results = Results.read(runs)
    headers = ("records", "epsilon", PERSON, *(f"less {method}" for method in _OTHERS))
    found = (Estimate.of(_by_seed(results, each, PERSON, e).values()) for each, e in product(SETTINGS, EPSILONS))
    fill(page, {"accuracies": f"{table(headers, _rows(results))}\n\n{errors(found)}"})
    print(results.missing(cells(), lambda cell: (cell.setting, cell.method)))


def _rows(results: Results) -> Iterator[Sequence[str]]:
    for setting, epsilon in product(SETTINGS, EPSILONS):
        found = Estimate.of(_by_seed(results, setting, PERSON, epsilon).values())
        leads = (_lead(results, setting, method, epsilon) for method in _OTHERS)
        yield setting, f"{epsilon:g}", bare(found), *leads


def _lead(results: Results, setting: str, method: str, epsilon: float) -> str:
    """By how much `person` is ahead, with its target if it has one."""
    found = difference(*(_by_seed(results, setting, each, epsilon) for each in (PERSON, method)))
    if method == RECORD and setting != EMBEDDED:
        return shown(found, sign=True)
    least = _LEAST[method, epsilon]
    return with_target(found, f">= {least:g}", lambda lead: lead.mean >= least)


def _by_seed(results: Results, setting: str, method: str, epsilon: float) -> dict[int, float]:
    return results.by_seed(PersonCell(setting=setting, method=method, epsilon=epsilon))


def main() -> None:
    """Do one step of the study."""
    arguments = parser(__doc__, "persons").parse_args()
    if arguments.step == "tables":
        write(arguments.page, arguments.runs)
        return
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    which = {"until": arguments.until, "only": arguments.only}
    run_federations(arguments.runs, arguments.out, arguments.data, list(cells()), configuration, **which)


if __name__ == "__main__":
    main()
