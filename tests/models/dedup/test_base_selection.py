"""Bases are chosen as the paper's text has it, and whatever is chosen keeps its bounds and the fairness rule."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.models.dedup._base_selection import (
    Candidate,
    cluster,
    fair_limits,
    metadata_distance,
    own_limits,
    select_bases,
    worthwhile_bases,
)
from fedpriv.models.variants.composition import Guarantee


def basic_cost(target, bases):
    """Theorem 4.1: epsilons on the same data add up, disjoint data give the maximum."""
    models = {each.name: each for each in (target, *bases)}.values()
    data_sets = frozenset().union(*(each.data_sets for each in models))
    of = [[each for each in models if id_ in each.data_sets] for id_ in data_sets]
    epsilons, deltas = ([math.fsum(getattr(m, key) for m in each) for each in of] for key in ("epsilon", "delta"))
    return Guarantee(epsilon=max(epsilons), delta=max(deltas))


def union_cost(target, bases):
    """That of one federation's global models: the union of two is the later one."""
    return Guarantee(epsilon=max(each.epsilon for each in (target, *bases)), delta=target.delta)


def selected(variants, *, cost=basic_cost, **options):
    return select_bases(variants, cost, **options)


# Table 1 of the paper: epsilons and the bound on their increase; A3's models are trained on disjoint parts.
SCENARIOS = {
    "A1": ([1.0, 2.0, 4.0, 6.0, 7.0], 1.0),
    "A2": ([0.3, 0.4, 0.6, 0.8, 1.0], 0.05),
    "A3": ([0.2, 0.4, 0.8, 1.6, 2.0], 0.2),
    "A4": ([0.5, 0.6, 0.75, 1.0, 2.0], 0.5),
    "A5": ([0.4, 0.6, 0.8, 1.0, 2.0], 0.5),
    "B1": ([float(epsilon) for epsilon in range(1, 11)], 1.0),
    "B2": ([0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95], 0.5),
    "B3": ([tenth / 10 for tenth in range(2, 22)], 0.2),
}


def variant(name, epsilon, bound=1.0, data="D", **changes):
    fields = {"architecture": "roberta", "delta": 1e-5, "utility": 0.8, "utility_bound": 0.015}
    return Candidate(name=name, epsilon=epsilon, epsilon_bound=bound, data_sets=frozenset({data}), **fields | changes)


def scenario(name, bound=None):
    epsilons, own = SCENARIOS[name]
    data = [f"{name}-{place}" if name == "A3" else name for place in range(len(epsilons))]
    return [
        variant(f"{name}-{e}", e, bound or own, data[place], utility=0.5 + place / 100, tags=frozenset({name}))
        for place, e in enumerate(epsilons)
    ]


def bases(selection):
    return {name: each.bases for name, each in selection.assignments.items()}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "A2"])
def test_the_first_model_is_the_base_of_all_others(name):
    # Section 5.1.1: "the first model is selected as the base model for all scenarios except A2".
    first, *others = [each.name for each in scenario(name)]
    selection = selected(scenario(name), fairness="outcome")
    assert bases(selection) == dict.fromkeys(others, (first,))
    assert selection.untouched == {first: "serves as a base"}


def test_all_models_of_a2_dangle_and_use_a3s_first():
    # "All models in A2 are dangling models, and they will use the model from A3 with epsilon = 0.2".
    for alone in (scenario("A2"), [variant("low", 1.0, 0.0), variant("high", 2.0, 0.5)]):
        assert not selected(alone).assignments
        assert set(selected(alone).untouched.values()) == {"no base meets its epsilon bound"}
    assert selected([]).assignments == {}
    together = selected([*scenario("A2"), *scenario("A3")])
    assert {bases(together)[each.name] for each in scenario("A2")} == {("A3-0.2",)}
    assert all(together.assignments[each.name].guarantee.epsilon == each.epsilon for each in scenario("A2"))
    assert sorted(map(len, together.clusters)) == [5, 5]


def test_bounds_cut_for_fairness_leave_wide_steps_as_they_are_and_costs_are_those_of_theorem_4_1():
    for name in ("A1", "A3", "B1"):
        selection = selected(scenario(name))
        assert bases(selection) == bases(selected(scenario(name), fairness="outcome"))
    assert [each.guarantee.epsilon for each in selection.assignments.values()] == list(range(3, 12))
    assert {each.guarantee.delta for each in selection.assignments.values()} == {2e-5}


