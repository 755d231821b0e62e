"""Sources of variants and their base: the folder of a run, or a store of deduplicated variants.

Variants are read into memory when they are asked for, and the least recently used ones are given up for others.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedpriv.adapters import A_SUFFIX, B_SUFFIX, as_tensor
from fedpriv.adapters.lora import CONVENTION_FILE
from fedpriv.config import RunConfig, parse
from fedpriv.data.records import chat_format_of
from fedpriv.errors import InputError
from fedpriv.runs import files
from fedpriv.serving._engine import Weights
from fedpriv.serving.requests import DamagedVariantError, ServingError, UnknownVariantError
from fedpriv.training import ends_of_turn
from fedpriv.training.model import TrainingModel
from fedpriv.training.workbench import load_model
from fedpriv.variants import folders, is_store
from fedpriv.variants.cache import BoundedCache, CacheStatistics, NoRoomError
from fedpriv.variants.kept import KeptVariants, open_variants
from fedpriv.variants.store import Store

GLOBAL = "global"


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Variants of one model, none of them read yet.

    Attributes:
        config: of the run, or what is known of it.
        readers: of each variant, by name, in the order in which they are listed.
        origin: the folder that they are read from, for people.
        labels: of a classifier, in the order of its outputs.
        again: the same source as it is by then.
    """

    config: RunConfig
    readers: Mapping[str, _Read]
    origin: str
    again: Callable[[], Source]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedBase:
    """The frozen base, ready to run.

    Attributes:
        model: with an adapter like the variants'.
        tokenizer: of transformers.
        ends: tokens that end a causal model's answer.
    """

    model: TrainingModel
    tokenizer: Any
    ends: frozenset[int] = frozenset()


def find(path: Path, *, base: str = "") -> Source:
    """The variants in the folder of a finished run, or in a store of them.

    A run's variants are read from its store if there is one, and those that it does not hold, or holds as they were
    before the run was resumed, from their own files. A store alone belongs to the run in whose folder it lies.

    Args:
        path: of the run's folder or of the store.
        base: for a store in no run's folder: the folder of a run of the same model, or the model's name, in which case
            the variants were made with the default settings of runs.

    Raises:
        InputError: neither a run nor a store is there, it holds no variant, or its base is not known.
        StoreError: the store is damaged as a whole.
    """
    again = partial(find, path, base=base)
    if (path / files.CONFIG).is_file():
        return _of_run(path, again)
    if not is_store(path):
        raise InputError(f"{path}: neither the folder of a run, with {files.CONFIG}, nor a store of variants")
    store = Store(path, read_only=True)
    if not store.names:
        raise InputError(f"{path}: this store holds no variant")
    run = next((folder for folder in (path.resolve().parent, Path(base)) if (folder / files.CONFIG).is_file()), None)
    if run is None and not base:
        raise InputError(f"{path}: lies in no run's folder; name the base, a model or a run's folder")
    config = files.read_config(run) if run else _defaults(base, store)
    labels = _labels_of_run(run, config) if run else ()
    return _source(store, _servable(config), labels or _numbered(_num_labels(store)), str(path), again)


def load(source: Source) -> LoadedBase:
    """The base of the variants, in the format of the run's configuration; no data are read.

    Raises:
        InputError: it cannot be loaded.
    """
    config = source.config
    base, model = load_model(config, num_labels=len(source.labels))
    ends: frozenset[int] = frozenset()
    if config.task == "CAUSAL_LM":
        chat = [(chat_format_of(config).end(base.tokenizer),)] if config.instructs else []
        ends = ends_of_turn(model, base.tokenizer, chat)
    return LoadedBase(model=model, tokenizer=base.tokenizer, ends=ends)


def _of_run(run: Path, again: Callable[[], Source]) -> Source:
    config = files.read_config(run)
    kept = open_variants(run / files.VARIANTS, run / files.STORE)
    if not kept.names:
        raise InputError(f"{run / files.VARIANTS}: holds no variant; give the folder of a finished run")
    labels = _labels_of_run(run, config)
    if config.task == "SEQ_CLS" and not labels:
        raise InputError(f"{run}: none of its variants says in {CONVENTION_FILE} which labels there are")
    num_own = sum(kept.reader(name) is kept.own for name in kept.names)
    origin = str(run / (files.VARIANTS if num_own == len(kept.names) else files.STORE))
    if 0 < num_own < len(kept.names):
        origin += f", and {num_own} that it does not hold, or holds as they were, from {run / files.VARIANTS}"
    return _source(kept, _servable(config), labels, origin, again, check=lambda name: kept.reader(name) is kept.own)


