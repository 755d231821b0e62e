"""What the server and c colluding clients can compute is uniform, except for the sum of all honest survivors.

The tests play them: they take every vector that arrived, and take off each mask that the revealed seeds and the
colluders' own keys give. What remains is tested against uniform bytes; the same test rejects as soon as the last mask
is left out. Each of some 150 tests has a false-alarm rate of 1e-9; with 4096 words, values give p < 1e-300.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
import pytest
from scipy import stats

from fedpriv.holder.sums import _client as node_side
from fedpriv.holder.sums._masks import (
    Words,
    agreements,
    combine,
    pairwise_masks,
    public_half,
    self_mask,
    to_centred,
    verify_once,
)
from fedpriv.holder.sums._messages import Reveal, mask_private_key
from fedpriv.holder.sums._terms import ProtocolError, Terms
from tests.holder.sums.attempts import make_terms, node

FALSE_ALARM = 1e-9
TERMS = make_terms(5, threshold=4, colluding=1, dimension=4096)
HONEST, COLLUDER = (0, 1, 2, 3), 4


def pairwise_mask(private: bytes, client: int, public: bytes, peer: int, terms: Terms = TERMS) -> Words:
    """What the client adds for one peer."""
    return pairwise_masks(agreements(private, {peer: public}), client, terms)


def looks_uniform(words: Words) -> bool:
    """Chi-square of the lowest and the highest byte of every word."""
    columns = words.view(np.uint8).reshape(len(words), -1)[:, [0, -1]]
    counts = [np.bincount(column, minlength=256) for column in columns.T]
    return all(stats.chisquare(count).pvalue > FALSE_ALARM for count in counts)


@dataclass(frozen=True)
class View:
    """What server and colluders hold after an attempt.

    Attributes:
        vectors: {client: its masked vector}.
        peers: {client: U2 as it was shown}.
        public: {client: mask key}.
        private: {client: private mask key} of colluders and of those whose key was revealed.
        seeds: {client: seed of its self-mask} where it was revealed.
        values: {client: what it masked}, which the server does not see.
    """

    vectors: Mapping[int, Words]
    peers: Mapping[int, set[int]]
    public: Mapping[int, bytes]
    private: Mapping[int, bytes]
    seeds: Mapping[int, bytes]
    values: Mapping[int, np.ndarray]

    def remainder(self, clients: Iterable[int]) -> Words:
        """The sum of these clients' vectors without any mask that can be computed."""
        total = sum(self.vectors[client] for client in clients)
        for client in clients:
            if client in self.seeds:
                total = total - self_mask(self.seeds[client], client, TERMS)
            for peer in self.peers[client] - {client}:
                # Either private key gives the mask; a peer's is the negative of the client's.
                if client in self.private:
                    total = total - pairwise_mask(self.private[client], client, self.public[peer], peer)
                elif peer in self.private:
                    total = total + pairwise_mask(self.private[peer], peer, self.public[client], client)
        return total


def played(
    *,
    arrived: Iterable[int] = range(5),
    confirming: Iterable[int] | None = None,
    late: Iterable[int] = (),
    hidden: tuple[int, int] | None = None,
    revealing: bool = True,
) -> tuple[View, dict[int, node_side.Shared]]:
    """The view of an attempt, and the nodes' states.

    Args:
        arrived: clients whose vectors are announced as the survivors'.
        confirming: who signs and reveals; all survivors by default.
        late: clients whose vectors arrive when all is over.
        hidden: (client, peer): the client is not shown the peer's shares.
        revealing: whether the attempt goes beyond the masked vectors.
    """
    generator = np.random.default_rng(5)
    begun = {
        k: node_side.advertise(TERMS, k, sign=node(k).sign, approved=None, verify=verify_once, draw=generator.bytes)
        for k in TERMS.by_client
    }
    shown = {k: advertisement for k, (_, advertisement) in begun.items()}
    shared = {k: node_side.share(state, shown) for k, (state, _) in begun.items()}
    values = {k: generator.integers(-(10**6), 10**6, TERMS.dimension) for k in TERMS.by_client}
    peers = {k: set(TERMS.by_client) - ({hidden[1]} if hidden and hidden[0] == k else set()) for k in TERMS.by_client}
    masked = {
        k: node_side.mask(shared[k][0], {j: shared[j][1][k] for j in peers[k] - {k}}, values[k])
        for k in (*arrived, *late)
    }
    survivors = sorted(arrived)
    reveals = reveals_of({k: masked[k][0] for k in confirming or survivors}, survivors) if revealing else []
    private = {COLLUDER: mask_private_key(begun[COLLUDER][0].mask_seed, COLLUDER, TERMS)}
    seeds = {COLLUDER: begun[COLLUDER][0].self_seed}
    if reveals:
        seeds |= {k: opened(reveals, "self_shares", k) for k in survivors}
        dropped = set(TERMS.by_client) - set(survivors)
        private |= {k: mask_private_key(opened(reveals, "mask_shares", k), k, TERMS) for k in dropped}
    vectors = {k: vector for k, (_, vector) in masked.items()}
    public = {k: advertisement.mask_key for k, advertisement in shown.items()}
    view = View(vectors=vectors, peers=peers, public=public, private=private, seeds=seeds, values=values)
    return view, {k: state for k, (state, _) in shared.items()}


