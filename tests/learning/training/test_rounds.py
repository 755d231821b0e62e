"""A run's rounds come in phases, each with one specification; some rules' rounds train parts of the adapter in turn.

What the server makes of a round's sum is the weighted average of the uploads that nobody sent. `train = auto` decides
by public numbers whether A and B are trained, and says why.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters import read
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX
from fedpriv.learning.adapters.pooling import BIAS_SCALE
from fedpriv.learning.aggregation._fedavg import weighted_average, weights_by_size
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.noise_plan import _num_lora_values, calibrated, decided, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule, client_masses, grid_of, mean_of_sum, mean_upload, num_included
from fedpriv.learning.training.stacked import execute_stacked
from fedpriv.privacy.accounting.recipe import LORA_PAYS
from fedpriv.privacy.mechanisms.discrete_gaussian import integers
from tests.learning.training.test_sensitivity import make_task

RATES = {"learning_rate": 13.0, "lora_head_learning_rate": 4.0, "lora_learning_rate": 20.0}
ONES = dict.fromkeys([*RATES, "start_noise_multiplier"], 1.0)

SIZES = {0: 20, 1: 45, 2: 90}
BASE = {"recipe": "per-sample", "secure_aggregation": True, "min_clients": 3, "num_clients": 3, "rounds": 3}
BASE |= {"local_steps": 1, "learning_rate": 0.5, "noise_multiplier": 0.7}


def derived(**changes):
    noise = {"noise_multiplier": 9.0, "start_noise_multiplier": 5.0, "lora_noise_multiplier": 2.0}
    return RunConfig(**{**RATES, **noise, "rounds": 10, "lora_rounds": 3, **changes})


def test_the_recipe_starts_the_head_then_trains_it_alone_then_all():
    start, head, everything = RunSchedule.of(derived()).phases
    assert [(p.name, p.num_rounds) for p in (start, head, everything)] == [("start", 1), ("head", 6), ("all", 3)]
    assert (start.spec.trains, start.spec.objective, start.spec.learning_rate) == ("head", "class-sums", 1.0)
    assert (start.spec.sampling_probability, start.spec.clip_norm, start.spec.noise_multiplier) == (1.0, 1.0, 5.0)
    assert (head.spec.trains, head.spec.objective, head.spec.learning_rate) == ("head", "loss", 13.0)
    assert (head.spec.sampling_probability, head.spec.noise_multiplier) == (1.0, 9.0)
    assert (everything.spec.trains, everything.spec.noise_multiplier) == ("all", 2.0)
    assert (everything.spec.learning_rate, everything.spec.lora_learning_rate) == (4.0, 20.0)
    assert everything.spec.sampling_probability == 0.125
    assert {p.spec.bias_scale for p in (start, head, everything)} == {BIAS_SCALE}
    assert {p.spec.num_rounds for p in (start, head, everything)} == {10}
    (paper,) = RunSchedule.of(RunConfig(recipe="per-sample")).phases  # whose steps are all alike
    assert (paper.spec.batch_size, paper.spec.local_steps, paper.spec.noise_multiplier) == (64, 3, 1.88)
    assert (paper.spec.sampling_probability, paper.spec.lora_learning_rate, paper.spec.bias_scale) == (0.0, 0.0, 1.0)


def test_phases_without_rounds_are_left_out():
    for changes, expected in (
        ({"train": "head"}, [("start", 1), ("head", 9)]),
        ({"lora_rounds": 0}, [("start", 1), ("head", 9)]),
        ({"lora_rounds": 99}, [("start", 1), ("all", 9)]),
        ({"lora_rounds": None}, [("start", 1), ("all", 9)]),
        ({"head_start": False}, [("head", 7), ("all", 3)]),
        ({"recipe": "per-sample", "lora_rounds": None, "head_start": False}, [("all", 10)]),
    ):
        assert derived(**changes).num_lora_rounds == dict(expected).get("all", 0)
        assert [(phase.name, phase.num_rounds) for phase in RunSchedule.of(derived(**changes)).phases] == expected


def test_every_round_has_the_specification_of_its_phase_and_what_follows_is_counted_by_phase():
    schedule = RunSchedule.of(derived())
    names = [schedule.phase(round_).name for round_ in range(1, 11)]
    assert names == ["start", *["head"] * 6, *["all"] * 3]
    assert schedule.spec(0) == schedule.spec(1)
    assert schedule.spec(11) == schedule.spec(10)
    for after, num_rounds in ((0, 10), (0, 3), (4, 4), (7, 3), (3, 0)):
        following = [(phase.name, count) for phase, count in schedule.following(after, num_rounds)]
        assert following == list(Counter(names[after : after + num_rounds]).items())


def test_what_is_still_to_be_derived_is_refused():
    for key in RATES:
        with pytest.raises(ValueError, match="not been derived"):
            RunSchedule.of(replace(derived(), **{key: "auto"}))
    with pytest.raises(ValueError, match="start_noise_multiplier"):
        RunSchedule.of(replace(derived(), start_noise_multiplier=None))


def schedule(rule: str, **changes) -> RunSchedule:
    keys = {"recipe": "fedpriv", "aggregation": rule, "rounds": 9, "lora_rounds": 5, **ONES}
    return RunSchedule.of(parse(keys | changes))


ALONE = {"recipe": "per-sample", "rounds": 3, "lora_rounds": "", "head_start": False}


def test_rounds_that_train_lora_take_turns_where_the_rule_has_some():
    for rule, changes, expected in (
        ("rolora", {}, ["head"] * 4 + ["lora-b", "lora-a"] * 2 + ["lora-b"]),
        ("fedsvd", {}, ["head"] * 4 + ["lora-b"] * 5),
        ("rolora", ALONE, ["lora-b", "lora-a", "lora-b"]),
        ("rolora", {"train": "head"}, ["head"] * 9),
    ):
        made = schedule(rule, **changes)
        assert [made.spec(round_).trains for round_ in range(1, len(expected) + 1)] == expected
        assert made.spec(1).objective == ("loss" if "recipe" in changes else "class-sums")
        *_, one, other = (made.spec(round_) for round_ in range(1, len(expected) + 1))
        assert replace(one, trains=other.trains) == other, "turns differ in what they train alone"


@pytest.mark.parametrize("rule", ["dp-lora", "rolora"])
def test_specifications_are_counted_as_in_a_loop_over_the_rounds(rule):
    made = schedule(rule)
    for after in range(10):
        for num_rounds in range(10 - after):
            looped = Counter(made.spec(round_) for round_ in range(after + 1, after + num_rounds + 1))
            assert made.counts(after, num_rounds) == looped
    assert made.totals == made.counts(0, 9)


def test_a_rule_whose_rounds_train_some_of_the_tensors_needs_sgd():
    for rule in ("rolora", "fedsvd"):
        with pytest.raises(InputError, match=rf"optimizer = adamw: aggregation = {rule} needs sgd"):
            parse({"aggregation": rule, "optimizer": "adamw"})
        assert parse({"aggregation": rule}).recipe == "fedpriv"


@pytest.mark.parametrize(("rule", "expected"), [("dp-lora", 44), ("rolora", 44), ("fedsvd", 28), ("fed-sb", 50)])
def test_the_rule_for_learning_rates_counts_the_lora_values_that_are_noised(rule, expected):
    shapes = {"m.lora_A.weight": (4, 4), "m.lora_B.weight": (7, 4), "head.weight": (3, 9)}
    if rule == "fed-sb":
        shapes = {"m" + INNER_SUFFIX: (5, 5), "n" + INNER_SUFFIX: (5, 5), "head.weight": (3, 9)}
    initial = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert _num_lora_values(parse({"aggregation": rule}), initial) == expected


@pytest.fixture
def model(encoder):
    return TrainingModel(encoder(), memory_limit=2**30)


def updates(model, make_records, config, spec):
    """{client: its update on its grid}, and the adapter that all of them start from."""
    start = {name: tensor + 0.01 for name, tensor in read(model.peft_model).items()}
    grid = grid_of(config, spec, SIZES)
    own = partial(make_task, model, spec=spec, adapter=start, num_registered=None)
    tasks = [own(make_records(size, seed=size), seed=client) for client, size in SIZES.items()]
    tasks = [replace(task, grid=grid.of(client)) for client, task in zip(SIZES, tasks, strict=True)]
    return dict(zip(SIZES, execute_stacked(model, tasks), strict=True)), start


def of_sum(config, spec, found, start, survivors, believed):
    """What a server makes of the sum of the survivors' terms, if it believes that it is that of these clients."""
    grid = grid_of(config, spec, SIZES)
    total = sum(integers(found[client].noised, grid.of(client).points) for client in survivors)
    return mean_upload(start, spec, mean_of_sum(config, spec, SIZES, total, believed))


