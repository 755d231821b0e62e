"""Private sums: a Poisson sample of records or persons, their clipped gradients, the exact sum of these, and its noise.

Every record is included independently, with the probability that is accounted for. Or every person, of whose records at
most so many count: which these are follows from a key that each draw makes, and from this person's name and records
alone.

Clipping bounds the influence of a record's gradient, or of a person's sum of them, by parts. Gradients are the rows of
a matrix [records, values]; a part is a slice of its columns. Norms and sums are float64: the square of every float32
value is a float64, so nothing under- or overflows. A row's clipped values depend on this row alone where it is the only
one of its call: kernels may round otherwise for another number of rows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.learning.data.records import Records
from fedpriv.learning.data.text import some_of
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.sensitivity import UPLOAD_FACTOR
from fedpriv.privacy.mechanisms.registry import FOR_SUMS, MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource, SecureSource

# Words of a key that chooses among a person's records.
_KEY_WORDS = 4

MOST_REGISTERED = 2**24
"""The largest N_k: sums have room for 64 times as many records, which a table may have come to hold."""

Parts = Sequence[slice]

MOST_ROWS = 2**30
"""Rows whose clipped sum is exact, far more than a process holds, so that no record decides whether others count."""

# Keeps every norm, clipped or not, below the clip norm: the rounding error of a float64 norm of 10^7 values is < 2e-9,
# and turning two sums of 2^30 rows into float64 errs by less than 2^-22.
ROUNDING_MARGIN = 1.0 - 2.0**-21

# A clipped value is a multiple of 2^-32 C or less, and less than 2^33 of these.
_GRID_BITS = 32

# Far below every float32 gradient, and far above the smallest float64.
_SMALLEST_CLIP_NORM = 1e-100

# Columns whose float64 copies are made at once: they stay in the CPU's caches. Fixed, so that a row's norm depends
# neither on the other rows nor on their number.
_COLUMNS_AT_ONCE = 2**14

# Rows that a CPU clips at once, for its caches too; their sum is exact in any order.
_ROWS_AT_ONCE = 32


class PoissonSampler:
    """Draws Poisson batches, and states their sampling probability.

    The probability is q = B / N_k with the *registered* number of records, or persons, which is equal in both
    neighbouring worlds, never with the number of those that are present.

    Args:
        num_registered: N_k >= 1.
        expected_batch_size: B, 0 < B <= N_k.
        choices: source of the keys that choose among a person's records; None takes that of inclusion. With one of its
            own, the coins for inclusion are those that records would get.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(
        self,
        *,
        num_registered: int,
        expected_batch_size: float,
        source: RandomSource,
        choices: RandomSource | None = None,
    ) -> None:
        if num_registered < 1:
            raise InputError(f"num_registered = {num_registered}: a client needs at least one record")
        if num_registered > MOST_REGISTERED:
            raise InputError(f"num_registered = {num_registered}: at most {MOST_REGISTERED}; use several clients")
        if not 0 < expected_batch_size <= num_registered:
            raise InputError(
                f"batch_size = {expected_batch_size}: must lie in 1..{num_registered}, the client's records"
            )
        self.num_registered = num_registered
        self.expected_batch_size = expected_batch_size
        self.sampling_probability = expected_batch_size / num_registered
        self.source = source
        self.choices = choices or source

    @classmethod
    def with_probability(
        cls, probability: float, *, num_registered: int, source: RandomSource, choices: RandomSource | None = None
    ) -> Self:
        """A sampler with exactly this q in (0, 1], whose expected batch size is q N_k; InputError if out of range."""
        if not 0 < probability <= 1:
            raise InputError(f"sampling_probability = {probability}: must lie in (0, 1]")
        size = probability * num_registered
        sampler = cls(num_registered=num_registered, expected_batch_size=size, source=source, choices=choices)
        sampler.sampling_probability = probability
        return sampler

    def draw(self, num_records: int) -> list[int]:
        """Indices of the included records; their number varies around its mean, down to 0. InputError if too many."""
        if num_records > MOST_ROWS:
            raise InputError(f"records = {num_records}: sums are exact up to {MOST_ROWS}")
        included = self.source.bernoulli(num_records, self.sampling_probability)
        return included.nonzero().squeeze(1).tolist()

    def draw_persons(self, records: Records, most: int) -> list[list[int]]:
        """The records that count of each included person, at least one and at most so many (m >= 1), ascending."""
        included = self.draw(records.num_units)
        return self.some_of_each(records, included, most)

    def some_of_each(self, records: Records, persons: Sequence[int], most: int) -> list[list[int]]:
        """The same of the given persons, by their place in `records.by_person`."""
        key = self.choices.words(_KEY_WORDS).tobytes()  # drawn whoever is included, so that no record decides it
        return [some_of(*records.by_person[person], most, key) for person in persons]


