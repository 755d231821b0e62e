"""A phase has the keys of its prefix where they are given, and else those without a prefix."""

from __future__ import annotations

import pytest

from fedpriv.config import RunConfig, parse

BASE = {"noise_multiplier": 2.0, "sampling_probability": 0.5, "rounds": 10, "learning_rate": 3.0}


def of(**changes) -> RunConfig:
    return parse(BASE | changes)


def test_the_last_rounds_have_noise_sampling_and_rates_of_their_own():
    start, head, everything = of(lora_noise_multiplier=1.0, lora_learning_rate=4.0, lora_head_learning_rate=5.0).phases
    assert (start.name, start.num_rounds, start.noise_multiplier) == ("start", 1, None)
    assert (head.name, head.num_rounds, head.learning_rate, head.lora_learning_rate) == ("head", 5, 3.0, None)
    assert (head.noise_multiplier, head.sampling_probability) == (2.0, 0.5)
    assert (everything.name, everything.num_rounds) == ("all", 4)
    assert (everything.noise_multiplier, everything.sampling_probability) == (1.0, 0.125)
    assert (everything.learning_rate, everything.lora_learning_rate) == (5.0, 4.0)


def test_without_keys_of_their_own_they_have_those_of_the_head():
    config = of(lora_sampling_probability="", head_start=False)
    head, everything = config.phases
    assert (head.num_rounds, everything.num_rounds) == (6, 4)
    assert (everything.noise_multiplier, everything.sampling_probability) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "name"), [({"train": "head"}, "head"), ({"lora_rounds": 0}, "head"), ({"lora_rounds": ""}, "all")]
)
def test_rounds_that_are_alike_are_one_phase(changes, name):
    (phase,) = of(head_start=False, **changes).phases
    assert (phase.name, phase.num_rounds) == (name, 10)
    assert of(**changes).lora_phase.num_rounds == 0


def test_noise_that_is_still_to_be_derived_is_not_read():
    (start, *_) = of().phases
    with pytest.raises(ValueError, match=r"^start_noise_multiplier: has not been derived yet"):
        _ = start.known_noise
