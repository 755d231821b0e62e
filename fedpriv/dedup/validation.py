"""Validation of a variant with replaced blocks: is it still accurate enough, on public or private records?

The drop is always measured against the original variant, never against the last one that passed: Algorithm 5 of Guan
et al. 2025 continues from the latter (line 18), so that its drops add up beyond the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedpriv.accounting.events import Event, PureEpsilon
from fedpriv.dedup.algorithms import BudgetSpent
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.mechanisms.svt import CutoffReached, SparseVector, noise_scales

# One record changes a difference of two counts by 2 if it is replaced, by 1 if it is added or removed.
SENSITIVITY = 2


def allowed_drop(utility_bound: float, num_records: int) -> int:
    """The largest number of correct answers that a variant may lose within the bound.

    A tolerance of a millionth of a record absorbs rounding, so that 0.57 - 0.56 of 100 records is one record.

    Args:
        utility_bound: in accuracy, in [0, 1].
        num_records: registered size of the validation set, >= 1.

    Raises:
        ValueError: a value is out of range.
    """
    if not 0 <= utility_bound <= 1:
        raise ValueError(f"utility_bound = {utility_bound}: must lie in [0, 1], in units of accuracy")
    if num_records < 1:
        raise ValueError(f"num_records = {num_records}: must be >= 1")
    return math.floor(utility_bound * num_records + 1e-6)


@dataclass(frozen=True, kw_only=True)
class PublicValidator:
    """Validation on public records.

    Attributes:
        original_correct: how many of them the original variant answers correctly.
        max_drop: see `allowed_drop`.
    """

    original_correct: int
    max_drop: int

    def accept(self, count_correct: int) -> bool:
        """Whether a variant with this many correct answers is within the bound."""
        return self.original_correct - count_correct <= self.max_drop


@dataclass(frozen=True, kw_only=True)
class PrivateRecords:
    """Private validation records and their costs.

    Attributes:
        data_set: id of the registered data set; one of the variants' own data sets if they were trained on it.
        delta: at which the epsilon of this data set is stated.
        saliency: cost of one measurement of saliency on these records; None for a measure that reads no record.
    """

    data_set: str
    delta: float
    saliency: Event | None = None


@dataclass(frozen=True, kw_only=True)
class PrivateValidation:
    """The terms on which private records are queried, separately for every target.

    Attributes:
        epsilon: of one target's run of the Sparse Vector Technique, finite and > 0.
        charge: durably records, by the target's name, what the target costs the records; called before any query.
        source: of the noise; seeded only in a run marked `simulate`.
        cutoff: failures before a target's run ends, >= 1.

    Raises:
        ValueError: a value is out of range.
    """

    epsilon: float
    charge: Callable[[str, Event], None]
    source: RandomSource
    cutoff: int = 3

    def __post_init__(self) -> None:
        noise_scales(self.epsilon, self.cutoff, SENSITIVITY)

    def events(self, records: PrivateRecords) -> tuple[Event, ...]:
        """The events that one target costs the records: its answers, and the saliency that orders its blocks."""
        return PureEpsilon(epsilon=self.epsilon), *([records.saliency] if records.saliency else [])

    def validator(self, name: str, original_correct: Callable[[], int], max_drop: int) -> PrivateValidator:
        """The validator of a target; charges for it, and then counts."""
        return PrivateValidator(
            original_correct=original_correct,
            max_drop=max_drop,
            epsilon=self.epsilon,
            charge=lambda event: self.charge(name, event),
            source=self.source,
            cutoff=self.cutoff,
        )


class PrivateValidator:
    """Validation on private records: one run of the Sparse Vector Technique, for one variant and one base.

    Guarantee: all answers of the run together are epsilon-DP under replacement of a validation record, and
    (epsilon / 2)-DP under add-or-remove adjacency. Answers are pass or fail; counts are never returned. A pass is
    correct only up to the noise. A failure, which means a drop above the bound, is the positive answer that is
    counted; any number of passes is free. If the records are also training records, `event` adds to their cost.

    The epsilon is charged before any noise is drawn: if charging raises, there is no validator and no answer.

    Args:
        original_correct: counts how many records the original variant answers correctly; called once it is charged.
        max_drop: see `allowed_drop`, with the registered number of records.
        epsilon: of the run, finite and > 0.
        charge: writes the event to the ledger, durably.
        source: of the noise; seeded only in a run marked `simulate`.
        cutoff: failures before the run ends, >= 1.

    Raises:
        ValueError: a value is out of range.

    Source: Guan et al. 2025, Algorithm 5, with whole numbers and the drop against the original variant.
    """

    def __init__(
        self,
        *,
        original_correct: Callable[[], int],
        max_drop: int,
        epsilon: float,
        charge: Callable[[PureEpsilon], None],
        source: RandomSource,
        cutoff: int = 3,
    ) -> None:
        if max_drop < 0:
            raise ValueError(f"max_drop = {max_drop}: must be >= 0 records")
        noise_scales(epsilon, cutoff, SENSITIVITY)  # refuses values out of range before anything is charged
        self.event, self.noise_source = PureEpsilon(epsilon=epsilon), source.name
        charge(self.event)
        self._original_correct, self._max_drop = original_correct(), max_drop
        self._answers = SparseVector(epsilon=epsilon, cutoff=cutoff, sensitivity=SENSITIVITY, source=source)

    def accept(self, count_correct: int) -> bool:
        """Whether a variant with this many correct answers passes, after adding noise.

        Raises:
            BudgetSpent: `cutoff` variants have failed already.
        """
        try:
            return not self._answers.reaches(self._original_correct - count_correct, self._max_drop + 1)
        except CutoffReached:
            raise BudgetSpent("this run's epsilon pays for no further failure") from None