def _source(
    kept: KeptVariants,
    config: RunConfig,
    labels: tuple[str, ...],
    origin: str,
    again: Callable[[], Source],
    *,
    check: Callable[[str], bool] = lambda name: False,
) -> Source:
    """The variants, of which those in folders of their own are checked to be of the run that they are found in."""
    scaling = config.alpha / config.rank
    # Requests are looked up among these names and nowhere else.
    readers = {name: partial(_read, kept, name, scaling if check(name) else None) for name in in_order(kept.names)}
    return Source(config=config, readers=readers, labels=labels, origin=origin, again=again)


def _servable(config: RunConfig) -> RunConfig:
    """The configuration, of which nothing but the base and its adapters is used."""
    if config.rule.ternary:
        raise InputError(
            f"aggregation = {config.aggregation}: its variants are whole weights, which do not share passes of a base"
        )
    if config.text_pair_column:
        raise InputError(f"text_pair_column = {config.text_pair_column!r}: pairs of texts are not served")
    return config


def in_order(names: Iterable[str]) -> list[str]:
    """Names of variants, `global` first, and numbers in them as numbers."""

    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.findall(r"[0-9]+|[^0-9]+", name)
        return name != GLOBAL, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(names, key=key)


def _read(kept: KeptVariants, name: str, scaling: float | None, most_bytes: int) -> Mapping[str, Tensor]:
    """The tensors of a variant, checked against their digests; see `_Read`.

    Args:
        kept: has it.
        name: of the variant.
        scaling: of the run, which its description must agree with; None does not read that.
        most_bytes: of its tensors.

    Raises:
        ServingError: they take more memory than that.
        Exception: they are not those that were described, or scaled in another way than the run's.
    """
    _check_room(name, kept.memory_bytes(name), most_bytes)
    if scaling is not None:
        described = kept.describe(name)
        if described is None or described.name != name:
            raise ValueError(f"{name}: is described as {described and described.name!r}")
        found = described.files[folders.ADAPTER_CONFIG]
        if abs(found["lora_alpha"] / found["r"] - scaling) > 1e-6 * scaling:
            raise ValueError(f"{name}: the scale in its {folders.ADAPTER_CONFIG} is not alpha / rank = {scaling:g}")
    return _checked(kept.tensors(name))


def _checked(tensors: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, Tensor]:
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds values that are no numbers")
    return {name: as_tensor(values) for name, values in tensors.items()}


def _labels_of_run(run: Path, config: RunConfig) -> tuple[str, ...]:
    """The classes in order, as any variant keeps them, or as the configuration or the summary names them."""
    if config.task != "SEQ_CLS":
        return ()
    for path in sorted((run / files.VARIANTS).glob(f"*/{CONVENTION_FILE}")):
        try:
            labels = json.loads(path.read_text(encoding="utf-8")).get("labels")
        except (OSError, ValueError, AttributeError):
            continue  # damaged; another has them too
        if labels and all(isinstance(label, str) for label in labels):
            return tuple(labels)
    if config.labels:
        return config.labels
    return tuple(files.read_values(run / files.SUMMARY, optional=True).get("labels") or ())


def _numbered(num: int) -> tuple[str, ...]:
    return tuple(map(str, range(num)))


def _num_labels(store: Store) -> int:
    """Outputs of the stored variants' heads; 0 of causal models."""
    layout = store.manifest(store.names[0]).layout
    heads = [t.shape[0] for t in layout.tensors if not t.name.endswith((A_SUFFIX, B_SUFFIX))]
    return heads[-1] if heads else 0


