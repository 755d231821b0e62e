"""A simulation that leaves out the masks ends with the same bits as one with the whole protocol, in every engine."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.sums import _messages
from fedpriv.holder.vault import _summed
from fedpriv.privacy.ledger.entries import CHARGED
from fedpriv.privacy.ledger.reader import reading
from server.sums import SecureSums
from tests.marks import slow
from tests.server.parts import global_adapter, run, summary

# Clients with as many records each, so that all have one event to account for.
SUMS = {"secure_aggregation": True, "min_clients": 3, "local_steps": 1, "num_clients": 3, "rounds": 3}
SUMS |= {"client_column": "", "partition": "iid"}


@pytest.fixture(scope="module")
def values(small_run):
    return small_run | SUMS


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = global_adapter(one), global_adapter(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def charges(ledger: Path) -> list[tuple]:
    with reading(ledger) as db:
        return [(e.client, e.round, e.event, e.aggregate_scale) for e in db.entries() if e.phase == CHARGED]


KINDS = {
    "upload": {"noise_on": "upload", "noise_multiplier": 20.0, "local_steps": 2, "optimizer": "adamw", "rounds": 2},
    "unequal": {"client_weights": "root-records", "partition": "natural", "client_column": "site", "rounds": 2},
    "recipe": {"recipe": "fedpriv", "batch_size": "by recipe", "noise_multiplier": "by recipe", "layers": "last-1"},
}


@pytest.fixture(scope="module")
def plain(values, tmp_path_factory) -> Path:
    """The folder of a run without masks, by the stacked engine."""
    return run(values, tmp_path_factory.mktemp("runs") / "plain")


@pytest.mark.parametrize("kind", ["unequal", "recipe", *slow("upload")])
def test_masks_cancel_to_the_bit(values, tmp_path, kind):
    unmasked = run(values, tmp_path / "unmasked", **KINDS[kind])
    masked = run(values, tmp_path / "masked", secure_masks=True, **KINDS[kind])
    assert_same(unmasked, masked)
    assert charges(unmasked / "ledger.sqlite") == charges(masked / "ledger.sqlite")
    assert summary(masked)["adapters_moved"]
    assert summary(unmasked)["bytes_up"] < summary(masked)["bytes_up"], "keys and shares are counted"


@pytest.mark.parametrize("engine", ["in-process", *slow("ray", "flower")])
def test_engines_agree(values, plain, tmp_path, engine):
    """Flower's own engine sums without masks."""
    other = global_adapter(run(values, tmp_path / engine, engine=engine, secure_masks=engine != "flower"))
    for name, tensor in global_adapter(plain).items():
        torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=1e-4)


class Deaf:
    """A node that fails at one step of one round."""

    def __init__(self, monkeypatch, step: str, client: int, round_: int) -> None:
        self.step, self.client, self.round = step, client, round_
        for name in ("share", "mask", "confirm", "reveal"):
            monkeypatch.setattr(_summed.Session, name, self.wrapped(name, getattr(_summed.Session, name)))

    def wrapped(self, name, method):
        def step(session, *args):
            if (name, session.client, session.terms.round) == (self.step, self.client, self.round):
                raise RuntimeError("gone")
            return method(session, *args)

        step.__name__ = name
        return step


@pytest.mark.parametrize("step", ["share", "mask", pytest.param("confirm", marks=pytest.mark.slow), "reveal"])
def test_who_drops_out_before_its_vector_is_not_in_the_sum_and_who_does_later_is(values, tmp_path, monkeypatch, step):
    Deaf(monkeypatch, step, client=1, round_=2)
    folder = run(values, tmp_path / "run", secure_masks=True, sampling_probability=0.25, num_clients=4, rounds=2)
    rows = pd.read_csv(folder / "clients.csv").query("round == 2").set_index("client")
    others = dict.fromkeys((0, 2, 3), "ok")
    assert rows["status"].to_dict() == {1: {"share": "left out", "mask": "failed"}.get(step, "ok"), **others}
    in_round = {client: scale for client, round_, _, scale in charges(folder / "ledger.sqlite") if round_ == 2}
    # Who dealt no shares was not asked for a vector, so it is not charged; whoever was asked is.
    assert in_round.keys() == ({"0", "2", "3"} if step == "share" else {"0", "1", "2", "3"})
    assert list(in_round.values()) == pytest.approx([2**0.5] * len(in_round)), "of three, one reads it"
    page = (folder / "report.html").read_text()
    assert ("Round 2 without" in page) == (step in ("share", "mask"))


