"""What a variant loses is limited with the stated confidence, on public records and, with noise, on private ones."""

import math
from collections import Counter
from functools import cache, partial
from itertools import combinations, product

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import binom, chi2, chisquare, multinomial, poisson

from fedpriv.models.dedup import ALGORITHMS, validation
from fedpriv.models.dedup.validation import (
    CONFIDENCE,
    PrivateQueries,
    PrivateValidation,
    PublicValidation,
    least_records,
    loss_limit,
    losses_of,
    proof_records,
    records_needed,
    search_records,
)
from fedpriv.privacy.accounting.events import PureEpsilon
from fedpriv.privacy.mechanisms.sources import SecureSource, SeededSource
from fedpriv.privacy.mechanisms.svt import CutoffReached, noise_margin, noise_scales
from tests.failing import DISK_IS_FULL, failing
from tests.marks import slow


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


class AfterSearch(Answers):
    """With half as many records more, which a search looks at and the original answered wrongly."""

    def __init__(self, num_records: int) -> None:
        super().__init__(math.ceil(num_records * 3 / 2))
        self.before = self.utilities({"right": original(num_records)}, np.arange(self.num_records))

    def utilities(self, tensors, records):
        right = np.zeros(self.num_records)
        right[proof_records(self.num_records)] = tensors["right"]
        return right[records]


def public(num_proven: int, bound: float) -> PublicValidation:
    evaluator = AfterSearch(num_proven)
    return PublicValidation(evaluator, evaluator.before, bound)


def private(num_records: int = 100_000, charge=lambda event: None, of=Answers, **changes) -> PrivateValidation:
    arguments = {"bound": 0.01, "epsilon": 1.0, "source": SeededSource(0)} | changes
    return PrivateValidation(of(num_records), lambda: original(num_records), charge=charge, **arguments)


def changes(lost: int, gained: int, num: int) -> np.ndarray:
    losses = np.zeros(num)
    losses[:lost], losses[lost : lost + gained] = 1, -1
    return losses


def counted(lost: int, gained: int = 0, num: int = 400, *, confidence: float = CONFIDENCE) -> float:
    """The limit of the number of records that are lost, which depends on the first two counts alone."""
    return loss_limit(changes(lost, gained, num), confidence=confidence) * num


@pytest.mark.parametrize("confidence", [CONFIDENCE, *slow(CONFIDENCE + validation._NOISE_FAILS)])
def test_limits_of_accuracy_cover_as_often_as_they_say_whatever_the_rates(confidence):
    """The probability that the limit is below the mean, added up over all counts of rare losses and gains."""
    means = np.concatenate([np.arange(0.05, 12, 0.23), np.arange(12, 90, 3.1)])
    counts = np.arange(170)
    limits = np.array([[counted(lost, gained, confidence=confidence) for gained in counts] for lost in counts])
    for a in means:
        for b in (0.0, 0.1, 0.4, 1.0, 3.0, 10.0, 40.0):
            probability = poisson.pmf(counts, a)[:, None] * poisson.pmf(counts, b)
            assert (probability * (limits >= a - b - 1e-9)).sum() >= confidence, (a, b)


@pytest.mark.parametrize("num", [20, 60])
def test_limits_cover_on_few_records_too(num):
    for lost, gained in ((0.02, 0.0), (0.1, 0.02), (0.3, 0.1), (0.2, 0.2), (0.05, 0.3)):
        covered = 0.0
        for losses in range(num + 1):
            gains = np.arange(num + 1 - losses)
            outcomes = np.stack([np.full_like(gains, losses), gains, num - losses - gains], 1)
            probability = multinomial.pmf(outcomes, num, [lost, gained, 1 - lost - gained])
            limits = [loss_limit(changes(losses, int(gain), num)) for gain in gains]
            covered += float((probability * (np.array(limits) >= lost - gained - 1e-12)).sum())
        assert covered >= CONFIDENCE, (lost, gained)


