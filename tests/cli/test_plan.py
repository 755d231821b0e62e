"""`fedpriv plan`: its figures are those of independent formulas, and it says what does not fit and what is hopeless."""

import json
import math
import re
from dataclasses import asdict

import dp_accounting
import pytest
from dp_accounting import pld

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.aggregation import head_of
from fedpriv.learning.training.noise_plan import _num_lora_values, calibrated, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.learning.training.workbench import workbench
from fedpriv.runs.plan import budget
from fedpriv.runs.plan.budget import Setting
from tests.cli.command_line import as_json, fedpriv, refused
from tests.marks import slow

SIZES = (1200, 1000, 800, 600, 400)
RECORDS = [word for size in SIZES for word in ("--records", size)]
SPEED = ("--records-per-second", 60)


@pytest.fixture(scope="module")
def five():
    """The plan of five hospitals for epsilon 2, with all alternatives."""
    return as_json("plan", *RECORDS, "--epsilon", 2, "--classes", 8, *SPEED)


@pytest.fixture(scope="module")
def planned():
    """The same by the library, without alternatives."""
    return budget.plan(Setting.of(SIZES, epsilon=2.0, num_classes=8))


def composed(*phases, delta=1e-5):
    """Epsilon by dp-accounting itself, of (z, q, count)."""
    library = pld.PLDAccountant()
    for z, q, count in phases:
        library.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count)
    return library.get_epsilon(delta)


def phases(plan):
    """(z, q, rounds) of each phase of a plan that was printed, or of the library's."""
    if isinstance(plan, budget.Plan):
        return [(p.spec.noise_multiplier, p.spec.sampling_probability, p.num_rounds) for p in plan.phases]
    return [(p["noise_multiplier"], p["sampling_probability"], p["rounds"]) for p in plan["phases"]]


@pytest.mark.slow
def test_start_and_steps_spend_the_budget_and_no_more(five):
    assert [(q, rounds) for _, q, rounds in phases(five)] == [(1.0, 1), (1.0, 35), (0.125, 4)]
    assert composed(*phases(five)) == pytest.approx(2.0, abs=2e-3)
    assert five["epsilon_local_max"] == pytest.approx(2.0, abs=1e-3)


def test_start_and_head_have_their_shares_of_the_budget(planned):
    """1 / z^2 adds up for full batches, and s1 is that of the exact Gaussian mechanism at epsilon 2 and delta 1e-5."""
    start, head, _ = phases(planned)
    assert (1.99381 / start[0]) ** 2 == pytest.approx(0.15, rel=1e-3)
    assert 35 * (1.99381 / head[0]) ** 2 == pytest.approx(0.83, rel=1e-3)


@pytest.mark.slow
def test_every_view_counts_the_noise_that_its_definition_says(five):
    weighted = [math.sqrt(size) * size for size in SIZES]
    bar = math.sqrt(sum((value / sum(weighted)) ** 2 for value in weighted))
    # sqrt(sum w^2) / w_k with w_k = sqrt(N_k), less the largest other's, which reads the sum.
    own = [math.sqrt((sum(SIZES) - max(SIZES[:i] + SIZES[i + 1 :])) / size) for i, size in enumerate(SIZES)]
    for client, factor in zip(five["clients"], own, strict=True):
        for view, scale in (("rho", bar), ("aggregate", factor)):
            scaled = [(scale * z, q, rounds) for z, q, rounds in phases(five)]
            assert client[f"epsilon_{view}"] == pytest.approx(composed(*scaled), rel=2e-3)


@pytest.fixture(scope="module")
def initial():
    """The adapter of a run with the default model, in whichever format its base computes."""
    return workbench(parse({"baselines": False, "base_dtype": "float32"})).initial


@pytest.mark.parametrize("min_clients", [None, *slow(3), 5])
@pytest.mark.parametrize("further", [{}, {"train": "head"}, *slow({"rounds": 6})], ids=str)
def test_a_plan_has_the_noise_and_the_rates_that_a_run_computes(min_clients, further, initial):
    """Of uploads, or of sums of no fewer clients."""
    of_view = {"secure_aggregation": True, "min_clients": min_clients} if min_clients else {}
    config = parse({"target_epsilon": 4.0} | of_view | further)
    run = with_learning_rates(calibrated(config, SIZES, initial), SIZES, initial)
    view = "aggregate" if of_view else "local"
    of_run = {"min_clients": min_clients, "num_classes": len(initial[head_of(initial)[1]])}
    setting = Setting.of(SIZES, epsilon=4.0, view=view, **of_run, **further)
    planned, phases_of_run = budget.plan(setting), RunSchedule.of(run).phases
    assert [(p.name, p.num_rounds) for p in planned.phases] == [(p.name, p.num_rounds) for p in phases_of_run]
    for found, of_run in zip(planned.phases, phases_of_run, strict=True):
        # What rounding to a grid costs depends on the number of values, of which a plan knows those of LoRA; a ten
        # thousandth for the head is half a hundredth of what the head leaves.
        assert asdict(found.spec) == {
            name: pytest.approx(value, rel=2e-2) if of_view and isinstance(value, float) else value
            for name, value in asdict(of_run.spec).items()
        }


