"""The engine under audit: what is observed is the clipped canaries plus the claimed noise, and audits stay below it.

The statistical tests by themselves are right under the null, and have power both ways.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.learning.training.canaries import inclusions
from fedpriv.methods.audit._bounds import one_run_audit
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.calibration import noise_multiplier_for
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.sensitivity import CLIPPING_RULES, UPLOAD_FACTOR
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.audit.harness import (
    HEAD,
    ROUNDING,
    A,
    B,
    Setup,
    batch_size_p_value,
    coordinate_directions,
    ideal_scores,
    largest_influence,
    matched_scores,
    noise_scale_p_value,
    observe,
    observe_clients,
    repeated_noise_p_value,
    update_spec,
)

DELTA = 1e-5
RNG = np.random.default_rng


def run(rounds: int, q: float, z: float, *, seed: int = 0, num: int = 400, clients: int = 2, clip_norm: float = 1.0):
    spec = update_spec(noise_multiplier=z, batch_size=round(q * 1000), clip_norm=clip_norm, rounds=rounds)
    setup = Setup(spec=spec, num_registered=1000, rounds=rounds, seed=seed, sizes={A: num // 2, B: num // 2})
    included = inclusions(num, setup.source("coins"))
    seen = observe(setup, coordinate_directions(num, range(num), num), included, num_clients=clients)
    return setup, seen


@pytest.mark.parametrize("clip_norm", [0.2, 30.0])
def test_local_view_is_the_canary_at_the_clip_norm_plus_the_claimed_noise(clip_norm):
    _, seen = run(20, 1.0, 0.7, clip_norm=clip_norm)
    values = seen.local.numpy().astype(float)
    noise = (values - seen.included).ravel()
    assert stats.kstest(noise / 0.7, "norm").pvalue > 1e-4
    assert stats.kstest(noise / (0.7 * 1.5), "norm").pvalue < 1e-4
    assert values[:, seen.included].mean() == pytest.approx(1, abs=5 * 0.7 / math.sqrt(20 * 200))


def test_aggregate_view_has_the_noise_of_all_clients():
    _, seen = run(20, 1.0, 0.7, clients=4)
    noise = (seen.aggregate.numpy().astype(float) - seen.included).ravel()
    assert stats.kstest(noise / (2 * 0.7), "norm").pvalue > 1e-4


def test_included_canaries_are_sampled_with_the_accounted_probability():
    setup, seen = run(40, 0.1, 1e-3)
    drawn = (seen.local.numpy() > 0.5)[:, seen.included]
    assert not (seen.local.numpy() > 0.5)[:, ~seen.included].any()
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.1).pvalue > 1e-4
    assert setup.event == SubsampledGaussian(noise_multiplier=1e-3, sampling_probability=0.1, count=40)


def test_an_audit_without_a_seed_draws_from_the_secure_source():
    setup = Setup(spec=update_spec(noise_multiplier=1.0), num_registered=1, sizes={A: 4})
    assert setup.source("noise").name == "secure"
    assert Setup(spec=setup.spec, num_registered=1, seed=1).source("noise").name == "seeded"


@pytest.mark.parametrize(("rounds", "q", "at_least"), [(5, 1.0, 0.6), (20, 0.1, 0.3)])
def test_correct_engine_stays_below_its_claim_and_close_to_the_ideal(rounds, q, at_least):
    # By rdp, in milliseconds: pld says 3.7 to 4 of the same noise.
    z = noise_multiplier_for(4.0, DELTA, sampling_probability=q, steps=rounds, accountant="rdp")
    found = []
    for seed in range(6):
        setup, seen = run(rounds, q, z, seed=seed)
        scores = matched_scores(seen.local, noise_stddev=z, sampling_probability=q)
        found.append(one_run_audit(scores, seen.included, num_guesses=40, delta=DELTA).epsilon_lower)
    assert epsilon_of([setup.event], DELTA, "rdp").epsilon <= 4
    assert max(found) < 4
    assert np.median(found) > at_least


def test_matched_scores_are_the_log_likelihood_ratio():
    y = np.array([[0.3, -1.2], [2.0, 0.1]])
    density = stats.norm(scale=0.8).pdf
    expected = np.log((0.7 * density(y) + 0.3 * density(y - 1)) / density(y)).sum(axis=0)
    assert matched_scores(y, noise_stddev=0.8, sampling_probability=0.3) == pytest.approx(expected)
    everyone = np.log(density(y - 1) / density(y)).sum(axis=0)
    assert matched_scores(y, noise_stddev=0.8, sampling_probability=1.0) == pytest.approx(everyone)


def test_matched_scores_beat_plain_sums_under_sampling():
    rng = np.random.default_rng(6)
    included = rng.random(4000) < 0.5
    drawn = included & (rng.random((50, 4000)) < 0.05)
    y = drawn + 0.5 * rng.standard_normal((50, 4000))

    def separation(scores: np.ndarray) -> float:
        return float(stats.mannwhitneyu(scores[included], scores[~included]).statistic / included.sum())

    assert separation(matched_scores(y, noise_stddev=0.5, sampling_probability=0.05)) > 1.05 * separation(y.sum(axis=0))


def test_ideal_attacker_has_the_engines_scores_in_distribution():
    setup, seen = run(10, 0.3, 0.8, num=1000)
    real = matched_scores(seen.local, noise_stddev=0.8, sampling_probability=0.3)
    ideal = ideal_scores(
        seen.included, rounds=10, noise_stddev=0.8, sampling_probability=0.3, generator=np.random.default_rng(7)
    )
    assert setup.dimension == 1000
    for chosen in (seen.included, ~seen.included):
        assert stats.ks_2samp(real[chosen], ideal[chosen]).pvalue > 1e-4


def test_client_level_canaries_lie_two_clip_norms_apart():
    spec = update_spec(noise_multiplier=0.5, noise_on="upload", clip_norm=0.3)
    setup = Setup(spec=spec, num_registered=1, seed=1, sizes={A: 4, B: 4})
    bits = inclusions(600, SeededSource(1))
    scores = observe_clients(setup, bits).numpy().astype(float)
    assert scores[bits].mean() - scores[~bits].mean() == pytest.approx(UPLOAD_FACTOR, abs=0.2)
    assert stats.kstest((scores - np.where(bits, 1, -1)) / 0.5, "norm").pvalue > 1e-4
    assert setup.event == SubsampledGaussian(noise_multiplier=0.25, sampling_probability=1.0, unit="client")


def test_canaries_are_dealt_out_to_clients_in_turn():
    """Two canaries of different clients on one coordinate: each is seen in its own client's upload alone."""
    spec = update_spec(noise_multiplier=1e-4)
    setup = Setup(spec=spec, num_registered=1, seed=1, sizes={A: 2})
    directions = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    seen = observe(setup, directions, np.array([True, False]), num_clients=2)
    assert seen.local[0].tolist() == pytest.approx([1, 0], abs=1e-2)
    assert seen.aggregate[0].tolist() == pytest.approx([1, 1], abs=1e-2)


