"""The engine under audit: what is observed is the clipped canaries plus the claimed noise, and audits stay below it."""

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
from fedpriv.privacy.accounting.sensitivity import UPLOAD_FACTOR
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.studies.audit.harness import (
    A,
    B,
    Setup,
    coordinate_directions,
    ideal_scores,
    matched_scores,
    observe,
    observe_clients,
    update_spec,
)

DELTA = 1e-5


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