@pytest.mark.parametrize("strategy", ["multi", "cross"])
def test_rivals_take_bases_while_the_bound_lasts(strategy):
    # Section 5.2.2 relaxes the bound to the sum of the first three epsilons: the first three become the bases.
    selection = selected(scenario("B1", 6.0), strategy=strategy, fairness="outcome")
    first = ("B1-1.0", "B1-2.0", "B1-3.0")
    assert {bases(selection)[f"B1-{epsilon}.0"] for epsilon in range(4, 11)} == {first}
    assert selection.assignments["B1-10.0"].guarantee.epsilon == 16.0
    if strategy == "multi":
        assert all(selection.untouched[name] == "serves as a base" for name in first)
    else:  # deduplicated targets serve as bases, and their originals count once
        assert bases(selection)["B1-2.0"] == ("B1-1.0",)
        assert selection.assignments["B1-3.0"].guarantee.epsilon == 6.0


def test_the_papers_adjustment_of_epsilon_would_turn_the_order_round():
    models = [variant("M1", 1.0, 2.0), variant("M2", 3.0, 2.0), variant("M3", 3.5, 2.0)]
    assert min(2.0, 3.0 - 1.0) == 2.0, "the paper's adjusted bound of M2: M1 as base gives 4 > 3.5"
    assert fair_limits(models[1], models).epsilon == 3.5
    assert "M2" not in bases(selected(models))


def test_utility_may_fall_to_the_next_lower_one_on_the_same_data():
    models = [variant(n, e, utility=u) for n, e, u in (("x", 1.0, 0.79), ("y", 2.0, 0.8), ("z", 3.0, 0.8))]
    others = [variant("w", 2.0, data="E", utility=0.799)]
    assert fair_limits(models[1], models + others).utility == 0.79
    assert own_limits(models[1]).utility == pytest.approx(0.785)
    selection = selected(models, fairness="outcome")
    assert all(each.limits.utility == 0.79 for each in selection.assignments.values())


def test_a_target_prefers_the_base_that_adds_least():
    target = variant("t", 5.0, 2.0, tags=frozenset({"x"}))
    both = Candidate(**vars(variant("s", 0.1, 0.0)) | {"data_sets": frozenset("DE")})
    elsewhere = variant("e", 4.0, 0.0, data="E", tags=frozenset({"x"}))
    # Algorithm 2's letter takes the smaller epsilon, its text the smaller increase: here 5.1 against 5.
    selection = selected([target, both, elsewhere], max_distance=1.0)
    assert bases(selection)["t"] == ("e",)


def test_a_base_of_another_architecture_is_taken_where_its_own_offers_none():
    alone = variant("vit", 2.0, data="E", architecture="vit")
    selection = selected([variant("a", 1.0, 1.0), variant("b", 2.0, 1.0), alone])
    assert bases(selection) == {"b": ("a",), "vit": ("a",)}
    assert len(selection.clusters) == 2
    pair = [alone, variant("wit", 4.0, 2.0, data="E", architecture="vit")]
    found = bases(selected([variant("a", 1.0, 1.0), variant("b", 2.0, 1.0), *pair]))
    assert found == {"b": ("a",), "wit": ("vit",)}


def test_one_cluster_of_all_architectures_has_the_paper_s_single_base():
    # The heterogeneous scenario: four at epsilon 2 of one architecture, three at 5 of another, all data disjoint.
    models = [variant(f"vit-{n}", 2.0, 0.0, data=f"V{n}", architecture="vit") for n in range(4)]
    models += [variant(f"text-{n}", 5.0, 0.0, data=f"T{n}") for n in range(3)]
    selection = selected(models, max_distance=2.0)
    assert bases(selection) == {each.name: ("vit-0",) for each in models if each.name != "vit-0"}
    after = {name: each.guarantee.epsilon for name, each in selection.assignments.items()}
    assert after == {each.name: each.epsilon for each in models[1:]}


def test_a_cost_by_provenance_lets_a_later_round_use_an_earlier_one_and_a_free_base_still_costs_a_target():
    models = [variant(f"round-{r}", r / 10, 0.0) for r in (5, 10, 15)]
    assert bases(selected(models, cost=union_cost)) == {"round-10": ("round-5",), "round-15": ("round-5",)}
    assert not selected(models, cost=basic_cost).assignments

    def found(**options):
        models = [variant(f"round-{r}", r / 10, 0.5) for r in range(1, 9)]
        return bases(selected(models, strategy="multi", cost=union_cost, **options))

    # Without a limit the last round takes all others as its bases, and seven of eight models stay whole.
    assert {name: len(its_bases) for name, its_bases in found().items()} == {"round-8": 7}
    assert found(most_bases=worthwhile_bases) == {f"round-{r}": ("round-1",) for r in range(2, 9)}
    assert found(most_bases=lambda num: 2) == {f"round-{r}": ("round-1", "round-2") for r in range(3, 9)}