def _defaults(model: str, store: Store) -> RunConfig:
    """The configuration of the run that made a store, as far as its tensors tell; the rest has its defaults."""
    tensors = store.manifest(store.names[0]).layout.tensors
    rank = next((tensor.shape[0] for tensor in tensors if tensor.name.endswith(A_SUFFIX)), 1)
    config = parse({"model": model, "task": "SEQ_CLS" if _num_labels(store) else "CAUSAL_LM"})
    layers = sorted({int(m.group(1)) for t in tensors if (m := re.search(r"\.(?:layer|layers|h)\.(\d+)\.", t.name))})
    return replace(config, rank=rank, alpha=config.alpha / config.rank * rank, layers=",".join(map(str, layers)))


log = logging.getLogger(__name__)

_Read = Callable[[int], Mapping[str, Tensor]]
"""The tensors of a variant from the disk, given the most bytes that they may take: a small store may hold models of any
size. Raises ServingError before it reads more, and any other exception if they are damaged."""


class VariantMemory:
    """Variants in bounded memory. Not thread-safe, except that `statistics` may be read from any thread.

    A variant in use stays until everyone has given it back. Between its last use and the next it may go, and the one
    that was asked for longest ago goes first.

    Args:
        readers: by the variant's name; names come from requests and are looked up here and nowhere else.
        weights: turns a variant's name and tensors into what passes use; raises ValueError if they do not fit.
        memory_bytes: of all variants in memory together.
    """

    def __init__(
        self,
        readers: Mapping[str, _Read],
        weights: Callable[[str, Mapping[str, Tensor]], Weights],
        memory_bytes: int,
    ) -> None:
        self._readers, self._weights, self._memory_bytes = readers, weights, memory_bytes
        self._cache: BoundedCache[Weights] = BoundedCache(_bytes_of)
        self._uses: Counter[str] = Counter()

    @property
    def statistics(self) -> CacheStatistics:
        """Counts of its work so far."""
        return self._cache.statistics

    def take(self, name: str, *, again: bool = False) -> Weights:
        """A variant, which stays in memory until `give_back` was called as often as this.

        Args:
            name: of the variant.
            again: whether the request has had it before, and is counted already.

        Raises:
            UnknownVariantError: there is none of this name.
            DamagedVariantError: it is not as it was written.
            ServingError: as of `fitted`.
            NoRoomError: it needs more than the variants in use leave.
        """
        held, read = self._cache.get(name), 0
        if held is None:
            held = self._read(name)
            read = held.num_bytes
            self._make_room(held)
        self._cache.keep(name, held, bytes_read=read, again=again)
        self._uses[name] += 1
        return held

    def give_back(self, name: str) -> None:
        """A use of a variant is over."""
        self._uses[name] -= 1
        if self._uses[name] <= 0:
            del self._uses[name]

    def forget(self, name: str) -> None:
        """Free a variant that nobody uses."""
        self._cache.forget(name)

    def clear(self) -> None:
        """Free all variants."""
        self._cache.clear()
        self._uses.clear()

    def _read(self, name: str) -> Weights:
        if name not in self._readers:
            raise UnknownVariantError(f"there is no variant {name!r}")
        return self.fitted(name, self._readers[name])

    def fitted(self, name: str, read: _Read) -> Weights:
        """A variant as passes use it, which is kept nowhere; may be called from any thread.

        Raises:
            DamagedVariantError: it is not as it was written, or does not fit.
            ServingError: it needs more memory than there is for all.
        """
        try:
            return self._weights(name, read(self._memory_bytes))
        except ServingError:
            raise
        except Exception as error:  # a damaged file may raise anything in its reader
            log.warning("variant %s is not served: %s", name, error)
            raise DamagedVariantError(f"variant {name!r} is damaged and not served; the others are") from None

    def _make_room(self, new: Weights) -> None:
        _check_room(new.variant, new.num_bytes, self._memory_bytes)
        in_use = _bytes_of([held for held in self._cache.held if held.variant in self._uses])
        if in_use + new.num_bytes > self._memory_bytes:  # others would make room in vain
            raise NoRoomError(new.variant)
        left = self._memory_bytes - new.num_bytes
        self._cache.make_room(lambda: new if _bytes_of(self._cache.held) <= left else None, in_use=self._uses)


def _check_room(name: str, num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ServingError(f"variant {name!r} needs {num_bytes} bytes, but the server has {most_bytes} for all")


def _bytes_of(variants: Iterable[Weights]) -> int:
    return sum(weights.num_bytes for weights in variants)