@pytest.mark.parametrize("train", ["head", *slow("all")])
@pytest.mark.parametrize("num_clients", [3, *slow(4, 5)])
def test_small_federations_have_a_plan_for_their_sum_and_its_alternatives(num_clients, train):
    setting = Setting.of(SIZES[:num_clients], epsilon=2.0, view="aggregate", train=train)
    planned = budget.plan(setting)
    assert max(cost.epsilon_aggregate for cost in planned.costs) <= 2.0
    found = budget.alternatives(setting)
    assert "uploads seen by the server" in found
    assert any("largest of" in name for name in found) == (num_clients > 4)


def test_two_holders_have_no_plan_for_a_sum_of_which_each_reads_the_others_part():
    with pytest.raises(InputError, match="min_clients = 3: there are 2 clients"):
        Setting.of(SIZES[:2], epsilon=2.0, view="aggregate")
    assert "secure aggregation" not in budget.alternatives(Setting.of(SIZES[:2], epsilon=2.0, train="head"))


def test_the_default_model_has_as_many_lora_values_as_a_plan_assumes(initial):
    assert _num_lora_values(RunConfig(), initial) == budget.LORA_VALUES


# LoRA needs three times as many alternatives.
@pytest.mark.parametrize("train", ["head", *slow("all")])
def test_the_command_shows_what_the_library_plans(train):
    found = as_json("plan", *RECORDS, "--epsilon", 2, "--train", train, "--classes", 8, *SPEED)
    planned = budget.plan(Setting.of(SIZES, epsilon=2.0, num_classes=8, train=train))
    assert phases(found) == phases(planned)
    rates = [(phase.spec.learning_rate, phase.spec.lora_learning_rate) for phase in planned.phases[1:]]
    assert [p["learning_rate"] for p in found["phases"]] == [None, *(rate for rate, _ in rates)]
    of_lora = [rate if phase.name == "all" else None for (_, rate), phase in zip(rates, planned.steps, strict=True)]
    assert [p["lora_learning_rate"] for p in found["phases"]] == [None, *of_lora]
    assert found["seconds"] == pytest.approx(planned.setting.record_passes / 60)
    for name in ("noise_per_step_length", "total_step", "affordable_step", "final_noise", "noise_to_signal"):
        assert found[name] == pytest.approx(getattr(planned, name)), name


# sqrt(sum w^2) / sum w_k N_k with w_k = sqrt(N_k).
NOISE_PER_RECORD = math.sqrt(sum(SIZES)) / sum(size**1.5 for size in SIZES)


def test_the_rates_are_the_recipes(planned):
    (_, (head, _, _), (joint, q, _)) = phases(planned)
    nu = 0.8 * head * NOISE_PER_RECORD / math.sqrt(35)
    delivered = math.sqrt(sum((1 - 0.9**s) ** 2 for s in range(5, 40)) / 35)  # of steps 5 to 39 rounds before the end
    assert planned.noise_per_step_length == pytest.approx(nu)
    assert planned.total_step == pytest.approx(0.487 / (delivered * nu))
    assert planned.affordable_step == pytest.approx(0.487 / nu)
    of_head, spec = (phase.spec for phase in planned.steps)
    assert of_head.learning_rate == pytest.approx(planned.total_step / 35)
    of_joint = 0.8 * joint * NOISE_PER_RECORD / (q * math.sqrt(4))
    assert spec.learning_rate == pytest.approx(min(0.18 / of_joint / 4, 4000 * q / 100))
    assert spec.lora_learning_rate == pytest.approx(0.016 / (of_joint**2 * 6144) / 4)


def end_of_weight(steps):
    """Where the server's momentum leaves a weight after these steps."""
    position, velocity = 0.0, 0.0
    for step in steps:
        velocity = 0.9 * velocity + 0.1 * step
        position += velocity
    return position


