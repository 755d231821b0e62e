"""Shares are those of pycryptodome, which is slow and independent; what is no share of t holders is refused by name."""

import os

import pytest
from Crypto.Protocol.SecretSharing import Shamir

from fedpriv.holder.sums._masks import SEED_BYTES, combine, split
from fedpriv.holder.sums._terms import ProtocolError
from tests.holder.sums.attempts import make_terms

SEEDS = bytes(16), bytes([255] * 16), os.urandom(16)


@pytest.mark.parametrize(("num_clients", "threshold"), [(3, 3), (7, 5), (70, 36)])
def test_either_library_reads_the_others_shares(num_clients, threshold):
    terms, chosen = make_terms(num_clients, threshold=threshold), range(num_clients - threshold, num_clients)
    for seed in SEEDS:
        ours = split(seed, SEEDS[2], terms)
        assert Shamir.combine([(k + 1, ours[k].self_seed) for k in chosen], ssss=False) == seed
        assert Shamir.combine([(k + 1, ours[k].mask_seed) for k in chosen], ssss=False) == SEEDS[2]
        assert Shamir.combine([(k + 1, ours[k].self_seed) for k in chosen[1:]], ssss=False) != seed
    theirs = [dict(Shamir.split(threshold, num_clients, seed, ssss=False)) for seed in SEEDS]
    assert combine({k: [shares[k + 1] for shares in theirs] for k in reversed(chosen)}, terms) == [*SEEDS]


def test_shares_of_an_attempt_say_nothing_of_those_of_another():
    terms = make_terms(5, threshold=3)
    one, other = (split(SEEDS[0], SEEDS[0], terms) for _ in range(2))
    drawn = [share for shares in (*one.values(), *other.values()) for share in (shares.self_seed, shares.mask_seed)]
    assert len({*drawn}) == 20
    mixed = {0: [one[0].self_seed], 1: [one[1].self_seed], 2: [other[2].self_seed]}
    assert combine(mixed, terms) != [SEEDS[0]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({2: None}, "shares: are of 2 clients, must be of 3"),
        ({3: [bytes(16)] * 2}, "shares: are of 4 clients, must be of 3"),
        ({2: None, 9: [bytes(16)] * 2}, "client 9: is no participant of this attempt"),
        ({2: None, -1: [bytes(16)] * 2}, "client -1: is no participant"),  # whose point would be zero
        ({2: [bytes(16)]}, "client 2: its shares must be 2 of 16 bytes each"),
        ({2: [bytes(15), bytes(17)]}, "client 2: its shares must be 2 of 16 bytes each"),
        ({0: [bytes(16)] * 3}, "client 1: its shares must be 3 of 16 bytes each"),
    ],
)
def test_what_is_no_share_of_t_holders_is_refused_by_name(change, match):
    terms = make_terms(5, threshold=3)
    shares = {k: [each.self_seed, each.mask_seed] for k, each in split(*SEEDS[:2], terms).items() if k < 3}
    assert combine(shares, terms) == [*SEEDS[:2]]
    with pytest.raises(ProtocolError, match=match):
        combine({k: held for k, held in (shares | change).items() if held is not None}, terms)


def test_every_holder_counts():
    """One flipped bit of any share gives another seed: no factor is zero, no share is left out."""
    terms = make_terms(6, threshold=5, colluding=1)
    shares = {k: [each.self_seed] for k, each in split(SEEDS[2], SEEDS[0], terms).items() if k != 1}
    for k, (share,) in shares.items():
        flipped = (int.from_bytes(share, "big") ^ 1).to_bytes(SEED_BYTES, "big")
        assert combine({**shares, k: [flipped]}, terms) != [SEEDS[2]]
