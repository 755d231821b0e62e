"""Charges from before an interruption: each pays for one request, and none is forgotten."""

from __future__ import annotations

import pytest

from fedpriv.accounting.events import SubsampledGaussian
from fedpriv.accounting.views import Release
from fedpriv.ledger.entries import Key
from server.earlier_charges import EarlierCharges

RELEASE = Release(event=SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.1), rho_bar=1.0)


def key(round_: int, client: int = 0) -> Key:
    return Key(run="run", client=str(client), round=round_, request="digest")


@pytest.fixture
def charges() -> EarlierCharges:
    """Client 0 repeats its replies, client 1 does not."""
    made = EarlierCharges()
    made.add(key(3), RELEASE, reusable=True)
    made.add(key(3, client=1), RELEASE, reusable=False)
    return made


def test_a_request_without_an_earlier_charge_keeps_its_key(charges: EarlierCharges) -> None:
    assert charges.key_for(key(4)) == (key(4), False)


def test_a_client_that_repeats_its_reply_is_paid_for_once(charges: EarlierCharges) -> None:
    assert charges.key_for(key(3)) == (key(3), True)
    again, is_paid = charges.key_for(key(3))
    assert again != key(3)
    assert not is_paid


def test_a_client_that_computes_another_release_gets_another_key(charges: EarlierCharges) -> None:
    first, is_paid = charges.key_for(key(3, client=1))
    assert not is_paid
    assert first not in charges
    charges.add(first, RELEASE, reusable=False)
    assert charges.key_for(key(3, client=1))[0] not in (first, key(3, client=1))


def test_unused_charges_are_counted_once_and_not_before_their_round(charges: EarlierCharges) -> None:
    assert charges.pop_unused(2) == []
    assert charges.pop_unused(3) == [(0, RELEASE)]
    assert charges.pop_unused(3) == []
    assert key(3) in charges
