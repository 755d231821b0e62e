"""Validation of a variant that is stored in parts of others: how much utility does it lose, at most?

Utility is measured record by record, before and after, so what a variant loses is the mean of paired differences. A
bound is kept if the upper confidence limit of that mean is within it, on records by which nothing was chosen: a search
looks at a third of the records, and what it found is proven on the others, in steps. They are taken in a fixed order,
the smallest first, until one fails, so all of them together fail with the probability of one (a fixed-sequence test).

The paper's rules prove nothing: `empirical` accepts a loss within the bound on the records that the search looked at,
and `sparse vector`, its Algorithm 5, does so with noise, for private records.

The loss is always measured against the original variant, never against the last one that passed: Algorithm 5 of Guan
et al. 2025 continues from the latter (line 18), so that its losses add up beyond the bound.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.models.dedup.planning import Acceptance
from fedpriv.models.dedup.saliency import Saliency
from fedpriv.privacy.accounting.events import Event, PureEpsilon
from fedpriv.privacy.mechanisms.sources import RandomSource
from fedpriv.privacy.mechanisms.svt import SparseVector, noise_margin, noise_scales

CONFIDENCE = 0.95
"""The confidence of the limit of what a variant loses."""

Utility = Literal["accuracy", "log likelihood"]
"""A record's utility is 1 or 0, for a right or a wrong answer, or the mean log likelihood of its targets, in nats,
which is minus the logarithm of the perplexity of its response."""

Tensors = Mapping[str, NDArray[Any]]
Utilities = NDArray[np.float64]

# Queries are whole numbers of these parts of a record, rounded up.
_PARTS = 16

# One record changes l - g by 2 and l + g by none, or both by 1, and then the limit by 1 + z (sqrt(7/4) - sqrt(3/4)) at
# most, which is less than 2 for z < 2.18; one part more for rounding up.
_SENSITIVITY = 2 * _PARTS + 1

# Of the number of records lost less those gained, which Algorithm 5 asks for.
_LOST = 2

# Of the two ways in which a variant may lose more than was proven: the choice of the records, and the noise.
_NOISE_FAILS = 0.01


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


class Evaluator(Protocol):
    """Measures how good a variant is on its validation records.

    Attributes:
        num_records: the registered number of validation records.
        private: whose records they are; None if they are public, so that figures may be shown.
    """

    num_records: int
    utility: Utility
    private: PrivateRecords | None

    def utilities(self, tensors: Tensors, records: NDArray[np.int64]) -> Utilities:
        """The utility of the variant with these tensors on each of the records.

        Args:
            records: their positions, in [0, num_records), in rising order.
        """

    def saliency(self, tensors: Tensors, records: NDArray[np.int64]) -> Saliency:
        """Measure on these records how much each weight matters, for every tensor that is cut into blocks.

        On private records it is noised, and its cost is stated by `private`.
        """


def losses_of(before: Utilities, after: Utilities) -> Utilities:
    """The loss on each record, 1 at most: a right answer, or a perplexity e times as high; no number counts as lost.

    Without a limit no number of records could exclude that one in many is ruined without end.
    """
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.clip(before - after, -1.0, 1.0), nan=1.0)


def loss_limit(losses: Utilities, *, num: int | None = None, confidence: float = CONFIDENCE) -> float:
    """The upper confidence limit of the mean loss, of which these are a sample.

    With z the normal quantile it is mean + ((z^2 + 2) / 3 + z sqrt(sum of squares + 3/4)) / n. For losses of 0 and 1
    that is the exact limit of a Poisson count within 0.05, and smaller losses are not harder to see than these.
    `tests/models/dedup/test_validation.py` adds up how often it covers at all rates of records lost and gained.

    Args:
        losses: in [-1, 1], [records]; of none nothing is known, and the limit is infinite.
        num: the limit is that of so many records with losses like these; None for as many as there are.
        confidence: 0.95 or 0.96, for which it was looked at.
    """
    if not len(losses):
        return math.inf
    count, quantile = num or len(losses), NormalDist().inv_cdf(confidence)
    squares = float((losses**2).mean())
    margin = (quantile**2 + 2) / 3 / count + quantile * math.sqrt(squares / count + 0.75 / count**2)
    return float(losses.mean()) + margin


def records_needed(losses: Utilities, bound: float) -> int | None:
    """The least number of records with losses like these whose limit is within the bound; None if the mean is not."""
    if not len(losses) or float(losses.mean()) >= bound:
        return None
    high = 1
    while loss_limit(losses, num=high) > bound:
        high *= 2
    return bisect_left(
        range(high + 1), True, lo=high // 2 + 1, hi=high, key=lambda num: loss_limit(losses, num=num) <= bound
    )


def least_records(bound: float) -> int | None:
    """The least number of public validation records with which anything can be proven; None if no number is enough.

    Args:
        bound: of what may be lost in the mean, >= 0.
    """
    least = math.ceil(loss_limit(np.zeros(1)) / bound) if bound else None
    return math.ceil(least * 3 / 2) if least else None  # a third of them is the search's own


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The utility of the form in which a variant is stored, on records by which nothing was chosen.

    Attributes:
        before, after: mean utility of the variant as it was given, and as it is stored.
        limit: of what it loses, `loss_limit`; None if it is `empirical`, and these records chose it.
    """

    before: float
    after: float
    limit: float | None
    num_records: int


