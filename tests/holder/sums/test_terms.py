"""Terms are checked when they are made, and their digest tells any two apart."""

import json
import math
from dataclasses import replace

import pytest

from fedpriv.holder.sums._masks import make_identity, verify_once
from fedpriv.holder.sums._terms import ProtocolError, smallest_threshold, terms_from_text
from fedpriv.privacy.ledger import keys
from tests.holder.sums.attempts import make_terms, node, with_participant

TERMS = make_terms(4, colluding=1)


def otherwise(line: str) -> list[str]:
    """A key, written in other ways."""
    return [f"{line}=", f"{line}====", f" {line}", f"{line} ", f"{line}\n", line.replace(" ", "  "), f"{line}AA=="]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        *(({"run": run}, "run = .*: must be 1 to 200") for run in ("", "a\nb", "a" * 201)),
        *(({"round": number}, f"round = {number}: must be an integer from 1") for number in (0, True, 1.0)),
        *(({"attempt": attempt}, f"attempt = '{attempt}': must be 16 to 64 hex") for attempt in ("ab", "AB" * 16)),
        ({"threshold": 5}, "threshold = 5: must be at least 3 and at most 4"),
        ({"threshold": 2}, "threshold = 2: must be at least 3"),
        ({"colluding": 2, "threshold": 3}, "threshold = 3: must be at least 4"),
        ({"colluding": 3, "threshold": 4}, "threshold = 4: must be at least 5 and at most 4"),
        ({"colluding": -1}, "colluding = -1"),
        *(({"modulus_bits": bits}, f"modulus_bits = {bits}: must be 32 or 64") for bits in (48, 32.0)),
        ({"grid_exponent": 101}, "grid_exponent = 101"),
        ({"dimension": 0}, "dimension = 0"),
        *(({"clip_norm": norm}, f"clip_norm = {norm}: must be a finite float > 0") for norm in (0.0, 1, math.inf)),
        *(({"noise_multiplier": z}, f"noise_multiplier = {z}: must be a finite float >= 0") for z in (math.nan, -1.0)),
        ({"clip_norm": 1e200, "noise_multiplier": 1e200}, r"noise_multiplier = 1e.200: must give finite noise"),
        ({"request": "cd"}, "request = 'cd': must be 64 hexadecimal digits"),
        ({"participants": TERMS.participants[:2]}, "participants: are 2, must be 3 to 1000: of the sum of two"),
        ({"participants": list(TERMS.participants)}, "participants: must be a tuple of Participant"),
        ({"participants": TERMS.participants[::-1]}, "client 2 must stand before client 3"),
        ({"participants": TERMS.participants[:1] * 3}, "participants: client 0 is listed twice"),
    ],
)
def test_terms_that_are_no_terms_are_refused_by_name(changes, match):
    with pytest.raises(ProtocolError, match=match) as refused:
        replace(TERMS, **changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"client": -1}, "client = -1"),
        ({"num_records": 0}, "client 2: num_records = 0"),
        ({"sampling_probability": 0.0}, r"client 2: sampling_probability = 0.0: must be a float in \(0, 1\]"),
        ({"sampling_probability": 1}, "client 2: sampling_probability = 1"),
        ({"scale": 1.5}, r"client 2: scale = 1.5: must be a float in \(0, 1\]"),
        ({"scale": float("nan")}, "client 2: scale = nan"),
        ({"identity": "ecdsa-sha2-nistp384 AAAA"}, "client 2: identity = .* must be `ssh-ed25519 AAAA"),
        ({"identity": node(2).public_line + " comment"}, "client 2: identity"),
        ({"identity": node(1).public_line}, "clients 1 and 2 have one identity"),
        # A key has one way to be written, so it cannot pass for two.
        *(({"identity": other}, "client 2: identity") for other in otherwise(node(1).public_line)),
    ],
)
def test_a_participant_that_is_none_is_refused_by_name(changes, match):
    with pytest.raises(ProtocolError, match=match):
        with_participant(TERMS, 2, **changes)


def test_terms_come_back_from_their_text_and_floats_keep_all_digits():
    terms = replace(with_participant(TERMS, 1, scale=1 / 3), clip_norm=0.1, noise_multiplier=2.0**-40, run='a "run"')
    assert terms_from_text(terms.text()) == terms
    assert terms_from_text(terms.text()).digest() == terms.digest()
    assert len(terms.digest()) == 32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda values: values.pop("round"), "terms: 'round' is missing"),
        (lambda values: values.update(more=1), "terms: 'more' is unknown"),
        (lambda values: values.update(round="1"), "round = '1': must be an integer"),
        (lambda values: values.update(clip_norm=None), "clip_norm = None"),
        (lambda values: values.update(run=["a"]), "run = "),
        (lambda values: values.update(participants={}), "participants: must be a list"),
        (lambda values: values.update(participants=[1, 2]), "participant = 1: must be an object"),
        (lambda values: values["participants"][0].pop("scale"), "participant: 'scale' is missing"),
        (lambda values: values["participants"][0].update(x=1), "participant: 'x' is unknown"),
    ],
)
def test_a_text_with_missing_unknown_or_mistyped_fields_is_refused(change, match):
    values = json.loads(TERMS.text())
    change(values)
    with pytest.raises(ProtocolError, match=match):
        terms_from_text(json.dumps(values))


@pytest.mark.parametrize("text", ["", "1", "[]", '{"run":Infinity}', '{"a":1,"a":1}', "{" * 10**5, " " * (2**20 + 1)])
def test_a_text_that_is_no_object_is_refused_in_one_line(text):
    with pytest.raises(ProtocolError, match="terms: ") as refused:
        terms_from_text(text)
    assert len(str(refused.value)) < 200


def test_the_noise_is_the_product_of_gamma_scale_noise_multiplier_and_clip_norm():
    terms = replace(with_participant(TERMS, 1, scale=0.5), grid_exponent=10, clip_norm=3.0, noise_multiplier=2.0)
    assert (terms.gamma, terms.noise_stddev(0), terms.noise_stddev(1)) == (1024, 6144, 3072)


def test_the_smallest_threshold_is_what_terms_accept():
    assert [smallest_threshold(count, 0) for count in (2, 3, 4, 5, 10, 100)] == [3, 3, 3, 3, 6, 51]
    assert [smallest_threshold(count, 1) for count in (2, 3, 4, 5, 10)] == [3, 3, 3, 4, 6]
    assert [smallest_threshold(count, 2) for count in (4, 5, 10)] == [4, 4, 7]


def test_an_identity_in_memory_signs_as_a_node_does():
    identity = make_identity()
    signature = identity.sign(b"message")
    for verify in (keys.verify, verify_once, verify_once):
        assert verify(identity.public_line, b"message", signature)
        assert not verify(identity.public_line, b"another", signature)
    assert "sign" not in repr(identity)
