"""A client that deviates is left out by name, or the sum is refused by its name; a wrong sum is never returned."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.holder.sums import _client as node_side
from fedpriv.holder.sums import _masks, _messages, server
from fedpriv.holder.sums._masks import verify_once
from fedpriv.holder.sums._messages import Complaint, advertised
from fedpriv.holder.sums._terms import ProtocolError, TooFewError
from tests.holder.sums.attempts import Attempt, attempted, begin, make_terms, make_values, node

TERMS = make_terms(5, threshold=3)
LIAR = 1


def advertised_by_all() -> tuple[Attempt, dict[int, str]]:
    """An attempt at its beginning, and {client: its advertisement}."""
    attempt = Attempt(terms=TERMS)
    return attempt, {client: session.advertisement for client, session in attempt.sessions.items()}


def signed_anew(text: str, **keys: bytes) -> str:
    """The liar's advertisement of other keys, which it signs."""
    lied = replace(_messages.advertisement_from_text(text), **keys)
    return _messages.advertisement_text(replace(lied, signature=node(LIAR).sign(advertised(TERMS, lied))))


def check_sum(recovered: server.Recovered, attempt: Attempt, *survivors: int) -> None:
    np.testing.assert_array_equal(recovered.values, sum(attempt.values[client] for client in survivors))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "advertisement: 'client' is missing"),
        (None, "client 1: its advertisement names client 2"),
        (begin(replace(TERMS, round=9), LIAR).advertisement, "did not sign these keys for these terms"),
        ("x" * 2**21, "must be a text of at most"),
        ('{"client":' + "[" * 10**5, "must be JSON"),
        ('{"client":1,"client":1}', "'client' is listed twice"),
        ('{"client":NaN}', "NaN is no JSON number"),
        ('{"client":1' + "0" * 5000 + "}", "must be JSON"),
    ],
)
def test_a_malformed_advertisement_makes_a_dropout_with_a_reason(text, match):
    attempt, texts = advertised_by_all()
    texts[LIAR] = attempt.sessions[2].advertisement if text is None else text
    attempt.u1 = server.collect_advertisements(TERMS, texts, verify=verify_once)
    assert list(attempt.u1.shown) == [0, 2, 3, 4]
    assert list(attempt.u1.refused) == [LIAR]
    assert match in attempt.u1.refused[LIAR]
    check_sum(attempt.share().mask().confirm().reveal(), attempt, 0, 2, 3, 4)


def test_a_copied_key_one_that_agrees_on_zero_and_a_stranger_are_left_out():
    _, texts = advertised_by_all()
    copied = {"mask_key": _messages.advertisement_from_text(texts[0]).encryption_key}
    zero = "its X25519 key agrees on zero with everyone"
    lies = [(copied, "one of its keys occurs twice"), *(({k: bytes(32)}, zero) for k in ("encryption_key", "mask_key"))]
    for lie, reason in lies:
        lied = texts | {LIAR: signed_anew(texts[LIAR], **lie), 9: texts[0]}
        state = server.collect_advertisements(TERMS, lied, verify=verify_once)
        assert state.refused == {LIAR: f"client 1: {reason}", 9: "client 9: took no part in the exchange before"}


@pytest.mark.parametrize("damage", ["missing", "short", "no base64", "unusual base64", "odd client"])
def test_malformed_shares_make_a_dropout_with_a_reason(damage):
    attempt = attempted(TERMS, "advertise")
    message = attempt.u1.message()
    texts = {client: session.share(message) for client, session in attempt.sessions.items()}
    parts = json.loads(texts[LIAR])
    change = {
        "missing": {"2": None},
        "short": {"2": parts["2"][:-4]},
        "no base64": {"2": "!" * len(parts["2"])},
        "unusual base64": {"1": parts["1"][:-3] + chr(ord(parts["1"][-3]) + 1) + "=="},
        "odd client": {"02": parts["2"]},
    }[damage]
    texts[LIAR] = json.dumps({key: value for key, value in (parts | change).items() if value is not None})
    attempt.u2 = server.collect_shares(attempt.u1, texts)
    assert list(attempt.u2.refused) == [LIAR]
    check_sum(attempt.mask().confirm().reveal(), attempt, 0, 2, 3, 4)


