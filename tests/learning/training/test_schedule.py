"""A run's rounds come in phases, each with one specification; some rules' rounds train parts of the adapter in turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedpriv.config import RunConfig, parse
from fedpriv.errors import InputError
from fedpriv.learning.adapters._arithmetic import INNER_SUFFIX
from fedpriv.learning.adapters.pooling import BIAS_SCALE
from fedpriv.learning.training.noise_plan import _num_lora_values
from fedpriv.learning.training.rounds import RunSchedule

RATES = {"learning_rate": 13.0, "lora_head_learning_rate": 4.0, "lora_learning_rate": 20.0}
ONES = dict.fromkeys([*RATES, "start_noise_multiplier"], 1.0)


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": "head"}, [("start", 1), ("head", 9)]),
        ({"lora_rounds": 0}, [("start", 1), ("head", 9)]),
        ({"lora_rounds": 99}, [("start", 1), ("all", 9)]),
        ({"lora_rounds": None}, [("start", 1), ("all", 9)]),
        ({"head_start": False}, [("head", 7), ("all", 3)]),
        ({"recipe": "dp-lora-paper", "lora_rounds": None, "head_start": False}, [("all", 10)]),
    ],
)
def test_phases_without_rounds_are_left_out(changes, expected):
    assert [(phase.name, phase.num_rounds) for phase in RunSchedule.of(derived(**changes)).phases] == expected


def test_without_lora_rounds_of_their_own_all_steps_are_alike():
    (paper,) = RunSchedule.of(RunConfig(recipe="dp-lora-paper")).phases
    assert (paper.spec.batch_size, paper.spec.local_steps, paper.spec.noise_multiplier) == (64, 3, 1.88)
    assert (paper.spec.sampling_probability, paper.spec.lora_learning_rate, paper.spec.bias_scale) == (0.0, 0.0, 1.0)


def test_every_round_has_the_specification_of_its_phase():
    schedule = RunSchedule.of(derived())
    names = [schedule.phase(round_).name for round_ in range(1, 11)]
    assert names == ["start", *["head"] * 6, *["all"] * 3]
    assert schedule.spec(0) == schedule.spec(1)
    assert schedule.spec(11) == schedule.spec(10)


@pytest.mark.parametrize(
    ("after", "num_rounds", "expected"),
    [
        (0, 10, [("start", 1), ("head", 6), ("all", 3)]),
        (0, 3, [("start", 1), ("head", 2)]),
        (4, 4, [("head", 3), ("all", 1)]),
        (7, 3, [("all", 3)]),
        (3, 0, []),
    ],
)
def test_what_follows_is_counted_by_phase(after, num_rounds, expected):
    following = RunSchedule.of(derived()).following(after, num_rounds)
    assert [(phase.name, count) for phase, count in following] == expected


@pytest.mark.parametrize("key", ["learning_rate", "lora_learning_rate", "lora_head_learning_rate"])
def test_a_rate_that_is_still_to_be_derived_is_refused(key):
    with pytest.raises(ValueError, match="not been derived"):
        RunSchedule.of(replace(derived(), **{key: "auto"}))


def test_the_noise_of_the_start_must_be_known():
    with pytest.raises(ValueError, match="start_noise_multiplier"):
        RunSchedule.of(replace(derived(), start_noise_multiplier=None))


def test_a_head_alone_has_no_rounds_for_lora():
    assert derived(train="head").num_lora_rounds == 0
    assert derived(lora_rounds=None).num_lora_rounds == 9


def schedule(rule: str, **changes) -> RunSchedule:
    return RunSchedule.of(
        parse({"recipe": "fedpriv", "aggregation": rule, "rounds": 9, "lora_rounds": 5, **ONES, **changes})
    )


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        ("rolora", {}, ["head"] * 4 + ["lora-b", "lora-a"] * 2 + ["lora-b"]),
        ("fedsvd", {}, ["head"] * 4 + ["lora-b"] * 5),
        (
            "rolora",
            {"recipe": "dp-lora-paper", "rounds": 3, "lora_rounds": "", "head_start": False},
            ["lora-b", "lora-a", "lora-b"],
        ),
        ("rolora", {"train": "head"}, ["head"] * 9),
    ],
    ids=["rolora", "fedsvd", "without a phase of the head", "without lora"],
)
def test_rounds_that_train_lora_take_turns_where_the_rule_has_some(rule, changes, expected):
    made = schedule(rule, **changes)
    assert [made.spec(round_).trains for round_ in range(1, len(expected) + 1)] == expected
    assert made.spec(1).objective == ("loss" if "recipe" in changes else "class-sums")


@pytest.mark.parametrize("rule", ["dp-lora", "rolora"])
@pytest.mark.parametrize("after", range(10))
def test_specifications_are_counted_as_in_a_loop_over_the_rounds(rule, after):
    made = schedule(rule)
    for num_rounds in range(10 - after):
        looped = Counter(made.spec(round_) for round_ in range(after + 1, after + num_rounds + 1))
        assert made.counts(after, num_rounds) == looped
    assert made.totals == made.counts(0, 9)


def test_turns_differ_in_what_they_train_alone():
    one, other = schedule("rolora").spec(5), schedule("rolora").spec(6)
    assert {name for name in one.__dataclass_fields__ if getattr(one, name) != getattr(other, name)} == {"trains"}


@pytest.mark.parametrize("rule", ["rolora", "fedsvd"])
def test_a_rule_whose_rounds_train_some_of_the_tensors_needs_sgd(rule):
    with pytest.raises(InputError, match=rf"optimizer = adamw: aggregation = {rule} needs sgd"):
        parse({"aggregation": rule, "optimizer": "adamw"})
    assert parse({"aggregation": rule}).recipe == "fedpriv"


@pytest.mark.parametrize(("rule", "expected"), [("dp-lora", 44), ("rolora", 44), ("fedsvd", 28)])
def test_the_rule_for_learning_rates_counts_the_lora_values_that_are_noised(rule, expected):
    shapes = {"m.lora_A.weight": (4, 4), "m.lora_B.weight": (7, 4), "head.weight": (3, 9)}
    initial = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert _num_lora_values(parse({"aggregation": rule}), initial) == expected


def test_with_r_between_frozen_factors_its_own_values_count():
    initial = {
        "m" + INNER_SUFFIX: torch.zeros(5, 5),
        "n" + INNER_SUFFIX: torch.zeros(5, 5),
        "head.weight": torch.zeros(3, 9),
    }
    assert _num_lora_values(parse({"aggregation": "fed-sb"}), initial) == 50
