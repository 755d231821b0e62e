"""Disjoint subsamples with the class distribution of the whole data set, and how many records each should have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InputError

Indices = npt.NDArray[np.int64]
"""Row numbers of records."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subsamples:
    """Disjoint subsamples of one size.

    Attributes:
        records: int64 [subsamples, size], rows of the data; no row occurs twice.
        class_counts: int64 [subsamples, classes].
        share_left_over: share of the data that is in no subsample, in [0, 1).
    """

    records: Indices
    class_counts: Indices
    share_left_over: float


def _largest_remainder(quotas: npt.NDArray[np.float64], total: int) -> Indices:
    """Integers that sum to `total`, each the floor or ceiling of its quota; ties go to the smaller index.

    Args:
        quotas: >= 0, summing to `total` up to rounding.
        total: >= 0.
    """
    # Quotas that are whole up to rounding errors are made whole, so that no empty class gets a record.
    quotas = np.where(np.abs(quotas - np.rint(quotas)) < 1e-9, np.rint(quotas), quotas)
    floors = np.floor(quotas).astype(np.int64)
    largest = np.argsort(-(quotas - floors), kind="stable")[: total - int(floors.sum())]
    floors[largest] += 1
    return floors


def class_counts(class_sizes: Sequence[int], size: int) -> Indices:
    """How many records of each class each subsample gets, int64 [subsamples, classes].

    Guarantee: every row sums to `size`; every count is the floor or the ceiling of the subsample's share of the class,
    size * class / all; no class has to give more records than it has. Rounding each subsample separately would not
    ensure the last: two subsamples of 5 from 3 and 7 records would each take 2 of the first class.

    The records above the floors are assigned to classes by largest remainder over all subsamples together, and are
    then dealt to the subsamples in turn, class by class: each subsample gets at most one of them per class.

    Args:
        class_sizes: records of each class, >= 0.
        size: N >= 1 of a subsample, at most all records.
    """
    sizes = np.asarray(class_sizes, dtype=np.int64)
    num_records = int(sizes.sum())
    num_subsamples = num_records // size
    floors = size * sizes // num_records
    num_extra = size - int(floors.sum())
    fractions = (size * sizes % num_records) / num_records
    extras = _largest_remainder(num_subsamples * fractions, num_subsamples * num_extra)
    counts = np.tile(floors, (num_subsamples, 1))
    classes = np.repeat(np.arange(len(sizes)), extras)
    np.add.at(counts, (np.arange(len(classes)) % num_subsamples, classes), 1)
    return counts


def disjoint_subsamples(
    labels: Indices, size: int, generator: np.random.Generator, *, names: Sequence[str] = ()
) -> Subsamples:
    """floor(|D| / N) disjoint subsamples of N records, each with the class distribution of the whole data set.

    Args:
        labels: int64 [records], classes from 0.
        size: N >= 1.
        generator: deals the records of each class.
        names: of the classes, for error messages.

    Raises:
        InputError: there are fewer than two subsamples, or too few records of a class for every subsample to get one.

    Source: Varshney and Torra 2023, section 3.
    """
    if size < 1:
        raise InputError(f"subsample_size = {size}: must be >= 1")
    num_subsamples = len(labels) // size
    if num_subsamples < 2:
        raise InputError(
            f"subsample_size = {size}: {len(labels)} records give {num_subsamples} subsamples; two need a size of at "
            f"most {len(labels) // 2}"
        )
    class_sizes = np.bincount(labels)
    counts = class_counts(class_sizes.tolist(), size)
    _check_every_class(class_sizes, counts, size, names)
    dealt = []
    for label, column in enumerate(counts.T):
        ends = np.cumsum(column)
        dealt.append(np.split(generator.permutation(np.flatnonzero(labels == label))[: ends[-1]], ends[:-1]))
    rows = [generator.permutation(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]
    records = np.stack(rows).astype(np.int64)
    return Subsamples(records=records, class_counts=counts, share_left_over=1 - records.size / len(labels))


def _check_every_class(class_sizes: Indices, counts: Indices, size: int, names: Sequence[str]) -> None:
    """Refuse a size for which some subsample gets no record of a class."""
    missing = np.flatnonzero((counts.min(axis=0) == 0) & (class_sizes > 0))
    if not len(missing):
        return
    label = int(missing[np.argmin(class_sizes[missing])])
    name, num_records = names[label] if names else label, int(class_sizes.sum())
    sufficient = math.ceil(num_records / int(class_sizes[label]))
    advice = (
        f"a size of at least {sufficient} has one in each"
        if sufficient <= num_records // 2
        else "merge or leave out this class"
    )
    raise InputError(
        f"subsample_size = {size}: class {name!r} has {class_sizes[label]} of {num_records} records, too few for one "
        f"in each of {len(counts)} subsamples; {advice}"
    )


_SAMPLES_PER_WEIGHT = 10
"""Source: Baum and Haussler 1988, as a rule of thumb in Varshney and Torra 2023, section 4.1."""


@dataclass(frozen=True, kw_only=True)
class _SampleSize:
    """A subsample size and the resulting number of subsamples.

    Attributes:
        records: N.
        num_subsamples: floor(|D| / N), disjoint.
    """

    records: int
    num_subsamples: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Sample sizes for one network and one data set.

    Attributes:
        num_parameters: weights and biases, used in place of the VC dimension, as in the paper.
        rule_of_thumb: ten records per parameter.
        pac: (VC + ln(1 / delta)) / epsilon^2 records. The bound is known up to a constant, taken as 1 here.
        chosen: the given subsample size, if any.
    """

    num_parameters: int
    rule_of_thumb: _SampleSize
    pac: _SampleSize
    chosen: _SampleSize | None


def advice(
    num_parameters: int,
    num_records: int,
    *,
    excess_loss: float = 0.1,
    failure_probability: float = 0.05,
    subsample_size: int | None = None,
) -> Advice:
    """Sample sizes for a network by the rule of thumb and by the PAC bound.

    Args:
        num_parameters: >= 1.
        num_records: |D| >= 1.
        excess_loss: epsilon of the PAC bound, in (0, 1): the excess over the best network of its kind. It is neither
            the epsilon of integral privacy nor that of differential privacy.
        failure_probability: delta of the PAC bound, in (0, 1).
        subsample_size: a size to evaluate as well, >= 1.

    Raises:
        InputError: a value is out of range.

    Source: Varshney and Torra 2023, section 4.1; Vershynin 2018 for O([VC + ln(1/delta)] / epsilon^2).
    """
    counts = {"num_parameters": num_parameters, "num_records": num_records, "subsample_size": subsample_size}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} = {count}: must be >= 1")
    for name, share in {"excess_loss": excess_loss, "failure_probability": failure_probability}.items():
        if not 0 < share < 1:
            raise InputError(f"{name} = {share}: must lie in (0, 1)")

    def sized(records: int) -> _SampleSize:
        return _SampleSize(records=records, num_subsamples=num_records // records)

    pac = math.ceil((num_parameters + math.log(1 / failure_probability)) / excess_loss**2)
    return Advice(
        num_parameters=num_parameters,
        rule_of_thumb=sized(_SAMPLES_PER_WEIGHT * num_parameters),
        pac=sized(pac),
        chosen=None if subsample_size is None else sized(subsample_size),
    )