def test_a_masked_vector_of_another_type_or_shape_makes_a_dropout():
    attempt = attempted(TERMS, "mask")
    for shape, kind in ((8, np.uint64), (8, np.int32), (7, np.uint32), ((8, 1), np.uint32)):
        attempt.u3 = server.collect_masked(attempt.u2, attempt.vectors | {LIAR: np.zeros(shape, kind)})
        assert "must be uint32 (8,)" in attempt.u3.refused[LIAR]
    check_sum(attempt.confirm().reveal(), attempt, 0, 2, 3, 4)


def test_a_wrong_signature_makes_a_dropout_but_the_vector_counts():
    attempt = attempted(TERMS, "mask")
    texts = {client: attempt.sessions[client].confirm(attempt.u3.message()) for client in range(5)}
    texts[LIAR] = texts[2]
    attempt.u4 = server.collect_signatures(attempt.u3, texts, verify=verify_once)
    assert attempt.u4.refused == {LIAR: "client 1: it did not sign this list of survivors"}
    recovered = attempt.reveal()
    assert recovered.revealed == (0, 2, 3, 4)
    check_sum(recovered, attempt, 0, 1, 2, 3, 4)


def test_a_holder_that_reveals_another_share_or_that_of_another_client_is_named_and_left_out():
    attempt = Attempt(terms=TERMS)
    attempt.advertise().share().mask([0, 1, 2, 3]).confirm()
    message = attempt.u4.message()
    texts = {client: attempt.sessions[client].reveal(message) for client in (0, 1, 2, 3)}
    honest, nothing = _messages.reveal_from_text(texts[LIAR]), bytes(16)
    for lie, reason in (
        ({"self_shares": honest.self_shares | {2: nothing}}, "share of client 2's seed is not the one it was dealt"),
        ({"mask_shares": {4: nothing}}, "its share of client 4's seed is not the one it was dealt"),
        ({"mask_shares": {**honest.mask_shares, 2: nothing}}, "must reveal the self-masks"),
        ({"client": 2}, "names client 2"),
    ):
        texts[LIAR] = _messages.reveal_text(replace(honest, **lie))
        recovered = server.recover(attempt.u4, texts)
        assert (list(recovered.refused), reason in recovered.refused[LIAR]) == ([LIAR], True), recovered.refused
        check_sum(recovered, attempt, 0, 1, 2, 3)
    texts[LIAR] = _messages.reveal_text(replace(honest, mask_shares={4: nothing}))
    with pytest.raises(TooFewError, match=r"came from 2 clients, .* refused: client 1: its share"):
        server.recover(attempt.u4, {client: texts[client] for client in (0, 1, 2)})


@pytest.mark.parametrize("seed", ["self_seed", "mask_seed"])
def test_a_dealer_whose_shares_give_another_seed_is_named_and_no_sum_is_made(seed):
    others = [client for client in range(5) if client != LIAR]
    attempt = Attempt(terms=TERMS)
    state, shown = node_side.advertise(TERMS, LIAR, sign=node(LIAR).sign, approved=None, verify=verify_once)
    texts = {client: attempt.sessions[client].advertisement for client in others}
    texts[LIAR] = _messages.advertisement_text(shown)
    attempt.u1 = server.collect_advertisements(TERMS, texts, verify=verify_once)
    shared, dealt = node_side.share(replace(state, **{seed: bytes(16)}), attempt.u1.shown)
    texts = {client: attempt.sessions[client].share(attempt.u1.message()) for client in others}
    attempt.u2 = server.collect_shares(attempt.u1, texts | {LIAR: _messages.sealed_text(dealt)})
    if seed == "self_seed":
        sealed = _messages.sealed_from_text(attempt.u2.message(LIAR))
        attempt.vectors[LIAR] = node_side.mask(shared, sealed, make_values(TERMS)[LIAR])[1]
    attempt.mask(others).confirm(others)
    with pytest.raises(ProtocolError, match=r"client 1: the shares that it dealt do not give the (seed|key)"):
        attempt.reveal(others)