def reveals_of(states: Mapping[int, node_side.Masked], survivors: list[int]) -> list[Reveal]:
    signed = {k: node_side.confirm(state, survivors) for k, state in states.items()}
    signatures = {k: signature for k, (_, signature) in signed.items()}
    return [node_side.reveal(state, signatures) for state, _ in signed.values()]


def opened(reveals: list[Reveal], kind: str, client: int) -> bytes:
    """A seed from the first t shares revealed."""
    shares = {found.client: [getattr(found, kind)[client]] for found in reveals[: TERMS.threshold]}
    return combine(shares, TERMS)[0]


def groups(clients: Iterable[int]) -> list[tuple[int, ...]]:
    """All nonempty subsets, the whole last."""
    members = tuple(clients)
    return list(chain.from_iterable(combinations(members, size) for size in range(1, len(members) + 1)))


@pytest.mark.parametrize("arrived", [(0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 1, 2, 3)], ids=str)
def test_nothing_but_the_sum_of_all_honest_survivors_can_be_computed(arrived):
    view, _ = played(arrived=arrived)
    honest = [client for client in arrived if client != COLLUDER]
    *parts, whole = groups(honest)
    assert all(looks_uniform(view.remainder(part)) for part in parts)
    assert not looks_uniform(view.remainder(whole))
    np.testing.assert_array_equal(to_centred(view.remainder(whole)), sum(view.values[client] for client in honest))


def test_without_a_reveal_nothing_at_all_can_be_computed():
    for arrived in ((0, 1, 2, 3, 4), (0, 1, 4), (0,)):
        view, _ = played(arrived=arrived, revealing=False)
        assert all(looks_uniform(view.remainder(part)) for part in groups(set(arrived) - {COLLUDER}))


def test_a_vector_that_arrives_after_its_masks_were_revealed_is_hidden_by_the_self_mask_alone():
    view, states = played(arrived=(0, 1, 2, 4), late=(3,))
    assert looks_uniform(view.remainder([3]))
    without = view.remainder([3]) - self_mask(states[3].begun.self_seed, 3, TERMS)
    assert not looks_uniform(without)
    np.testing.assert_array_equal(to_centred(without), view.values[3])


def test_one_mask_left_out_is_found():
    view, states = played()
    for client in HONEST:
        remainder = view.remainder([client])
        peers = [peer for peer in HONEST if peer != client]
        for count, peer in enumerate(peers, start=1):
            private = mask_private_key(states[peer].begun.mask_seed, peer, TERMS)
            remainder = remainder + pairwise_mask(private, peer, view.public[client], client)
            assert looks_uniform(remainder) == (count < len(peers))


def test_a_client_that_was_shown_fewer_peers_than_the_others_gives_nothing_away():
    with pytest.raises(ProtocolError, match="survivors: client 3 took no part"):
        played(hidden=(0, 3))
    # The others do not notice, and are enough to reveal: the one-sided mask then hides everything.
    view, _ = played(hidden=(0, 3), confirming=(1, 2, 3, 4))
    assert all(looks_uniform(view.remainder(part)) for part in groups(HONEST))


def test_masks_differ_between_attempts_even_if_a_node_drew_the_same_keys():
    """A broken generator of one node alone does not repeat a mask."""
    other = replace(TERMS, attempt="00" * 16)
    seed = bytes(16)
    private, peer = mask_private_key(seed, 0, TERMS), public_half(bytes([1] * 32))
    for one, two in (
        (self_mask(seed, 0, TERMS), self_mask(seed, 0, other)),
        (self_mask(seed, 0, TERMS), self_mask(seed, 1, TERMS)),
        (pairwise_mask(private, 0, peer, 1), pairwise_mask(private, 0, peer, 1, other)),
        (pairwise_mask(private, 0, peer, 1), pairwise_mask(private, 0, peer, 2)),
    ):
        assert looks_uniform(one - two)
        assert not looks_uniform(one - one)