def test_noise_to_signal_is_what_noise_and_mean_gradient_make_of_a_weight(planned):
    specs = [phase.spec for phase in planned.steps for _ in range(phase.num_rounds)]
    signal = end_of_weight([spec.learning_rate for spec in specs])
    squares = 0.0
    for before, spec in enumerate(specs):
        step = spec.learning_rate * 0.8 * spec.noise_multiplier * NOISE_PER_RECORD / spec.sampling_probability
        squares += end_of_weight([0.0] * before + [step] + [0.0] * (38 - before)) ** 2
    assert planned.final_noise == pytest.approx(math.sqrt(squares))
    assert planned.noise_to_signal == pytest.approx(150 * math.sqrt(squares) / signal)


def test_persons_cost_what_as_many_records_do_and_their_plan_is_one_of_persons(tmp_path):
    asked = ("plan", "--records", 300, "--epsilon", 1, "--train", "head", "--rounds", 6, *SPEED)
    records, persons = as_json(*asked), (*asked, "--max-records-per-person", 3)
    found = as_json(*persons, "--out", tmp_path / "plan.json")
    assert "exists; name another file" in refused(*persons, "--out", tmp_path / "plan.json")
    assert (records["unit"], found["unit"]) == ("record", "person")
    assert phases(found) == phases(records)
    assert found["seconds"] == pytest.approx(3 * records["seconds"])
    (client,) = json.loads((tmp_path / "plan.json").read_text())["clients"]
    assert {event["unit"] for event in client["events"]} == {"person"}
    shown, _ = fedpriv(*persons)
    assert re.search("^num_persons +300$", shown, re.MULTILINE)
    assert "persons in the same proportions" in shown


@pytest.mark.slow
def test_train_auto_is_explained_and_changes_the_plan_where_lora_pays(five):
    assert five["train_auto"].startswith("train = auto: the head alone, since nu^2 d")
    assert "train = auto" not in {row["plan"] for row in five["alternatives"]}
    large = (12_000,) * 5
    setting = Setting.of(large, epsilon=8.0)
    chosen, reason = budget.lora_choice(setting)
    assert reason.startswith("train = auto: R of rank 64 and head, since nu^2 d")
    found = budget.plan(chosen)
    specs = [(p.spec.noise_multiplier, p.spec.sampling_probability, p.num_rounds) for p in found.phases]
    assert [(q, rounds) for _, q, rounds in specs] == [(1.0, 1), (1.0, 53), (1 / 16, 160)]
    assert composed(*specs, delta=1 / 120_000) == pytest.approx(8.0, abs=1e-2)
    assert found == budget.plan(Setting.of(large, epsilon=8.0, train="auto"))
    assert found == budget.alternatives(setting)["train = auto"]


def test_fewer_values_in_a_and_b_may_make_lora_pay():
    few, many = (Setting.of((5_000,), epsilon=8.0, num_lora_values=d) for d in (500, 100_000))
    assert budget.lora_choice(few)[0].num_lora_rounds > 0
    assert budget.lora_choice(many)[0].num_lora_rounds == 0


@pytest.mark.parametrize("size", [6000, *slow(1200, 12_000)])
@pytest.mark.parametrize("given", [{}, {"rank": 8}, {"rank": 16, "aggregation": "fed-sb"}])
def test_what_is_chosen_is_chosen_again(size, given):
    values = {"train": "auto", **given} if "aggregation" not in given else given
    chosen, _ = budget.lora_choice(Setting.of((size,) * 5, epsilon=8.0, **values))
    again, again_reason = budget.lora_choice(chosen)
    _, by_default = budget.lora_choice(Setting.of((size,) * 5, epsilon=8.0, train="auto"))
    assert again_reason == by_default
    if "rank" not in given:
        assert (again.config.rounds, again.config.trained_rank) == (chosen.config.rounds, chosen.config.trained_rank)


def test_time_is_one_pass_for_the_features_and_what_lora_draws(planned):
    assert planned.setting.record_passes == pytest.approx(4000 * (1 + 4 * 0.125))
    assert planned.setting.seconds(60) == pytest.approx(6000 / 60)


