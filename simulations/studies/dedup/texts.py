"""Texts of three sources as MiniLM encodes them, computed once and kept beside the study's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from fedpriv.data import hospital
from fedpriv.errors import InputError
from simulations.studies.dedup.networks import EMBEDDING, FROZEN_LAYERS, encoder
from simulations.studies.dedup.records import TokenRecords, Vectors

TextTask = Literal["sst2", "medquad", "hospital"]
TextSplit = Literal["public", "tuning", "validation", "test", "private", "parts"]

MAX_TOKENS = 32
# Tokens of a pass of the encoder.
_TOKENS = 8192

# The 15 types of MedQuAD's questions that have at least 40 answers; the index is the label.
QUESTION_TYPES = (
    "information", "symptoms", "treatment", "inheritance", "frequency", "genetic changes", "causes",
    "exams and tests", "research", "outlook", "susceptibility", "considerations", "prevention", "stages",
    "complications",
)  # fmt: skip

# Records of each split, cut in this order from one fixed permutation, so that no record is in two of them.
SIZES: dict[TextTask, dict[TextSplit, int]] = {
    "sst2": {"public": 600, "tuning": 2000, "validation": 2000, "test": 2000, "private": 20000, "parts": 30000},
    "medquad": {"public": 600, "tuning": 1500, "validation": 1500, "test": 1500, "private": 10500},
    # The last three from messages of other phrases than those of training, as the corpus has them.
    "hospital": {"public": 400, "private": 3600, "tuning": 300, "validation": 350, "test": 350},
}
# Of these splits the tokens are kept too.
_WITH_TOKENS = ("public", "tuning", "validation", "test", "private")

Corpus = tuple[list[str], list[int]]
"""Texts and labels."""


def prepare(out: Path, data: Path, task: TextTask) -> None:
    """Encode the texts of a task into `out/texts`, if they are not encoded yet.

    Args:
        out: the study's folder.
        data: holds sst2_train.csv.gz and medquad.csv.gz.
        task: whose texts.

    Raises:
        InputError: a file is missing.
    """
    if not (out / "texts" / f"{task}.labels.npy").is_file():
        texts, labels = _CORPORA[task](data)
        num = sum(SIZES[task].values())
        print(f"{task}: {num} texts are being encoded", flush=True)
        _write(out / "texts", task, _encoded(texts[:num], _num_with_tokens(task)), labels[:num])


def embedded(out: Path, task: TextTask, split: TextSplit) -> Vectors:
    """The texts of a split as vectors of 384 values whose mean square is 1."""
    rows = _rows(task, split)
    return Vectors(torch.from_numpy(np.array(_read(out, task, "embeddings")[rows])), _labels(out, task, rows))


def tokens(out: Path, task: TextTask, split: TextSplit) -> TokenRecords:
    """The texts of a split as the states of their tokens after MiniLM's frozen layers."""
    rows = _rows(task, split)
    starts, lengths = (_read(out, task, name)[rows] for name in ("starts", "lengths"))
    return TokenRecords(_read(out, task, "states"), starts, lengths, _labels(out, task, rows))


@dataclass(frozen=True, eq=False)
class _Encoded:
    embeddings: Tensor
    lengths: Tensor
    starts: Tensor
    states: Tensor


@torch.inference_mode()
def _encoded(texts: Sequence[str], num_with_tokens: int) -> _Encoded:
    """Embeddings of all texts, and the states of the first ones, in passes of one length: no token is padding."""
    base = encoder(torch.bfloat16)
    ids = base.tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    lengths = torch.tensor([len(each) for each in ids])
    starts = lengths.cumsum(0) - lengths
    embeddings = torch.empty(len(ids), EMBEDDING)
    states = torch.empty(int(lengths[:num_with_tokens].sum()), EMBEDDING, dtype=torch.float16)
    for rows in _same_length(lengths):
        hidden = base.model.base_model.embeddings(input_ids=torch.tensor([ids[row] for row in rows]))
        for index, layer in enumerate(base.model.base_model.encoder.layer):
            if index == FROZEN_LAYERS:
                kept = rows < num_with_tokens
                places = starts[rows[kept]].unsqueeze(1) + torch.arange(hidden.shape[1])
                states[places] = hidden[kept].half()
            hidden = layer(hidden)
        embeddings[rows] = F.normalize(hidden.float().mean(dim=1), dim=1) * EMBEDDING**0.5
    return _Encoded(embeddings, lengths, starts, states)


def _same_length(lengths: Tensor) -> Iterator[Tensor]:
    for length in lengths.unique().tolist():
        yield from (lengths == length).nonzero().squeeze(1).split(max(1, _TOKENS // length))


def _write(folder: Path, task: TextTask, encoded: _Encoded, labels: Sequence[int]) -> None:
    """Write the arrays; the labels come last, so that a task that has them is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {**vars(encoded), "labels": torch.tensor(labels, dtype=torch.int64)}
    for name, values in arrays.items():
        temporary = folder / f"{task}.{name}.tmp.npy"
        np.save(temporary, values.numpy())
        temporary.replace(folder / f"{task}.{name}.npy")


def _read(out: Path, task: TextTask, name: str) -> Any:
    path = out / "texts" / f"{task}.{name}.npy"
    if not path.is_file():
        raise InputError(f"{path}: is missing; train writes it, from --data FOLDER")
    return np.load(path, mmap_mode="r")


def _labels(out: Path, task: TextTask, rows: slice) -> Tensor:
    return torch.from_numpy(np.array(_read(out, task, "labels")[rows]))


def _rows(task: TextTask, split: TextSplit) -> slice:
    sizes = SIZES[task]
    if split not in sizes:
        raise InputError(f"split = {split!r}: {task} has {', '.join(sizes)}")
    begin = sum(sizes[each] for each in list(sizes)[: list(sizes).index(split)])
    return slice(begin, begin + sizes[split])


def _num_with_tokens(task: TextTask) -> int:
    return sum(size for split, size in SIZES[task].items() if split in _WITH_TOKENS)


def _table(data: Path, file: str) -> pd.DataFrame:
    path = data / file
    if not path.is_file():
        raise InputError(f"--data {data}: holds no {file}; name the folder that does")
    return pd.read_csv(path)


def _shuffled(frame: pd.DataFrame) -> Corpus:
    """Texts and labels of a table, each text once, in a fixed random order."""
    unique = frame.drop_duplicates("text").sample(frac=1, random_state=0)
    return unique["text"].tolist(), unique["label"].tolist()


def _sst2(data: Path) -> Corpus:
    return _shuffled(_table(data, "sst2_train.csv.gz"))


def _medquad(data: Path) -> Corpus:
    table = _table(data, "medquad.csv.gz")
    labels = table["question_type"].map({name: label for label, name in enumerate(QUESTION_TYPES)})
    return _shuffled(pd.DataFrame({"text": table["answer"], "label": labels}).dropna().astype({"label": int}))


def _hospital(_: Path) -> Corpus:
    texts: list[str] = []
    labels: list[int] = []
    for messages in hospital.generate():
        order = np.random.default_rng(0).permutation(len(messages))
        texts += [messages[index].text for index in order]
        labels += [hospital.DEPARTMENTS.index(messages[index].department) for index in order]
    return texts, labels


_CORPORA: dict[TextTask, Callable[[Path], Corpus]] = {"sst2": _sst2, "medquad": _medquad, "hospital": _hospital}