def part_norms(rows: Tensor, parts: Parts) -> Tensor:
    """L2 norm of each part of each row, float64 [parts, records]; NaN or inf if the part is not finite."""
    norms = rows.new_zeros((len(parts), len(rows)), dtype=torch.float64)
    for index, part in enumerate(parts):
        for columns in _pieces(part):
            norms[index] += rows[:, columns].to(torch.float64, copy=True).square_().sum(dim=1)
    return norms.sqrt_()


def clipped_rows(rows: Tensor, clip_norm: float, parts: Parts) -> Tensor:
    """The rows with each part clipped to `clip_norm`, float64; a row with any value that is not finite becomes zero.

    Guarantee: the results for any two rows differ by at most 2 sqrt(parts) * clip_norm in L2.

    Source: Liu et al., Algorithm 1, line 14, for a batch's mean under the `batch` rule.
    """
    rows, scales = _finite_rows_and_scales(rows, clip_norm, parts)
    return torch.cat([scale.unsqueeze(1) * rows[:, part] for part, scale in zip(parts, scales, strict=True)], dim=1)


def add_clipped(totals: Tensor, rows: Tensor, owners: Tensor, clip_norm: float, parts: Parts) -> None:
    """Add to each owner's total the sum of its rows, with each part clipped to `clip_norm`.

    Guarantee: adding or removing one row moves each part of its owner's total by at most `clip_norm` in L2, hence the
    whole by at most sqrt(parts) * clip_norm, and no other total. A row that is not finite counts as zero. Clipped
    values are truncated towards zero to multiples of a power of two, so sums of up to `MOST_ROWS` rows are exact: they
    do not depend on the order of the rows, and a sum with a row differs from that without it by this row alone.

    Args:
        totals: int64 [owners, values], changed in place; holds sums of earlier calls with the same clip norm, which
            `clipped_sums` turns into gradient units.
        rows: [records, values], gradient units; there may be none.
        owners: int64 [records], the row of `totals` to which each record is added.
        clip_norm: C, finite, >= 1e-100, gradient units.
        parts: slices that together cover every column once.

    Raises:
        ValueError: clip_norm is out of range, or totals are not int64.

    Source: Abadi et al. 2016, Algorithm 1, for one part.
    """
    if totals.dtype != torch.int64:
        raise ValueError(f"totals: are {totals.dtype}; only int64 sums keep the guarantee")
    size = _ROWS_AT_ONCE if _is_on_cpu(rows) else max(1, len(rows))
    for some, own in zip(rows.split(size), owners.split(size), strict=True):
        values, scales = _finite_rows_and_scales(some, clip_norm, parts)
        for part, scale in zip(parts, scales, strict=True):
            factor = (scale / clip_unit(clip_norm)).unsqueeze(1)
            for columns in _pieces(part):
                # Conversion to integers truncates.
                totals[:, columns].index_add_(0, own, (values[:, columns] * factor).to(torch.int64))


def clipped_sums(totals: Tensor, clip_norm: float) -> Tensor:
    """The sums that `add_clipped` made, float64, gradient units; arguments as there."""
    return totals.double() * clip_unit(clip_norm)


def clip_unit(clip_norm: float) -> float:
    """The power of two of which clipped values are multiples, gradient units."""
    return 2.0 ** (math.frexp(clip_norm)[1] - 1 - _GRID_BITS)


def add_finite(totals: Tensor, rows: Tensor, owners: Tensor) -> None:
    """Add its rows, unclipped, to each owner's total, for the `batch` rule; a row that is not finite counts as zero."""
    whole_row = (slice(0, rows.shape[1]),)
    rows, _ = _finite_rows(rows, part_norms(rows, whole_row))
    for columns in _pieces(*whole_row):
        totals[:, columns].index_add_(0, owners, rows[:, columns].double())


def add_in_turn(totals: Tensor, rows: Tensor, targets: Tensor) -> None:
    """Add each row, unclipped, to its own total, one after the other; a row that is not finite counts as zero.

    Guarantee: a total is the sum of its rows in the order in which these come, to the bit, whatever other rows there
    are and however the rows are shared out among calls.

    Args:
        totals: float64 [totals, values], changed in place.
        rows: [records, values], gradient units; there may be none.
        targets: int64 [records], the total to which each row is added.
    """
    whole_row = (slice(0, rows.shape[1]),)
    rows, _ = _finite_rows(rows, part_norms(rows, whole_row))
    left = list(enumerate(targets.tolist()))
    while left:  # each time the first that is left of each total, so that no index occurs twice
        first: dict[int, int] = {}
        for row, target in left:
            first.setdefault(target, row)
        chosen = torch.tensor(list(first.values()), device=rows.device)
        totals[torch.tensor(list(first), device=totals.device)] += rows[chosen].double()
        left = [(row, target) for row, target in left if first[target] != row]


