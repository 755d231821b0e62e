"""A simulation that leaves out the masks ends with the same bits as one with the whole protocol, in every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedpriv.config import parse
from fedpriv.errors import TooFewClientsError
from fedpriv.ledger.entries import CHARGED, entries
from fedpriv.ledger.reader import reading
from fedpriv.vault import summed
from server.observer import LogObserver
from server.sums import Sums
from simulations.engines import federation

SUMS = {"secure_aggregation": True, "min_clients": 3, "local_steps": 1, "num_clients": 3, "rounds": 3}


@pytest.fixture
def values(small_run):
    return small_run | SUMS


def run(values, out: Path, **changes) -> Path:
    federation.run(parse({**values, **changes, "out": str(out)}), LogObserver())
    return out


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "variants" / "global" / "adapter_model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = adapter(one), adapter(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def charges(ledger: Path) -> list[tuple]:
    with reading(ledger) as db:
        return [(e.client, e.round, e.event, e.aggregate_scale) for e in entries(db) if e.phase == CHARGED]


KINDS = {
    "gradients": {},
    "upload": {"noise_on": "upload", "noise_multiplier": 20.0, "local_steps": 2, "optimizer": "adamw"},
    "unequal": {"client_weights": "root-records"},
    "recipe": {"recipe": "fedpriv", "batch_size": "by recipe", "noise_multiplier": "by recipe", "layers": "last-1"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_cancel_to_the_bit(values, tmp_path, kind):
    plain = run(values, tmp_path / "plain", **KINDS[kind])
    masked = run(values, tmp_path / "masked", secure_masks=True, **KINDS[kind])
    assert_same(plain, masked)
    assert charges(plain / "ledger.sqlite") == charges(masked / "ledger.sqlite")
    untrained = json.loads((masked / "summary.json").read_text())
    assert untrained["adapters_moved"]
    sent = [json.loads((folder / "summary.json").read_text())["bytes_up"] for folder in (plain, masked)]
    assert sent[0] < sent[1], "keys and shares are counted"


@pytest.mark.parametrize("engine", ["in-process", pytest.param("ray", marks=pytest.mark.slow)])
def test_engines_agree(values, tmp_path, engine):
    one = run(values, tmp_path / "stacked")
    other = run(values, tmp_path / engine, engine=engine, secure_masks=True)
    ours, theirs = adapter(one), adapter(other)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_flowers_own_engine_sums_without_masks(values, tmp_path):
    one = run(values, tmp_path / "stacked")
    other = run(values, tmp_path / "flower", engine="flower")
    for name, tensor in adapter(one).items():
        torch.testing.assert_close(adapter(other)[name], tensor, atol=2e-5, rtol=1e-4)


class Deaf:
    """A node that fails at one step of one round."""

    def __init__(self, monkeypatch, step: str, client: int, round_: int) -> None:
        self.step, self.client, self.round = step, client, round_
        for name in ("share", "mask", "confirm", "reveal"):
            monkeypatch.setattr(summed.Session, name, self.wrapped(name, getattr(summed.Session, name)))

    def wrapped(self, name, method):
        def step(session, *args):
            if (name, session.client, session.terms.round) == (self.step, self.client, self.round):
                raise RuntimeError("gone")
            return method(session, *args)

        step.__name__ = name
        return step


@pytest.mark.parametrize("step", ["share", "mask", "confirm", "reveal"])
def test_who_drops_out_before_its_vector_is_not_in_the_sum_and_who_drops_out_later_is(
    values, tmp_path, monkeypatch, step
):
    Deaf(monkeypatch, step, client=1, round_=2)
    four = {"num_clients": 4, "client_column": "", "min_clients": 3}
    folder = run(values, tmp_path / "run", secure_masks=True, sampling_probability=0.25, **four)
    rows = pd.read_csv(folder / "clients.csv").query("round == 2").set_index("client")
    others = dict.fromkeys((0, 2, 3), "ok")
    assert rows["status"].to_dict() == {1: {"share": "left out", "mask": "failed"}.get(step, "ok"), **others}
    in_round = {client: scale for client, round_, _, scale in charges(folder / "ledger.sqlite") if round_ == 2}
    # Who dealt no shares was not asked for a vector, so it is not charged; whoever was asked is.
    assert in_round.keys() == ({"0", "2", "3"} if step == "share" else {"0", "1", "2", "3"})
    assert list(in_round.values()) == pytest.approx([2**0.5] * len(in_round)), "of three, one reads it"
    page = (folder / "report.html").read_text()
    assert ("Round 2 without" in page) == (step in ("share", "mask"))


def test_a_round_with_too_few_ends_by_name_and_its_charges_stand(values, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        Deaf(patch, "mask", client=2, round_=2)
        with pytest.raises(TooFewClientsError, match=r"round 2: masked vectors: came from 2 clients, must .* 3"):
            run(values, tmp_path / "run", secure_masks=True)
    before = charges(tmp_path / "run" / "ledger.sqlite")
    assert [round_ for _, round_, _, _ in before] == [1, 1, 1, 2, 2, 2]
    run(values, tmp_path / "run", secure_masks=True, resume=str(tmp_path / "run"))
    after = charges(tmp_path / "run" / "ledger.sqlite")
    assert after[:6] == before
    assert [round_ for _, round_, _, _ in after[6:]] == [3, 3, 3]


def test_a_round_that_is_repeated_after_a_crash_is_a_new_attempt_with_charges_of_its_own(values, tmp_path, monkeypatch):
    close, attempts = Sums.close, []

    def crash(self, link, round_, opened, vectors):
        attempts.append(opened.terms.attempt)
        if len(attempts) == 2:
            raise RuntimeError("the server's machine loses power")
        return close(self, link, round_, opened, vectors)

    monkeypatch.setattr(Sums, "close", crash)
    with pytest.raises(RuntimeError, match="power"):
        run(values, tmp_path / "run", secure_masks=True)
    run(values, tmp_path / "run", secure_masks=True, resume=str(tmp_path / "run"))
    assert len(set(attempts)) == 4
    charged = [round_ for _, round_, _, _ in charges(tmp_path / "run" / "ledger.sqlite")]
    assert charged == [1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    # Seeded noise is the same again: in a simulation the model is that of a run without a crash.
    assert_same(run(values, tmp_path / "whole"), tmp_path / "run")


@pytest.mark.parametrize("masks", [False, True])
def test_rounds_without_noise_that_follow_for_comparison_need_no_sum(values, tmp_path, masks):
    folder = run(values, tmp_path / "run", comparison=True, secure_masks=masks, rounds=1)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_non_private"] is not None
    assert {scale is None for _, _, _, scale in charges(folder / "ledger.sqlite")} == {False}


def test_the_figures_of_a_sum_are_those_of_the_same_noise_that_everybody_sees(values, tmp_path):
    """On the local view hiding the uploads saves nothing; on the sum's view three equal clients have sqrt(3)."""
    equal = {"partition": "iid", "client_column": ""}
    hidden = run(values, tmp_path / "hidden", **equal)
    seen = run({**values, "secure_aggregation": False, "min_clients": 1}, tmp_path / "seen", **equal)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (hidden, seen))
    assert ours["epsilon_local_max"] == pytest.approx(theirs["epsilon_local_max"], rel=1e-3)
    assert ours["epsilon_local_max"] > theirs["epsilon_local_max"], "rounding costs something"
    assert ours["epsilon_aggregate_max"] < ours["epsilon_local_max"] / 1.5
    assert theirs["epsilon_aggregate_max"] is None
    assert replace(parse(values), secure_masks=True).digest != parse(values).digest
