"""A saved variant, in its run's folder or on its own, and its model ready to answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpriv.adapters import lora
from fedpriv.adapters.base_models import load_base
from fedpriv.adapters.locations import check_weights, public_name
from fedpriv.adapters.pooling import normalizes
from fedpriv.config import RunConfig
from fedpriv.data.encoding import TextReading
from fedpriv.errors import InputError
from fedpriv.runs import files
from fedpriv.variants import folders

GLOBAL = "global"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class SavedVariant:
    """A variant on disk; its weights are not read yet.

    Attributes:
        folder: with its files.
        run: the folder of its run; None for a variant that was copied elsewhere.
        config: of the run; None without one.
        model: where its base is, as `load_base` takes it.
        task: `SEQ_CLS` or `CAUSAL_LM`.
        convention: what its fedpriv.json says.
        reading: how it reads texts.
    """

    folder: Path
    run: Path | None
    config: RunConfig | None
    model: str
    task: str
    convention: dict[str, Any]
    reading: TextReading

    @property
    def name(self) -> str:
        """The variant's name in its run."""
        return self.folder.resolve().name

    @property
    def base(self) -> str:
        """The name of its base elsewhere, see `public_name`; files of older versions may name a path instead."""
        settings = files.read_values(self.folder / ADAPTER_CONFIG)
        return public_name(str(self.convention.get("base_model") or settings["base_model_name_or_path"]))

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes in order; none of a causal model."""
        return tuple(map(str, self.convention["labels"]))

    @property
    def pooling(self) -> str:
        """One of `fedpriv.adapters.pooling.CONVENTIONS`."""
        return str(self.convention["pooling"])


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedVariant:
    """A variant's model in float32, in eval mode.

    Attributes:
        saved: which it is.
        peft_model: the base with the adapter, pooled as in training.
        tokenizer: of transformers.
        device: where it computes.
    """

    saved: SavedVariant
    peft_model: Any
    tokenizer: Any
    device: torch.device


def names_in(run: Path) -> list[str]:
    """The variants in a run's folder that are complete, `global` first."""
    found = sorted(path.parent.name for path in (run / files.VARIANTS).glob(f"*/{lora.CONVENTION_FILE}"))
    return sorted(found, key=lambda name: name != GLOBAL)


def find(path: Path, *, variant: str = "", model: str = "") -> SavedVariant:
    """The variant in a folder.

    Args:
        path: of a finished run, or of one variant.
        variant: which of the run's; empty for `global`.
        model: the base; empty for the one that the run, or else the variant, names.

    Raises:
        InputError: there is no such variant, or its files are damaged.
    """
    if (path / files.CONFIG).is_file():
        run, name, known = path, variant or GLOBAL, names_in(path)
        if name not in known:
            raise InputError(f"variant = {name!r}: {path / files.VARIANTS} has {', '.join(known[:20]) or 'none'}")
        folder = path / files.VARIANTS / name
    elif (path / lora.CONVENTION_FILE).is_file():
        if variant:
            raise InputError(f"variant = {variant!r}: {path} is one variant already; give the folder of its run")
        folder, run = path, path.resolve().parent.parent
    else:
        raise InputError(f"{path}: neither the folder of a run, with {files.CONFIG}, nor of a variant")
    convention = lora.read_convention(folder)
    config = files.read_config(run) if (run / files.CONFIG).is_file() else None
    return SavedVariant(
        folder=folder,
        run=run if config else None,
        config=config,
        model=model or (config.model if config else _base_of(folder, convention)),
        task=_task_of(folder),
        convention=convention,
        reading=TextReading.of(config) if config else _reading_of(folder, convention),
    )


def load(saved: SavedVariant) -> LoadedVariant:
    """The variant's model, in float32 whatever format the run computed in.

    Raises:
        InputError: its files were changed; its base is not to be found, or has other weights than in training.
    """
    folders.read_tensors(saved.folder)  # against their digest
    check_weights(saved.model, saved.convention.get("base_weights") or {})
    normalize = normalizes(saved.pooling)
    base = load_base(saved.model, task=saved.task, num_labels=len(saved.labels), normalize=normalize)
    try:
        model = lora.load(base, saved.folder)
    except InputError:
        raise
    except (RuntimeError, KeyError, ValueError) as error:  # of torch and peft, for tensors of other shapes or names
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model = {saved.model!r}: the adapter in {saved.folder} does not fit it ({reason})") from None
    return LoadedVariant(saved=saved, peft_model=model, tokenizer=base.tokenizer, device=torch.device("cpu"))


def _task_of(folder: Path) -> str:
    task = files.read_values(folder / ADAPTER_CONFIG).get("task_type")
    if task not in ("SEQ_CLS", "CAUSAL_LM"):
        raise InputError(f"{folder / ADAPTER_CONFIG}: task_type = {task!r}: must be SEQ_CLS or CAUSAL_LM")
    return str(task)


def _base_of(folder: Path, convention: dict[str, Any]) -> str:
    name = convention.get("base_model")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / lora.CONVENTION_FILE}: names no base_model; give --model")
    return name


def _reading_of(folder: Path, convention: dict[str, Any]) -> TextReading:
    where = folder / lora.CONVENTION_FILE
    if not isinstance(convention.get("reading"), dict):
        raise InputError(f"{where}: says nothing of max_length; give the folder of the variant's run")
    return TextReading.from_json(convention["reading"], where=str(where))
