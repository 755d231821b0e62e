"""Tests of what an audit is too weak to detect: noise scale, independent noise, one record's influence, batch sizes.

Each returns a p-value under the correct mechanism, or a size to compare with its bound. They have access to internals
and use data of the tester's choice; their outputs on real data must not be published.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from fedpriv.accounting.sensitivity import clipping_parts, sensitivity_factor
from fedpriv.audit.harness import LinearModel, Setup, observed, records_of

# Relative error that float32 and the grid of the noise may add to a difference that is exactly at its bound.
ROUNDING = 1e-3


def noise_scale_p_value(noise: npt.ArrayLike, stddev: float) -> float:
    """Two-sided p-value of the sum of squares of Gaussian noise, chi-squared with one degree of freedom per value.

    Args:
        noise: uploads of a client whose samples were empty, any shape.
        stddev: claimed standard deviation, > 0, in the same units.
    """
    values = np.asarray(noise, dtype=float).ravel()
    statistic = float(((values / stddev) ** 2).sum())
    return float(min(1.0, 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))))


def repeated_noise_p_value(noise: npt.ArrayLike) -> float:
    """p-value of the largest correlation between the noise of any two rounds, with Bonferroni correction over pairs.

    If two rounds share noise, their difference has less than twice the variance: its expectation is
    2 (1 - correlation) times the variance of one.

    Args:
        noise: [rounds, values], rounds >= 2, of a client whose samples were empty.
    """
    rows = np.asarray(noise, dtype=float)
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), k=1)]
    largest = min(1.0, float(np.abs(correlations).max()))
    # For independent normal rows the correlation has exactly this distribution.
    p_value = 2 * stats.beta.sf((largest + 1) / 2, rows.shape[1] / 2 - 1, rows.shape[1] / 2 - 1)
    return min(1.0, len(correlations) * float(p_value))


def batch_size_p_value(sizes: npt.ArrayLike, *, num_records: int, sampling_probability: float) -> float:
    """Two-sided p-value of the spread of batch sizes, by the normal approximation of Binomial(N, q).

    Fixed batches have no spread at all; the size of a Poisson sample has variance N q (1 - q).

    Args:
        sizes: [batches].
        num_records: N.
        sampling_probability: q, with N q (1 - q) of at least about 10.
    """
    deviations = np.asarray(sizes, dtype=float) - num_records * sampling_probability
    return noise_scale_p_value(deviations, math.sqrt(num_records * sampling_probability * (1 - sampling_probability)))


def largest_influence(setup: Setup, *, num_records: int = 5, trials: int = 8, seed: int = 0) -> float:
    """How far one record changed the sum before noise, divided by the claimed bound: at most 1 if clipping is correct.

    Neighbouring batches are sent through the engine with the same noise, which cancels. All records are sampled. Their
    raw gradients, in random directions of all tensors or of one tensor alone, have 1e3 times the clip norm, and that
    of the last record, which the neighbouring batch lacks, has 1e6 times.

    Args:
        setup: with q = 1 and a seed, so that noise repeats.
        num_records: in the larger batch.
        trials: number of random batches over all tensors, in addition to one for each tensor alone.
        seed: of the gradients.

    Raises:
        ValueError: the setup has no seed, or does not sample every record.
    """
    if setup.seed is None or setup.spec.batch_size != setup.num_registered:
        raise ValueError("setup: needs a seed and batch_size = num_registered")
    names = list(setup.sizes)
    bound = sensitivity_factor(setup.spec.clipping, len(clipping_parts(setup.spec.clipping, names)))
    generator = torch.Generator().manual_seed(seed)
    batches = [_raw_gradients(setup, num_records, None, generator) for _ in range(trials)]
    batches += [_raw_gradients(setup, num_records, name, generator) for name in names]
    model = LinearModel(torch.cat(batches), setup.sizes)
    # Each batch belongs to one client, whose noise is the same in both calls.
    starts = range(0, len(batches) * num_records, num_records)
    with_it, without = (
        observed(setup, model, [records_of(range(start, start + num)) for start in starts], 0).double()
        for num in (num_records, num_records - 1)
    )
    return float((with_it - without).square().sum(dim=1).sqrt().max()) / bound


def _raw_gradients(setup: Setup, num_records: int, only: str | None, generator: torch.Generator) -> Tensor:
    """[records, values] Rows in random directions of all tensors, or of only one, far longer than the clip norm."""
    blocks = [
        torch.randn(num_records, size, generator=generator) * float(only in (None, name))
        for name, size in setup.sizes.items()
    ]
    rows = torch.cat(blocks, dim=1)
    rows *= 2e3 * setup.spec.clip_norm / rows.square().sum(dim=1, keepdim=True).sqrt()
    rows[-1] *= 1e3
    return rows
