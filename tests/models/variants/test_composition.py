"""What a deduplicated variant costs, against the paper's text, brute force over release graphs, and closed forms."""

import itertools
import math

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.models.variants import composition
from fedpriv.models.variants.composition import Guarantee, History, Upload, publication_cost, uploads_of
from fedpriv.privacy.accounting import EpsilonDelta, PureEpsilon, Release, SubsampledGaussian, epsilon_of
from fedpriv.privacy.ledger.entries import Key
from server.registry import client_ancestors, global_ancestors
from tests.marks import slow

DELTA = 1e-5
CLIENTS, ROUNDS = ("a", "b"), (1, 2, 3)


def gaussian(noise_multiplier, q=1.0, count=1):
    return SubsampledGaussian(noise_multiplier=noise_multiplier, sampling_probability=q, count=count)


def upload(client, round_, run="run"):
    """Every upload has a noise of its own, so that a wrong set shows as a wrong epsilon."""
    return Upload(data_set=client, run=run, round=round_, event=gaussian(4 + round_ + 0.3 * (client == "b")))


UPLOADS = [upload(client, round_) for client in CLIENTS for round_ in ROUNDS]
DELTAS = dict.fromkeys(CLIENTS, DELTA)

VARIANTS = {("global", r): History(name=f"global-{r}", ancestors=global_ancestors(UPLOADS, "run", r)) for r in ROUNDS}
VARIANTS |= {
    (client, r): History(name=f"{client}-{r}", ancestors=client_ancestors(UPLOADS, "run", r, client))
    for client in CLIENTS
    for r in ROUNDS
}


def inputs(node):
    """The graph as training makes it, edge by edge: what was directly used to compute a node."""
    kind, round_ = node[0], node[1]
    before = [("global", round_ - 1)] if round_ > 1 else []
    if kind == "upload":  # from the model that was broadcast
        return before
    if kind == "global":
        return before + [("upload", round_, client) for client in CLIENTS]
    return [("upload", round_, kind)]  # a client's own variant


def reached(nodes):
    """All uploads that the nodes descend from, by walking edges."""
    found = set().union(*(reached(inputs(node)) for node in nodes))
    return found | {(node[2], node[1]) for node in nodes if node[0] == "upload"}


def by_library(noises, accountant):
    accountant.compose(dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(noise) for noise in noises]))
    return accountant.get_epsilon(DELTA)


def provenance(cost):
    return {each.data_sets[0]: each.epsilons["provenance"] for each in cost.by_data_set}


def test_the_three_situations_of_the_paper_by_basic_composition():
    for models, epsilon in (
        ([("t", "D", 2.0), ("t", "D", 2.0)], 2.0),  # Section 4.1, situation 1: Intra-Model
        ([("M1", "D", 1.0), ("M2", "D", 3.0)], 4.0),  # 2: Inter-Model Intra-Data; Figure 2: M2 with blocks of M1
        ([("x", "D", 3.0), ("y", "E", 1.0)], 3.0),  # 3: Inter-Model Inter-Data
    ):
        stated = [History(name=name, events={data: (PureEpsilon(epsilon=e),)}) for name, data, e in models]
        cost = publication_cost(stated, {"D": 1e-5, "E": 1e-5})
        assert max(each.epsilons["basic"] for each in cost.by_data_set) == pytest.approx(epsilon)


@given(st.lists(st.frozensets(st.sampled_from("abcdefgh"), max_size=3), max_size=8))
def test_united_sets_are_the_components_that_a_walk_finds(sets):
    def walk(start):
        seen = {start}
        for _ in range(8):
            seen |= {other for ids in sets for other in ids if seen & ids}
        return frozenset(seen)

    found = composition._merge_overlapping(sets)
    assert set(found) == {walk(id_) for ids in sets for id_ in ids}
    assert len(found) == len(set(found))


