"""What a variant loses is limited with the stated confidence, on public records and, with noise, on private ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, multinomial, poisson

from fedpriv.accounting.events import PureEpsilon
from fedpriv.dedup import validation
from fedpriv.dedup.validation import (
    CONFIDENCE,
    PrivateQueries,
    PrivateValidation,
    PublicValidation,
    least_records,
    loss_limit,
    records_needed,
)
from fedpriv.mechanisms.sources import SecureSource, SeededSource
from fedpriv.mechanisms.svt import CutoffReached


class Answers:
    """An evaluator whose variants are their own answers."""

    utility = "accuracy"

    def __init__(self, num_records: int) -> None:
        self.num_records = num_records

    def utilities(self, tensors, records):
        return tensors["right"][records]


def losing(num_records: int, lost: int, gained: int = 0) -> dict[str, np.ndarray]:
    """Answers to records of which the original had half, in turn: so many of them lost and gained, spread evenly."""
    right = original(num_records).copy()
    right[np.flatnonzero(right)[np.linspace(0, num_records // 2 - 1, lost).astype(int)]] = 0
    right[np.flatnonzero(original(num_records) == 0)[:gained]] = 1
    return {"right": right}


def original(num_records: int) -> np.ndarray:
    return (np.arange(num_records) % 2).astype(np.float64)


def public(num_records: int, bound: float, *, searches: bool = False) -> PublicValidation:
    return PublicValidation(Answers(num_records), original(num_records), bound, searches=searches)


def private(num_records: int = 100_000, charge=lambda event: None, **changes) -> PrivateValidation:
    arguments = {"bound": 0.01, "epsilon": 1.0, "source": SeededSource(0)} | changes
    return PrivateValidation(Answers(num_records), lambda: original(num_records), charge=charge, **arguments)


def changes(lost: int, gained: int, num: int) -> np.ndarray:
    losses = np.zeros(num)
    losses[:lost], losses[lost : lost + gained] = 1, -1
    return losses


@pytest.mark.parametrize("confidence", [CONFIDENCE, CONFIDENCE + validation._NOISE_FAILS])
def test_limits_of_accuracy_cover_as_often_as_they_say_whatever_the_rates(confidence):
    """The probability that the limit is below the mean, added up over all counts of rare losses and gains."""
    means = np.concatenate([np.arange(0.05, 12, 0.23), np.arange(12, 90, 3.1)])
    counts = np.arange(170)
    limits = np.array([[counted(lost, gained, confidence) for gained in counts] for lost in counts])
    for a in means:
        for b in (0.0, 0.1, 0.4, 1.0, 3.0, 10.0, 40.0):
            probability = poisson.pmf(counts, a)[:, None] * poisson.pmf(counts, b)
            assert (probability * (limits >= a - b - 1e-9)).sum() >= confidence, (a, b)


def counted(lost: int, gained: int, confidence: float) -> float:
    """The limit of the number of records that are lost, which depends on these counts alone."""
    return loss_limit(changes(lost, gained, 400), "accuracy", confidence=confidence) * 400


@pytest.mark.parametrize("num", [20, 60])
def test_limits_cover_on_few_records_too(num):
    for lost, gained in ((0.02, 0.0), (0.1, 0.02), (0.3, 0.1), (0.2, 0.2), (0.05, 0.3)):
        covered = 0.0
        for losses in range(num + 1):
            gains = np.arange(num + 1 - losses)
            outcomes = np.stack([np.full_like(gains, losses), gains, num - losses - gains], 1)
            probability = multinomial.pmf(outcomes, num, [lost, gained, 1 - lost - gained])
            limits = [loss_limit(changes(losses, int(gain), num), "accuracy") for gain in gains]
            covered += float((probability * (np.array(limits) >= lost - gained - 1e-12)).sum())
        assert covered >= CONFIDENCE, (lost, gained)


def test_without_a_change_the_limit_is_that_of_a_count_of_zero():
    limit = loss_limit(np.zeros(1000), "accuracy") * 1000
    assert limit == pytest.approx(poisson_limit(0), abs=0.01)
    assert loss_limit(changes(5, 0, 1000), "accuracy") * 1000 == pytest.approx(poisson_limit(5), abs=0.05)


def poisson_limit(count: int) -> float:
    """The largest mean of which so few events are no rarer than 5 %, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if poisson.cdf(count, middle) > 1 - CONFIDENCE else (low, middle)
    return low