def test_a_round_repeated_after_a_crash_is_a_new_attempt_with_its_own_charges(values, plain, tmp_path, monkeypatch):
    close, attempts = SecureSums.total, []

    def crash(self, link, round_, opened, vectors):
        attempts.append(opened.terms.attempt)
        if len(attempts) == 2:
            raise RuntimeError("the server's machine loses power")
        return close(self, link, round_, opened, vectors)

    monkeypatch.setattr(SecureSums, "total", crash)
    with pytest.raises(RuntimeError, match="power"):
        run(values, tmp_path / "run", secure_masks=True)
    run(values, tmp_path / "run", secure_masks=True, resume=str(tmp_path / "run"))
    assert len(set(attempts)) == 4
    charged = [round_ for _, round_, _, _ in charges(tmp_path / "run" / "ledger.sqlite")]
    assert charged == [1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    # Seeded noise is the same again: in a simulation the model is that of a run without a crash.
    assert_same(plain, tmp_path / "run")


@pytest.mark.parametrize("masks", [True, *slow(False)])
def test_rounds_without_noise_that_follow_for_comparison_need_no_sum(values, tmp_path, masks):
    folder = run(values, tmp_path / "run", comparison=True, secure_masks=masks, rounds=1)
    assert summary(folder)["accuracy_non_private"] is not None
    assert {scale is None for _, _, _, scale in charges(folder / "ledger.sqlite")} == {False}


def test_the_figures_of_a_sum_are_those_of_the_same_noise_that_everybody_sees(values, plain, tmp_path):
    """On the local view hiding the uploads saves nothing; on the sum's view three equal clients have sqrt(2)."""
    seen = run({**values, "secure_aggregation": False, "min_clients": 1}, tmp_path / "seen")
    ours, theirs = summary(plain), summary(seen)
    assert ours["epsilon_local_max"] == pytest.approx(theirs["epsilon_local_max"], rel=1e-3)
    assert ours["epsilon_local_max"] > theirs["epsilon_local_max"], "rounding costs something"
    assert ours["epsilon_aggregate_max"] < ours["epsilon_local_max"] / 1.5
    assert theirs["epsilon_aggregate_max"] is None
    assert replace(parse(values), secure_masks=True).digest != parse(values).digest


FIVE = {"num_clients": 5, "min_clients": 4}


def of_round(folder: Path, round_: int) -> list[str]:
    """The clients that were charged in a round, once for each charge."""
    return sorted(client for client, number, *_ in charges(folder / "ledger.sqlite") if number == round_)


class Dealer:
    """A node that deals what it likes; `asked` are the clients that were asked for shares, in order."""

    def __init__(self, monkeypatch, client: int, deal) -> None:
        self.asked: list[int] = []
        share = _summed.Session.share

        def dealt(session, message):
            self.asked.append(session.client)
            return deal(session, message, share) if session.client == client else share(session, message)

        monkeypatch.setattr(_summed.Session, "share", dealt)


def unreadable(session, message, share):
    """Shares that no peer can open."""
    parts = _messages.dealt_from_text(share(session, message), session.client)
    return _messages.sealed_text({k: part if k == session.client else bytes(len(part)) for k, part in parts.items()})


def inconsistent(session, message, share):
    """Shares that open and fit their hashes, of another seed than the node masks with."""
    state = session._state
    session._state = replace(state, self_seed=bytes(16))
    text = share(session, message)
    session._state = replace(session._state, begun=state)
    return text


def test_a_dealer_of_unreadable_shares_is_left_out_uncharged_and_in_a_resumed_run_too(values, tmp_path, monkeypatch):
    """The run ends in a round of which too few vectors come: by name, and with its charges."""
    dealer, folder = Dealer(monkeypatch, 1, unreadable), tmp_path / "run"
    with monkeypatch.context() as patch:
        Deaf(patch, "mask", client=2, round_=2)
        with pytest.raises(TooFewClientsError, match=r"round 2: masked vectors: came from 3 clients, must .* 4"):
            run(values, folder, secure_masks=True, **FIVE)
    rows = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")
    assert rows["status"].to_dict() == {0: "ok", 1: "left out", 2: "ok", 3: "ok", 4: "ok"}
    assert "dealt shares of no use" in rows["detail"][1]
    run(values, folder, secure_masks=True, **FIVE, resume=str(folder))
    assert [of_round(folder, round_) for round_ in (1, 2, 3)] == [["0", "2", "3", "4"]] * 3, "each once"
    assert dealer.asked.count(1) == 1


def test_a_dealer_of_another_seed_costs_a_round_and_is_asked_no_more(values, tmp_path, monkeypatch):
    dealer = Dealer(monkeypatch, 1, inconsistent)
    folder = run(values, tmp_path / "run", secure_masks=True, **FIVE)
    assert of_round(folder, 1) == ["0", "1", "2", "3", "4"], "nobody is charged again for its round"
    assert [of_round(folder, round_) for round_ in (2, 3)] == [["0", "2", "3", "4"]] * 2
    assert "the shares that it dealt do not give the seed" in summary(folder)["clients"][1]["retired"]
    assert summary(folder)["adapters_moved"]
    assert dealer.asked.count(1) == 1


def test_without_a_dishonest_dealer_too_few_may_be_left_and_nobody_is_charged(values, tmp_path, monkeypatch):
    Dealer(monkeypatch, 1, unreadable)
    with pytest.raises(TooFewClientsError, match=r"round 1: client 1: dealt shares of no use: .* 4 clients are left"):
        run(values, tmp_path / "run", secure_masks=True, **{**FIVE, "min_clients": 5})
    assert charges(tmp_path / "run" / "ledger.sqlite") == []