def test_provenance_is_brute_force_over_every_publication():
    for published in itertools.chain(*(itertools.combinations(VARIANTS, num) for num in (1, 2, 3))):
        cost = publication_cost([VARIANTS[node] for node in published], DELTAS, accountant="rdp")
        expected = reached(published)
        for client, epsilon in provenance(cost).items():
            noises = [upload(*each).event.noise_multiplier for each in expected if each[0] == client]
            assert epsilon == pytest.approx(by_library(noises, rdp.RdpAccountant()))
        assert set(provenance(cost)) == {client for client, _ in expected}


@pytest.mark.parametrize("published", [[("a", 3), ("b", 2)], *slow([("global", 1), ("global", 3)], list(VARIANTS))])
def test_provenance_by_pld_is_dp_accountings_own(published):
    cost = publication_cost([VARIANTS[node] for node in published], DELTAS)
    for client, epsilon in provenance(cost).items():
        noises = [upload(*each).event.noise_multiplier for each in reached(published) if each[0] == client]
        assert epsilon == pytest.approx(by_library(noises, pld.PLDAccountant()), rel=1e-3)
        exact = dp_accounting.get_epsilon_gaussian(1 / math.sqrt(sum(z**-2 for z in noises)), DELTA)
        assert epsilon == pytest.approx(exact, rel=5e-3)


def test_a_later_global_model_as_base_costs_the_union_not_the_sum():
    early, late = VARIANTS["global", 1], VARIANTS["global", 3]
    together, alone = publication_cost([early, late], DELTAS), publication_cost([late], DELTAS)
    assert provenance(together) == provenance(alone)
    assert together.guarantee == alone.guarantee
    assert provenance(together)["a"] > provenance(publication_cost([early], DELTAS))["a"], "what was looked at is paid"
    for cost in together.by_data_set:
        assert cost.used == "provenance"
        assert cost.epsilons["provenance"] < cost.epsilons["accountant"] < cost.epsilons["basic"]


def test_a_buyer_of_base_and_target_pays_for_the_base_once():
    # Figure 2, Buyer-1: the paper counts M1 (1) and M2' (1 + 3) as 5; both are functions of M1's and M2's releases.
    uploads = [
        Upload(data_set="D1", run=n, round=0, event=PureEpsilon(epsilon=e)) for n, e in (("M1", 1.0), ("M2", 3.0))
    ]
    models = [History(name=u.run, ancestors=frozenset({u})) for u in uploads]
    deduplicated = History(name="M2'", ancestors=frozenset(uploads))
    cost = publication_cost([*models, deduplicated], {"D1": DELTA}).guarantee
    assert cost.epsilon == pytest.approx(4.0, abs=1e-3)


def test_warm_start_brings_its_ancestors():
    earlier = frozenset({upload("a", 7, run="earlier")})
    own = [upload("a", 1), upload("b", 1), upload("a", 2)]
    assert global_ancestors(own, "run", 1, earlier) == earlier | set(own[:2])
    assert client_ancestors(own, "run", 2, "b", earlier) == earlier | set(own[:2])
    assert client_ancestors(own, "run", 2, "a", earlier) == earlier | set(own)
    assert global_ancestors([*own, *earlier], "run", 9) == set(own), "another run's uploads are no ancestors"


def test_unknown_ancestors_refuse_provenance_by_name():
    stranger = History(name="bought", events={"a": (gaussian(2.0),)})
    with pytest.raises(ValueError, match="one of the two"):
        History(name="both", ancestors=frozenset(UPLOADS), events=stranger.events)
    cost = publication_cost([VARIANTS["global", 1], stranger], DELTAS)
    assert cost.refused == {"provenance": "the ancestors of bought are unknown"}
    assert all(set(each.epsilons) == {"basic", "accountant"} for each in cost.by_data_set)


