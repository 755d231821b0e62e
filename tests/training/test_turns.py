"""Rules whose rounds train parts of the adapter in turn: which part each round asks for, and how often."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fedpriv.adapters._arithmetic import INNER_SUFFIX
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.training.noise_plan import _num_lora_values
from fedpriv.training.schedule import RunSchedule

RATES = {"learning_rate": 1.0, "lora_learning_rate": 1.0, "lora_head_learning_rate": 1.0, "start_noise_multiplier": 1.0}


def schedule(rule: str, **changes) -> RunSchedule:
    return RunSchedule.of(
        parse({"recipe": "fedpriv", "aggregation": rule, "rounds": 9, "lora_rounds": 5, **RATES, **changes})
    )


def trained(made: RunSchedule, rounds: int) -> list[str]:
    return [made.spec(round_).trains for round_ in range(1, rounds + 1)]


def test_the_last_rounds_of_rolora_train_b_and_a_in_turn():
    made = schedule("rolora")
    assert trained(made, 9) == ["head"] * 4 + ["lora-b", "lora-a"] * 2 + ["lora-b"]
    assert made.spec(1).objective == "class-sums"


def test_the_last_rounds_of_fedsvd_train_b():
    assert trained(schedule("fedsvd"), 9) == ["head"] * 4 + ["lora-b"] * 5


def test_without_a_phase_of_the_head_all_rounds_take_turns():
    made = schedule("rolora", recipe="dp-lora-paper", rounds=3, lora_rounds="", head_start=False)
    assert trained(made, 3) == ["lora-b", "lora-a", "lora-b"]


def test_rounds_without_lora_have_no_turns():
    assert trained(schedule("rolora", train="head"), 9) == ["head"] * 9


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
