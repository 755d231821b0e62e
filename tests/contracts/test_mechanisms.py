"""The contract of every mechanism in the registry, and of one that stands here alone, outside of the library."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import pld
from scipy import stats

from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging, _guard
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.noise_plan import calibrated
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import ORDERS, epsilon_of
from fedpriv.privacy.accounting.events import EVENTS, from_json, group, to_json
from fedpriv.privacy.accounting.law import Event, Unit, check_non_negative
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource, laplace_from_words, on_grid
from tests.server.parts import events_charged, run, summary

LMO = '{"combination": "mixture", "uniform": {"weight": 1.0, "low": 1.0, "high": 3.0}}'
PUBLISHED = json.dumps({**json.loads(LMO), "accounting": "published"})
FALSE_ALARM = 1e-6
DELTA = 1e-5
PLAIN = UpdateSpec.of(parse({"recipe": "per-sample"}))


@dataclass(frozen=True, kw_only=True)
class SubsampledLaplace(Event):
    """Laplace noise with scale `noise_multiplier` times the L1 sensitivity, on a Poisson sample."""

    noise_multiplier: float
    sampling_probability: float
    count: int = 1
    unit: Unit = "record"

    has_pld = True

    def __post_init__(self):
        check_non_negative("noise_multiplier", self.noise_multiplier)
        super().__post_init__()

    @property
    def _epsilon(self):
        """Epsilon of one release: 1 / z, amplified by sampling (Balle, Barthe and Gaboardi 2018, Theorem 8)."""
        return math.log1p(self.sampling_probability * math.expm1(1 / self.noise_multiplier))

    def rdp(self, orders):
        """The curve of randomised response, which dominates every epsilon-DP mechanism."""
        orders, epsilon = np.asarray(orders, dtype=float), self._epsilon
        log_p = -np.log1p(np.exp(-epsilon))
        return self.count * (log_p + np.logaddexp((orders - 1) * epsilon, -orders * epsilon)) / (orders - 1)

    def pld(self, value_interval):
        parameters = pld.common.DifferentialPrivacyParameters(self._epsilon, 0.0)
        single = pld.privacy_loss_distribution.from_privacy_parameters(parameters, value_interval)
        return single.self_compose(self.count)

    def with_noise(self, factor):
        return replace(self, noise_multiplier=factor * self.noise_multiplier)

    @property
    def effective_noise_multiplier(self):
        """That of the Gaussian with the same ratio of variance to squared sensitivity."""
        return math.sqrt(2) * self.noise_multiplier

    @property
    def max_loss(self):
        return self.count * self._epsilon


class Laplace:
    """Laplace noise of scale z C on every coordinate; one record changes the sum by at most sqrt(d) factor C in L1."""

    parameters_hint = ""
    noise_adds_up = False
    cost_depends_on_dimension = True

    def checked(self, parameters, noise_multiplier):
        if parameters or noise_multiplier == 0:
            raise InputError(f"mechanism_parameters = {parameters!r}: laplace takes none, and needs noise")
        return ""

    def caveat(self, parameters):
        return ""

    def planned_events(self, request):
        self.checked(request.parameters, request.noise_multiplier)
        z = request.noise_multiplier / (math.sqrt(request.dimension) * request.sensitivity_factor)
        shared = {"noise_multiplier": z, "count": request.count, "unit": request.unit}
        return [SubsampledLaplace(sampling_probability=q, **shared) for q in request.sampling_probabilities]

    def add_noise(self, sums, request, sources):
        request.check_fits(sums, sources)
        scale = request.noise_multiplier * request.clip_norm
        noise = np.stack([laplace_from_words(source.words(request.dimension)) for source in sources])
        noised = on_grid(torch.from_numpy(noise).mul_(scale).add_(sums), scale)
        return noised.to(sums.dtype), self.planned_events(request)


@dataclass(frozen=True, kw_only=True)
class Example:
    """How to use a mechanism here: valid and invalid parameters, and the distribution of its noise for z = C = 1."""

    cdf: Callable[[Any], Any]
    parameters: str = ""
    invalid: str = '{"no": "parameters"}'
    # For a run of the small federation.
    noise_multiplier: float = 1.0


EXAMPLES = {
    "gaussian": Example(cdf=stats.norm.cdf),
    "discrete-gaussian": Example(cdf=stats.norm.cdf),
    "lmo": Example(cdf=Columns.of(LmoParameters.from_json(LMO)).cdf, parameters=LMO),
    "laplace": Example(cdf=stats.laplace.cdf, noise_multiplier=1000.0),
}


@pytest.fixture(autouse=True)
def laplace(monkeypatch):
    """The mechanism of these tests: its object in one registry, its event in the other, the library unedited."""
    monkeypatch.setitem(MECHANISMS, "laplace", Laplace())
    monkeypatch.setitem(EVENTS, "subsampled_laplace", SubsampledLaplace)


@pytest.fixture(params=EXAMPLES)
def name(request):
    return request.param


def request_for(name, dimension, **changes):
    fields = {"noise_multiplier": 1.5, "clip_norm": 4.0, "sampling_probabilities": (0.25,)} | changes
    return NoiseRequest(parameters=EXAMPLES[name].parameters, dimension=dimension, **fields)


def event_of(name, **changes):
    (event,) = MECHANISMS[name].planned_events(request_for(name, changes.pop("dimension", 50), **changes))
    return event


def epsilon(*events, accountant="rdp"):
    return epsilon_of(events, DELTA, accountant).epsilon


def test_every_mechanism_has_an_example_here():
    assert EXAMPLES.keys() == set(MECHANISMS)


def test_the_planned_event_is_the_returned_event(name):
    for unit, factor in (("record", math.sqrt(3)), ("client", 2.0)):
        probabilities = (0.1, 0.2, 1.0) if unit == "record" else (1.0, 1.0, 1.0)
        request = request_for(name, 40, sampling_probabilities=probabilities, sensitivity_factor=factor, unit=unit)
        planned = MECHANISMS[name].planned_events(request)
        _, returned = MECHANISMS[name].add_noise(torch.zeros(3, 40), request, [SeededSource(k) for k in range(3)])
        assert returned == planned
        assert [event.sampling_probability for event in planned] == list(probabilities)
        assert {(event.unit, event.count) for event in planned} == {(unit, 1)}
        several = MECHANISMS[name].planned_events(replace(request, count=7))
        assert several == [event.with_count(7) for event in planned]


@pytest.mark.parametrize("source", [SecureSource, lambda: SeededSource(0)], ids=["secure", "seeded"])
def test_noise_has_the_stated_scale_and_no_other_on_every_part(name, source):
    request = request_for(name, 30_000)
    noised, _ = MECHANISMS[name].add_noise(torch.zeros(1, 30_000), request, [source()])
    for values in noised[0].double().numpy().reshape(3, -1) / (1.5 * 4.0):
        p_values = {scale: stats.kstest(values * scale, EXAMPLES[name].cdf).pvalue for scale in (2 / 3, 1, 3 / 2)}
        assert [scale for scale, p in p_values.items() if p > FALSE_ALARM] == [1]


def test_noise_is_added_and_the_input_is_unchanged(name):
    sums, request = torch.arange(100.0).view(1, 100), request_for(name, 100)
    moved, _ = MECHANISMS[name].add_noise(sums, request, [SeededSource(0)])
    still, _ = MECHANISMS[name].add_noise(torch.zeros(1, 100), request, [SeededSource(0)])
    torch.testing.assert_close(moved - still, sums, atol=1e-4, rtol=0)
    assert torch.equal(sums, torch.arange(100.0).view(1, 100))


def test_every_value_of_every_client_gets_noise_of_its_own(name):
    request, alone = request_for(name, 30, sampling_probabilities=(0.1, 0.2)), request_for(name, 30)
    both, _ = MECHANISMS[name].add_noise(torch.zeros(2, 30), request, [SeededSource(3), SeededSource(4)])
    assert (both != 0).all()
    # One value may meet another by chance: float32 has some 2^24 near these.
    assert len(both.unique()) >= 59
    for row, seed in zip(both, (3, 4), strict=True):
        assert torch.equal(row, MECHANISMS[name].add_noise(torch.zeros(1, 30), alone, [SeededSource(seed)])[0][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm = 0.0"),
        ({"clip_norm": math.nan}, "clip_norm = nan"),
        ({"clip_norm": math.inf}, "clip_norm = inf"),
        ({"sensitivity_factor": 0.5}, "sensitivity_factor = 0.5"),
        ({"sampling_probabilities": (0.1, 0.2)}, "1 sums, 2 sampling probabilities and 1 sources"),
        ({"sampling_probabilities": (1.5,)}, "sampling_probability = 1.5"),
        ({"dimension": 4}, "dimension = 4"),
        ({"count": 0}, "count = 0"),
    ],
)
def test_a_request_that_would_make_the_event_overstate_the_noise_is_refused(name, changes, message):
    request = {"dimension": 3} | changes
    with pytest.raises(ValueError, match=message):
        MECHANISMS[name].add_noise(torch.zeros(1, 3), request_for(name, **request), [SeededSource(0)])


def test_invalid_parameters_are_refused_by_name_and_canonical_ones_are_kept(name):
    mechanism, example = MECHANISMS[name], EXAMPLES[name]
    canonical = mechanism.checked(example.parameters, 1.0)
    assert mechanism.checked(canonical, 1.0) == canonical
    with pytest.raises(InputError, match="mechanism_parameters"):
        mechanism.checked(example.invalid, 1.0)
    assert (mechanism.parameters_hint == "") == (example.parameters == "")


def test_the_properties_of_a_mechanism_are_those_of_its_event(name):
    event = event_of(name)
    assert from_json(to_json(event.with_count(3))) == event_of(name, count=3)
    assert MECHANISMS[name].caveat(EXAMPLES[name].parameters) == event.caveat
    assert MECHANISMS[name].noise_adds_up == event.noise_adds_up
    depends = epsilon(event_of(name, dimension=50)) != epsilon(event_of(name, dimension=5000))
    assert MECHANISMS[name].cost_depends_on_dimension == depends
    assert (event.pld(1e-2) is not None) == event.has_pld
    answer = epsilon_of([event], DELTA)
    assert event.has_pld or answer.accountant == "rdp"
    assert answer.upper_bound_only == (answer.accountant == "rdp")
    if name == "lmo":
        (event,) = MECHANISMS[name].planned_events(replace(request_for(name, 50), parameters=PUBLISHED))
        assert event.caveat == MECHANISMS[name].caveat(PUBLISHED) != "", "unproven accounting is one of both"


# --- the contract between the event of a mechanism and the accountants ---


def test_renyi_curves_grow_linearly_with_the_count_and_are_the_same_for_many_at_once(name):
    event = event_of(name)
    curve = event.rdp(ORDERS)
    assert curve.shape == np.shape(ORDERS)
    assert np.isfinite(curve).any()
    np.testing.assert_allclose(event.with_count(5).rdp(ORDERS), 5 * curve, rtol=1e-9)
    many = type(event).rdp_of_many([event, event.with_count(2), event], ORDERS)
    np.testing.assert_array_equal(many, np.stack([curve, event.with_count(2).rdp(ORDERS), curve]))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_noise_fewer_releases_and_less_sampling_never_cost_more(name, accountant):
    scale = EXAMPLES[name].noise_multiplier

    def cost(noise_multiplier=2.0, count=1, probability=0.25):
        changes = {"noise_multiplier": noise_multiplier * scale, "sampling_probabilities": (probability,)}
        return epsilon(event_of(name, count=count, **changes), accountant=accountant)

    by_noise = [cost(z, count=4) for z in (4.0, 2.0, 1.0)]
    by_count = [cost(count=count) for count in (1, 4, 16)]
    by_sampling = [cost(probability=q) for q in (0.0, 0.1, 1.0)]
    assert [sorted(costs) for costs in (by_noise, by_count, by_sampling)] == [by_noise, by_count, by_sampling]
    assert by_sampling[0] == 0


def test_scaling_the_noise_costs_the_same_as_scaling_the_noise_multiplier(name):
    event, doubled = event_of(name), event_of(name, noise_multiplier=3.0)
    scaled, expected = event.with_noise(2.0), doubled.effective_noise_multiplier
    assert epsilon(scaled) == pytest.approx(epsilon(doubled), rel=1e-6)
    assert scaled.effective_noise_multiplier == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(2 * event.effective_noise_multiplier, rel=0.2)
    assert Release(event=event, rho_bar=0.5).seen_by("rho") == event.with_noise(0.5)
    assert Release(event=event, rho_bar=0.5).seen_by("local") == event


def test_equal_events_are_grouped_and_compose_with_other_mechanisms(name):
    event, other = event_of(name), event_of("gaussian", noise_multiplier=2.0)
    assert group([event, event.with_count(2)]) == (event.with_count(3),)
    total = epsilon(event, other)
    assert max(epsilon(event), epsilon(other)) <= total <= epsilon(event) + epsilon(other) + math.log(1 / DELTA)


# --- whole runs ---


def values_of(small_run, name, **changes):
    example = EXAMPLES[name]
    noise = {"mechanism_parameters": example.parameters, "noise_multiplier": example.noise_multiplier}
    return {**small_run, "mechanism": name, **noise, "rounds": 1, **changes}


# Every day tests/privacy/accounting/test_calibration.py calibrates LMO noise, and tests/server/test_lmo_run.py has runs
# with it: their ledger, and their noise for a target.
without_lmo_every_day = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "lmo" else []) for name in EXAMPLES], indirect=True
)


@without_lmo_every_day
def test_a_run_charges_the_planned_event_to_every_ledger(small_run, tmp_path, name):
    out = run(values_of(small_run, name), tmp_path / "run")
    assert summary(out)["mechanism"] == name
    assert (pd.read_csv(out / "clients.csv").status == "ok").all()
    charged = events_charged(out / "ledger.sqlite")
    assert len(charged) == 3
    for client in summary(out)["clients"]:
        events = charged[client["name"]]
        assert {type(event) for event in events} == {type(event_of(name))}
        assert client["epsilon_local"] == pytest.approx(epsilon_of(events, client["delta"]).epsilon)


@without_lmo_every_day
def test_a_target_epsilon_is_met_by_scaling_the_noise(small_run, name):
    config = parse(values_of(small_run, name, target_epsilon=3.0, noise_multiplier=BY_RECIPE, rounds=2))
    initial = workbench(parse(small_run)).initial
    spec = UpdateSpec.of(calibrated(config, [84, 56, 52], initial))
    steps = {"clip_norm": spec.clip_norm, "sampling_probabilities": (8 / 84, 8 / 56, 8 / 52), "count": 4}
    steps |= {"dimension": sum(tensor.numel() for tensor in initial.values()), "parameters": spec.mechanism_parameters}

    def cost(noise_multiplier):
        events = MECHANISMS[name].planned_events(NoiseRequest(noise_multiplier=noise_multiplier, **steps))
        return max(epsilon_of([event], 1e-5).epsilon for event in events)

    assert cost(spec.noise_multiplier) <= 3.0 < cost(0.99 * spec.noise_multiplier)


def refusal_by_guard(**changes):
    """In what words a node refuses an instruction."""
    policy = _charging.NodePolicy(allow_unrecorded=True)
    with pytest.raises(_charging.RefusedError) as refusal:
        _guard.check_instruction(replace(PLAIN, **changes), policy, noise_source="secure", num_registered=100)
    return str(refusal.value)


@pytest.mark.parametrize("multiplier", [0.0, 1e-300, 1e300])
def test_a_noise_multiplier_out_of_range_is_refused_before_anything_is_planned(multiplier):
    with pytest.raises(InputError, match="noise_multiplier = "):
        MECHANISMS["lmo"].checked(LMO, multiplier)
    refusal = refusal_by_guard(mechanism="lmo", mechanism_parameters=LMO, noise_multiplier=multiplier)
    assert "noise_multiplier = " in refusal


def test_an_unknown_mechanism_is_refused_by_config_and_guard():
    must_be = "mechanism = 'quantum': must be one of gaussian, discrete-gaussian, lmo, laplace"
    with pytest.raises(InputError, match=must_be):
        parse({"mechanism": "quantum"})
    assert must_be in refusal_by_guard(mechanism="quantum")


def test_a_node_limits_every_mechanism_by_its_effective_noise_multiplier(name):
    with pytest.raises(_charging.RefusedError, match="its effective value"):
        _guard.check_limits(PLAIN, event_of(name, noise_multiplier=1e-3), 1, _guard.NodeLimits())


def test_a_node_charges_no_event_that_protects_nobody_whatever_its_mechanism_says(tmp_path):
    policy = _charging.NodePolicy(ledger=tmp_path / "ledger.sqlite")
    data_set = _charging.registered_data_set(policy, "0", 100)
    key = Key(run="r", client="0", round=1, request="digest")
    published = replace(request_for("lmo", 50), parameters=PUBLISHED)
    for event, message in (
        (event_of("gaussian", noise_multiplier=5e-324), "its effective value is 0"),
        (MECHANISMS["lmo"].planned_events(published)[0], "no privacy guarantee"),
    ):
        with pytest.raises(_charging.RefusedError, match=message):
            _charging.charge(policy, key, Release(event=event, rho_bar=1.0), data_set, noise_source="secure")
    with Ledger(policy.ledger) as ledger:
        assert ledger.releases(data_set.id) == []


@pytest.mark.parametrize(
    "parameters",
    [
        " " * 20_000 + LMO,
        '{"combination": ' + "[" * 980 + "]" * 980 + "}",
        '{"combination": "' + "x" * 5000 + '"}',
        '{"combination": "mixture", "uniform": {"weight": 1' + "0" * 5000 + ', "low": 1, "high": 1}}',
        "[" * 9000,
    ],
    ids=["long", "nested", "text", "digits", "brackets"],
)
def test_parameters_of_a_hostile_coordinator_are_refused_in_one_short_line(parameters):
    assert len(refusal_by_guard(mechanism="lmo", mechanism_parameters=parameters)) < 300


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="mechanism = 'lmo': is registered already"):
        MECHANISMS["lmo"] = Laplace()