def test_without_noise_epsilon_is_infinite():
    bare = Upload(data_set="a", run="run", round=9, event=gaussian(0.0))
    cost = publication_cost([VARIANTS["global", 1], History(name="bare", ancestors=frozenset({bare}))], DELTAS)
    of_a, of_b = cost.by_data_set
    assert set(of_a.epsilons.values()) == {math.inf}
    assert of_b.guarantee.epsilon < math.inf
    assert cost.guarantee == Guarantee(epsilon=math.inf, delta=DELTA)


@pytest.mark.parametrize("event", [PureEpsilon(epsilon=0.5), gaussian(2.0)], ids=["pure", "gaussian"])
def test_what_validation_and_saliency_release_is_added_by_every_method(event):
    variants, extra = [VARIANTS["global", 2]], {"a": [event], "v": [event]}
    plain = publication_cost(variants, DELTAS).by_data_set
    by_id = {
        each.data_sets: each for each in publication_cost(variants, DELTAS | {"v": DELTA}, extra=extra).by_data_set
    }
    for method in ("basic", "accountant", "provenance"):
        assert by_id["a",].epsilons[method] > plain[0].epsilons[method] + 0.1
        assert by_id["b",].epsilons[method] == plain[1].epsilons[method]
    assert by_id["v",].epsilons["basic"] == pytest.approx(by_id["v",].epsilons["provenance"], abs=1e-3)


def test_stated_guarantees_add_up_to_their_deltas():
    stated = {n: History(name=n, events={"D": (EpsilonDelta(epsilon=1.0, delta=DELTA),)}) for n in ("x", "y")}
    (cost,) = publication_cost(stated.values(), {"D": 2 * DELTA}).by_data_set
    assert cost.epsilons["basic"] == 2.0
    # Both deltas are all there is, and nothing is left to convert with: here alone `accountant` is above `basic`.
    assert cost.epsilons["accountant"] == math.inf
    assert cost.used == "basic"
    (cost,) = publication_cost(stated.values(), {"D": 1.9 * DELTA}).by_data_set
    assert cost.guarantee.epsilon == math.inf


def test_data_sets_that_may_share_records_pay_for_each_other():
    apart = publication_cost([VARIANTS["global", 1]], DELTAS)
    joined = publication_cost([VARIANTS["global", 1]], DELTAS | {"b": 1e-6}, overlapping=[frozenset({"a", "b", "c"})])
    (cost,) = joined.by_data_set
    assert cost.data_sets == ("a", "b")
    assert cost.delta == 1e-6
    assert cost.guarantee.epsilon > max(each.guarantee.epsilon for each in apart.by_data_set)


EVENTS = st.builds(gaussian, st.sampled_from([1.0, 3.0, 8.0]), st.sampled_from([0.1, 1.0])) | st.builds(
    lambda epsilon: PureEpsilon(epsilon=epsilon), st.sampled_from([0.01, 0.2])
)
GRAPH = st.lists(st.tuples(st.sampled_from(CLIENTS), EVENTS), min_size=1, max_size=6).map(
    lambda nodes: [Upload(data_set=c, run="r", round=i, event=e) for i, (c, e) in enumerate(nodes)]
)


@pytest.mark.parametrize("num_known", [2, 1])
def test_a_person_in_several_data_sets_pays_for_the_costliest(num_known):
    """Two data sets of four; also where the ancestors of one variant are unknown, so that both count in full."""
    noises, deltas = (1.0, 3.0, 2.0, 4.0), {f"clinic-{client}": DELTA for client in range(4)}
    uploads = frozenset(
        Upload(data_set=f"clinic-{client}", run="run", round=round_, event=gaussian(z, 0.1))
        for client, z in enumerate(noises)
        for round_ in (1, 2)
    )
    first = frozenset(upload for upload in uploads if upload.round == 1)
    events = {upload.data_set: (upload.event,) for upload in first}
    known = [History(name="later", ancestors=uploads, holders=2), History(name="earlier", ancestors=first, holders=2)]
    histories = [*known[:num_known], *([History(name="old", events=events)] if num_known == 1 else [])]
    count = 2 if num_known == 2 else 3
    pairs = itertools.combinations(noises, 2)
    worst = max(epsilon_of([gaussian(z, 0.1, count) for z in pair], DELTA).epsilon for pair in pairs)
    assert publication_cost(histories, deltas).guarantee.epsilon == pytest.approx(worst)
    together = publication_cost(histories, deltas, overlapping=[frozenset({"clinic-0", "clinic-3"})]).guarantee
    assert together.epsilon == pytest.approx(epsilon_of([gaussian(z, 0.1, count) for z in noises], DELTA).epsilon)


