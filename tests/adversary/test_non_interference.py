"""Two nodes that differ in one record, or in whom they know, answer alike to the byte, but for what is paid.

Whatever a coordinator asks.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fedpriv.learning.training import workbench
from tests.adversary.exchanges import Exchange, play
from tests.adversary.questions import ATTACKS, exchanges, exchanges_with_persons
from tests.adversary.stand_ins import coupled_by
from tests.threads import NUMBERS, with_threads

NUM_QUESTIONS = 5


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_unpaid_comes_out_of_a_known_attack(approved, starts, tmp_path, name):
    """Not where the operator has approved what nobody should, so that no refusal hides what is behind it."""
    outcome = play(ATTACKS[name](starts), approved, tmp_path)
    assert not outcome.interferes, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_comes_out_where_only_a_sound_model_is_approved(approved, starts, tmp_path, name):
    """The attacks as a coordinator can play them: on a node with the default policy."""
    outcome = play(replace(ATTACKS[name](starts), limits={}), {"tiny": approved["tiny"]}, tmp_path)
    assert not outcome.interferes, outcome


def generated(approved, start, num_exchanges: int, kind=exchanges) -> tuple[int, int]:
    """Plays that many generated exchanges; how many questions were asked, and how many of them got an upload."""
    asked = uploads = 0

    @settings(
        max_examples=num_exchanges // NUM_QUESTIONS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # making a failure smaller takes minutes
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind(start, NUM_QUESTIONS))
    def one(exchange: Exchange) -> None:
        nonlocal asked, uploads
        with tempfile.TemporaryDirectory() as folder:
            outcome = play(exchange, approved, Path(folder))
        assert not outcome.interferes, f"{outcome}\n{exchange}"
        asked, uploads = asked + len(exchange.questions), uploads + outcome.num_uploads

    one()
    return asked, uploads


@pytest.mark.parametrize("kind", [exchanges, exchanges_with_persons])
@pytest.mark.parametrize("num", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_unpaid_comes_out_of_generated_exchanges(approved, starts, num, kind):
    asked, uploads = generated(approved, starts["tiny"], num, kind)
    assert asked >= num
    assert uploads >= asked / 5, "most of what was asked was refused, so little was tried"


@pytest.mark.parametrize("num", [10, pytest.param(5000, marks=pytest.mark.slow)])
def test_nothing_unpaid_comes_out_while_a_kernel_rounds_records_by_their_number(approved, starts, num, monkeypatch):
    monkeypatch.setattr(workbench, "num_cores", lambda: 2)
    with coupled_by("linear") as stand_in:
        stand_in.active = True
        asked, uploads = generated(approved, starts["tiny"], num)
    assert uploads >= asked / 5, "most of what was asked was refused, so little was tried"


@pytest.mark.slow
@pytest.mark.parametrize("threads", NUMBERS, ids="{} threads".format)
def test_nothing_unpaid_comes_out_at_any_number_of_threads(approved, starts, threads):
    with with_threads(threads):
        asked, uploads = generated(approved, starts["tiny"], 10)
    assert uploads >= asked / 5, "most of what was asked was refused, so little was tried"