NORMALIZED = {"sampling_probability": 0.5, "normalize_features": True}


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"sampling_probability": 0.25}, {}),
        ({"sampling_probability": 1.0, "client_weights": "root-records"}, {}),
        ({"batch_size": 8}, {}),
        ({"batch_size": 8, "clipping": "batch"}, {}),
        ({"sampling_probability": 0.5, "noise_on": "upload", "local_steps": 3, "optimizer": "adamw"}, {}),
        (NORMALIZED | {"clipping": "split", "client_weights": "uniform"}, {}),
        (NORMALIZED, {"trains": "head", "centred": True}),
        (NORMALIZED, {"trains": "head", "objective": "class-sums"}),
        (NORMALIZED, {"lora_learning_rate": 0.05, "bias_scale": 3.0}),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_the_average_of_the_sum_is_that_of_the_uploads(model, make_records, changes, phase):
    config = parse(BASE | changes)
    spec = replace(UpdateSpec.of(config), **phase)
    found, start = updates(model, make_records, config, spec)
    for survivors in ((0, 1, 2), (0, 2)):
        weights = weights_by_size(client_masses(config, {client: SIZES[client] for client in survivors}))
        expected = weighted_average([found[client].adapter for client in weights], list(weights.values()))
        summed = of_sum(config, spec, found, start, survivors, survivors)
        moved = {name: float((tensor - start[name]).abs().max()) for name, tensor in expected.items()}
        for name, tensor in expected.items():
            torch.testing.assert_close(summed[name], tensor, atol=2e-6 + 1e-5 * moved[name], rtol=0, msg=name)
        assert max(moved.values()) > 1e-3, "the updates changed something"
        wrong = of_sum(config, spec, found, start, survivors, (1,))
        assert any(not torch.allclose(wrong[name], expected[name], atol=1e-4) for name in expected)


