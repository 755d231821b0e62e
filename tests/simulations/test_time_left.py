"""The time left is what rounds of the same kind took; kinds not seen yet make it a lower bound."""

from __future__ import annotations

from fedpriv.config import RunConfig
from simulations.display import _phases_of, _time_left, _TimeLeft


def test_rounds_take_what_the_last_three_of_their_kind_took():
    took = {"start": [9.0], "head": [8.0, 1.0, 1.0, 1.0]}
    assert _time_left(took, ["head"] * 5, 0.0, None) == _TimeLeft(seconds=5.0, is_least=False)
    assert _time_left(took, ["head"] * 5, 0.6, None) == _TimeLeft(seconds=4.4, is_least=False)


def test_a_round_that_takes_longer_than_usual_is_about_to_end_and_never_below_zero():
    assert _time_left({"head": [1.0]}, ["head", "head"], 7.0, None) == _TimeLeft(seconds=1.0, is_least=False)
    assert _time_left({}, [], 7.0, 1.0) == _TimeLeft(seconds=0.0, is_least=False)


def test_rounds_of_a_kind_that_was_not_timed_make_a_lower_bound():
    assert _time_left({"head": [1.0]}, ["head", "all"], 0.0, None) == _TimeLeft(seconds=1.0, is_least=True)
    assert _time_left({"head": [1.0]}, ["all", "all"], 3.0, None) == _TimeLeft(seconds=0.0, is_least=True)


def test_the_first_round_is_estimated_from_its_share_once_that_says_something():
    assert _time_left({}, ["all"] * 3, 5.0, None) is None
    assert _time_left({}, ["all"] * 3, 5.0, 0.01) is None
    assert _time_left({}, ["all"] * 3, 5.0, 0.5) == _TimeLeft(seconds=25.0, is_least=False)


def test_every_round_of_a_run_has_a_phase():
    phases = _phases_of(RunConfig(rounds=10, lora_rounds=3))
    assert phases == ["start", *["head"] * 6, *["all"] * 3]
    assert _phases_of(RunConfig(rounds=4, lora_rounds=None, head_start=False, recipe="dp-lora-paper")) == ["all"] * 4
