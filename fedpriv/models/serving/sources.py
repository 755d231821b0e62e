"""Sources of variants and their base: the folder of a run, or a store of deduplicated variants.

Variants are read into bounded memory when they are asked for, and those used longest ago are given up for others.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, StoreError
from fedpriv.learning.adapters import as_tensor, lora
from fedpriv.learning.adapters.pooling import normalizes
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.workbench import load_frozen, ready
from fedpriv.models.publishing import saved
from fedpriv.models.publishing.saved import GLOBAL, SavedVariant
from fedpriv.models.serving._engine import Weights
from fedpriv.models.serving.requests import ServingError, UnknownVariantError, UnreadableVariantError
from fedpriv.models.variants import is_store
from fedpriv.models.variants.folders import VariantFolders
from fedpriv.models.variants.store import Store
from fedpriv.models.variants.stored import readers_of
from fedpriv.runs import RunFolder, files

log = logging.getLogger(__name__)

_Read = Callable[[int], Mapping[str, Tensor]]
"""The tensors of a variant from the disk, given the most bytes that they may take: a small store may hold models of any
size. Raises ServingError before it reads more, and any other exception if they are damaged."""

Held = TypeVar("Held")


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Variants of one model, none of them read yet.

    Attributes:
        like: the first that says how it is used; what it shares with the others is that of the model that is served.
        readers: of each variant, by name, in the order in which they are listed.
        origin: the folder that they are read from, for people.
    """

    like: SavedVariant
    config: RunConfig
    readers: Mapping[str, _Read]
    origin: str


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedBase:
    """The frozen base, ready to run: with an adapter like the variants', and the tokens that end an answer."""

    model: TrainingModel
    tokenizer: Any
    ends: frozenset[int] = frozenset()


def find(path: Path, *, model: str = "") -> Source:
    """The variants in the folder of a finished run, or in a store of them.

    A run's variants are read from its store if there is one, and those that it does not hold, or holds as they were
    before the run was resumed, from their own files.

    Args:
        model: the base; empty for the one that the run, or else a variant, names.

    Raises:
        InputError: neither a run nor a store is there, or it holds no variant that can be served.
        StoreError: the store is damaged as a whole.
    """
    if (path / files.CONFIG).is_file():
        run, kept = path, readers_of(path / files.VARIANTS, path / files.STORE)
        origin = _origin(run, kept)
    elif is_store(path):
        store = Store(path, read_only=True)
        run, kept, origin = path.resolve().parent, dict.fromkeys(store.names, store), str(path)
    else:
        raise InputError(f"{path}: neither the folder of a run, with {files.CONFIG}, nor a store of variants")
    names, folder = in_order(kept), RunFolder(run)
    if not names:
        raise InputError(f"{path}: holds no variant; give the folder of a finished run, or a store of variants")
    like = _first(kept, names, folder, model)
    if like.settings.get("peft_type") != "LORA":
        raise InputError(f"{like.name}: whole weights, as of t-fedavg, do not share passes of a base; use predict")
    if like.reading.pairs:
        raise InputError(f"{like.name}: reads pairs of texts, which are not served; use predict")
    # Requests are looked up among these names and nowhere else.
    readers = {name: partial(_read, kept[name], name, folder, like) for name in names}
    return Source(like=like, config=like.config or RunConfig(), readers=readers, origin=origin)


def _origin(run: Path, kept: Mapping[str, VariantFolders | Store]) -> str:
    num_own = sum(isinstance(reader, VariantFolders) for reader in kept.values())
    origin = str(run / (files.VARIANTS if num_own == len(kept) else files.STORE))
    if 0 < num_own < len(kept):
        origin += f", and {num_own} that it does not hold, or holds as they were, from {run / files.VARIANTS}"
    return origin


def _first(
    kept: Mapping[str, VariantFolders | Store], names: Sequence[str], run: RunFolder, model: str
) -> SavedVariant:
    """The first variant that says how it is used; the error of the last one if none does."""
    for name in names:
        try:
            return saved.of(kept[name], name, run, model=model)
        except (InputError, StoreError):
            if name == names[-1]:
                raise
    raise AssertionError("a source has names")


