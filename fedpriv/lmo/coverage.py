"""How closely LMO noise approximates arbitrary noise on a grid (the paper's Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special
from scipy.spatial.distance import cdist

from fedpriv.accounting.composition.law import Array
from fedpriv.accounting.lmo.distribution import Columns, log_mgf
from fedpriv.errors import InputError
from fedpriv.lmo.search import SearchSpace, sobol_candidates


def coverage(
    space: SearchSpace,
    *,
    quantisations: Sequence[float] = (0.1, 0.01, 0.001),
    domain_sizes: Sequence[int] = (11, 51, 101),
    num_samples: int = 256,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """For every quantisation and domain size, the distance of simulated noise from the nearest LMO noise.

    A simulated noise is the histogram of 1 / quantisation random draws over equal cells. LMO noise with random
    parameters is discretised to the same cells, which cover [-1, 1] clip norms; its mass outside is dropped and the
    rest normalised. `kl` (divergence of the simulated noise from LMO noise, nats), `l2` and `emd` (earth mover's
    distance, in shares of the domain) are means over simulated noises of the distance to the nearest LMO noise;
    `..._worst` are the largest.

    Args:
        space: of the LMO noise.
        quantisations: in (0, 1].
        domain_sizes: numbers of cells, >= 2.
        num_samples: noises of each kind, >= 1.
        seed: of both kinds.

    Raises:
        InputError: an argument is out of range.

    Source: Yang et al., Algorithm 2 and Figure 5. It averages over pairs; the claim there is about the nearest, and
    its step C.1.2, which fits parameters to each simulated noise, is the choice of the nearest here.
    """
    for quantisation in quantisations:
        if not 0 < quantisation <= 1:
            raise InputError(f"quantisation = {quantisation}: must lie in (0, 1]")
    for size in domain_sizes:
        if size < 2:
            raise InputError(f"domain_size = {size}: must be >= 2")
    if num_samples < 1:
        raise InputError(f"num_samples = {num_samples}: must be >= 1")
    generator = np.random.default_rng(seed)
    noises = sobol_candidates(space, num_samples, seed=seed)
    records = []
    for quantisation in quantisations:
        throws = round(1 / quantisation)
        for size in domain_sizes:
            simulated = generator.multinomial(throws, np.full(size, 1 / size), size=num_samples) / throws
            records.append(
                {"quantisation": quantisation, "domain_size": size, "num_samples": num_samples}
                | nearest_distances(simulated, cell_probabilities(noises, size))
            )
    return records


def cell_probabilities(candidates: Columns, num_cells: int) -> Array:
    """[n, cells] Probability of equal cells of [-1, 1] under each noise, normalised to sum to one."""
    edges = np.linspace(-1, 1, num_cells + 1)
    tails = np.exp(log_mgf(candidates.with_axes(1), -np.abs(edges))) / 2
    shares = np.diff(np.where(edges < 0, tails, 1 - tails))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def nearest_distances(simulated: Array, noises: Array) -> dict[str, float]:
    """Mean and largest distance of rows [m, cells] to the nearest of rows [n, cells]; each row is a distribution."""
    floor = np.maximum(noises, np.finfo(float).tiny)
    kl = special.xlogy(simulated, simulated).sum(axis=1)[:, None] - simulated @ np.log(floor).T
    emd = cdist(simulated.cumsum(axis=1), noises.cumsum(axis=1), "cityblock") / simulated.shape[1]
    summary: dict[str, float] = {}
    for name, distances in (("kl", kl), ("l2", cdist(simulated, noises)), ("emd", emd)):
        nearest = distances.min(axis=1)
        summary |= {name: float(nearest.mean()), f"{name}_worst": float(nearest.max())}
    return summary
