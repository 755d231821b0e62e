"""The corpora of the studies: records with a label, those of each client for training and others for testing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedpriv.errors import InputError
from fedpriv.learning.data import hospital

TEST_FRACTION = 0.2

# Of simulations/configs/medquad.toml: the eight types of question of which each has some hundred answers.
QUESTION_TYPES = (
    "information", "symptoms", "treatment", "inheritance", "frequency", "genetic changes", "causes", "exams and tests",
)  # fmt: skip

Frames = tuple[pd.DataFrame, pd.DataFrame]
"""Training and test records, with the columns text, label and, where records have a holder, client."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Records and how they are shared.

    Attributes:
        frames: (data folder, seed) -> training and test records.
        files: that the data folder must hold.
        sharing: the configuration's keys that say which client has which records.
        named: whether the recipe's constants were chosen with these data in view; the others are untuned.
    """

    frames: Callable[[Path, int], Frames]
    files: tuple[str, ...] = ()
    sharing: tuple[tuple[str, Any], ...] = (("partition", "iid"), ("num_clients", 5))
    named: bool = True


def missing_file(name: str, data: Path) -> str | None:
    """The first file of a corpus that a data folder lacks; None if it holds all."""
    return next((file for file in CORPORA[name].files if not (data / file).is_file()), None)


def keys(name: str, seed: int, *, data: Path, folder: Path, validation: bool, pooled: bool) -> dict[str, Any]:
    """The configuration's keys that say where the corpus is and who holds it; its records are written there.

    Args:
        name: of the corpus.
        seed: of the subset and of the split.
        data: folder of the public files.
        folder: to write to.
        validation: whether to test on a part of the training records instead of the test records.
        pooled: whether one client holds all training records.

    Raises:
        InputError: the data folder lacks a file.
    """
    corpus = CORPORA[name]
    if missing := missing_file(name, data):
        raise InputError(f"data = {data}: holds no {missing}")
    train, test = corpus.frames(data, seed)
    if validation:
        train, test = _split(train, seed)
    paths = []
    for part, frame in (("train", train), ("test", test)):
        paths.append(folder / f"{name}-{seed}-{'validation-' * validation}{part}.csv".replace(" ", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_csv(paths[-1], index=False)
    sharing = {"partition": "iid", "num_clients": 1} if pooled else dict(corpus.sharing)
    labels = sorted({*train["label"], *test["label"]})
    return {"data": str(paths[0]), "test_data": str(paths[1]), "labels": labels, "public_data": True, **sharing}


def _split(frame: pd.DataFrame, seed: int) -> Frames:
    order = np.random.default_rng(seed).permutation(len(frame))
    num_test = round(TEST_FRACTION * len(frame))
    return frame.iloc[np.sort(order[num_test:])], frame.iloc[np.sort(order[:num_test])]


def _embedded(data: Path, seed: int) -> Frames:
    train, test = hospital.generate()
    frames = [
        pd.DataFrame([(m.text, m.department, m.hospital) for m in part], columns=["text", "label", "client"])
        for part in (train, test)
    ]
    return frames[0], frames[1]


def _sst2(most: int | None) -> Callable[[Path, int], Frames]:
    def frames(data: Path, seed: int) -> Frames:
        train, dev = (_read(data / f"sst2_{part}.csv.gz") for part in ("train", "dev"))
        return train.iloc[np.random.default_rng(seed).permutation(len(train))[:most]], dev

    return frames


def _medquad(
    *, text: str = "answer", label: str = "question_type", classes: tuple[str, ...] = (), most: int | None = None
) -> Callable[[Path, int], Frames]:
    def frames(data: Path, seed: int) -> Frames:
        table = _read(data / "medquad.csv.gz").dropna(subset=[text, label])
        if classes:
            table = table[table[label].isin(classes)]
        columns = {"text": table[text], "label": table[label], "client": table["source"]}
        return _split(_some(pd.DataFrame(columns), most, seed), seed)

    return frames


def _adult(most: int) -> Callable[[Path, int], Frames]:
    def frames(data: Path, seed: int) -> Frames:
        table = _some(_read(data / "adult.csv.gz"), most, seed)
        texts = [_sentence(row) for row in table.to_dict("records")]
        return _split(pd.DataFrame({"text": texts, "label": table["income"].to_numpy()}), seed)

    return frames


def _sentence(row: Mapping[Hashable, str]) -> str:
    """A person's attributes of Adult in words, without those that only repeat others or weigh the census."""
    return (
        f"A {row['age']}-year-old {row['sex'].lower()} from {row['native-country']}, {row['marital-status']} "
        f"({row['relationship']}), education {row['education']}, works as {row['occupation']} ({row['workclass']}) "
        f"{row['hours-per-week']} hours a week, capital gain {row['capital-gain']}, capital loss {row['capital-loss']}."
    )


def _some(table: pd.DataFrame, most: int | None, seed: int) -> pd.DataFrame:
    """The first rows after a shuffle by the seed."""
    return table.iloc[np.random.default_rng(seed).permutation(len(table))[:most]]


@cache
def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str)


_SST2 = ("sst2_train.csv.gz", "sst2_dev.csv.gz")
_MEDQUAD = ("medquad.csv.gz",)
_MOST = 6000

CORPORA = {
    "embedded": Corpus(
        frames=_embedded,
        sharing=(("partition", "natural"), ("client_column", "client")),
    ),
    "SST-2 6,000 iid": Corpus(frames=_sst2(_MOST), files=_SST2),
    "SST-2 6,000 Dirichlet": Corpus(
        frames=_sst2(_MOST),
        files=_SST2,
        sharing=(("partition", "dirichlet"), ("num_clients", 5), ("dirichlet_alpha", 1.0)),
    ),
    "MedQuAD by source": Corpus(
        frames=_medquad(classes=QUESTION_TYPES),
        files=_MEDQUAD,
        sharing=(("partition", "natural"), ("client_column", "client")),
    ),
    "SST-2 5,000": Corpus(frames=_sst2(5000), files=_SST2),
    "SST-2 15,000": Corpus(frames=_sst2(15_000), files=_SST2),
    "SST-2 30,000": Corpus(frames=_sst2(30_000), files=_SST2),
    "SST-2 all rows": Corpus(frames=_sst2(None), files=_SST2),
    "MedQuAD type of question": Corpus(
        frames=_medquad(text="question", classes=QUESTION_TYPES, most=_MOST), files=_MEDQUAD, named=False
    ),
    "MedQuAD source of answer": Corpus(frames=_medquad(label="source", most=_MOST), files=_MEDQUAD, named=False),
    "MedQuAD 15 types of answer": Corpus(frames=_medquad(most=_MOST), files=_MEDQUAD, named=False),
    "Adult in sentences": Corpus(frames=_adult(_MOST), files=("adult.csv.gz",), named=False),
}