def search_records(num_records: int) -> NDArray[np.int64]:
    """The positions of the records that a search looks at: a third, drawn, since files have an order.

    Everyone can draw them again, so that an interrupted call goes on with the same: the stream of this generator is
    never to change.
    """
    drawn = np.random.RandomState(0).permutation(num_records)[: math.ceil(num_records / 3)]
    return np.sort(drawn).astype(np.int64)


def proof_records(num_records: int) -> NDArray[np.int64]:
    """The positions of the others."""
    return np.setdiff1d(np.arange(num_records), search_records(num_records))


class PublicValidation:
    """Validation of the forms of one target on public records: `empirical` searches and measures on all of them.

    Attributes:
        searches: whether `accept` may be asked; else the ladder of `proves` is all there is.
        acceptance: `proof`; or `empirical` or `sparse vector`, by which what a search accepted is stored unproven.
        proof: of the last form that was proven; None without one, and of private records.
        needed: how many validation records would tell that the form that failed keeps the bound; None if none has
            failed, if it does not seem to keep it, and of private records.
    """

    searches = True
    proof: Proof | None = None
    needed: int | None = None

    def __init__(
        self, evaluator: Evaluator, before: Utilities, bound: float, *, acceptance: Acceptance = "proof"
    ) -> None:
        self._evaluator, self._before, self._bound = evaluator, before, bound
        self.acceptance: str = acceptance
        number = evaluator.num_records
        self._searched, self._others = search_records(number), proof_records(number)
        if acceptance == "empirical":
            self._searched = self._others = np.arange(number)

    def __getstate__(self) -> dict[str, Any]:
        """Its findings, for another process, where it can be asked nothing."""
        return {"proof": self.proof, "needed": self.needed, "acceptance": self.acceptance}

    def accept(self, tensors: Tensors) -> bool:
        """Whether the variant in this form seems to lose no more than the bound, on the records of the search."""
        losses = losses_of(self._before[self._searched], self._evaluator.utilities(tensors, self._searched))
        # A millionth of a record absorbs rounding.
        return float(losses.sum()) <= self._bound * len(losses) + 1e-6

    def proves(self, tensors: Tensors) -> bool:
        """Whether it is proven to lose no more than the bound; after one that is not, none may be asked.

        Of an unproven one it is only measured, and not even that on private records.
        """
        before, after = self._before[self._others], self._evaluator.utilities(tensors, self._others)
        if not np.isfinite(after).all():  # a broken model, however rarely it shows
            return False
        losses = losses_of(before, after)
        limit = loss_limit(losses) if self.acceptance == "proof" else None
        if limit is not None and not limit <= self._bound:
            needed = records_needed(losses, self._bound)
            self.needed = None if needed is None else math.ceil(needed * len(self._before) / len(losses))
            return False
        means = float(before.mean()), float(after.mean())
        self.proof = Proof(before=means[0], after=means[1], limit=limit, num_records=len(self._others))
        return True


@dataclass(frozen=True, kw_only=True)
class PrivateQueries:
    """The terms on which private records are queried, separately for every target.

    Attributes:
        epsilon: of one target's run of the Sparse Vector Technique, finite and > 0.
        charge: durably records, by the target's name, what the target costs the records; called before any query.
        source: of the noise; seeded only in a run marked `simulate`.

    Raises:
        ValueError: a value is out of range.
    """

    epsilon: float
    charge: Callable[[str, Event], None]
    source: RandomSource

    def __post_init__(self) -> None:
        noise_scales(self.epsilon, 1, _SENSITIVITY)

    def events(self, records: PrivateRecords) -> tuple[Event, ...]:
        """The events that one target costs the records: its answers, and the saliency that orders its blocks."""
        return PureEpsilon(epsilon=self.epsilon), *([records.saliency] if records.saliency else [])

    def least_records(self, bound: float) -> int | None:
        """The least number of records with which anything can be proven; None if no number is enough."""
        hidden = noise_margin(noise_scales(self.epsilon, 1, _SENSITIVITY), _NOISE_FAILS) / _PARTS
        limit = loss_limit(np.zeros(1), confidence=CONFIDENCE + _NOISE_FAILS) + hidden
        return math.ceil(limit / bound) if bound else None