def check_clip_norm(clip_norm: float) -> None:
    """Refuse one that is out of range, with a ValueError."""
    if not _SMALLEST_CLIP_NORM <= clip_norm < math.inf:
        raise ValueError(f"clip_norm = {clip_norm}: must be finite and at least {_SMALLEST_CLIP_NORM}")


def _pieces(part: slice) -> list[slice]:
    """The part, cut into pieces of bounded length."""
    starts = range(part.start, part.stop, _COLUMNS_AT_ONCE)
    return [slice(start, min(start + _COLUMNS_AT_ONCE, part.stop)) for start in starts]


def _finite_rows_and_scales(rows: Tensor, clip_norm: float, parts: Parts) -> tuple[Tensor, Tensor]:
    """The rows, zero where not finite, and the scales that clip their parts, float64 [parts, records]."""
    check_clip_norm(clip_norm)
    norms = part_norms(rows, parts)
    rows, finite = _finite_rows(rows, norms)
    at_most = clip_norm * ROUNDING_MARGIN
    scales = torch.where(norms > at_most, at_most / norms, torch.ones_like(norms))
    return rows, torch.where(finite, scales, torch.zeros_like(scales))


def _finite_rows(rows: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, with zeros for those whose norm is not finite, and which norms are finite, bool [records]."""
    finite = torch.isfinite(norms).all(dim=0)
    if _is_on_cpu(rows) and bool(finite.all()):  # a GPU would have to be waited for
        return rows, finite
    return torch.where(finite.unsqueeze(1), rows, torch.zeros_like(rows)), finite


def _is_on_cpu(rows: Tensor) -> bool:
    return rows.device.type == "cpu"


def noised_sum(
    rows: Iterable[Tensor],
    like: Tensor,
    *,
    clip_norm: float,
    noise_multiplier: float,
    sampling_probability: float,
    source: RandomSource,
    charge: Callable[[Event], object] | None = None,
) -> tuple[Tensor, Event]:
    """The sum of per-sample gradients, each clipped to C as a whole, with N(0, (z C)^2) added, float32
    [values]; and its event.

    Guarantee: if every record was included independently with the given probability, the event bounds the privacy loss
    of the sum under add-or-remove adjacency.

    Args:
        rows: pieces [records, values] of the included records' gradients, of 2^30 records at most; without any, the
            result is noise alone.
        like: [values], a tensor on the device for the sum.
        clip_norm: C, finite, > 0, gradient units.
        noise_multiplier: z >= 0; 0 adds nothing, and the event costs infinity.
        sampling_probability: q in [0, 1], from the sampler that drew the records.
        charge: is given the event before the first piece is computed; what it raises ends the call.

    Raises:
        ValueError: a value is out of range.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        dimension=len(like),
        sampling_probabilities=(sampling_probability,),
    )
    mechanism = MECHANISMS["gaussian"]
    if charge is not None:
        charge(*mechanism.planned_events(request))
    total = like.new_zeros((1, len(like)), dtype=torch.int64)
    whole_row = (slice(0, len(like)),)
    for piece in rows:
        owners = torch.zeros(len(piece), dtype=torch.int64, device=total.device)
        add_clipped(total, piece, owners, clip_norm, whole_row)
    noised, (event,) = mechanism.add_noise(clipped_sums(total, clip_norm), request, [source])
    return noised[0].float(), event


@dataclass(frozen=True, kw_only=True)
class UpdateNoise:
    """The release of one client's update at a time: clip, noise, and the event that pays.

    Guarantee: replacing all data of the client costs what `event` says. The client is known to take part, so any two
    of its updates count, and these are up to 2 C apart.

    Attributes:
        clip_norm: C, finite, > 0, in units of the update.
        noise_multiplier: z > 0, the noise over C; the event has z / 2, less what rounding to the noise's grid adds.

    Raises:
        InputError: clip_norm or noise_multiplier is out of range.
    """

    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise InputError(f"noise_multiplier = {self.noise_multiplier}: must be > 0")
        try:
            self.noised(torch.zeros(1, dtype=torch.float64), SecureSource())
        except ValueError as error:
            raise InputError(str(error)) from None

    def event(self, num_values: int) -> Event:
        """The cost of one release of so many values, or of fewer; rounding adds a little for each."""
        (event,) = MECHANISMS[FOR_SUMS].planned_events(self._request(num_values))
        return event

    def noised(self, update: Tensor, source: RandomSource) -> Tensor:
        """The clipped update [values], zero if not finite, with noise of standard deviation z C on each, float64."""
        clipped = clipped_rows(update.unsqueeze(0), self.clip_norm, [slice(0, len(update))])
        noised, _ = MECHANISMS[FOR_SUMS].add_noise(clipped, self._request(len(update)), [source])
        return noised[0]

    def _request(self, num_values: int) -> NoiseRequest:
        return NoiseRequest(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            sensitivity_factor=UPLOAD_FACTOR,
            dimension=num_values,
            sampling_probabilities=(1.0,),
            unit="client",
        )
