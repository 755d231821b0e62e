"""The corpora of the studies: records with a label, those of each client for training and others for testing.

No test record is a near copy of one of training: rows are compared as words in lower case. SST-2's rows are phrases, of
which whole sentences are tested, and no part of these is trained on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.feature_extraction.text import CountVectorizer

from fedpriv.errors import InputError
from fedpriv.learning.data import hospital

TEST_FRACTION = 0.2

# Two texts are near if they share so much of their runs of three words: intersection over union.
NEAR = 0.8

# Texts that are compared with all others in one product of sparse matrices.
_AT_ONCE = 250

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
        frames: (data folder, seed) -> training and test records, as they are.
        files: that the data folder must hold.
        has_copies: whether a test record near one of training is its copy, which is not tested. Where a template makes
            texts of attributes drawn at random, it is another record.
        are_phrases: whether rows are parts of each other.
        most: training records, of phrases; None for all that are part of no tested sentence.
        sharing: the configuration's keys that say which client has which records.
        named: whether the recipe's constants were chosen with these data in view; the others are untuned.
    """

    frames: Callable[[Path, int], Frames]
    files: tuple[str, ...] = ()
    has_copies: bool = True
    are_phrases: bool = False
    most: int | None = None
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
    train, test = apart(name, data, seed)
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


def apart(name: str, data: Path, seed: int) -> Frames:
    """The records of a corpus, without test records that are near copies of training ones."""
    corpus = CORPORA[name]
    if corpus.are_phrases:
        train, test = _sentences(corpus.frames, data)
        return train.iloc[np.random.default_rng(seed).permutation(len(train))[: corpus.most]], test
    train, test = corpus.frames(data, seed)
    return train, test[nearest(test["text"], train["text"]) < NEAR] if corpus.has_copies else test


@cache
def _sentences(frames: Callable[[Path, int], Frames], data: Path) -> Frames:
    """The training phrases that are part of no tested sentence, and the sentences: test phrases within no other row."""
    train, test = frames(data, 0)
    rows = [[words(text) for text in part["text"]] for part in (train, test)]
    inner = parts_of({*rows[0], *rows[1]}, within={*rows[1]}, whole=False)
    test = test[[text not in inner for text in rows[1]]]
    test = test[~test["text"].map(words).duplicated()]
    inner = parts_of(map(words, test["text"]), within={*rows[0]}, whole=True)
    train = train[[text not in inner for text in rows[0]]]
    return train, test[nearest(test["text"], train["text"]) < NEAR]


def overlap(name: str, data: Path, seed: int) -> dict[str, float]:
    """The test records of a corpus as they are, the shares of them that training records tell, and how many are left.

    `within` is the share that is a run of words of a training record, `equal` the share that is one, and `near` the
    share that has a near one.
    """
    train, test = CORPORA[name].frames(data, seed)
    known, tested = {words(text) for text in train["text"]}, [words(text) for text in test["text"]]
    inner = parts_of(known, within={*tested}, whole=True)
    shares = {
        "within": np.mean([text in inner for text in tested]),
        "equal": np.mean([text in known for text in tested]),
        "near": np.mean(nearest(test["text"], train["text"]) >= NEAR),
    }
    left = dict(zip(("num_train", "num_left"), map(len, apart(name, data, seed)), strict=True))
    return {"num_test": len(test), **{share: float(value) for share, value in shares.items()}, **left}


def words(text: str) -> str:
    """A text's words in lower case, with one space between them."""
    return " ".join(re.findall(r"\w+", str(text).lower()))


def parts_of(texts: Iterable[str], *, within: set[str], whole: bool) -> set[str]:
    """Those of a set's texts that are a run of words of a text; of all its words only if `whole`."""
    found, lengths = set(), defaultdict[str, set[int]](set)
    for text in within:
        lengths[text.split(" ", 1)[0]].add(text.count(" ") + 1)
    for split in (text.split(" ") for text in texts):
        for start, first in enumerate(split):
            ends = (start + length for length in lengths.get(first, ()))
            runs = {" ".join(split[start:end]) for end in ends if whole or end - start < len(split)}
            found |= runs & within
    return found


def nearest(texts: Iterable[str], others: Iterable[str]) -> npt.NDArray[np.float64]:
    """The largest Jaccard similarity of each text to one of the others, by their runs of three words, exactly."""
    texts, others = list(map(str, texts)), list(map(str, others))
    counted = CountVectorizer(analyzer=_runs, binary=True, dtype=np.float32).fit_transform([*texts, *others])
    ours, theirs = counted[: len(texts)], counted[len(texts) :].T.tocsr()
    sizes, found = np.diff(counted.indptr), np.zeros(len(texts))
    for start in range(0, len(texts), _AT_ONCE):
        shared = (ours[start : start + _AT_ONCE] @ theirs).tocoo()
        rows = start + shared.row
        np.maximum.at(found, rows, shared.data / (sizes[rows] + sizes[len(texts) + shared.col] - shared.data))
    return found


def _runs(text: str) -> set[str]:
    """A text's runs of three words; a shorter text is one run."""
    split = words(text).split(" ")
    return {" ".join(split[start : start + 3]) for start in range(max(1, len(split) - 2))}


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


def _sst2(data: Path, seed: int) -> Frames:
    return _read(data / "sst2_train.csv.gz"), _read(data / "sst2_dev.csv.gz")


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


_SST2: Mapping[str, Any] = {
    "frames": _sst2, "files": ("sst2_train.csv.gz", "sst2_dev.csv.gz"), "are_phrases": True
}  # fmt: skip
_MEDQUAD = ("medquad.csv.gz",)
_MOST = 6000

CORPORA = {
    "embedded": Corpus(
        frames=_embedded,
        has_copies=False,
        sharing=(("partition", "natural"), ("client_column", "client")),
    ),
    "SST-2 6,000 iid": Corpus(**_SST2, most=_MOST),
    "SST-2 6,000 Dirichlet": Corpus(
        **_SST2,
        most=_MOST,
        sharing=(("partition", "dirichlet"), ("num_clients", 5), ("dirichlet_alpha", 1.0)),
    ),
    "MedQuAD by source": Corpus(
        frames=_medquad(classes=QUESTION_TYPES),
        files=_MEDQUAD,
        sharing=(("partition", "natural"), ("client_column", "client")),
    ),
    "SST-2 5,000": Corpus(**_SST2, most=5000),
    "SST-2 15,000": Corpus(**_SST2, most=15_000),
    "SST-2 30,000": Corpus(**_SST2, most=30_000),
    "SST-2 all rows": Corpus(**_SST2),
    "MedQuAD type of question": Corpus(
        frames=_medquad(text="question", classes=QUESTION_TYPES, most=_MOST), files=_MEDQUAD, named=False
    ),
    "MedQuAD source of answer": Corpus(frames=_medquad(label="source", most=_MOST), files=_MEDQUAD, named=False),
    "MedQuAD 15 types of answer": Corpus(frames=_medquad(most=_MOST), files=_MEDQUAD, named=False),
    "Adult in sentences": Corpus(frames=_adult(_MOST), files=("adult.csv.gz",), has_copies=False, named=False),
}
