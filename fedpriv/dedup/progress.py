"""How far a deduplication is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a deduplication.

    Attributes:
        name: of the variant that is under way, or was just stored.
        num_stored: variants in the store, those of an earlier attempt included.
        num_variants: in total.
        num_validations: in this attempt so far, over all variants.
        seconds_left: an estimate; None as long as there is nothing to estimate from.
        stored: whether `name` was just stored.
    """

    name: str
    num_stored: int
    num_variants: int
    num_validations: int
    seconds_left: float | None
    stored: bool


Observer = Callable[[Progress], None]


def seconds_left(taken: Mapping[bool, Sequence[float]], num_left: Mapping[bool, int], elapsed: float) -> float | None:
    """What the remaining variants take if each takes the mean of its kind so far.

    Args:
        taken: {whether targets: seconds that each of those that are stored took}.
        num_left: {whether targets: how many are still to be stored, the one under way included}.
        elapsed: seconds since the one under way began.

    Returns:
        >= 0; None if no variant of a kind that is left was stored yet.
    """
    left = {kind: num for kind, num in num_left.items() if num}
    if any(not taken[kind] for kind in left):
        return None
    total = sum(num * sum(taken[kind]) / len(taken[kind]) for kind, num in left.items())
    return max(0.0, total - elapsed)


@dataclass(kw_only=True)
class Watch:
    """Tells an observer how far a deduplication is.

    Attributes:
        observer: is told after every validation and every stored variant; None for nobody.
        num_variants: in total.
        num_left: {whether targets: how many are not stored yet}.
    """

    observer: Observer | None
    num_variants: int
    num_left: dict[bool, int]
    _taken: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _num_validations: int = 0
    _name: str = ""
    _began: float = 0.0

    def begin(self, name: str) -> None:
        """A variant is under way."""
        self._name, self._began = name, time.monotonic()
        self._tell(stored=False)

    def validated(self) -> None:
        """It was validated once."""
        self._num_validations += 1
        self._tell(stored=False)

    def store(self, *, is_target: bool) -> None:
        """It was stored."""
        self._taken[is_target].append(time.monotonic() - self._began)
        self.num_left[is_target] -= 1
        self._began = time.monotonic()
        self._tell(stored=True)

    def _tell(self, *, stored: bool) -> None:
        if self.observer is not None:
            progress = Progress(
                name=self._name,
                num_stored=self.num_variants - sum(self.num_left.values()),
                num_variants=self.num_variants,
                num_validations=self._num_validations,
                seconds_left=seconds_left(self._taken, self.num_left, time.monotonic() - self._began),
                stored=stored,
            )
            self.observer(progress)