def test_a_dealer_whose_shares_do_not_fit_their_commitments_is_named_by_the_holder(monkeypatch):
    attempt = attempted(TERMS, "advertise")
    with monkeypatch.context() as lying:
        lying.setattr(_masks, "commitments", lambda shared, route: bytes(64))
        dealt = {LIAR: attempt.sessions[LIAR].share(attempt.u1.message())}
    dealt |= {k: attempt.sessions[k].share(attempt.u1.message()) for k in range(5) if k != LIAR}
    attempt.u2 = server.collect_shares(attempt.u1, dealt)
    with pytest.raises(ProtocolError, match="shares from client 1: do not fit the hashes"):
        attempt.sessions[0].mask(attempt.u2.message(0), attempt.values[0])


def checks(attempt: Attempt) -> dict[int, str]:
    """What everyone answers about the shares that it was dealt."""
    return {client: attempt.sessions[client].check(attempt.u2.message(client)) for client in attempt.u2.dealt}


@pytest.mark.parametrize("holders", [(0,), (0, 2, 3, 4)])
def test_a_dealer_of_unreadable_shares_is_named_before_anything_is_masked(holders):
    attempt = attempted(TERMS, "share")
    dealt = {dealer: dict(parts) for dealer, parts in attempt.u2.dealt.items()}
    # Nobody's; the liar cannot know that the server reads no commitments off them yet.
    dealt[LIAR] |= {holder: bytes(len(dealt[LIAR][holder])) for holder in holders}
    attempt.u2 = replace(attempt.u2, dealt=dealt)
    checked = server.collect_checks(attempt.u2, checks(attempt))
    assert list(checked.dishonest) == [LIAR]
    assert "client 1: dealt shares of no use: shares from client 1" in checked.dishonest[LIAR]
    assert list(checked.refused) == list(holders), "who opened its shares takes no further part"
    for client in holders:
        with pytest.raises(ProtocolError, match="is over"):
            attempt.sessions[client].mask(attempt.u2.message(client), attempt.values[client])


def test_sound_shares_are_checked_without_effect_and_who_complains_of_them_is_named_in_place_of_their_dealer():
    attempt = attempted(TERMS, "share")
    honest, own = checks(attempt), attempt.sessions[LIAR]._state.begun.encryption_private
    checked = server.collect_checks(attempt.u2, honest)
    assert (checked.dishonest, checked.refused, checked.dealt) == ({}, {}, attempt.u2.dealt)
    lies = {
        "that are sound": Complaint(dealers=(2,), opening=own),
        "that it does not open": Complaint(dealers=(2,), opening=bytes(32)),
        "that nobody dealt": Complaint(dealers=(9,), opening=own),
    }
    for reason, lie in lies.items():
        checked = server.collect_checks(attempt.u2, honest | {LIAR: _messages.complaint_text(lie)})
        assert list(checked.dishonest) == [LIAR]
        assert reason in checked.dishonest[LIAR]
    for text in ("{}", '{"dealers":[2],"opening":""}', '{"dealers":[],"opening":"AAAA"}'):
        checked = server.collect_checks(attempt.u2, honest | {LIAR: text})
        assert (list(checked.dishonest), list(checked.refused)) == ([], [LIAR])
    with pytest.raises(TooFewError, match="checks: came from 2 clients"):
        server.collect_checks(attempt.u2, {client: honest[client] for client in (0, 2)})
    check_sum(attempt.mask().confirm().reveal(), attempt, *range(5))