@pytest.mark.parametrize("draw", ["normal", "lognormal", "exponential"])
def test_limits_of_log_likelihoods_cover(draw):
    generator = np.random.default_rng(0)
    samples = getattr(generator, draw)(size=(4000, 60))
    mean = {"normal": 0.0, "lognormal": math.exp(0.5), "exponential": 1.0}[draw]
    covered = np.mean([loss_limit(sample - mean, "log likelihood") >= 0 for sample in -samples + 2 * mean])
    other = np.mean([loss_limit(sample, "log likelihood") >= mean for sample in samples])
    # Losses with a heavy tail above are covered a little less, which the correction for skewness makes up for in part.
    assert other >= {"normal": 0.94, "lognormal": 0.89, "exponential": 0.935}[draw]
    assert covered >= 0.94


def test_of_few_log_likelihoods_nothing_is_told():
    assert loss_limit(np.zeros(19), "log likelihood") == math.inf
    assert loss_limit(np.zeros(20), "log likelihood") == 0.0
    assert records_needed(np.zeros(19), "log likelihood", 0.1) is None


def test_as_many_records_as_are_said_to_be_needed_are_enough():
    losses = changes(4, 1, 300)
    needed = records_needed(losses, "accuracy", 0.02)
    assert loss_limit(losses, "accuracy", num=needed) <= 0.02 < loss_limit(losses, "accuracy", num=needed - 1)
    assert records_needed(losses, "accuracy", 0.01) is None, "the mean is no less"
    assert least_records("accuracy", 0.01, searches=False) == math.ceil(2.9931 / 0.01)
    assert least_records("accuracy", 0.01, searches=True) == 450
    assert least_records("log likelihood", 0.01, searches=True) == 30
    assert least_records("accuracy", 0.0, searches=True) is None


def test_what_a_search_accepts_is_judged_on_every_third_record_and_proven_on_the_others():
    validation_, hidden = public(3000, 0.01, searches=True), losing(3000, 0)
    hidden["right"][np.arange(3000) % 3 == 0] = original(3000)[np.arange(3000) % 3 == 0]
    hidden["right"][np.arange(3000) % 3 != 0] = 0
    assert validation_.accept(hidden)
    assert not validation_.proves(hidden)
    assert validation_.proof is None
    assert validation_.needed is None, "no number of such records would prove it"


def test_a_proof_says_what_was_seen():
    validation_ = public(3000, 0.01)
    assert validation_.proves(losing(3000, 10))
    proof = validation_.proof
    assert (proof.before, proof.after, proof.num_records) == (0.5, pytest.approx(0.5 - 10 / 3000), 3000)
    assert 10 / 3000 < proof.limit <= 0.01
    assert not validation_.proves(losing(3000, 25))
    assert validation_.proof is proof
    assert validation_.needed > 3000


def test_losses_do_not_add_up_over_proven_steps():
    # Each step loses as much as is allowed against the one before it, as line 18 of Algorithm 5 would have it.
    shown, hidden = public(100_000, 0.01), private()
    assert [shown.proves(losing(100_000, 450 * step)) for step in range(4)] == [True, True, True, False]
    assert [hidden.proves(losing(100_000, 450 * step)) for step in range(3)] == [True, True, False]


def test_a_ladder_of_bad_forms_is_climbed_as_rarely_as_one_of_them_is_proven():
    """A fixed sequence: that any form beyond the bound is proven has the probability of one false proof."""
    generator, bound, false = np.random.default_rng(1), 0.02, 0
    for _ in range(600):
        ladder, right = public(400, bound), original(400)
        for _step in range(8):  # each form loses more, and the first as much as is allowed
            right = right * (generator.random(400) >= 2 * bound)
            if not ladder.proves({"right": right}):
                break
        false += ladder.proof is not None
    assert binom.sf(false - 1, 600, 1 - CONFIDENCE) > 1e-3