@pytest.mark.slow
def test_under_secure_aggregation_four_of_five_noises_are_those_of_one_client_with_all_records():
    """The reader of a sum knows its own noise, so the other four hide a record, and the sum has that of all five."""
    hidden = as_json("plan", *RECORDS, "--epsilon", 2, "--view", "aggregate", *SPEED)
    one = budget.plan(Setting.of((4000,), epsilon=2.0))
    for (z, _, _), phase in zip(phases(hidden), one.phases, strict=True):
        assert z == pytest.approx(phase.spec.noise_multiplier / math.sqrt(4), rel=5e-4)
    assert hidden["noise_to_signal"] == pytest.approx(one.noise_to_signal * math.sqrt(5 / 4), rel=5e-4)
    assert hidden["epsilon_aggregate_max"] == pytest.approx(2.0, abs=1e-3)
    assert hidden["epsilon_local_max"] > 4


@pytest.mark.slow
def test_each_alternative_is_the_plan_of_its_own_setting(five):
    rows = {row["plan"]: row for row in five["alternatives"]}
    names = {"q = 0.1", "20 rounds", "80 rounds", "LoRA q = 0.5", "head alone"}
    assert rows.keys() == names | {"3 largest of 5 clients", "secure aggregation"}
    few = budget.plan(Setting.of((1200, 1000, 800), epsilon=2.0))
    assert rows["3 largest of 5 clients"]["noise_to_signal"] == pytest.approx(few.noise_to_signal)
    head = rows["head alone"]["noise_multiplier"]
    assert composed(phases(five)[0], (head, 1.0, 39)) == pytest.approx(2.0, abs=2e-3)
    assert five["helps_most"] == "secure aggregation"


def test_a_delta_of_a_large_client_is_its_own_and_the_smallest_sets_the_noise():
    setting = Setting.of((100, 50_000), epsilon=1.0, train="head")
    found = budget.plan(setting)
    assert setting.deltas == (1e-5, 2e-6)
    small, large = found.costs
    assert small.epsilon_local < large.epsilon_local == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "lora_rounds", "of_lora", "q", "head_start"),
    [(1000, 4, 0.125, 1.0, True), (80, 4, 0.05, 1.0, True), (67, 0, 0.125, 1.0, True), (20, 0, 0.125, None, False)],
)
def test_what_the_time_does_not_allow_is_left_out_in_order(seconds, lora_rounds, of_lora, q, head_start):
    setting, notes = budget.fitted(Setting.of(SIZES, epsilon=2.0), seconds=seconds, records_per_second=60)
    assert (setting.num_lora_rounds, setting.config.head_start) == (lora_rounds, head_start)
    assert setting.config.lora_sampling_probability == pytest.approx(of_lora)
    assert q is None or setting.config.sampling_probability == q
    assert setting.record_passes <= 60 * seconds * (1 + 1e-9)
    assert bool(notes) == (seconds < 1000)


@pytest.mark.slow
def test_a_plan_that_cannot_work_says_so_and_what_would_help():
    arguments = ["plan", *["--records", 20] * 3, "--epsilon", 1, *SPEED]
    out = fedpriv(*arguments)[0]
    assert "Hopeless" in out
    assert "secure aggregation helps most" in out
    found = as_json(*arguments)
    assert found["is_hopeless"]
    assert found["affordable_step"] < 40
    factor = found["needed_records"] / 60
    enough = budget.plan(Setting.of((round(20 * factor),) * 3, epsilon=1.0, delta=1e-5))
    assert enough.noise_to_signal == pytest.approx(0.2, rel=0.01)
    assert "Hopeless" not in fedpriv("plan", *RECORDS, "--epsilon", 2, *SPEED)[0]


def test_what_does_not_fit_is_shown():
    arguments = ["plan", *RECORDS, "--epsilon", 2, *SPEED, "--seconds", 67]
    assert "note: 67 seconds are too short for LoRA" in fedpriv(*arguments)[0]
    assert as_json(*arguments)["lora_rounds"] == 0
    assert as_json(*arguments, "--train", "head")["left_out"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        *(("--records", 0), ("--rounds", 1), ("--epsilon", 0), ("--delta", 0), ("--delta", 1), ("--view", "rho")),
        *(("--classes", 1), ("--min-clients", 2), ("--train", "lora"), ("--lora-values", 0), ("--seconds", 0)),
        ("--records-per-second", -1),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(wrong):
    error = refused("plan", "--records", 100, "--epsilon", 2, "--train", "head", *SPEED, *wrong)
    assert wrong[0].removeprefix("--").replace("-", "_") in error


def test_without_a_speed_it_is_timed_on_the_default_model(monkeypatch):
    monkeypatch.setattr("fedpriv.learning.training.workbench.records_per_second", lambda: 42.0)
    assert as_json("plan", "--records", 100, "--epsilon", 2, "--train", "head")["records_per_second"] == 42.0