@st.composite
def consulted(draw):
    graph = draw(GRAPH)
    ancestors = draw(st.lists(st.frozensets(st.sampled_from(graph)), min_size=1, max_size=4))
    return [History(name=str(place), ancestors=each) for place, each in enumerate(ancestors)]


@given(consulted())
@settings(deadline=None, max_examples=10)
def test_each_composition_is_within_the_looser_one(histories):
    # pld rounds losses up to a grid of 1e-4 for every release and is within 0.1 % of exact.
    for cost in publication_cost(histories, DELTAS).by_data_set:
        slack = 1e-4 * 24 + 1e-3 * cost.epsilons["basic"]
        assert cost.epsilons["provenance"] <= cost.epsilons["accountant"] + slack
        assert cost.epsilons["accountant"] <= cost.epsilons["basic"] + slack
        assert cost.guarantee.epsilon == min(cost.epsilons.values())


@given(consulted())
@settings(deadline=None, max_examples=20)
def test_provenance_is_idempotent_monotone_and_blind_to_order(histories):
    def of(some):
        return provenance(publication_cost(some, DELTAS, accountant="rdp"))

    everything = of(histories)
    again = [History(name=f"{history.name}'", ancestors=history.ancestors) for history in histories]
    assert of([*histories, *again]) == of(histories[::-1]) == everything
    for fewer in (histories[1:], histories[:1]):
        for client, epsilon in of(fewer).items():
            assert epsilon <= everything[client] * (1 + 1e-12)


def test_uploads_of_the_ledger_keep_their_keys_apart():
    keys = (Key(run="run", client="a", round=3, request=request) for request in ("first", "second"))
    charged = [(key, Release(event=gaussian(2.0), rho_bar=0.5)) for key in keys]
    found = uploads_of("id", charged)
    assert len(set(found)) == 2, "equal releases of one round cost twice"
    assert found[0].event == gaussian(2.0)
    assert uploads_of("id", charged, view="rho")[0].event == gaussian(1.0)


CONTRADICTED = History(name="x", ancestors=frozenset({Upload(data_set="a", run="run", round=1, event=gaussian(9))}))


def test_what_has_no_answer_is_refused():
    for others, deltas, message in (
        ([], {"a": DELTA}, "none for data set b"),
        ([], DELTAS | {"b": 0.0}, "delta"),
        ([History(name="global-1", ancestors=frozenset(UPLOADS))], DELTAS, "two different"),
        ([CONTRADICTED], DELTAS, "two uploads"),
    ):
        with pytest.raises(ValueError, match=message):
            publication_cost([VARIANTS["global", 1], *others], deltas)


@pytest.mark.parametrize("others", [[], [VARIANTS["global", 1]]], ids=["alone", "beside a known one"])
def test_what_is_of_unknown_origin_bounds_nothing_and_what_is_public_costs_nobody_anything(others):
    unknown = publication_cost([History(name="found"), *others], DELTAS)
    assert unknown.is_unknown
    assert unknown.guarantee.epsilon == math.inf
    assert {each.guarantee.epsilon for each in unknown.by_data_set} <= {math.inf}
    public = publication_cost([History(name="found", ancestors=frozenset()), *others], DELTAS)
    assert public.guarantee.epsilon == publication_cost(others, DELTAS).guarantee.epsilon < math.inf
