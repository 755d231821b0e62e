"""The masked sum equals the plain one, to the integer, after every pattern of dropouts; below the threshold is none.

A pattern says of each client which exchange is its last: 0 none, 1 advertise, 2 share, 3 masked vector, 4 confirmation,
5 reveal. Transitions are pure, so what patterns have in common is computed once.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest

from fedpriv.holder.sums import _client as node_side
from fedpriv.holder.sums import _messages, server
from fedpriv.holder.sums._masks import verify_once
from fedpriv.holder.sums._terms import Terms, TooFewError, smallest_threshold
from tests.holder.sums.attempts import Attempt, make_terms, make_values, node
from tests.marks import slow

Group = frozenset[int]


class Patterns:
    """All attempts under the same terms; each method is the outcome of an exchange, given who took part so far."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.values = terms, make_values(terms)
        begun = {
            k: node_side.advertise(terms, k, sign=node(k).sign, approved=None, verify=verify_once)
            for k in terms.by_client
        }
        self.begun = {client: state for client, (state, _) in begun.items()}
        self.texts = {client: _messages.advertisement_text(message) for client, (_, message) in begun.items()}
        for name in ("advertised", "shared", "masked", "confirmed"):
            setattr(self, name, cache(getattr(self, name)))

    def advertised(self, u1: Group):
        state = server.collect_advertisements(self.terms, {k: self.texts[k] for k in u1}, verify=verify_once)
        shown = _messages.advertisements_from_text(state.message())
        return state, {k: node_side.share(self.begun[k], shown) for k in u1}

    def shared(self, u1: Group, u2: Group):
        before, nodes = self.advertised(u1)
        state = server.collect_shares(before, {k: _messages.sealed_text(nodes[k][1]) for k in u2})
        sealed = {k: _messages.sealed_from_text(state.message(k)) for k in u2}
        return state, {k: node_side.mask(nodes[k][0], sealed[k], self.values[k]) for k in u2}

    def masked(self, u1: Group, u2: Group, u3: Group):
        before, nodes = self.shared(u1, u2)
        state = server.collect_masked(before, {k: nodes[k][1] for k in u3})
        survivors = _messages.survivors_from_text(state.message())
        return state, {k: node_side.confirm(nodes[k][0], survivors) for k in u3}

    def confirmed(self, u1: Group, u2: Group, u3: Group, u4: Group):
        before, nodes = self.masked(u1, u2, u3)
        texts = {k: _messages.signature_text(nodes[k][1]) for k in u4}
        state = server.collect_signatures(before, texts, verify=verify_once)
        signatures = _messages.signatures_from_text(state.message())
        return state, {k: _messages.reveal_text(node_side.reveal(nodes[k][0], signatures)) for k in u4}

    def recovered(self, groups: tuple[Group, ...]) -> server.Recovered:
        state, reveals = self.confirmed(*groups[:4])
        return server.recover(state, {k: reveals[k] for k in groups[4]})


def thresholds(num_clients: int) -> range:
    return range(smallest_threshold(num_clients, 0), num_clients + 1)


@pytest.mark.parametrize(
    ("num_clients", "threshold"),
    [pytest.param(k, t, marks=pytest.mark.slow if k > 4 else []) for k in (3, 4, 5, 6) for t in thresholds(k)],
)
def test_the_sum_of_the_survivors_is_exact_for_every_pattern_of_dropouts(num_clients, threshold):
    terms = make_terms(num_clients, threshold=threshold, dimension=4)
    patterns, clients = Patterns(terms), sorted(terms.by_client)
    outcomes = {True: 0, False: 0}
    for last in product(range(6), repeat=len(clients)):
        groups = tuple(frozenset(k for k, step in zip(clients, last, strict=True) if step >= n) for n in range(1, 6))
        enough = len(groups[-1]) >= terms.threshold
        outcomes[enough] += 1
        if not enough:
            with pytest.raises(TooFewError, match=f"must (be of|come from) at least {terms.threshold}"):
                patterns.recovered(groups)
            continue
        recovered = patterns.recovered(groups)
        assert recovered.survivors == tuple(sorted(groups[2]))
        assert recovered.refused == {}
        np.testing.assert_array_equal(recovered.values, sum(patterns.values[k] for k in groups[2]))
    assert min(outcomes.values()) > 0


@pytest.mark.parametrize("num_clients", [10, *slow(30, 100)])
def test_the_sum_of_many_is_exact_after_random_dropouts(num_clients):
    """At every stage, so that a threshold remains."""
    generator = np.random.default_rng(1)
    terms = make_terms(num_clients, colluding=num_clients // 5, dimension=16)
    for _ in range({10: 3, 30: 5, 100: 1}[num_clients]):
        attempt, left = Attempt(terms=terms), sorted(terms.by_client)
        groups = []
        for _ in range(5):
            dropped = generator.integers(0, (len(left) - terms.threshold) // 2 + 1)
            left = sorted(generator.choice(left, len(left) - dropped, replace=False).tolist())
            groups.append(left)
        attempt.advertise(groups[0]).share(groups[1]).mask(groups[2]).confirm(groups[3])
        recovered = attempt.reveal(groups[4])
        assert list(recovered.survivors) == groups[2]
        np.testing.assert_array_equal(recovered.values, sum(attempt.values[k] for k in groups[2]))


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_are_centred_and_wrap_around_at_half_the_modulus(bits):
    half = 2 ** (bits - 1)
    terms = make_terms(3, modulus_bits=bits, dimension=6)
    rows = [half - 1, -half, half - 1, -1, 0, 7], [0, 0, 1, -1, 0, -9], [0, 0, 0, -1, 0, 1]
    values = {client: np.array(row) for client, row in enumerate(rows)}
    attempt = Attempt(terms=terms, values=values)
    recovered = attempt.advertise().share().mask().confirm().reveal()
    assert attempt.vectors[0].dtype == np.dtype(f"uint{bits}")
    assert recovered.values.dtype == np.int64
    # Integers of unbounded size, reduced to [-2^(m-1), 2^(m-1)).
    sums = [sum(int(values[k][i]) for k in values) for i in range(6)]
    assert recovered.values.tolist() == [(total + half) % 2**bits - half for total in sums]
    assert recovered.values.tolist() == [half - 1, -half, -half, -3, 0, -1]


def test_values_outside_the_modulus_count_modulo_it_and_those_that_a_node_gives_are_not_changed():
    values = {0: np.array([2**40 + 3, -(2**33)]), 1: np.array([2, 5]), 2: np.array([0, 0])}
    attempt = Attempt(terms=make_terms(3, dimension=2), values={k: each.copy() for k, each in values.items()})
    assert attempt.advertise().share().mask().confirm().reveal().values.tolist() == [5, 5]
    for client, given in values.items():
        np.testing.assert_array_equal(attempt.values[client], given)
