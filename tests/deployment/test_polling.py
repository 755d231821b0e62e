"""What comes is seen at most a tenth late, and nobody is asked all the time."""

from __future__ import annotations

import pytest

from fedpriv.deployment import flower


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.05), (0.5, 0.05), (8.0, 0.8), (30.0, 3.0), (3600.0, 3.0)])
def test_a_pause_is_a_tenth_of_the_wait_within_bounds(waited, seconds):
    assert flower.seconds_to_pause(waited, shortest=0.05, longest=3.0) == pytest.approx(seconds)


def test_a_pause_is_never_longer_than_asked():
    assert flower.seconds_to_pause(1e9, shortest=0.05, longest=0.01) == 0.01


def test_an_hour_of_waiting_takes_few_questions():
    waited, questions = 0.0, 0
    while waited < 3600:
        waited += flower.seconds_to_pause(waited, shortest=0.05, longest=60.0)
        questions += 1
    assert questions < 150
