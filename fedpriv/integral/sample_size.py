"""How many records a network needs, and how many disjoint subsamples of that size a data set has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedpriv.errors import InputError

SAMPLES_PER_WEIGHT = 10
"""Source: Baum and Haussler 1988, as a rule of thumb in Varshney and Torra 2023, section 4.1."""


@dataclass(frozen=True, kw_only=True)
class SampleSize:
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
    rule_of_thumb: SampleSize
    pac: SampleSize
    chosen: SampleSize | None


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

    def sized(records: int) -> SampleSize:
        return SampleSize(records=records, num_subsamples=num_records // records)

    pac = math.ceil((num_parameters + math.log(1 / failure_probability)) / excess_loss**2)
    return Advice(
        num_parameters=num_parameters,
        rule_of_thumb=sized(SAMPLES_PER_WEIGHT * num_parameters),
        pac=sized(pac),
        chosen=None if subsample_size is None else sized(subsample_size),
    )
