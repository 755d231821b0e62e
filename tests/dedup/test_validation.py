"""Validation tells pass or fail: exactly on public records, and on private ones as often as was paid for."""

from __future__ import annotations

import pytest

from fedpriv.accounting.events import PureEpsilon
from fedpriv.dedup.algorithms import BudgetSpent
from fedpriv.dedup.validation import PrivateValidator, PublicValidator, allowed_drop
from fedpriv.mechanisms.sources import SecureSource, SeededSource


def private(charge=lambda event: None, **changes):
    arguments = {"original_correct": lambda: 90_000, "max_drop": 1500, "epsilon": 1.0, "source": SeededSource(0)}
    return PrivateValidator(charge=charge, **arguments | changes)


@pytest.mark.parametrize(
    ("bound", "num_records", "drop"),
    [(0.015, 1000, 15), (0.0, 1000, 0), (0.0159, 1000, 15), (0.57 - 0.56, 100, 1), (1.0, 7, 7), (0.29, 100, 29)],
)
def test_allowed_drop_is_the_largest_count_within_the_bound(bound, num_records, drop):
    assert allowed_drop(bound, num_records) == drop


@pytest.mark.parametrize("values", [(-0.1, 10), (1.1, 10), (float("nan"), 10), (0.1, 0)])
def test_a_bound_that_is_no_accuracy_is_refused(values):
    with pytest.raises(ValueError, match="must"):
        allowed_drop(*values)


def test_public_validation_holds_against_the_original():
    validator = PublicValidator(original_correct=900, max_drop=15)
    assert [validator.accept(count) for count in (950, 900, 885, 884)] == [True, True, True, False]


def test_drops_do_not_add_up_over_accepted_steps():
    # Each step loses as much as is allowed against the one before it, as line 18 of Algorithm 5 would have it.
    public, hidden = PublicValidator(original_correct=900, max_drop=15), private()
    assert [public.accept(900 - 15 * step) for step in range(4)] == [True, True, False, False]
    assert [hidden.accept(90_000 - 1000 * step) for step in range(4)] == [True, True, False, False]


def test_private_validation_fails_at_most_cutoff_times():
    validator = private()
    assert all(validator.accept(90_000) for _ in range(100)), "passes are free"
    assert [validator.accept(50_000) for _ in range(3)] == [False] * 3
    for count in (50_000, 90_000):
        with pytest.raises(BudgetSpent):
            validator.accept(count)


def test_epsilon_is_charged_once_for_each_run_before_it_answers():
    charged = []
    validators = [private(charged.append, epsilon=0.5) for _ in range(50)]
    assert charged == [PureEpsilon(epsilon=0.5)] * 50
    validators[0].accept(0)
    assert len(charged) == 50
    assert validators[0].event == charged[0]


def test_without_a_charge_there_is_no_noise_and_no_answer():
    class Watched(SeededSource):
        def words(self, num):
            raise AssertionError("noise was drawn before the charge")

    def full_disk(event):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        private(full_disk, source=Watched(0))


@pytest.mark.parametrize("change", [{"epsilon": 0.0}, {"cutoff": 0}, {"max_drop": -1}], ids=str)
def test_what_cannot_run_is_refused_before_it_is_charged(change):
    charged = []
    with pytest.raises(ValueError, match=next(iter(change))):
        private(charged.append, **change)
    assert charged == []


def test_the_noise_is_secure_or_says_that_it_is_not():
    assert private(source=SecureSource()).noise_source == "secure"
    assert private().noise_source == "seeded"


def test_only_pass_or_fail_is_shown():
    validator = private()
    assert type(validator.accept(90_000)) is bool
    assert "90000" not in repr(validator)
