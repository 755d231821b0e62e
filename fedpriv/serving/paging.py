"""The variants in memory: read when they are asked for, and the least recently used ones given up for others."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedpriv.serving.engine import Weights
from fedpriv.serving.requests import DamagedVariantError, ServingError, UnknownVariantError

log = logging.getLogger(__name__)

Read = Callable[[], Mapping[str, Tensor]]
"""The tensors of a variant, from the disk; raises an exception of any kind if they are damaged."""


@dataclass(frozen=True, kw_only=True)
class Paged:
    """What was asked of the memory so far; see `fedpriv.serving.requests.Statistics`."""

    hits: int = 0
    misses: int = 0
    bytes_in_memory: int = 0
    bytes_read: int = 0


class NoRoomError(RuntimeError):
    """Variants in use leave no room now; there will be some when they are given back."""


class Memory:
    """Variants in bounded memory. Not thread-safe, except that `paged` may be read from any thread.

    A variant in use stays until everyone has given it back. Between its last use and the next it may go, and the one
    that was asked for longest ago goes first.

    Args:
        readers: by the variant's name; names come from requests and are looked up here and nowhere else.
        weights: turns a variant's name and tensors into what passes use; raises ValueError if they do not fit.
        memory_bytes: of all variants in memory together.

    Attributes:
        paged: what has happened so far.
    """

    def __init__(
        self,
        readers: Mapping[str, Read],
        weights: Callable[[str, Mapping[str, Tensor]], Weights],
        memory_bytes: int,
    ) -> None:
        self._readers, self._weights, self._memory_bytes = readers, weights, memory_bytes
        self._held: OrderedDict[str, Weights] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self.paged = Paged()

    def take(self, name: str, *, again: bool = False) -> Weights:
        """A variant, which stays in memory until `give_back` was called as often as this.

        Args:
            name: of the variant.
            again: whether the request has had it before, and is counted already.

        Raises:
            UnknownVariantError: there is none of this name.
            DamagedVariantError: it is not as it was written.
            ServingError: it needs more memory than there is.
            NoRoomError: it needs more than the variants in use leave.
        """
        held = self._held.get(name)
        read = 0
        if held is None:
            held = self._read(name)
            read = held.num_bytes
            self._make_room(held)
            self._held[name] = held
        self._held.move_to_end(name)
        self._uses[name] += 1
        before = self.paged
        self.paged = Paged(
            hits=before.hits + (not read and not again),
            misses=before.misses + (bool(read) and not again),
            bytes_in_memory=sum(weights.num_bytes for weights in self._held.values()),
            bytes_read=before.bytes_read + read,
        )
        return held

    def give_back(self, name: str) -> None:
        """A use of a variant is over."""
        self._uses[name] -= 1
        if self._uses[name] <= 0:
            del self._uses[name]

    def clear(self) -> None:
        """Free all variants."""
        self._held.clear()
        self._uses.clear()
        self.paged = replace(self.paged, bytes_in_memory=0)

    def _read(self, name: str) -> Weights:
        if name not in self._readers:
            raise UnknownVariantError(f"there is no variant {name!r}")
        try:
            return self._weights(name, self._readers[name]())
        except Exception as error:  # a damaged file makes of its readers what it likes
            log.warning("variant %s is not served: %s", name, error)
            raise DamagedVariantError(f"variant {name!r} is damaged and not served; the others are") from None

    def _make_room(self, new: Weights) -> None:
        if new.num_bytes > self._memory_bytes:
            raise ServingError(
                f"variant {new.variant!r} needs {new.num_bytes} bytes, but the server has {self._memory_bytes} for all"
            )
        excess = sum(held.num_bytes for held in self._held.values()) + new.num_bytes - self._memory_bytes
        leaving = []
        for name, held in self._held.items():
            if excess <= 0:
                break
            if name not in self._uses:
                leaving.append(name)
                excess -= held.num_bytes
        if excess > 0:
            raise NoRoomError(new.variant)
        for name in leaving:
            del self._held[name]
