"""A server that deviates: every deviation is refused by name, ends the session, and nothing is unmasked."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from fedpriv.holder.sums import _messages
from fedpriv.holder.sums._masks import verify_once
from fedpriv.holder.sums._messages import Advertisement, advertised
from fedpriv.holder.sums._session import Session, Sessions
from fedpriv.holder.sums._terms import ProtocolError, TooFewError, smallest_threshold
from tests.holder.sums.attempts import Attempt, attempted, begin, make_terms, node, with_participant

TERMS = make_terms(5, colluding=0, threshold=4)
VALUES = np.zeros(TERMS.dimension, np.int64)
STEPS = {
    "share": lambda session: session.share("{}"),
    "mask": lambda session: session.mask("{}", VALUES),
    "confirm": lambda session: session.confirm('{"survivors":[0,1,2,3,4]}'),
    "reveal": lambda session: session.reveal("{}"),
}


def refuses(session: Session, step: str, message: str, match: str, *, few: bool = False) -> None:
    """The step raises this, and afterwards the session does nothing at all."""
    arguments = (message, VALUES) if step == "mask" else (message,)
    with pytest.raises(TooFewError if few else ProtocolError, match=match):
        getattr(session, step)(*arguments)
    assert session.expects is None
    for later, run in STEPS.items():
        with pytest.raises(ProtocolError, match=f"{later}: out of order, this session is over"):
            run(session)


def changed(text: str, **entries: object) -> str:
    """A JSON object with these keys replaced; None removes one."""
    values = json.loads(text) | {key.lstrip("c"): value for key, value in entries.items()}
    return json.dumps({key: value for key, value in values.items() if value is not None})


def signed(client: int, terms=TERMS, **changes):
    """An advertisement that a malicious client signs properly though it holds something else."""
    honest = _messages.advertisement_from_text(begin(terms, client).advertisement)
    altered = replace(honest, **changes)
    return replace(altered, signature=node(client).sign(advertised(terms, altered)))


# Exchange 1 and 2: whose keys these are.


def with_two_purposes(own: Advertisement) -> Advertisement:
    return replace(own, encryption_key=own.mask_key, mask_key=own.encryption_key)


def signed_by_the_server(own: Advertisement) -> Advertisement:
    return replace(own, signature=node(99).sign(advertised(TERMS, own)))


# {which key: what the server shows of those that clients have shown}
FORGED = {
    **{
        key: lambda shown, key=key: {1: replace(shown[1], **{key: getattr(shown[2], key)})}
        for key in ("encryption_key", "mask_key", "self_commitment")
    },
    "of two clients": lambda shown: {1: shown[2], 2: shown[1]},
    "of two purposes": lambda shown: {1: with_two_purposes(shown[1])},
    "signed": lambda shown: {1: signed_by_the_server(replace(shown[1], encryption_key=shown[2].encryption_key))},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_key_that_the_server_put_in_place_of_a_clients_is_refused(forged):
    attempt = attempted(TERMS, "advertise")
    message = _messages.advertisements_text({**attempt.u1.shown, **forged(attempt.u1.shown)})
    refuses(attempt.sessions[0], "share", message, "client 1: its registered key did not sign")


OTHER_VALUES = {
    **{"noise_multiplier": 0.5, "grid_exponent": 11, "clip_norm": 2.0, "threshold": 5, "colluding": 1, "dimension": 9},
    **{"modulus_bits": 64, "request": "ce" * 32, "run": "trial 2", "round": 4, "attempt": "ac" * 16},
}
OTHER_ENTRIES = {"num_records": 101, "sampling_probability": 0.25, "scale": 0.5, "identity": node(98).public_line}
OTHER_TERMS = {
    **{name: replace(TERMS, **{name: value}) for name, value in OTHER_VALUES.items()},
    **{name: with_participant(TERMS, 3, **{name: value}) for name, value in OTHER_ENTRIES.items()},
    "participants": make_terms(6, threshold=4),
}


@pytest.mark.parametrize("field", OTHER_TERMS)
def test_clients_with_different_terms_refuse_each_other(field):
    """As they do advertisements of another attempt, round or run."""
    told_otherwise = begin(OTHER_TERMS[field], 0)
    attempt = Attempt(terms=TERMS, sessions={k: begin(TERMS, k) for k in range(1, 5)})
    attempt.advertise()
    shown = {**attempt.u1.shown, 0: _messages.advertisement_from_text(told_otherwise.advertisement)}
    refuses(attempt.sessions[1], "share", _messages.advertisements_text(shown), "client 0: .* for these terms")
    refuses(told_otherwise, "share", _messages.advertisements_text(shown), "client 1: .* for these terms")


def test_every_field_of_the_terms_is_tried():
    tried = set(OTHER_TERMS) | {"client"}
    assert tried == set(TERMS.__dataclass_fields__) | set(TERMS.participants[0].__dataclass_fields__)


def test_only_peers_that_the_operator_has_approved_are_accepted_and_no_foreign_identity_for_oneself():
    approved = {client: node(client).public_line for client in range(5)}
    assert begin(TERMS, 0, approved).expects == "share"
    for peers, match in (
        ({k: approved[k] for k in (1, 2, 3)}, "client 4: .* has not approved"),
        (approved | {3: node(97).public_line}, "client 3: its identity is not"),
        ({}, "client 1: .* has not approved"),
    ):
        with pytest.raises(ProtocolError, match=match):
            begin(TERMS, 0, peers)
    foreign = "its identity in the terms is not the key of this node"
    for client, match in ((0, f"client 0: {foreign}"), (7, "client 7: is no participant")):
        with pytest.raises(ProtocolError, match=match):
            Session(TERMS, client, sign=node(1).sign, approved=approved, verify=verify_once)


def test_ones_own_advertisement_must_be_there_unchanged_and_no_client_be_listed_twice_or_unknown():
    attempt = attempted(TERMS, "advertise")
    without = {k: shown for k, shown in attempt.u1.shown.items() if k != 0}
    refuses(attempt.sessions[0], "share", _messages.advertisements_text(without), "client 0: its own .* missing")
    earlier = _messages.advertisement_from_text(begin(TERMS, 1).advertisement)
    message = _messages.advertisements_text({**attempt.u1.shown, 1: earlier})
    refuses(attempt.sessions[1], "share", message, "client 1: its own .* changed")
    message = attempt.u1.message()
    refuses(attempt.sessions[2], "share", message[:-1] + "," + message[1:], "advertisements: '0' is listed twice")
    unknown = changed(message, c9=json.loads(message)["1"])
    refuses(attempt.sessions[3], "share", unknown, "client 9 took no part")


# {what a malicious client signs: (its keys, why peers refuse them)}
SIGNED = {
    "a peer's": (lambda shown: {"mask_key": shown[1].mask_key}, "one of its keys is also a key of client 1"),
    "of two purposes": (
        lambda shown: {"encryption_key": shown[3].mask_key, "mask_key": shown[3].mask_key},
        "one of its keys is also a key of client 3",
    ),
    "encryption to zero": (lambda shown: {"encryption_key": bytes(32)}, "its X25519 key agrees on zero"),
    "a mask of zero": (lambda shown: {"mask_key": bytes(32)}, "its X25519 key agrees on zero"),
    "a second name": (
        lambda shown: {"mask_key": shown[3].mask_key[:-1] + bytes([shown[3].mask_key[-1] | 128])},
        "its keys must be X25519",
    ),
}


@pytest.mark.parametrize(("keys", "match"), SIGNED.values(), ids=SIGNED)
def test_a_key_with_two_owners_purposes_or_names_or_that_agrees_on_zero_is_refused_before_masks(keys, match):
    attempt = attempted(TERMS, "advertise")
    message = _messages.advertisements_text({**attempt.u1.shown, 3: signed(3, **keys(attempt.u1.shown))})
    refuses(attempt.sessions[0], "share", message, f"client 3: {match}")


# Exchange 3: whose shares these are.


def test_ciphertexts_swapped_between_peers_or_of_an_earlier_attempt_are_refused():
    earlier, attempt = attempted(TERMS, "share"), attempted(TERMS, "share")
    to_0, to_1 = json.loads(attempt.u2.message(0)), json.loads(attempt.u2.message(1))
    swapped = changed(attempt.u2.message(0), c1=to_0["2"], c2=to_0["1"])
    refuses(attempt.sessions[0], "mask", swapped, "shares from client 1: are not what it sealed for client 0")
    others = changed(attempt.u2.message(1), c2=to_0["2"])
    refuses(attempt.sessions[1], "mask", others, "shares from client 2: are not what it sealed for client 1")
    assert to_1["2"] != to_0["2"]
    stale = changed(attempt.u2.message(2), c1=json.loads(earlier.u2.message(2))["1"])
    refuses(attempt.sessions[2], "mask", stale, "shares from client 1: are not what it sealed")
    own = changed(attempt.u2.message(3), c3=to_0["4"])
    refuses(attempt.sessions[3], "mask", own, "shares: client 3 is listed twice")  # one's own come from nowhere else


@pytest.mark.parametrize("position", [0, 63, 64, 76, 107, 123], ids="byte {}".format)
def test_sealed_shares_with_a_changed_bit_are_refused(position):
    attempt = attempted(TERMS, "share")
    received = _messages.sealed_from_text(attempt.u2.message(0))
    part = bytearray(received[2])
    part[position] ^= 1
    refuses(attempt.sessions[0], "mask", _messages.sealed_text({**received, 2: bytes(part)}), "shares from client 2")


def test_shares_that_were_sealed_after_other_advertisements_are_refused():
    attempt = attempted(TERMS, "advertise")
    fewer = {k: shown for k, shown in attempt.u1.shown.items() if k != 4}
    dealt = {k: _messages.dealt_from_text(attempt.sessions[k].share(attempt.u1.message()), k) for k in (0, 1, 2)}
    dealt[3] = _messages.dealt_from_text(attempt.sessions[3].share(_messages.advertisements_text(fewer)), 3)
    message = _messages.sealed_text({k: dealt[k][0] for k in (1, 2, 3)})
    refuses(attempt.sessions[0], "mask", message, "shares from client 3: .* after the same advertisements")


# Exchange 4 and 5: one list of survivors.


def test_a_list_without_oneself_with_a_stranger_or_with_a_client_twice_is_refused():
    attempt = attempted(TERMS, "mask")
    refuses(attempt.sessions[0], "confirm", '{"survivors":[1,2,3,4]}', "client 0, this node, is missing")
    refuses(attempt.sessions[1], "confirm", '{"survivors":[0,1,2,3,3]}', "survivors: client 3 is listed twice")
    refuses(attempt.sessions[2], "confirm", '{"survivors":[0,1,2,3,8]}', "survivors: client 8 took no part")
    refuses(attempt.sessions[3], "confirm", '{"survivors":[0,1,2,3,true]}', "survivors: client = True")
    attempt = Attempt(terms=TERMS)
    attempt.advertise().share([0, 1, 2, 3]).mask()  # 4 sent no shares
    refuses(attempt.sessions[0], "confirm", '{"survivors":[0,1,2,4]}', "survivors: client 4 took no part")


def test_of_two_lists_a_client_signs_one():
    attempt = attempted(TERMS, "confirm")
    refuses(attempt.sessions[0], "confirm", '{"survivors":[0,1,2,3]}', "out of order, this session expected reveal")


def test_signatures_of_another_list_are_refused():
    attempt = attempted(TERMS, "mask")
    lists = {client: [0, 1, 2, 3, 4] if client in (0, 1) else [0, 2, 3, 4] for client in (0, 1, 2, 3, 4)}
    signatures = {
        client: _messages.signature_from_text(attempt.sessions[client].confirm(_messages.survivors_text(listed)))
        for client, listed in lists.items()
    }
    both = _messages.signatures_text(signatures)
    refuses(attempt.sessions[0], "reveal", both, "signatures: that of client 2 is not of")
    # Client 1 is no survivor in the other list, so there its mask key would be asked for, and above its self-mask.
    refuses(attempt.sessions[2], "reveal", both, "signatures: client 1 took no part")
    valid = {client: signatures[client] for client in (0, 1)}
    refuses(attempt.sessions[1], "reveal", _messages.signatures_text(valid), "are of 2 clients", few=True)


def test_a_signature_counts_once_for_its_signer_alone_and_for_no_other_session_under_the_same_terms():
    earlier, attempt = attempted(TERMS, "confirm"), attempted(TERMS, "confirm")
    assert earlier.u3.survivors == attempt.u3.survivors
    mixed = _messages.signatures_text({**attempt.u4.signatures, 1: earlier.u4.signatures[1]})
    refuses(attempt.sessions[3], "reveal", mixed, "signatures: that of client 1 is not of")
    message = attempt.u4.message()
    refuses(attempt.sessions[0], "reveal", message[:-1] + "," + message[1:], "'0' is listed twice")
    borrowed = _messages.signatures_text({**attempt.u4.signatures, 1: attempt.u4.signatures[2]})
    refuses(attempt.sessions[1], "reveal", borrowed, "signatures: that of client 1 is not of")
    refuses(attempt.sessions[2], "reveal", changed(message, c9=attempt.u4.signatures[2]), "client 9 took no part")


def test_no_client_reveals_both_shares_of_one_peer():
    attempt = Attempt(terms=TERMS)
    attempt.advertise().share().mask([0, 1, 2, 3]).confirm()
    message = attempt.u4.message()
    for session in (attempt.sessions[client] for client in (0, 1, 2, 3)):
        revealed = _messages.reveal_from_text(session.reveal(message))
        assert set(revealed.self_shares) == {0, 1, 2, 3}
        assert set(revealed.mask_shares) == {4}
        with pytest.raises(ProtocolError, match="reveal: out of order, this session is over"):
            session.reveal(message)


# The order of the steps, and how many take part.


# {exchange that a session has reached: its next step}
NEXT = {"advertise": "share", "share": "mask", "mask": "confirm", "confirm": "reveal"}


@pytest.mark.parametrize("reached", NEXT)
def test_fewer_than_the_threshold_are_refused(reached):
    attempt, step = attempted(TERMS, reached), NEXT[reached]
    few = {
        "share": lambda: _messages.advertisements_text({k: attempt.u1.shown[k] for k in (0, 1, 2)}),
        "mask": lambda: _messages.sealed_text({k: attempt.u2.dealt[k][0] for k in (1, 2)}),
        "confirm": lambda: _messages.survivors_text([0, 1, 2]),
        "reveal": lambda: _messages.signatures_text({k: attempt.u4.signatures[k] for k in (0, 1, 2)}),
    }[step]()
    refuses(attempt.sessions[0], step, few, "are of 3 clients, must be of at least 4", few=True)


@pytest.mark.parametrize("reached", NEXT)
def test_a_step_out_of_order_ends_the_session(reached):
    sessions, expected = iter(attempted(TERMS, reached).sessions.values()), NEXT[reached]
    for step in STEPS.keys() - {expected}:
        session = next(sessions)
        with pytest.raises(ProtocolError, match=f"{step}: out of order, this session expected {expected}"):
            STEPS[step](session)
        assert session.expects is None


def test_an_error_within_a_step_ends_the_session_too():
    attempt = attempted(TERMS, "share")
    with pytest.raises(AttributeError):
        attempt.sessions[0].mask(attempt.u2.message(0), "no array")
    assert attempt.sessions[0].expects is None


def test_a_run_has_one_session_and_a_node_a_bounded_number_of_them(monkeypatch):
    monkeypatch.setattr("fedpriv.holder.sums._session.MAX_RUNS", 2)
    sessions = Sessions()

    def start(run: str, attempt: str) -> Session:
        terms = replace(TERMS, run=run, attempt=attempt * 16)
        return sessions.begin(terms, 0, sign=node(0).sign, approved=None, verify=verify_once)

    def is_over(run: str, attempt: str) -> None:
        with pytest.raises(ProtocolError, match="takes no part in it"):
            sessions.of(run, attempt * 16)

    first, second = start("a", "01"), start("a", "02")
    assert first.expects is None
    assert sessions.of("a", "02" * 16) is second
    is_over("a", "01")
    start("b", "01")
    start("c", "01")
    assert second.expects is None
    is_over("a", "02")
    with pytest.raises(ProtocolError, match="has not approved"):
        sessions.begin(replace(TERMS, run="b"), 0, sign=node(0).sign, approved={}, verify=verify_once)
    is_over("b", "01")


# Two lists of survivors.


def two_lists_possible(num_clients: int, threshold: int, colluding: int) -> bool:
    """Brute force: whether honest clients, each signing once, and colluders, signing both, can sign two lists."""
    honest = set(range(num_clients - colluding))
    needed = max(threshold - colluding, 0)
    groups = (set(group) for size in range(needed, len(honest) + 1) for group in combinations(honest, size))
    return any(len(honest - group) >= needed for group in groups)


@pytest.mark.parametrize("num_clients", range(2, 9))
def test_two_lists_never_both_gather_the_threshold_exactly_under_its_rule(num_clients):
    for colluding in range(num_clients - 1):
        for threshold in range(1, num_clients + 1):
            rule = 2 * threshold > num_clients + colluding
            assert two_lists_possible(num_clients, threshold, colluding) is not rule
            allowed = threshold >= smallest_threshold(num_clients, colluding)
            assert allowed == (rule and threshold >= max(colluding, 1) + 2)