class PrivateValidation:
    """Validation on private records: one run of the Sparse Vector Technique, for one target.

    Without a cut-off there is no search, whose answers would be paid for too: the forms of the ladder are asked about
    until one fails, which is the one positive answer of the run. What is asked is whether the limit of the loss reaches
    the bound, less what the noise may hide, so that all in all the bound is kept with the same confidence. That is not
    shown for blocks that were ordered by saliency measured on these records.

    With one it is Algorithm 5: the search asks whether the records lost, less those gained, exceed the bound, and its
    c-th failure, which is the c-th positive answer, ends it. The noise of each answer grows with c, and nothing is
    proven.

    Guarantee: all answers of the run together are epsilon-DP under replacement of a validation record, and under
    add-or-remove adjacency, whichever search asks, since it knows of the records by earlier answers alone
    (`fedpriv.privacy.mechanisms.svt.SparseVector`). Answers are pass or fail; figures are never returned. If the
    records are also training records, `event` adds to their cost.

    The epsilon is charged before any noise is drawn: if charging raises, there is no validation and no answer.

    Args:
        evaluator: of the target, whose utility is accuracy: no other has a bounded sensitivity.
        before: gives its utilities on all records, as it was given; called once it is charged.
        bound: of what it may lose in the mean, >= 0.
        epsilon: of the run, finite and > 0.
        charge: writes the event to the ledger, durably.
        source: of the noise; seeded only in a run marked `simulate`.
        cutoff: c, failures after which a search ends, >= 1; None for a proof without a search.

    Raises:
        ValueError: a value is out of range.

    Source: Guan et al. 2025, Algorithm 5, with the limit of the loss in its place where there is no cut-off, and always
    against the original variant.
    """

    proof: Proof | None = None
    needed: int | None = None

    def __init__(
        self,
        evaluator: Evaluator,
        before: Callable[[], Utilities],
        bound: float,
        *,
        epsilon: float,
        charge: Callable[[PureEpsilon], None],
        source: RandomSource,
        cutoff: int | None = None,
    ) -> None:
        if evaluator.utility != "accuracy":
            raise ValueError(f"utility = {evaluator.utility!r}: private records need one that is bounded, accuracy")
        if bound < 0:
            raise ValueError(f"utility_bound = {bound}: must be >= 0")
        self.searches, self.acceptance = cutoff is not None, "proof" if cutoff is None else "sparse vector"
        run = {"cutoff": 1 if cutoff is None else cutoff, "sensitivity": _SENSITIVITY if cutoff is None else _LOST}
        scales = noise_scales(epsilon, **run)  # refuses values out of range before anything is charged
        self.event, self.noise_source = PureEpsilon(epsilon=epsilon), source.name
        charge(self.event)
        self._evaluator, self._before = evaluator, _right(before())
        parts = 1 if self.searches else _PARTS
        self._threshold = math.floor(bound * evaluator.num_records * parts + 1e-6)
        self._threshold -= 0 if self.searches else noise_margin(scales, _NOISE_FAILS)
        self._answers = SparseVector(epsilon=epsilon, source=source, **run)

    def accept(self, tensors: Tensors) -> bool:
        """See `PublicValidation`; CutoffReached after the last failure."""
        return not self._answers.reaches(int(self._losses(tensors).sum()), self._threshold + 1)

    def proves(self, tensors: Tensors) -> bool:
        """See `PublicValidation`."""
        if self.searches:
            return True
        losses = self._losses(tensors)
        limit = loss_limit(losses, confidence=CONFIDENCE + _NOISE_FAILS) * len(losses)
        return not self._answers.reaches(math.ceil(limit * _PARTS - 1e-6), self._threshold + 1)

    def _losses(self, tensors: Tensors) -> Utilities:
        """The loss of each record, unless no further answer is paid for."""
        self._answers.check_open()
        return self._before - _right(self._evaluator.utilities(tensors, np.arange(len(self._before))))


Validation = PublicValidation | PrivateValidation


def _right(utilities: Utilities) -> Utilities:
    """0 or 1, on which the sensitivity rests, whatever an evaluator may say."""
    return (utilities > 0.5).astype(np.float64)
