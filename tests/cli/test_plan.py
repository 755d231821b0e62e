"""`fedpriv plan`: its figures are those of independent formulas, and it says what does not fit and what is hopeless."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting import pld

from fedpriv import planning
from fedpriv.config import RunConfig
from fedpriv.planning import Setting
from fedpriv.training.schedule import Schedule
from tests.cli.command_line import as_json, fedpriv

SIZES = (1200, 1000, 800, 600, 400)
RECORDS = [word for size in SIZES for word in ("--records", size)]
SPEED = ("--records-per-second", 60)


@pytest.fixture(scope="module")
def five():
    """The plan of five hospitals for epsilon 2."""
    return as_json("plan", *RECORDS, "--epsilon", 2, "--classes", 8, *SPEED)


def composed(*phases, delta=1e-5):
    """Epsilon by dp-accounting itself, of (z, q, count)."""
    library = pld.PLDAccountant()
    for z, q, count in phases:
        library.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count)
    return library.get_epsilon(delta)


def test_the_noise_of_start_and_steps_spends_the_budget_and_no_more(five):
    z, start = five["noise_multiplier"], five["start_noise_multiplier"]
    assert composed((start, 1.0, 1), (z, 1.0, 31), (z, 0.1, 8)) == pytest.approx(2.0, abs=2e-3)
    assert five["epsilon_local_max"] == pytest.approx(2.0, abs=1e-3)


def test_every_view_counts_the_noise_that_its_definition_says(five):
    z, start = five["noise_multiplier"], five["start_noise_multiplier"]
    weighted = [math.sqrt(size) * size for size in SIZES]
    bar = math.sqrt(sum((value / sum(weighted)) ** 2 for value in weighted))
    own = [math.sqrt(sum(SIZES) / size) for size in SIZES]  # sqrt(sum w^2) / w_k with w_k = sqrt(N_k)
    for client, factor in zip(five["clients"], own, strict=True):
        for view, scale in (("rho", bar), ("aggregate", factor)):
            phases = [(scale * start, 1.0, 1), (scale * z, 1.0, 31), (scale * z, 0.1, 8)]
            assert client[f"epsilon_{view}"] == pytest.approx(composed(*phases), rel=2e-3)


def test_the_rate_is_the_recipes(five):
    nu = five["noise_multiplier"] * math.sqrt(sum(SIZES)) / (math.sqrt(39) * sum(size**1.5 for size in SIZES))
    assert five["noise_per_step_length"] == pytest.approx(nu)
    assert five["total_step"] == pytest.approx(0.6 / nu)
    assert five["learning_rate"] == pytest.approx(0.6 / nu / 39)


def end_of_weight(steps):
    """Where the server's momentum leaves a weight after these steps."""
    position, velocity = 0.0, 0.0
    for step in steps:
        velocity = 0.9 * velocity + 0.1 * step
        position += velocity
    return position


def test_noise_to_signal_is_what_noise_and_mean_gradient_make_of_a_weight(five):
    signal = end_of_weight([1.0] * 31 + [0.1] * 8)  # sums of a tenth of the records
    ends = [end_of_weight([0.0] * before + [1.0] + [0.0] * (38 - before)) for before in range(39)]
    noise = five["noise_per_step_length"] * math.sqrt(39) * math.sqrt(sum(end**2 for end in ends))
    assert five["noise_to_signal"] == pytest.approx(150 * noise / signal)


def test_a_plan_has_the_phases_of_a_run():
    config = RunConfig(learning_rate=1.0, noise_multiplier=1.0, start_noise_multiplier=1.0)
    setting = Setting(sizes=SIZES, epsilon=2.0)
    phases = [(phase.num_rounds, phase.spec.probability(1000)) for phase in Schedule.of(config).phases]
    planned = [(event.count, event.sampling_probability) for event in setting.releases(1.0)]
    assert [(1, 1.0), *planned] == phases


def test_time_is_one_pass_for_the_features_and_what_lora_draws(five):
    assert five["record_passes"] == pytest.approx(4000 * (1 + 8 * 0.1))
    assert five["seconds"] == pytest.approx(7200 / 60)