def test_without_a_gain_the_limit_is_the_largest_mean_of_which_so_few_losses_are_no_rarer_than_5_percent():
    for count, rounding in ((0, 0.01), (5, 0.05)):
        largest = chi2.ppf(CONFIDENCE, 2 * (count + 1)) / 2  # of a Poisson distribution, in closed form
        assert counted(count, num=1000) == pytest.approx(largest, abs=rounding)


@pytest.mark.parametrize(("rate", "size"), [(0.03, 3.0), (0.01, 5.0), (0.005, 5.0), (0.002, 10.0), (0.05, 0.6)])
@pytest.mark.parametrize("num", [60, *slow(20, 300, 700)])
def test_rare_large_losses_of_likelihoods_are_not_taken_for_none(num, rate, size):
    """Of losses that no sample shows, none that is larger than the limit is called proven more often than stated."""
    generator = np.random.default_rng(0)
    lost = generator.binomial(num, rate, size=2000)
    background = 0.02 * generator.normal(size=(2000, num))
    limits = []
    for count, sample in zip(lost, background, strict=True):
        sample[:count] += size
        limits.append(loss_limit(losses_of(np.zeros(num), -sample)))
    covered = int((np.array(limits) >= rate * min(size, 1.0)).sum())
    assert binom.cdf(covered, 2000, CONFIDENCE) > 1e-4  # 93 % instead of 95 % would be told


@pytest.mark.parametrize("draw", ["normal", "lognormal", "exponential", "standard_cauchy"])
@pytest.mark.parametrize("num", [20, 300])
def test_limits_of_likelihoods_cover(draw, num):
    generator = np.random.default_rng(0)
    samples = np.clip(0.3 * getattr(generator, draw)(size=(2000, num)), -1, 1)
    mean = float(np.clip(0.3 * getattr(np.random.default_rng(1), draw)(size=10**6), -1, 1).mean())
    for sign in (1, -1):
        covered = sum(loss_limit(sign * sample) >= sign * mean for sample in samples)
        assert binom.cdf(covered, 2000, CONFIDENCE) > 1e-4


def test_what_is_no_number_counts_as_lost():
    before, after = np.zeros(4000), np.zeros(4000)
    after[:4] = np.nan, -np.inf, -5.0, np.inf
    assert losses_of(before, after).tolist()[:5] == [1.0, 1.0, 1.0, -1.0, 0.0]
    for spoiled, places in product((np.nan, -np.inf), (slice(None), slice(1))):
        validation_, form = public(3000, 0.01), losing(3000, 0)
        form["right"][places] = spoiled
        assert not validation_.proves(form), "one record is enough to see that a model is broken"
        assert validation_.proof is None
    assert loss_limit(np.zeros(0)) == math.inf


def test_as_many_records_as_are_said_to_be_needed_are_enough():
    losses = changes(4, 1, 300)
    needed = records_needed(losses, 0.02)
    assert loss_limit(losses, num=needed) <= 0.02 < loss_limit(losses, num=needed - 1)
    assert records_needed(losses, 0.01) is None, "the mean is no less"
    assert least_records(0.01) == math.ceil(math.ceil(2.9931 / 0.01) * 3 / 2) == 450
    assert least_records(0.0) is None


def test_what_a_search_accepts_is_judged_on_a_third_of_the_records_and_proven_on_the_others():
    validation_, hidden = PublicValidation(Answers(3000), original(3000), 0.01), losing(3000, 0)
    hidden["right"][proof_records(3000)] = 0
    assert validation_.accept(hidden)
    assert not validation_.proves(hidden)
    assert validation_.proof is None
    assert validation_.needed is None, "no number of such records would prove it"


