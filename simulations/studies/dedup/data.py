"""The records of every task and split, as each architecture reads them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, cast, get_args

from simulations.studies.dedup import images, texts
from simulations.studies.dedup.images import ImageTask
from simulations.studies.dedup.networks import Architecture
from simulations.studies.dedup.records import StudyRecords
from simulations.studies.dedup.texts import TextTask

Task = ImageTask | TextTask
Split = Literal["public", "tuning", "validation", "test", "private", "parts"]
"""`tuning` chooses settings of the study and nothing else; `parts` is a second private set of SST-2."""

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
        return images.images(cast(ImageTask, task), cast(images.ImageSplit, split))
    if architecture != "minilm":
        return texts.embedded(out, cast(TextTask, task), split)
    found = texts.tokens(out, cast(TextTask, task), split)
    return found.first(_MOST_TEXTS) if split in ("tuning", "validation", "test") else found
