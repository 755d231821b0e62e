"""A noise schedule of one's own: every round costs its own event, and no other noise is taken for it."""

import math
from dataclasses import replace

import pytest
import torch

from fedpriv.config import parse, read, to_flower, to_toml
from fedpriv.errors import InputError
from fedpriv.learning.training.noise_plan import calibrated, planned_releases, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.accounting import epsilon_of
from fedpriv.privacy.accounting.filters import CommittedPlan, CommittedPlans
from fedpriv.runs.files import CONFIG
from server.checkpoint import check_configuration
from server.costs import RoundCosts
from simulations.api import _resolved
from tests.events import gaussian
from tests.marks import slow

SIZES, DELTA = (300, 200), 1e-5
ADAPTER = {
    "layer.lora_A.weight": torch.empty(2, 3),
    "layer.lora_B.weight": torch.empty(3, 2),
    "head.bias": torch.ones(2),
}
Z = [8.0, 6.0, 6.0, 5.0, 4.0]


def scheduled(values=Z, **keys):
    return parse({"noise_schedule": values, "rounds": 5, "lora_rounds": 2, "delta": DELTA, **keys})


def costs(config):
    return RoundCosts(with_learning_rates(config, SIZES, ADAPTER), dict(enumerate(SIZES)), ADAPTER)


def test_each_round_costs_its_own_event_and_all_together_what_these_compose_to():
    """Full batches of z_t cost what one Gaussian of z = 1 / sqrt(sum 1 / z_t^2) does."""
    config = scheduled(lora_sampling_probability=1.0)
    assert (config.recipe, config.target_epsilon, config.noise_multiplier) == ("fedpriv", None, 1.0)
    of_run = costs(config)
    assert [of_run.event(0, round_) for round_ in range(1, 6)] == list(map(gaussian, Z))
    assert [count for _, count in of_run.planned(0, 0, 5)] == [1, 2, 1, 1]
    assert of_run.events(0, 3, 2) == [gaussian(5.0), gaussian(4.0)]
    whole = epsilon_of([gaussian(1 / math.sqrt(sum(1 / z**2 for z in Z)))], DELTA).epsilon
    assert epsilon_of(of_run.events(0, 0, 5), DELTA).epsilon == pytest.approx(whole, rel=1e-3)
    # A pair sets the sampling of its round too.
    pairs = [[9.0, 1.0], [3.0, 0.5], [2.0, 0.5], [2.0, 0.25], [1.5, 0.125]]
    of_run = costs(scheduled(pairs))
    assert [of_run.event(1, round_) for round_ in range(1, 6)] == [gaussian(z, q) for z, q in pairs]


@pytest.mark.parametrize("keys", [{}, *slow({"recipe": "per-sample", "lora_rounds": "", "local_steps": 1})])
def test_a_target_scales_the_schedule_and_keeps_its_shape(keys):
    found = calibrated(scheduled(target_epsilon=2.0, **keys), SIZES, ADAPTER)
    assert [z / found.scheduled[0][0] for z, _ in found.scheduled] == pytest.approx([z / Z[0] for z in Z])
    found = with_learning_rates(found, SIZES, ADAPTER)
    spent = epsilon_of(planned_releases(found, dict(enumerate(SIZES)), 1, ADAPTER), DELTA)  # of the smallest client
    assert 1.99 < spent.epsilon <= 2.0


def test_rates_follow_the_noise_that_the_rounds_leave_together_and_a_level_schedule_changes_none():
    level = scheduled([5.0] * 5, lora_sampling_probability=0.1)
    plain = replace(level, noise_schedule=(), noise_multiplier=5.0, start_noise_multiplier=5.0)
    one, other = (RunSchedule.of(with_learning_rates(config, SIZES, ADAPTER)) for config in (level, plain))
    assert one.phases == other.phases
    assert [one.spec(k) for k in range(1, 7)] == [other.spec(k) for k in range(1, 7)]
    uneven = with_learning_rates(scheduled([5.0, 2.0, 7.0, 5.0, 5.0]), SIZES, ADAPTER)
    assert uneven.main_phase.noise_multiplier == pytest.approx(math.sqrt((4 + 49) / 2))
    huge = scheduled([5.0, 1e300, 1e300, 5.0, 5.0])
    assert huge.main_phase.noise_multiplier == pytest.approx(1e300)