def test_both_parts_make_all_and_no_period_of_a_file_falls_into_one():
    for num in (1, 2, 3, 10, 300, 1001):
        searched, proven = search_records(num), proof_records(num)
        assert sorted([*searched, *proven]) == list(range(num))
        assert len(searched) == math.ceil(num / 3)
        assert search_records(num).tolist() == searched.tolist(), "drawn anew it would be another"
        for period in (2, 3, 4, 6) if num >= 300 else ():
            assert max(np.mean(searched % period == place) for place in range(period)) < 1.6 / period


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
    assert [hidden.proves(losing(100_000, 480 * step)) for step in range(3)] == [True, True, False]


def test_a_ladder_of_bad_forms_is_climbed_as_rarely_as_one_of_them_is_proven():
    """A fixed sequence: that any form beyond the bound is proven has the probability of one false proof."""
    generator, bound, false = np.random.default_rng(1), 0.02, 0
    for _ in range(300):
        ladder, right = public(400, bound), original(400)
        for _step in range(8):  # each form loses more, and the first as much as is allowed
            right = right * (generator.random(400) >= 2 * bound)
            if not ladder.proves({"right": right}):
                break
        false += ladder.proof is not None
    assert binom.sf(false - 1, 300, 1 - CONFIDENCE) > 1e-3  # twice as many would be told


def test_one_record_changes_a_private_query_by_no_more_than_its_sensitivity():
    @cache
    def parts(lost: int, gained: int) -> int:
        limit = counted(lost, gained, 5000, confidence=CONFIDENCE + validation._NOISE_FAILS)
        return math.ceil(limit * validation._PARTS - 1e-6)

    for lost, gained in np.ndindex(12, 12):
        for moved in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1)):
            other = lost + moved[0], gained + moved[1]
            assert min(other) < 0 or abs(parts(*other) - parts(lost, gained)) <= validation._SENSITIVITY


def test_an_evaluator_that_gives_parts_of_a_record_does_not_change_what_one_record_does():
    class Parts(Answers):
        def utilities(self, tensors, records):
            return np.where(super().utilities(tensors, records) > 0, 0.7, math.nan)

    hidden = private(of=Parts)
    assert [hidden.proves(losing(100_000, lost)) for lost in (0, 20_000)] == [True, False]


def test_the_margin_is_the_least_that_the_noise_passes_so_rarely():
    for epsilon in (0.3, 1.0, 8.0):
        scales = noise_scales(epsilon, 1, validation._SENSITIVITY)
        margin = noise_margin(scales, 0.01)
        pmfs = []
        for scale in (float(scales.threshold), float(scales.query)):
            values = np.arange(-math.ceil(40 * scale), math.ceil(40 * scale) + 1)
            pmfs.append((values, np.exp(-np.abs(values) / scale) / np.exp(-np.abs(values) / scale).sum()))
        both = fftconvolve(pmfs[0][1], pmfs[1][1])
        first = pmfs[0][0][0] + pmfs[1][0][0]
        tail = both[::-1].cumsum()[::-1]  # of the sum, at first, first + 1, ...: the query's noise is symmetric
        assert tail[margin + 1 - first] <= 0.01 < tail[margin - first]
    scales = noise_scales(1e-6, 1, validation._SENSITIVITY)
    assert noise_margin(scales, 0.01) > 4 * float(scales.query), "of very wide noise it is no less"


def test_noise_lets_a_form_beyond_the_bound_pass_as_rarely_as_it_says():
    num, bound = 5000, 0.02
    lost = next(n for n in range(num) if loss_limit(changes(n, 0, num), confidence=0.96) >= bound)
    form = losing(num, lost)
    passed = sum(private(num, bound=bound, source=SeededSource(0, seed)).proves(form) for seed in range(3000))
    assert binom.sf(passed - 1, 3000, validation._NOISE_FAILS) > 1e-3
    assert binom.cdf(passed, 3000, validation._NOISE_FAILS) > 1e-3, "the margin is larger than it must be"