def load(source: Source) -> LoadedBase:
    """The base of the variants, in the format of the run's configuration; InputError if it cannot be had."""
    like = source.like
    with saved.fitting(like):
        normalize = normalizes(like.pooling)
        base = load_frozen(source.config, like.model, task=like.task, labels=like.labels, normalize=normalize)
        peft_model = lora.shaped(base, like.settings)
    model = ready(source.config, peft_model)
    ends = saved.ends_in(like.reading, model, base.tokenizer) if like.task == "CAUSAL_LM" else frozenset[int]()
    return LoadedBase(model=model, tokenizer=base.tokenizer, ends=ends)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of variants, `global` first, and numbers in them as numbers."""

    def key(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.findall(r"[0-9]+|[^0-9]+", name)
        return name != GLOBAL, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(names, key=key)


def _shared(variant: SavedVariant) -> dict[str, Any]:
    """The uses of a variant that all have in common which share a base and its tokenizer."""
    settings = variant.settings
    return {
        "task": variant.task,
        "labels": variant.labels,
        "pooling": variant.pooling,
        "reading": variant.reading,
        "lora_alpha / r": f"{settings['lora_alpha'] / settings['r']:.6g}",
        "base_weights": set(variant.convention["base_weights"].values()),
    }


def _read(
    reader: VariantFolders | Store, name: str, run: RunFolder, like: SavedVariant, most_bytes: int
) -> Mapping[str, Tensor]:
    """The tensors of a variant, whose uses are those of `like`, checked against their digests; see `_Read`."""
    _check_room(name, reader.memory_bytes(name), most_bytes)
    own, expected = _shared(saved.of(reader, name, run, model=like.model)), _shared(like)
    if other := next((key for key in own if own[key] != expected[key]), None):
        raise ValueError(f"its {other} = {own[other]} is not the served model's {expected[other]}")
    tensors = reader.tensors(name)
    for tensor, values in tensors.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{tensor} holds values that are no numbers")
    return {tensor: as_tensor(values) for tensor, values in tensors.items()}


class VariantMemory:
    """Variants in bounded memory. Not thread-safe, except that `statistics` may be read from any thread.

    A variant in use stays until everyone has given it back. Between its last use and the next it may go, and the one
    that was asked for longest ago goes first.

    Args:
        readers: by the variant's name; names come from requests and are looked up here and nowhere else.
        weights: turns a variant's name and tensors into what passes use; raises ValueError if they do not fit.
    """

    def __init__(
        self, readers: Mapping[str, _Read], weights: Callable[[str, Mapping[str, Tensor]], Weights], memory_bytes: int
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
            again: whether the request has had it before, and is counted already.

        Raises:
            UnknownVariantError: there is none of this name.
            UnreadableVariantError: it is changed, missing, unreadable or of another use; the log says which.
            ServingError: it needs more memory than there is for all.
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

    def clear(self) -> None:
        """Free all variants."""
        self._cache.clear()
        self._uses.clear()

    def _read(self, name: str) -> Weights:
        if name not in self._readers:
            raise UnknownVariantError(f"there is no variant {name!r}")
        try:
            return self._weights(name, self._readers[name](self._memory_bytes))
        except ServingError:
            raise
        except Exception as error:  # a damaged file may raise anything in its reader
            log.warning("variant %s is not served: %s", name, error)
            raise UnreadableVariantError(f"variant {name!r} cannot be read; the log says why") from None

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


@dataclass(frozen=True, kw_only=True)
class CacheStatistics:
    """Hits and misses of a cache so far, and the bytes in memory; what several variants have in common counts once."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_in_memory: int = 0


class NoRoomError(RuntimeError):
    """Variants in use leave no room now; there will be some when they are given back."""


class BoundedCache(Generic[Held]):
    """Variants in memory by their last use. Not thread-safe, but any thread may read `statistics`."""

    def __init__(self, num_bytes: Callable[[Collection[Held]], int]) -> None:
        self._num_bytes = num_bytes
        self._held: OrderedDict[str, Held] = OrderedDict()
        self.statistics = CacheStatistics()

    @property
    def names(self) -> list[str]:
        """The variants in memory, least recently used first."""
        return list(self._held)

    @property
    def held(self) -> Collection[Held]:
        """The memory of each of them."""
        return self._held.values()

    def get(self, name: str) -> Held | None:
        """The memory of a variant; None if it is not held."""
        return self._held.get(name)

    def keep(self, name: str, held: Held, *, bytes_read: int, again: bool = False) -> None:
        """Hold a variant as the one that was used last, and count the request for it.

        Args:
            bytes_read: for this request; 0 is a hit.
            again: whether the request has had the variant before, and is counted already.
        """
        before, is_new = self.statistics, self._held.get(name) is not held
        self._held[name] = held
        self._held.move_to_end(name)
        self.statistics = CacheStatistics(
            hits=before.hits + (not bytes_read and not again),
            misses=before.misses + (bool(bytes_read) and not again),
            bytes_read=before.bytes_read + bytes_read,
            bytes_in_memory=self._num_bytes(self._held.values()) if is_new else before.bytes_in_memory,
        )

    def make_room(self, attempt: Callable[[], Held | None], *, in_use: Iterable[str]) -> Held:
        """The first result of the attempt that is not None; after each other, the variant used longest ago is given up.

        Raises:
            NoRoomError: all variants that are left are in use.
        """
        kept = set(in_use)
        while (found := attempt()) is None:
            oldest = next((name for name in self._held if name not in kept), None)
            if oldest is None:
                raise NoRoomError
            del self._held[oldest]
        return found

    def forget(self, name: str) -> None:
        """Give up a variant, if it is held."""
        self._held.pop(name, None)
        self.statistics = replace(self.statistics, bytes_in_memory=self._num_bytes(self._held.values()))

    def clear(self) -> None:
        """Give up all variants."""
        self._held.clear()
        self.statistics = replace(self.statistics, bytes_in_memory=0)
