"""A run's rounds come in phases, each with one specification."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedpriv.adapters.pooling import BIAS_SCALE
from fedpriv.config import RunConfig
from fedpriv.training.schedule import RunSchedule

RATES = {"learning_rate": 13.0, "lora_head_learning_rate": 4.0, "lora_learning_rate": 20.0}


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
