"""Noise that is correlated over b rounds, on paper: how much less of it there could be, beside larger samples.

    python -m simulations.studies.banded_noise

The steps of J rounds get the rows of C^-1 Z for noise, with C banded, b diagonals wide, and columns of norm 1. Records
are dealt to b groups, and round i draws, with probability b q, from group i mod b: a round has as many records as
before, and each record is in J / b rounds that share no noise, which cost as much as J / b independent releases
(BandMF; Choquette-Choo and others 2023). Noise reaches the model through the server's momentum: row t of the workload
is 1 - m^(t - s + 1), s <= t. C is the Toeplitz matrix with the least root mean square of the noise over all rounds.

Figures are the noise in the model over that of independent noise, at equal epsilon, records a round and rounds: over
all rounds, and after the last one. The third in a cell is that of independent noise of b times as many records in
J / b rounds, which takes as long. No cell is better than that, so runs have no such noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from fedpriv.privacy.accounting import noise_multiplier_for
from simulations.studies.harness import parser, table

SCHEDULES = ((1 / 16, 48), (1 / 16, 320), (1 / 8, 40), (1 / 4, 40))
BANDS = (2, 4, 8, 16)
EPSILONS = (2.0, 8.0)
DELTA = 1e-5
MOMENTUM = 0.9

Vector = NDArray[np.float64]


def noise_of_model(bands: Vector, num_rounds: int, momentum: float) -> Vector:
    """[rounds] the standard deviation of the noise in the model after each round, for columns of norm 1.

    Args:
        bands: [b], the first column of C, of any norm.
        num_rounds: J.
        momentum: m in [0, 1).
    """
    reached = 1 - momentum ** np.arange(1, num_rounds + 1)
    # Toeplitz matrices commute, so the rows of A C^-1 are the workload, filtered.
    rows = lfilter([1.0], bands, reached) * np.linalg.norm(bands)
    return np.asarray(np.sqrt(np.cumsum(rows**2)))


def best_bands(num_bands: int, num_rounds: int, momentum: float) -> Vector:
    """[b] the first column of the C with the least root mean square of the noise over all rounds."""

    def cost(rest: Vector) -> float:
        noise = noise_of_model(np.append(1.0, rest), num_rounds, momentum)
        return float(np.log(np.mean(noise**2))) if np.isfinite(noise).all() else 100.0

    square_root = [math.comb(2 * k, k) / 4**k for k in range(1, num_bands)]  # of the matrix of prefix sums
    return np.append(1.0, minimize(cost, square_root, method="L-BFGS-B").x) if num_bands > 1 else np.ones(1)


def relative_noise(probability: float, num_rounds: int, num_bands: int, epsilon: float) -> tuple[float, float, float]:
    """The figures of one cell: over all rounds, after the last, and of larger samples in fewer rounds."""

    def multiplier(factor: int) -> float:
        return noise_multiplier_for(
            epsilon,
            DELTA,
            sampling_probability=factor * probability,
            steps=math.ceil(num_rounds / factor),
        )

    z = multiplier(num_bands) / multiplier(1)
    banded = noise_of_model(best_bands(num_bands, num_rounds, MOMENTUM), num_rounds, MOMENTUM)
    plain = noise_of_model(np.ones(1), num_rounds, MOMENTUM)
    fewer = noise_of_model(np.ones(1), math.ceil(num_rounds / num_bands), 0.0)[-1]
    return (
        z * math.sqrt(np.mean(banded**2) / np.mean(plain**2)),
        z * float(banded[-1] / plain[-1]),
        z * float(fewer / noise_of_model(np.ones(1), num_rounds, 0.0)[-1]),
    )


def rows() -> Iterator[tuple[str, ...]]:
    """The table's rows."""
    for probability, num_rounds in SCHEDULES:
        for epsilon in EPSILONS:
            cells = [
                " / ".join(f"{figure:.2f}" for figure in relative_noise(probability, num_rounds, bands, epsilon))
                if bands * probability <= 1
                else "-"
                for bands in BANDS
            ]
            yield (f"1/{round(1 / probability)}, {num_rounds}", f"{epsilon:g}", *cells)


def main() -> None:
    """Print the table."""
    parser(__doc__).parse_args()
    print(table(("q, J", "epsilon", *(f"b = {bands}" for bands in BANDS)), rows()))


if __name__ == "__main__":
    main()