def test_the_run_without_noise_has_none_in_any_round():
    plain = scheduled().without_noise
    assert {z for z, _ in plain.scheduled} == {0.0}
    assert not any(spec.noise_multiplier for spec in RunSchedule.of(with_learning_rates(plain, SIZES, ADAPTER)).totals)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"values": Z[:4]}, "noise_schedule: has 4 values for rounds = 5; give one for every round"),
        ({"values": [*Z[:4], 0.0]}, "noise_schedule = .*: input should be greater than 0"),
        ({"values": [*Z[:4], -1.0]}, "noise_schedule = .*: input should be greater than 0"),
        ({"values": [*Z[:4], math.nan]}, "noise_schedule = .*: input should be a finite number"),
        ({"values": [*Z[:4], math.inf]}, "noise_schedule = .*: input should be a finite number"),
        ({"values": [[2.0, 1.0]] * 4 + [3.0]}, r"noise_schedule: must be z of every round, or .* \[z, q\]"),
        ({"values": [[2.0, 1.5]] * 5}, r"noise_schedule: must be .* with q in \(0, 1\]"),
        ({"values": [[2.0, 0.5]] * 5}, "noise_schedule: round 1 has q = 0.5; the head's start is of all records"),
        ({"train": "auto"}, "noise_schedule: train = auto chooses the rounds"),
        ({"start_noise_multiplier": 2.0}, "start_noise_multiplier = 2.0: noise_schedule has the noise of every round"),
        ({"lora_noise_multiplier": 2.0}, "lora_noise_multiplier = 2.0: noise_schedule has the noise of every round"),
        (
            {"noise_multiplier": 2.0, "target_epsilon": 2.0},
            "noise_multiplier = 2.0: target_epsilon = 2.0 says how much",
        ),
    ],
)
def test_a_schedule_that_no_run_could_follow_is_refused_in_one_line(keys, message):
    with pytest.raises(InputError, match=f"^{message}") as caught:
        scheduled(**keys)
    assert "\n" not in str(caught.value)


def test_a_function_is_the_list_of_its_values_before_anything_starts(tmp_path):
    asked = []

    def falling(round_):
        asked.append(round_)
        return torch.tensor(9.0) / round_, 1.0

    config, _ = _resolved(None, {"noise_schedule": falling, "rounds": 3, "train": "head"}, tmp_path)
    assert asked == [1, 2, 3]
    assert config.noise_schedule == ((9.0, 1.0), (4.5, 1.0), (3.0, 1.0))
    (tmp_path / CONFIG).write_text(to_toml(config))
    assert parse(read(tmp_path / CONFIG)) == parse(to_flower(config)) == config
    with pytest.raises(InputError, match=r"^noise_schedule: the function fails \(.*division by zero\)"):
        _resolved(None, {"noise_schedule": lambda round_: 1 / (round_ - 2), "rounds": 3}, tmp_path)


def test_a_run_resumes_with_its_own_schedule_alone(tmp_path):
    (tmp_path / CONFIG).write_text(to_toml(scheduled()))
    check_configuration(scheduled(resume=str(tmp_path)))
    with pytest.raises(InputError, match="began with another configuration; noise_schedule differ"):
        check_configuration(scheduled([*Z[:4], 3.9], resume=str(tmp_path)))


def test_a_node_that_committed_the_schedule_releases_nothing_with_less_noise_than_a_round_of_it_has():
    events = [costs(scheduled()).event(0, round_) for round_ in range(1, 6)]
    rule = CommittedPlans(plans=(CommittedPlan.of(events, DELTA),))

    def left(done, event):
        return rule.remaining(done, event, epsilon=rule.epsilon, delta=rule.delta)

    q = events[-1].sampling_probability
    assert (left([], gaussian(3.99, q)), left([], gaussian(5.99))) == (0, 0)
    assert (left([], gaussian(6.0)), left(events[1:3], gaussian(6.0))) == (2, 0), "the two rounds of so much noise"
    assert left(events[:4], events[4]) == 1
    assert left(events, events[4]) == 0