def test_a_vector_beyond_its_share_is_clamped_and_the_noise_is_that_of_the_terms(model, make_records):
    config = parse(BASE | {"sampling_probability": 1.0, "noise_multiplier": 3.0})
    spec = UpdateSpec.of(config)
    grid, (found, _) = grid_of(config, spec, SIZES), updates(model, make_records, config, spec)
    for client, update in found.items():
        assert num_included(spec, SIZES[client]) == SIZES[client]
        steps = integers(update.noised, grid.of(client).points).double()
        stddev = grid.of(client).points * 3.0 * spec.clip_norm
        # Records move few of some thousand values: nearly all are noise alone.
        robust = float(steps.abs().median()) / 0.6745
        assert robust == pytest.approx(stddev, rel=0.1)
        assert math.isfinite(float(steps.abs().max()))
    assert grid_of(parse(BASE | {"secure_aggregation": False}), spec, SIZES) is None


# ---------------------------------------------------------------- whether A and B are trained

LORA = {"layer.lora_A.weight": torch.zeros(4, 768), "layer.lora_B.weight": torch.zeros(768, 4)}
INITIAL = LORA | {"head.weight": torch.zeros(2, 384), "head.bias": torch.zeros(2)}
AUTO = {"train": "auto", "target_epsilon": 8.0, "delta": 1e-5}
MANY = [12_000] * 5


def test_with_many_records_most_rounds_train_a_and_b_with_most_of_the_budget():
    config, reason = decided(parse(AUTO | {"aggregation": "dp-lora", "rounds": 53}), MANY, INITIAL)
    assert (config.lora_rounds, config.lora_share, config.lora_server_optimizer) == (39, 0.75, "adam")
    assert reason.startswith("train = auto: A, B and head, since nu^2 d, the noise in A and B,")
    assert f"{LORA_PAYS:g}" in reason
    schedule = RunSchedule.of(with_learning_rates(calibrated(config, MANY, INITIAL), MANY, INITIAL))
    assert [(phase.name, phase.num_rounds) for phase in schedule.phases] == [("start", 1), ("head", 13), ("all", 39)]
    assert not decided(parse(AUTO | {"target_epsilon": 0.5}), MANY, INITIAL)[0].lora_rounds, "less budget is a reason"
    for train in ("all", "head"):
        config = parse(AUTO | {"train": train})
        assert decided(config, MANY, INITIAL) == (config, ""), "any other choice is left alone"


