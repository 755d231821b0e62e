"""Runs with an audit: canaries are registered and trained on, a run without noise is found out, a private one not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.node import holder_of
from fedpriv.audit.black_box import audit_of, audited
from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.training.workbench import workbench
from fedpriv.vault._charging import RefusedError
from fedpriv.vault.holder import run_of
from server.observer import LogObserver
from simulations.engines import federation

AUDIT = {"audit": "tokens", "audit_canaries": 60}


def run(values, out: Path, **changes) -> tuple[Path, dict]:
    federation.run(parse({**values, **AUDIT, "out": str(out), **changes}), LogObserver())
    return out, json.loads((out / "summary.json").read_text())


def test_registered_numbers_count_all_canaries_whatever_the_coins_show(small_run, tmp_path):
    folder, summary = run(small_run, tmp_path / "run")
    assert [client["num_records"] for client in summary["clients"]] == [84 + 60, 56 + 60, 52 + 60]
    config = parse({**small_run, **AUDIT})
    for place, size in enumerate((84, 56, 52)):
        client = audited(config, workbench(config), place)
        assert len(client.records) == size + client.included.sum()
        assert 0 < client.included.sum() < 60
        assert client is audited(config, workbench(config), place)
    found = summary["audit"]
    assert (found["num_canaries"], found["num_guesses"], found["confidence"]) == (180, 90, 0.95)
    assert found["claimed_epsilon"] == pytest.approx(summary["epsilon_local_max"])
    assert not found["refuted"]
    page = (folder / "report.html").read_text()
    assert "<h3>Audit</h3>" in page
    assert "stands" in page


@pytest.mark.parametrize(("num", "num_guesses"), [(29, 42), (30, 44), (31, 46), (32, 48), (50, 74)])
def test_half_of_any_number_of_canaries_is_an_even_number_of_guesses(small_run, num, num_guesses):
    """Three clients with 30 or 50 canaries each: half of 90 and of 150 are odd, and a guess needs its counterpart."""
    config = parse({**small_run, **AUDIT, "audit_canaries": num})
    bench = workbench(config)
    found = audit_of(config, bench, bench.initial, delta=1e-5, claimed_epsilon=1.0)
    assert (found["num_canaries"], found["num_guesses"]) == (3 * num, num_guesses)


@pytest.mark.slow
def test_a_run_that_learns_its_records_by_heart_is_found_out_and_its_private_twin_is_not(small_run, tmp_path):
    much = {"layers": "all", "rank": 16, "rounds": 4, "local_steps": 20, "batch_size": 50, "clip_norm": 100.0}
    much |= {"optimizer": "adamw", "learning_rate": 0.02}
    _, plain = run(small_run, tmp_path / "plain", **much, noise_multiplier=0.0)
    _, private = run(small_run, tmp_path / "private", **much, target_epsilon=0.3, noise_multiplier=BY_RECIPE)
    assert plain["audit"]["epsilon_lower"] > 0.3 >= private["audit"]["epsilon_lower"]
    assert not private["audit"]["refuted"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "on-nodes", "test_data": "x.csv", "labels": ["a", "b"]}, "audit a simulation"),
        ({"aggregation": "flora"}, "more than one adapter"),
        ({"noise_on": "upload"}, "protects whole clients"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(small_run, changes, message):
    with pytest.raises(InputError, match=message):
        parse({**small_run, **AUDIT, **changes})


def test_too_few_records_to_mislabel_are_refused(small_run, tmp_path):
    with pytest.raises(InputError, match="num = 60: the client has only 56 records to mislabel"):
        audited(parse({**small_run, **AUDIT, "audit": "mislabelled"}), workbench(parse(small_run)), 1)


def test_a_node_of_its_own_takes_no_canaries(small_run):
    values = {**small_run, **AUDIT}
    context = federation.contexts(parse(values))[0]
    assert run_of(context.run_config, holder_of(context)).audit == "tokens"
    context.node_config.pop("trust-run-config")
    with pytest.raises(RefusedError, match="takes no data from a run"):
        run_of(context.run_config, holder_of(context))