def test_under_secure_aggregation_the_sum_has_the_noise_of_one_client_with_all_records():
    hidden = as_json("plan", *RECORDS, "--epsilon", 2, "--view", "aggregate", *SPEED)
    one = planning.plan(Setting(sizes=(4000,), epsilon=2.0))
    assert hidden["noise_multiplier"] == pytest.approx(one.noise_multiplier / math.sqrt(5))
    assert hidden["noise_to_signal"] == pytest.approx(one.noise_to_signal)
    assert hidden["epsilon_aggregate_max"] == pytest.approx(2.0, abs=1e-3)
    assert hidden["epsilon_local_max"] > 4


def test_each_alternative_is_the_plan_of_its_own_setting(five):
    rows = {row["plan"]: row for row in five["alternatives"]}
    assert rows.keys() == {
        *("q = 0.1", "20 rounds", "80 rounds", "LoRA q = 0.4", "head alone"),
        *("3 largest of 5 clients", "secure aggregation"),
    }
    few = planning.plan(Setting(sizes=(1200, 1000, 800), epsilon=2.0))
    assert rows["3 largest of 5 clients"]["noise_to_signal"] == pytest.approx(few.noise_to_signal)
    head = rows["head alone"]["noise_multiplier"]
    assert composed((five["start_noise_multiplier"], 1.0, 1), (head, 1.0, 39)) == pytest.approx(2.0, abs=2e-3)
    assert five["helps_most"] == "secure aggregation"


def test_a_delta_of_a_large_client_is_its_own_and_the_smallest_sets_the_noise():
    setting = Setting(sizes=(100, 50_000), epsilon=1.0, lora_rounds=0)
    found = planning.plan(setting)
    assert setting.deltas == (1e-5, 2e-6)
    small, large = found.costs
    assert small.epsilon_local < large.epsilon_local == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "lora_rounds", "of_lora", "q", "head_start"),
    [(1000, 8, 0.1, 1.0, True), (100, 8, 0.0625, 1.0, True), (70, 0, 0.1, 1.0, True), (20, 0, 0.1, None, False)],
)
def test_what_the_time_does_not_allow_is_left_out_in_order(seconds, lora_rounds, of_lora, q, head_start):
    setting, notes = planning.fitted(Setting(sizes=SIZES, epsilon=2.0), seconds=seconds, records_per_second=60)
    assert (setting.lora_rounds, setting.head_start) == (lora_rounds, head_start)
    assert setting.lora_sampling_probability == pytest.approx(of_lora)
    assert q is None or setting.sampling_probability == q
    assert setting.record_passes <= 60 * seconds * (1 + 1e-9)
    assert bool(notes) == (seconds < 1000)


def test_a_plan_that_cannot_work_says_so_and_what_would_help():
    arguments = ["plan", "--records", 30, "--records", 30, "--epsilon", 1, *SPEED]
    out = fedpriv(*arguments)[0]
    assert "Hopeless" in out
    assert "secure aggregation helps most" in out
    found = as_json(*arguments)
    assert found["is_hopeless"]
    assert found["affordable_step"] < 50
    factor = found["needed_records"] / 60
    enough = planning.plan(Setting(sizes=(round(30 * factor),) * 2, epsilon=1.0, delta=1e-5))
    assert enough.noise_to_signal == pytest.approx(0.2, rel=0.01)
    assert "Hopeless" not in fedpriv("plan", *RECORDS, "--epsilon", 2, *SPEED)[0]


def test_what_does_not_fit_is_shown(five):
    arguments = ["plan", *RECORDS, "--epsilon", 2, *SPEED, "--seconds", 70]
    assert "note: 70 seconds are too short for LoRA" in fedpriv(*arguments)[0]
    assert as_json(*arguments)["lora_rounds"] == 0
    assert five["left_out"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--records", 0),
        ("--rounds", 1),
        ("--epsilon", 0),
        ("--delta", 0),
        ("--delta", 1),
        ("--view", "rho"),
        ("--classes", 1),
        ("--seconds", 0),
        ("--records-per-second", -1),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(wrong):
    out, err = fedpriv("plan", "--records", 100, "--epsilon", 2, *SPEED, *wrong, code=2)
    assert out == ""
    assert err.count("\n") == 1
    assert wrong[0].removeprefix("--").replace("-", "_") in err


def test_without_a_speed_it_is_timed_on_the_default_model(monkeypatch):
    monkeypatch.setattr("fedpriv.training.speed.records_per_second", lambda: 42.0)
    assert as_json("plan", "--records", 100, "--epsilon", 2)["records_per_second"] == 42.0