def test_epsilon_is_charged_once_for_each_target_before_it_answers_and_without_a_charge_there_is_no_noise():
    charged = []
    targets = [private(1000, charged.append, epsilon=0.5) for _ in range(50)]
    assert charged == [PureEpsilon(epsilon=0.5)] * 50
    targets[0].proves(losing(1000, 0))
    assert len(charged) == 50
    assert targets[0].event == charged[0]

    class Watched(SeededSource):
        words = failing(AssertionError("noise was drawn before the charge"))

    with pytest.raises(OSError, match="No space left"):
        private(charge=failing(DISK_IS_FULL), source=Watched(0))


class Likelihoods(Answers):
    utility = "log likelihood"


def test_what_cannot_run_is_refused_before_it_is_charged():
    for change, message in (
        ({"epsilon": 0.0}, "epsilon"),
        ({"bound": -1.0}, "utility_bound"),
        ({"of": Likelihoods}, "accuracy"),
        ({"cutoff": 0}, "cutoff = 0"),
    ):
        charged = []
        with pytest.raises(ValueError, match=message):
            private(charge=charged.append, **change)
        assert charged == []


def test_private_records_that_the_noise_hides_are_too_few():
    queries = PrivateQueries(epsilon=1.0, charge=lambda name, event: None, source=SeededSource(0))
    least = queries.least_records(0.01)
    assert private(least).proves(losing(least, 0)) or least > 3000
    assert queries.least_records(0.0) is None
    assert least > least_records(0.01)


def test_only_pass_or_fail_is_shown_and_whether_the_noise_is_secure():
    hidden = private()
    assert type(hidden.proves(losing(100_000, 0))) is bool
    assert (hidden.proof, hidden.needed) == (None, None)
    assert "50000" not in repr(hidden)
    assert (hidden.noise_source, private(source=SecureSource()).noise_source) == ("seeded", "secure")


def test_the_papers_rule_accepts_a_loss_at_the_bound_on_all_records_and_proves_nothing():
    rule = PublicValidation(Answers(3000), original(3000), 0.01, acceptance="empirical")
    assert [rule.accept(losing(3000, lost)) for lost in (30, 31)] == [True, False]
    assert rule.proves(losing(3000, 30))
    assert (rule.proof.after, rule.proof.limit, rule.proof.num_records) == (pytest.approx(0.49), None, 3000)
    assert not PublicValidation(Answers(3000), original(3000), 0.01).proves(losing(3000, 30))


class Drops(Answers):
    """An evaluator whose form k loses so many of a few records."""

    def __init__(self, lost: dict[int, int]) -> None:
        super().__init__(8)
        self.lost = lost

    def utilities(self, tensors, records):
        return (records >= self.lost[tensors["form"]]).astype(float)


SEARCHED, EPSILON = 6, 1.5
SUBSETS = [frozenset(few) for num in range(SEARCHED + 1) for few in combinations(range(SEARCHED), num)]
FORMS = {positions: number for number, positions in enumerate(SUBSETS)}


def walked(search, answers: tuple[bool, ...], cutoff: int):
    """{the forms asked about, the answers} of every way that a search may go, from those after given answers."""
    asked = []

    def accept(positions):
        if answers[: len(asked)].count(False) == cutoff:
            raise CutoffReached
        if len(asked) == len(answers):
            raise NextQuestionError(FORMS[positions])
        asked.append(FORMS[positions])
        return answers[len(asked) - 1]

    try:
        search(SEARCHED, accept)
        return [(tuple(asked), answers)]
    except NextQuestionError:
        return [each for answer in (True, False) for each in walked(search, (*answers, answer), cutoff)]


class NextQuestionError(Exception):
    pass


def likelihood(way, lost: dict[int, int], threshold: int, scales) -> float:
    """The probability of one way, in the plain: the threshold's noise summed over, then a product over answers."""
    ratio = math.exp(-1 / float(scales.threshold))
    total = (1 - ratio) / (1 + ratio) * ratio ** np.abs(NOISE)
    for form, passed in zip(*way, strict=True):
        fails = tail(threshold + 1 - lost[form], float(scales.query))
        total = total * (1 - fails if passed else fails)
    return float(total.sum())