@pytest.mark.parametrize(("num_variants", "expected"), [(1, 1), (2, 1), (10, 1), (20, 2), (50, 5)])
def test_how_many_bases_save_most(num_variants, expected):
    assert worthwhile_bases(num_variants) == expected
    saved = [(num_variants - k) * (1 + 0.1 * math.log2(k)) for k in range(1, num_variants)]
    assert not saved or saved[expected - 1] == max(saved)


def test_clusters_hold_nothing_further_apart_than_allowed():
    tags = {"a": "uv", "b": "uw", "c": "xy", "d": "xz"}  # 2 / 3 apart within a pair, 1 across
    models = [variant(name, 1.0, data=name, tags=frozenset(tags[name])) for name in "acbd"]
    groups = [[each.name for each in group] for group in cluster(models, 0.7)]
    assert groups == [["a", "b"], ["c", "d"]]
    assert len(cluster(models, 0.6)) == 4


def test_distance_by_metadata():
    for of_one, of_other, apart in (
        ({}, {}, 0.0),
        ({}, {"data": "E"}, 1.0),
        ({"tags": frozenset("xy")}, {"data": "E", "tags": frozenset("yz")}, 2 / 3),
        ({}, {"architecture": "vit"}, 1.0),
        ({}, {"data": "E", "architecture": "vit"}, 2.0),
    ):
        one, other = variant("a", 1.0, **of_one), variant("b", 2.0, **of_other)
        assert metadata_distance(one, other) == metadata_distance(other, one) == apart


def test_what_cannot_be_selected_and_a_variant_out_of_range_are_refused():
    for variants, options, message in (
        ([], {"strategy": "all"}, "strategy = 'all'"),
        ([], {"fairness": "none"}, "fairness = 'none'"),
        ([variant("a", 1.0), variant("a", 2.0)], {}, "same name"),
    ):
        with pytest.raises(ValueError, match=message):
            selected(variants, **options)
    for change in ({"epsilon": -1.0}, {"epsilon": math.nan}, {"bound": -0.1}, {"utility": 1.1}, {"delta": 2.0}):
        with pytest.raises(ValueError, match="must"):
            variant("x", **{"epsilon": 1.0} | change)


ROWS = st.fixed_dictionaries(
    {
        "epsilon": st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf]),
        "epsilon_bound": st.sampled_from([0.0, 0.1, 0.3, 1.0, 5.0]),
        "data_sets": st.frozensets(st.sampled_from("ABC"), min_size=1, max_size=2),
        "architecture": st.sampled_from(["r", "r", "v"]),
        "utility": st.sampled_from([0.5, 0.51, 0.6, 0.9]),
        "utility_bound": st.sampled_from([0.0, 0.02, 0.5]),
    }
)
VARIANTS = st.lists(ROWS, max_size=9).map(
    lambda rows: [
        Candidate(name=f"M{place}", delta=1e-6, tags=row["data_sets"] | {"common"}, **row)
        for place, row in enumerate(rows)
    ]
)
STRATEGIES, FAIRNESS = st.sampled_from(["single", "multi", "cross"]), st.sampled_from(["bounds", "outcome"])


@given(VARIANTS, STRATEGIES, FAIRNESS, st.sampled_from([None, worthwhile_bases]), st.randoms())
@settings(deadline=None, max_examples=100)
def test_every_selection_keeps_bounds_orders_and_roles(variants, strategy, fairness, most, random):
    selection = selected(variants, strategy=strategy, fairness=fairness, most_bases=most)
    by_name, chosen = {each.name: each for each in variants}, bases(selection)
    assert set(chosen) | set(selection.untouched) == set(by_name)
    assert not set(chosen) & set(selection.untouched)

    done = set(selection.untouched)
    for name, its_bases in chosen.items():
        assert its_bases
        assert set(its_bases) <= done, "a base is finished before it is used, so no cycle exists"
        done.add(name)
        if strategy != "cross":
            assert not set(its_bases) & set(chosen), "no base is a target"
        assert strategy != "single" or len(its_bases) == 1

    after = {name: each.epsilon for name, each in by_name.items()}
    for name, each in selection.assignments.items():
        after[name] = each.guarantee.epsilon
        assert by_name[name].epsilon <= after[name] <= own_limits(by_name[name]).epsilon
        assert own_limits(by_name[name]).utility <= each.limits.utility <= by_name[name].utility
    for one in variants:
        for other in variants:
            if one.data_sets == other.data_sets and one.epsilon < other.epsilon:
                assert after[one.name] <= after[other.name]

    shuffled = random.sample(variants, len(variants))
    assert selected(shuffled, strategy=strategy, fairness=fairness, most_bases=most) == selection