def test_private_validation_ends_with_its_first_failure():
    hidden = private()
    assert all(hidden.proves(losing(100_000, 0)) for _ in range(50)), "passes are free"
    assert not hidden.proves(losing(100_000, 20_000))
    with pytest.raises(CutoffReached):
        hidden.proves(losing(100_000, 0))


def test_one_record_changes_a_private_query_by_no_more_than_its_sensitivity():
    worst = 0.0
    for lost, gained in np.ndindex(12, 12):
        for moved in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1)):
            other = lost + moved[0], gained + moved[1]
            if min(other) >= 0:
                limits = [
                    loss_limit(changes(*each, 5000), "accuracy", confidence=CONFIDENCE + validation._NOISE_FAILS) * 5000
                    for each in ((lost, gained), other)
                ]
                parts = [math.ceil(limit * validation._PARTS - 1e-6) for limit in limits]
                worst = max(worst, abs(parts[1] - parts[0]))
    assert worst <= validation._SENSITIVITY


def test_noise_lets_a_form_beyond_the_bound_pass_as_rarely_as_it_says():
    num, bound = 20_000, 0.01
    lost = next(n for n in range(num) if loss_limit(changes(n, 0, num), "accuracy", confidence=0.96) >= bound)
    passed = sum(
        private(num, bound=bound, source=SeededSource(0, seed)).proves(losing(num, lost)) for seed in range(3000)
    )
    assert binom.sf(passed - 1, 3000, validation._NOISE_FAILS) > 1e-3
    assert passed > 0, "the margin is no larger than it must be"


def test_epsilon_is_charged_once_for_each_target_before_it_answers():
    charged = []
    targets = [private(1000, charged.append, epsilon=0.5) for _ in range(50)]
    assert charged == [PureEpsilon(epsilon=0.5)] * 50
    targets[0].proves(losing(1000, 0))
    assert len(charged) == 50
    assert targets[0].event == charged[0]


def test_without_a_charge_there_is_no_noise_and_no_answer():
    class Watched(SeededSource):
        def words(self, num):
            raise AssertionError("noise was drawn before the charge")

    def full_disk(event):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        private(charge=full_disk, source=Watched(0))


@pytest.mark.parametrize(("change", "message"), [({"epsilon": 0.0}, "epsilon"), ({"bound": -1.0}, "utility_bound")])
def test_what_cannot_run_is_refused_before_it_is_charged(change, message):
    charged = []
    with pytest.raises(ValueError, match=message):
        private(charge=charged.append, **change)
    assert charged == []


def test_likelihoods_of_private_records_are_not_asked_for():
    class Likelihoods(Answers):
        utility = "log likelihood"

    with pytest.raises(ValueError, match="accuracy"):
        PrivateValidation(
            Likelihoods(10), lambda: np.zeros(10), 0.1, epsilon=1.0, charge=lambda event: None, source=SeededSource(0)
        )


def test_private_records_that_the_noise_hides_are_too_few():
    queries = PrivateQueries(epsilon=1.0, charge=lambda name, event: None, source=SeededSource(0))
    least = queries.least_records(0.01)
    assert private(least).proves(losing(least, 0)) or least > 3000
    assert queries.least_records(0.0) is None
    assert least > least_records("accuracy", 0.01, searches=False)


def test_the_noise_is_secure_or_says_that_it_is_not():
    assert private(source=SecureSource()).noise_source == "secure"
    assert private().noise_source == "seeded"


def test_only_pass_or_fail_is_shown():
    hidden = private()
    assert type(hidden.proves(losing(100_000, 0))) is bool
    assert hidden.proof is None
    assert hidden.needed is None
    assert "50000" not in repr(hidden)