def test_adam_steps_less_far_where_there_is_more_noise_or_there_are_more_rounds():
    many, few = ([size] * 5 for size in (40_000, 2700))
    keys, cases = AUTO | {"aggregation": "dp-lora"}, ((many, 53), (many, 214), (few, 53))
    chosen = (decided(parse(keys | {"rounds": n}), sizes, INITIAL)[0] for sizes, n in cases)
    rates = [config.lora_server_learning_rate for config in chosen]
    assert rates[0] == 0.02
    assert rates[1] == pytest.approx(0.126 / 160**0.5)
    assert 0 < rates[2] < rates[0]


def test_with_r_between_frozen_factors_fewer_records_suffice():
    inner = {f"{name}{INNER_SUFFIX}": torch.zeros(16, 16) for name in ("query", "value")}
    initial = {"dp-lora": INITIAL, "fed-sb": inner | {"head.weight": torch.zeros(2, 384)}}
    chosen = [decided(parse(AUTO | {"aggregation": rule}), [1500] * 5, initial[rule])[0] for rule in initial]
    assert [config.lora_rounds for config in chosen] == [0, 39]


def test_r_of_every_layer_is_what_it_chooses_about_unless_another_rule_is_named():
    config = parse(AUTO)
    assert (config.aggregation, config.rank, config.alpha, config.layers) == ("fed-sb", 64, 256.0, "all")
    assert parse(AUTO | {"layers": "last-2", "rounds": 40}).layers == "last-2"
    narrow = parse(AUTO | {"rank": 8})
    assert narrow.alpha / narrow.rank == config.alpha / config.rank
    other = parse(AUTO | {"aggregation": "ffa-lora"})
    assert (other.aggregation, other.rank, other.layers) == ("ffa-lora", RunConfig().rank, RunConfig().layers)


@pytest.mark.parametrize(("rounds", "joint", "probability"), [(54, 40, 0.25), (214, 160, 1 / 16)])
def test_more_rounds_draw_fewer_records_each_so_that_they_cost_no_more_passes(rounds, joint, probability):
    config, _ = decided(parse(AUTO | {"rounds": rounds}), MANY, INITIAL)
    assert (config.lora_rounds, config.lora_sampling_probability) == (joint, probability)


@pytest.mark.parametrize(
    ("changes", "size", "rank", "rounds", "joint"),
    [
        ({}, 12_000, 64, 214, 160),
        ({}, 6_000, 16, 53, 39),
        ({"rank": 8, "alpha": 32.0, "rounds": 30}, 600, 8, 30, 0),
        ({}, 200, 16, 40, 0),
        pytest.param({"secure_aggregation": True, "target_epsilon": 2.0}, 12_000, 64, 214, 160, marks=pytest.mark.slow),
        pytest.param({}, 600, 16, 40, 0, marks=pytest.mark.slow),
        pytest.param({"rank": 8, "alpha": 32.0}, 12_000, 8, 53, 39, marks=pytest.mark.slow),
        pytest.param({"rounds": 53}, 12_000, 16, 53, 39, marks=pytest.mark.slow),
    ],
)
def test_the_rank_and_the_rounds_are_the_most_that_noise_and_configuration_allow(changes, size, rank, rounds, joint):
    inner = {f"{number}{INNER_SUFFIX}": torch.zeros(64, 64) for number in range(12)}
    configured = parse(AUTO | changes)
    config, reason = decided(configured, [size] * 5, inner | {"head.weight": torch.zeros(2, 384)})
    assert (config.trained_rank, config.rounds, config.lora_rounds) == (rank, rounds, joint)
    assert (config.rank, config.alpha) == (configured.rank, configured.alpha), "nodes release by these"
    assert joint or changes or rounds == parse(AUTO | {"train": "head"}).rounds, "as a run of the head trains it"
    trained = f"R of rank {rank} and head" if joint else "the head alone"
    measured = f"the noise in R of rank {min(rank, 16)}"
    assert reason.startswith(f"train = auto: {trained}, since nu^2 d, {measured}, would be ")
