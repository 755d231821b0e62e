"""The Gaussian mechanism adds noise of scale z C to every coordinate of every tensor and returns one event."""

import math

import pytest
import torch
from scipy import stats

from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.mechanisms import gaussian
from fedpriv.privacy.mechanisms.gaussian import MECHANISM
from fedpriv.privacy.mechanisms.registry import NoiseRequest
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource

FALSE_ALARM = 1e-6
SUM = torch.zeros(6000)
PARTS = {"first": slice(0, 2000), "middle": slice(2000, 5000), "last": slice(5000, 6000)}


def noised(z=1.5, clip_norm=4.0, total=SUM, source=None, **more):
    fields = {"noise_multiplier": z, "clip_norm": clip_norm, "sampling_probabilities": (0.25,), **more}
    request = NoiseRequest(dimension=len(total), **fields)
    sums, (event,) = MECHANISM.add_noise(total.unsqueeze(0), request, [source or SeededSource(0)])
    return sums[0], event


def accepts(values, scale):
    statistic = float((values.double() / scale).square().sum())
    p_value = 2 * min(stats.chi2.cdf(statistic, values.numel()), stats.chi2.sf(statistic, values.numel()))
    return p_value > FALSE_ALARM


@pytest.mark.parametrize("source", [SecureSource(), SeededSource(0)], ids=["secure", "seeded"])
def test_every_part_has_noise_of_scale_z_times_c_and_the_event_states_it(source):
    values, event = noised(source=source)
    for part in PARTS.values():
        assert [scale for scale in (4.0, 6.0, 9.0) if accepts(values[part], scale)] == [6.0]
    assert event == SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.25)
    # Some of 6000 float32 values coincide by chance.
    assert len(values.unique()) > 0.99 * len(values), "no noise value is used twice"


def test_a_scale_that_is_off_by_half_a_percent_would_be_noticed():
    """The standard deviation of so many values is within 0.35 % of the true one, but for five standard errors."""
    values, _ = noised(total=torch.zeros(10**6))
    assert values.double().square().mean().sqrt().item() == pytest.approx(6.0, rel=0.0035)


def test_without_noise_the_sum_is_returned_unchanged_and_the_event_states_no_noise():
    result, event = noised(z=0.0, total=torch.ones(5))
    assert result.tolist() == [1.0] * 5
    assert event.noise_multiplier == 0


# 1000 pairs at a false-alarm rate of 1e-6; the same test detects correlation from half of the variance being shared.
@pytest.mark.parametrize(("one", "other"), [("first", "middle"), ("first", "last"), ("middle", "last")])
def test_noise_of_different_parts_is_uncorrelated(one, other):
    result, _ = noised()
    pair = [result[PARTS[name]][:1000] for name in (one, other)]
    assert stats.pearsonr(*pair).pvalue > FALSE_ALARM
    assert stats.pearsonr(pair[0], pair[0] + pair[1]).pvalue < FALSE_ALARM, "the test must detect correlation"


def test_a_larger_sensitivity_lowers_the_multiplier_in_the_event_but_not_the_noise():
    plain, _ = noised(z=3.0)
    split, event = noised(z=3.0, sensitivity_factor=math.sqrt(2))
    assert torch.equal(plain, split)
    assert event.noise_multiplier == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e-7, 2.0**-30, 0.7])
def test_every_noised_sum_lies_on_the_same_grid(value):
    scale = 1.3 * 2.5
    step = 2.0 ** (math.floor(math.log2(scale)) - 18)
    total = torch.full((20_000,), value)
    points = noised(z=1.3, clip_norm=2.5, total=total)[0].double() / step
    assert torch.equal(points, points.round()), "no digits below the grid reveal the sum"
    assert len(points.unique()) > 15_000, "the grid is far finer than the noise"


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_each_client_gets_noise_from_its_own_source_and_an_event_of_its_own(monkeypatch, at_once):
    monkeypatch.setattr(gaussian, "_VALUES_AT_ONCE", at_once)
    totals = torch.arange(12.0).view(3, 4)
    request = NoiseRequest(noise_multiplier=1.5, clip_norm=4.0, dimension=4, sampling_probabilities=(0.1, 0.2, 0.3))
    sums, events = MECHANISM.add_noise(totals, request, [SeededSource(seed) for seed in range(3)])
    for client in range(3):
        alone, _ = noised(total=totals[client], source=SeededSource(client))
        assert torch.equal(sums[client], alone)
    assert [event.sampling_probability for event in events] == [0.1, 0.2, 0.3]
