"""`train = auto` decides by public numbers whether A and B are trained, and says why."""

import pytest
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX
from fedpriv.learning.training.noise_plan import calibrated, decided, with_learning_rates
from fedpriv.learning.training.rounds import RunSchedule
from fedpriv.privacy.accounting.recipe import LORA_PAYS

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


def test_less_budget_is_a_reason_against_lora():
    config, _ = decided(parse(AUTO | {"target_epsilon": 0.5}), MANY, INITIAL)
    assert not config.lora_rounds


def test_adam_steps_less_far_where_there_is_more_noise_or_there_are_more_rounds():
    many, few = ([size] * 5 for size in (40_000, 2700))
    keys = AUTO | {"aggregation": "dp-lora"}
    chosen = (
        decided(parse(keys | {"rounds": n}), sizes, INITIAL)[0] for sizes, n in ((many, 53), (many, 214), (few, 53))
    )
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
    trained = f"R of rank {rank} and head" if joint else "the head alone"
    measured = f"the noise in R of rank {min(rank, 16)}"
    assert reason.startswith(f"train = auto: {trained}, since nu^2 d, {measured}, would be ")


def test_with_few_records_the_head_alone_is_trained_as_a_run_of_the_head_trains_it():
    inner = {f"0{INNER_SUFFIX}": torch.zeros(64, 64), "head.weight": torch.zeros(2, 384)}
    config, reason = decided(parse(AUTO), [200] * 5, inner)
    assert not config.lora_rounds
    assert reason.startswith("train = auto: the head alone")
    assert config.rounds == parse(AUTO | {"train": "head"}).rounds


def test_any_other_choice_is_left_alone():
    for train in ("all", "head"):
        config = parse(AUTO | {"train": train})
        assert decided(config, MANY, INITIAL) == (config, "")
