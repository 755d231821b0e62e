"""Charges from before an interruption: each pays for one request, and none is forgotten."""

from dataclasses import replace

import pytest
import torch

from fedpriv.config import parse
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from server.bookkeeping import Books
from server.costs import EarlierCharges

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


def test_a_part_in_a_sum_that_was_interrupted_is_spent_before_the_next_attempt_is_judged(tmp_path):
    """Another attempt has other terms, so it is another release: a budget for one round does not allow both."""
    keys = {"recipe": "per-sample", "local_steps": 1, "rounds": 3, "sampling_probability": 0.25}
    keys |= {"secure_aggregation": True, "mechanism": "discrete-gaussian", "optimizer": "sgd", "min_clients": 3}
    config = parse(keys | {"noise_multiplier": 2.0, "delta": 1e-5, "privacy_view": "local"})
    adapter = {"A": torch.zeros(2, 3), "B": torch.zeros(4)}
    registered = [
        Registration(client=c, num_records=400, name="", data_set=f"d{c}", keeps_replies=True) for c in range(3)
    ]
    one = Books(config, "run", registered, initial=adapter).costs.event(0, 1)
    config = replace(config, budget_epsilon=(1.01 * epsilon_of([one], 1e-5).epsilon,))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        books = Books(config, "run", registered, initial=adapter, ledger=ledger)
        assert books.within_budget(1, range(3)) == [0, 1, 2]
        books.charge(1, dict.fromkeys(range(3), "terms of the first attempt"))
        resumed = Books(config, "run", registered, initial=adapter, ledger=ledger, resumed_after=0)
        assert resumed.within_budget(1, range(3)) == []
        assert [resumed.accounts.num_releases(client) for client in range(3)] == [1, 1, 1]