def is_uniform(p_values: list[float]) -> bool:
    return stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_noise_scale_is_uniform_under_the_claim_and_rejects_other_scales():
    rng = RNG(1)
    assert is_uniform([noise_scale_p_value(2.5 * rng.standard_normal(50), 2.5) for _ in range(400)])
    noise = 2.5 * rng.standard_normal(600)
    for claimed in (2.5 * 2 / 3, 2.5 * 3 / 2):
        assert noise_scale_p_value(noise, claimed) < 1e-6


def test_repeated_noise_is_uniform_for_two_rounds_and_rejects_shared_noise():
    rng = RNG(2)
    assert is_uniform([repeated_noise_p_value(rng.standard_normal((2, 40))) for _ in range(400)])
    rows = rng.standard_normal((6, 500))
    assert repeated_noise_p_value(rows) > 1e-4
    rows[4] = -0.5 * rows[1] + 0.1 * rows[4]  # scaled, turned round and three rounds apart
    assert repeated_noise_p_value(rows) < 1e-6


def test_batch_sizes_accept_poisson_sampling_and_reject_other_spreads():
    rng = RNG(3)
    sizes = rng.binomial(500, 0.1, size=100)
    assert batch_size_p_value(sizes, num_records=500, sampling_probability=0.1) > 1e-4
    for wrong in (np.full(100, 50), 50 + 1.5 * (sizes - 50), 50 + (sizes - 50) / 1.5):
        assert batch_size_p_value(wrong, num_records=500, sampling_probability=0.1) < 1e-3


@pytest.mark.parametrize("rule", CLIPPING_RULES)
@pytest.mark.parametrize("clip_norm", [0.3, 5.0])
def test_influence_stays_within_every_rules_bound_and_comes_near_it(rule, clip_norm):
    spec = update_spec(noise_multiplier=1.0, batch_size=4, clip_norm=clip_norm, clipping=rule)
    setup = Setup(spec=spec, num_registered=4, seed=1, sizes={A: 40, B: 40, HEAD: 10})
    found = largest_influence(setup, num_records=4)
    assert 0.5 < found <= 1 + ROUNDING


def test_influence_needs_noise_that_repeats_and_every_record():
    for setup in (
        Setup(spec=update_spec(noise_multiplier=1.0, batch_size=4), num_registered=4),
        Setup(spec=update_spec(noise_multiplier=1.0, batch_size=4), num_registered=8, seed=1),
    ):
        with pytest.raises(ValueError, match="seed and batch_size"):
            largest_influence(setup)
