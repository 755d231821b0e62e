"""The statistical tests by themselves: right under the null, and with power both ways."""

import numpy as np
import pytest
from scipy import stats

from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES
from simulations.studies.audit import harness
from simulations.studies.audit.harness import HEAD, A, B, Setup, update_spec

RNG = np.random.default_rng


def is_uniform(p_values: list[float]) -> bool:
    return stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_noise_scale_is_uniform_under_the_claim_and_rejects_other_scales():
    rng = RNG(1)
    assert is_uniform([harness.noise_scale_p_value(2.5 * rng.standard_normal(50), 2.5) for _ in range(400)])
    noise = 2.5 * rng.standard_normal(600)
    for claimed in (2.5 * 2 / 3, 2.5 * 3 / 2):
        assert harness.noise_scale_p_value(noise, claimed) < 1e-6


def test_repeated_noise_is_uniform_for_two_rounds_and_rejects_shared_noise():
    rng = RNG(2)
    assert is_uniform([harness.repeated_noise_p_value(rng.standard_normal((2, 40))) for _ in range(400)])
    rows = rng.standard_normal((6, 500))
    assert harness.repeated_noise_p_value(rows) > 1e-4
    rows[4] = -0.5 * rows[1] + 0.1 * rows[4]  # scaled, turned round and three rounds apart
    assert harness.repeated_noise_p_value(rows) < 1e-6


def test_batch_sizes_accept_poisson_sampling_and_reject_other_spreads():
    rng = RNG(3)
    sizes = rng.binomial(500, 0.1, size=100)
    assert harness.batch_size_p_value(sizes, num_records=500, sampling_probability=0.1) > 1e-4
    for wrong in (np.full(100, 50), 50 + 1.5 * (sizes - 50), 50 + (sizes - 50) / 1.5):
        assert harness.batch_size_p_value(wrong, num_records=500, sampling_probability=0.1) < 1e-3


@pytest.mark.parametrize("rule", CLIPPING_RULES)
@pytest.mark.parametrize("clip_norm", [0.3, 5.0])
def test_influence_stays_within_every_rules_bound_and_comes_near_it(rule, clip_norm):
    spec = update_spec(noise_multiplier=1.0, batch_size=4, clip_norm=clip_norm, clipping=rule)
    setup = Setup(spec=spec, num_registered=4, seed=1, sizes={A: 40, B: 40, HEAD: 10})
    found = harness.largest_influence(setup, num_records=4)
    assert 0.5 < found <= 1 + harness.ROUNDING


def test_influence_needs_noise_that_repeats_and_every_record():
    for setup in (
        Setup(spec=update_spec(noise_multiplier=1.0, batch_size=4), num_registered=4),
        Setup(spec=update_spec(noise_multiplier=1.0, batch_size=4), num_registered=8, seed=1),
    ):
        with pytest.raises(ValueError, match="seed and batch_size"):
            harness.largest_influence(setup)