NOISE = np.arange(-300, 301)


@cache
def tail(margin: int, scale: float) -> np.ndarray:
    """P(discrete Laplace >= margin + the threshold's noise), in closed form, for every value of the latter."""
    values, ratio = margin + NOISE, math.exp(-1 / scale)
    above, below = ratio ** np.maximum(values, 1) / (1 + ratio), 1 - ratio ** np.maximum(1 - values, 1) / (1 + ratio)
    return np.where(values > 0, above, below)


@pytest.mark.parametrize("cutoff", [2, *slow(1, 3)])
@pytest.mark.parametrize("name", ["drd", "dred", "greedy"])
def test_all_answers_of_a_search_by_algorithm_5_cost_epsilon_by_brute_force(name, cutoff):
    """Every way that a search may go, on the worst pair of neighbours for it, and the class goes them as often."""
    search = partial(ALGORITHMS[name], **({"batch": 1} if name == "greedy" else {"min_batch": 1}))
    ways, scales = walked(search, (), cutoff), noise_scales(EPSILON, cutoff, 2)
    lost = {form: (form * 5) % 4 + 1 for form in FORMS.values()}
    assert sum(likelihood(way, lost, 2, scales) for way in ways) == pytest.approx(1)
    largest = 0.0
    for way in ways:
        passes = dict(zip(*way, strict=True))
        for sign in (1, -1):  # one record moves each answer by two, towards what was answered or away from it
            other = lost | {form: lost[form] + (2 * sign if passed else -2 * sign) for form, passed in passes.items()}
            largest = max(largest, math.log(likelihood(way, lost, 2, scales) / likelihood(way, other, 2, scales)))
    assert 0.5 * EPSILON < largest <= EPSILON, "nor is more noise drawn than need be"
    drawn = Counter(answered(search, lost, cutoff, seed) for seed in range(1000))
    assert set(drawn) <= set(ways)
    expected = np.array([1000 * likelihood(way, lost, 2, scales) for way in ways])
    seen, often = np.array([drawn[way] for way in ways]), expected >= 8
    pairs = [np.append(each[often], each[~often].sum()) for each in (seen, expected)]
    assert chisquare(*(each + 1e-9 for each in pairs), sum_check=False).pvalue > 1e-5


def answered(search, lost: dict[int, int], cutoff: int, seed: int):
    """The way that the class itself goes."""
    asked, answers, noise = [], [], {"epsilon": EPSILON, "source": SeededSource("way", seed), "cutoff": cutoff}
    run = PrivateValidation(Drops(lost), lambda: np.ones(8), 0.25, charge=lambda _: None, **noise)
    assert run._answers._scales == noise_scales(EPSILON, cutoff, 2)

    def accept(positions):
        answers.append(run.accept({"form": FORMS[positions]}))
        asked.append(FORMS[positions])
        return answers[-1]

    result = search(SEARCHED, accept)
    assert result.num_validations == len(asked)
    return tuple(asked), tuple(answers)


def test_after_the_last_failure_no_record_is_looked_at():
    kept, lost, few = (losing(100_000, number) for number in (0, 20_000, 500))
    runs = private(), private(cutoff=2)
    assert all(runs[0].proves(kept) for _ in range(50)), "passes are free"
    assert not runs[0].proves(lost)
    assert [runs[1].accept(form) for form in (kept, lost, few, lost)] == [True, False, True, False]
    for run, ask in zip(runs, (runs[0].proves, runs[1].accept), strict=True):
        run._evaluator = None
        with pytest.raises(CutoffReached):
            ask(kept)
    assert [(run.acceptance, run.proof) for run in runs] == [("proof", None), ("sparse vector", None)]
