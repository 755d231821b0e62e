"""The study of correlated noise: its figures against matrices that are written out."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy.linalg import toeplitz

from simulations.studies import banded_noise
from simulations.studies.banded_noise import best_bands, noise_of_model, relative_noise

ROUNDS, BANDS, MOMENTUM = 12, 3, 0.9


def written_out(bands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C, whose full columns have norm 1, and the workload of the server's momentum."""
    column = np.zeros(ROUNDS)
    column[: len(bands)] = bands / np.linalg.norm(bands)
    reached = 1 - MOMENTUM ** np.arange(1, ROUNDS + 1)
    return toeplitz(column, np.zeros(ROUNDS)), toeplitz(reached, np.zeros(ROUNDS))


def test_the_noise_is_that_of_the_matrices():
    bands = np.array([1.0, 0.5, 0.2])
    c, workload = written_out(bands)
    expected = np.linalg.norm(workload @ np.linalg.inv(c), axis=1)
    np.testing.assert_allclose(noise_of_model(bands, ROUNDS, MOMENTUM), expected)


def test_rounds_of_one_group_share_no_noise_so_a_record_moves_them_as_independent_releases():
    c, _ = written_out(best_bands(BANDS, ROUNDS, MOMENTUM))
    for group in range(BANDS):
        moved = c[:, group::BANDS]
        gram = moved.T @ moved
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-12)
        assert np.diag(gram).max() <= 1 + 1e-12


def test_the_best_bands_are_better_than_none_and_than_others_near_them():
    def cost(bands: np.ndarray) -> float:
        return float(np.mean(noise_of_model(bands, ROUNDS, MOMENTUM) ** 2))

    best = best_bands(BANDS, ROUNDS, MOMENTUM)
    assert cost(best) < 0.8 * cost(np.ones(1))
    for step in ((0, 0.05, 0), (0, -0.05, 0), (0, 0, 0.05), (0, 0, -0.05)):
        assert cost(best + np.array(step)) > cost(best)


def test_independent_noise_is_the_measure_and_no_correlation_beats_fewer_rounds():
    """No row of the workload is longer than Cauchy and Schwarz allow: one group's rounds, with all of the noise."""
    assert relative_noise(1 / 8, 40, 1, 8.0) == pytest.approx((1.0, 1.0, 1.0))
    over_all, last, fewer = relative_noise(1 / 8, 40, 4, 8.0)
    assert fewer < last < over_all < 0.85


@pytest.mark.slow
def test_main_prints_a_row_for_each_schedule_and_epsilon(monkeypatch, capsys):
    monkeypatch.setattr(banded_noise, "SCHEDULES", ((1 / 8, 16),))
    monkeypatch.setattr(sys, "argv", ["banded_noise"])
    banded_noise.main()
    printed = capsys.readouterr().out
    assert printed.count("| 1/8, 16 |") == 2
    assert " - |" in printed
