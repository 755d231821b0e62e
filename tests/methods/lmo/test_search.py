"""The search meets its budget, repeats itself and ends where theory says; comparison and coverage add up."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy import optimize

from fedpriv.errors import InputError
from fedpriv.methods.lmo import search as lmo_search
from fedpriv.methods.lmo.comparison import (
    _cell_probabilities,
    _gaussian_sizes,
    _least_mean_absolute,
    _nearest_distances,
    compare,
    coverage,
    write_plots,
)
from fedpriv.methods.lmo.search import (
    PARTS,
    Budget,
    SearchSpace,
    cost,
    costs,
    fitted,
    laplace,
    search,
    search_orders,
    sobol_candidates,
)
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.lmo_distribution import Columns
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from tests.marks import slow
from tests.privacy.accounting.lmo_oracle import gamma, uniform

BUDGET = Budget(epsilon=2.0, delta=1e-6)


@pytest.mark.parametrize("accounting", ["published", "sound"])
@pytest.mark.parametrize("combination", ["mixture", *slow("linear")])
def test_search_meets_its_budget_from_below_and_repeats_itself(monkeypatch, combination, accounting):
    budget = replace(BUDGET, accounting=accounting, dimension=1 if accounting == "sound" else 50)
    space = SearchSpace(combination=combination, parts=("gamma", "uniform"))
    monkeypatch.setattr(lmo_search, "_GENERATIONS", {"published": 2, "sound": 2})
    found = search(space, budget, seed=3)
    assert 0.9999 * budget.epsilon <= found.epsilon <= budget.epsilon
    assert found.epsilon == cost(found.parameters, budget)
    assert found.valid_dimension == 1
    assert found.value == pytest.approx(float(Columns.of(found.parameters).variance))
    assert found == search(space, budget, seed=3)


# u constant has the least variance of all u of one cost (Jensen), so nothing may beat it, and the search gets there.
@pytest.mark.parametrize("objective", ["variance", "mean-absolute", "usefulness"])
def test_search_ends_at_laplace_noise_where_the_ranges_hold_it(objective):
    found = search(SearchSpace(combination="linear", parts=("exponential", "uniform")), BUDGET, objective=objective)
    best = Columns.of(laplace(BUDGET))
    values = {"variance": best.variance, "mean-absolute": best.mean_absolute, "usefulness": 2 * (1 - best.cdf(1.0))}
    assert values[objective] * (1 - 1e-6) <= found.value <= 1.01 * values[objective]


@pytest.mark.slow
def test_search_for_a_whole_run_is_valid_in_its_dimension(monkeypatch):
    monkeypatch.setattr(lmo_search, "_COARSE", {"published": 64, "sound": 32})
    monkeypatch.setattr(lmo_search, "_GENERATIONS", {"published": 3, "sound": 1})
    budget = Budget(epsilon=3.0, delta=1e-5, steps=30, sampling_probability=0.1, dimension=1000)
    found = search(SearchSpace(parts=("uniform",)), budget)
    assert found.valid_dimension == 1000
    assert cost(found.parameters, budget) <= 3.0
    assert cost(found.parameters, replace(budget, steps=31)) > 3.0
    scalar = search(SearchSpace(parts=("uniform",)), replace(budget, accounting="published"))
    assert scalar.valid_dimension == 1
    assert scalar.value < found.value


def test_short_cuts_of_the_search_only_raise_the_cost():
    budget = replace(BUDGET, dimension=40, steps=5)
    for parameters in (uniform(0.1, 0.3), gamma(3, 0.02)):
        quick = float(costs(Columns.of(parameters), budget, search_orders(budget), 48))
        assert cost(parameters, budget) <= quick <= 1.1 * cost(parameters, budget)


def test_fitting_finds_the_least_noise_of_a_kind():
    shape = gamma(3, 123.0)
    found = fitted(shape, BUDGET)
    assert cost(found, BUDGET) <= 2.0 < cost(found.scaled(1 + 1e-5), BUDGET)
    assert found.gamma.shape == 3
    capped = fitted(uniform(1e-3, 1e-3), BUDGET, largest_factor=2.0)
    assert capped.uniform.low == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: SearchSpace(shape=(3.0, 2.0)), "shape = [3.0, 2.0]"),
        (lambda: SearchSpace(rate=(0.0, 1.0)), "rate = [0.0, 1.0]"),
        (lambda: SearchSpace(scale=()), "scale = []"),
        (lambda: SearchSpace(weight=(0.5, 0.9)), "no 3 weights in this range sum to 1"),
        (lambda: SearchSpace(low=(2.0, 3.0), high=(0.1, 1.0)), "no low is at most a high"),
        (lambda: SearchSpace(parts=()), "parts"),
        (lambda: SearchSpace(parts=("normal",)), "'normal'"),
        (lambda: SearchSpace(combination="sum"), "combination = 'sum'"),
        (lambda: Budget(epsilon=0.0, delta=1e-5), "epsilon = 0.0"),
        (lambda: Budget(epsilon=1.0, delta=1e-5, steps=0), "steps = 0"),
        (lambda: Budget(epsilon=1.0, delta=1e-5, sampling_probability=0.0), "sampling_probability = 0.0"),
        (lambda: Budget(epsilon=1.0, delta=1e-5, sensitivity=math.inf), "sensitivity = inf"),
        (lambda: Budget(epsilon=1.0, delta=1e-5, accounting="hopeful"), "accounting = 'hopeful'"),
        (lambda: search(SearchSpace(), BUDGET, objective="size"), "objective = 'size'"),
        (lambda: search(SearchSpace(), BUDGET, objective="usefulness", tolerance=0.0), "tolerance = 0.0"),
        (lambda: search(SearchSpace(), BUDGET, objective="variance"), "infinite for all noise"),
        (
            lambda: search(SearchSpace(parts=("uniform",), low=(5, 9), high=(5, 9)), BUDGET),
            "no noise in these ranges meets it",
        ),
        (lambda: fitted(uniform(1, 1), Budget(epsilon=1e-8, delta=1e-10)), "no scale of this noise meets it"),
        (lambda: coverage(SearchSpace(), quantisations=[0.0]), "quantisation = 0.0"),
        (lambda: coverage(SearchSpace(), domain_sizes=[1]), "domain_size = 1"),
        (lambda: coverage(SearchSpace(), num_samples=0), "num_samples = 0"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(call, part):
    with pytest.raises(InputError) as refusal:
        call()
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("parts", [each for num in (1, 2, 3) for each in combinations(PARTS, num)], ids="+".join)
@pytest.mark.parametrize(("combination", "weight"), [("mixture", (0.2, 0.6)), ("linear", (0.1, 0.9))])
def test_every_candidate_lies_in_the_space(parts, combination, weight):
    of = sobol_candidates(SearchSpace(combination=combination, parts=parts, weight=weight), 200, seed=1)
    active = np.array([name in parts for name in PARTS])
    assert (of.weights[~active] == 0).all()
    if len(parts) > 1:
        assert ((of.weights[active] >= weight[0] - 1e-12) & (of.weights[active] <= weight[1] + 1e-12)).all()
    if combination == "mixture":
        assert of.weights.sum(axis=0) == pytest.approx(np.ones(200))
    assert (of.low <= of.high).all()
    for name, part in (("shape", "gamma"), ("scale", "gamma"), ("rate", "exponential"), ("high", "uniform")):
        low, high = getattr(SearchSpace(), name)
        values = getattr(of, name)
        assert part not in parts or ((values >= low * 0.999) & (values <= high * 1.001)).all()


# --- comparison ---


# Every day for one epsilon, in long series for two.
@pytest.fixture(scope="module", params=[(0.5,), *slow((0.5, 2.0))], ids=len)
def epsilons(request):
    return request.param


@pytest.fixture(scope="module")
def records(epsilons):
    return compare(Budget(epsilon=1.0, delta=1e-6), epsilons=epsilons, dimensions=(1, 10_000))


@pytest.mark.slow
def test_all_noises_of_a_comparison_cost_the_same(records):
    for record in records:
        budget = Budget(epsilon=record["epsilon"], delta=1e-6, dimension=record["dimension"])
        if record["noise"] == "gaussian":
            plain = SubsampledGaussian(noise_multiplier=record["noise_multiplier"], sampling_probability=1.0)
            found = epsilon_of([plain], 1e-6, "rdp").epsilon
        else:
            found = cost(LmoParameters.from_dict(record["parameters"]), budget)
        assert found == pytest.approx(record["epsilon"], rel=1e-5)
        assert found <= record["epsilon"] * (1 + 1e-9)


def row(records, noise, dimension, epsilon=0.5):
    return next(r for r in records if (r["noise"], r["dimension"], r["epsilon"]) == (noise, dimension, epsilon))


def test_lmo_noise_beats_gaussian_noise_on_one_number_and_not_on_a_gradient(records, epsilons):
    for epsilon in epsilons:
        one, many = ([row(records, n, d, epsilon) for n in ("gaussian", "laplace", "lmo")] for d in (1, 10_000))
        assert one[2]["mean_absolute_reduction"] > 0.5
        assert one[2]["variance"] >= one[1]["variance"] * (1 - 1e-6)
        # With u constant the variance is 2 / u^2 where Gaussian noise has 1 / u^2, and u constant is the best.
        assert many[2]["variance"] >= many[1]["variance"] * (1 - 1e-6)
        assert many[1]["variance"] == pytest.approx(2 * many[0]["variance"], rel=0.02)
        assert one[2]["epsilon_at_dimension"] > 3 * epsilon


def test_no_scalar_noise_is_smaller_than_the_staircase_allows(records, epsilons):
    for epsilon in epsilons:
        assert row(records, "lmo", 1, epsilon)["mean_absolute"] > _least_mean_absolute(epsilon)

    # Geng and Viswanath: the least over the step's place of the mean size of staircase noise.
    def staircase(place, epsilon=1.0):
        b = math.exp(-epsilon)
        a = (1 - b) / (2 * (place + b * (1 - place)))
        inner = [a * b**k * ((k + place) ** 2 - k**2) for k in range(200)]
        outer = [a * b ** (k + 1) * ((k + 1) ** 2 - (k + place) ** 2) for k in range(200)]
        return sum(inner) + sum(outer)

    found = optimize.minimize_scalar(staircase, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).fun
    assert _least_mean_absolute(1.0) == pytest.approx(found, rel=1e-6)


def test_gaussian_sizes_are_those_of_samples():
    sample = 3.0 * np.random.default_rng(0).standard_normal(400_000)
    found = _gaussian_sizes(3.0)
    assert found["mean_absolute"] == pytest.approx(np.abs(sample).mean(), rel=0.01)
    assert found["median_absolute"] == pytest.approx(np.median(np.abs(sample)), rel=0.01)
    assert found["variance"] == 9.0


def test_plots_are_written(records, tmp_path):
    written = write_plots(records, tmp_path / "plots")
    assert [path.name for path in written] == ["lmo-amplitude.png", "lmo-variance-entropy.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


# --- coverage ---


def test_distances_of_small_distributions_by_hand():
    found = _nearest_distances(np.array([[1.0, 0.0, 0.0]]), np.array([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8]]))
    assert found["kl"] == pytest.approx(math.log(2))
    assert found["l2"] == found["l2_worst"] == pytest.approx(math.sqrt(0.5))
    assert found["emd"] == pytest.approx(0.5 / 3)


def test_cells_hold_what_the_distribution_says():
    chosen = gamma(2, 1.5)
    (found,) = _cell_probabilities(Columns.of(chosen).mapped(lambda column: column[None]), 8)
    edges = np.linspace(-1, 1, 9)
    expected = np.diff(Columns.of(chosen).cdf(edges))
    assert found == pytest.approx(expected / expected.sum())


def test_finer_histograms_are_nearer_to_lmo_noise():
    found = coverage(SearchSpace(), quantisations=(0.1, 0.001), domain_sizes=(11,), num_samples=64)
    for metric in ("kl", "l2", "emd"):
        assert found[1][metric] < found[0][metric] <= found[0][f"{metric}_worst"]
    assert found == coverage(SearchSpace(), quantisations=(0.1, 0.001), domain_sizes=(11,), num_samples=64)
