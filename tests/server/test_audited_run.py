"""Runs with an audit: canaries are registered and trained on, a run without noise is found out, a private one not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.node import holder_of
from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault._charging import RefusedError
from fedpriv.holder.vault.holder import run_of
from fedpriv.learning.adapters import lora
from fedpriv.learning.training.canaries import audited
from fedpriv.learning.training.workbench import workbench
from fedpriv.methods.audit import black_box
from fedpriv.methods.audit.black_box import audit_of, registration, run_scores
from fedpriv.privacy.accounting import SubsampledGaussian, epsilon_of
from fedpriv.runs import RunWriter
from simulations.engines import federation
from tests.cli.command_line import as_json
from tests.server.parts import run, summary
from tests.tiny import with_persons

AUDIT = {"audit": "tokens", "audit_canaries": 60}


def audited_run(values, out: Path, **changes) -> tuple[Path, dict]:
    folder = run(values, out, **AUDIT, **changes)
    return folder, summary(folder)


def test_registered_numbers_count_all_canaries_whatever_the_coins_show(small_run, tmp_path):
    folder, told = audited_run(small_run, tmp_path / "run", rounds=1)
    assert [client["num_records"] for client in told["clients"]] == [84 + 60, 56 + 60, 52 + 60]
    config = parse({**small_run, **AUDIT})
    for place, size in enumerate((84, 56, 52)):
        client = audited(config, workbench(config), place)
        assert len(client.records) == size + client.included.sum()
        assert 0 < client.included.sum() < 60
        assert client is audited(config, workbench(config), place)
    found = told["audit"]
    assert (found["num_canaries"], found["num_guesses"], found["confidence"]) == (180, 68, 0.95)
    registered = json.loads((folder / "audit.json").read_text())
    assert {key: found[key] for key in ("kind", "num_canaries", "num_guesses", "sha256")}.items() <= registered.items()
    assert found["roc"]["fpr"][0] == found["roc"]["tpr"][0] == 0
    assert found["roc"]["fpr"][-1] == found["roc"]["tpr"][-1] == 1
    assert found["claimed_epsilon"] == pytest.approx(told["epsilon_local_max"])
    assert not found["refuted"]
    scores = ("--scores", folder / "audit_scores.csv", "--guesses", 68, "--delta", found["delta"])
    again = {key: found[key] for key in ("num_canaries", "num_correct", "epsilon_lower")}
    assert again.items() <= as_json("audit", "one-run", *scores).items()
    page = (folder / "report.html").read_text()
    assert "<h3>Audit</h3>" in page
    assert "stands" in page


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_audit_of_any_number_of_canaries_is_registered_and_carried_out(small_run, repeats):
    config = parse({**small_run, **AUDIT, "audit_canaries": 29, "audit_repeats": repeats})
    bench = workbench(config)
    events = [SubsampledGaussian(noise_multiplier=1.0, sampling_probability=1.0)]
    claim = epsilon_of(events, 1e-5)
    registered = registration(config, bench)
    scores, included = run_scores(config, bench, bench.initial)
    found = audit_of(config, scores, included, registered=registered, events=events, claim=claim)
    assert (found["num_canaries"], found["num_guesses"], found["group_size"]) == (87, 46, repeats)
    assert found["epsilon_lower"] == found["epsilon_lower_f_dp"] == 0.0  # nothing was trained
    client = audited(config, bench, 0)
    assert len(client.records) == 84 + repeats * client.included.sum()
    assert client.num_registered == 84 + 29 * repeats


def test_other_canaries_than_the_registered_ones_end_a_resumed_run(small_run, tmp_path):
    config = parse({**small_run, **AUDIT})
    writer = RunWriter.created(tmp_path / "run", config)
    registered = registration(config, workbench(config))
    for _ in range(2):
        writer.register_audit(registered)
    others = parse({**small_run, **AUDIT, "seed": 1})
    with pytest.raises(InputError, match="other canaries, coins or guesses were registered"):
        writer.register_audit(registration(others, workbench(others)))


def test_sums_are_audited_against_the_claim_about_those_who_see_sums_alone(small_run, tmp_path):
    sums = {"secure_aggregation": True, "local_steps": 1, "min_clients": 3, "rounds": 1}
    _, told = audited_run(small_run, tmp_path / "run", **sums)
    assert told["audit"]["claimed_epsilon"] == pytest.approx(told["epsilon_aggregate_max"])
    assert told["epsilon_aggregate_max"] < told["epsilon_local_max"]


@pytest.mark.slow
def test_a_run_that_learns_its_records_by_heart_is_found_out_and_its_private_twin_is_not(small_run, tmp_path):
    much = {"layers": "all", "rank": 16, "rounds": 4, "local_steps": 20, "batch_size": 50, "clip_norm": 100.0}
    much |= {"optimizer": "adamw", "learning_rate": 0.02}
    _, plain = audited_run(small_run, tmp_path / "plain", **much, noise_multiplier=0.0)
    _, private = audited_run(small_run, tmp_path / "private", **much, target_epsilon=0.3, noise_multiplier=BY_RECIPE)
    assert plain["audit"]["epsilon_lower"] > 0.3 >= private["audit"]["epsilon_lower"]
    assert not private["audit"]["refuted"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "on-nodes", "test_data": "x.csv", "labels": ["a", "b"]}, "audit a simulation"),
        ({"aggregation": "flora"}, "more than one adapter"),
        ({"noise_on": "upload"}, "protects whole clients"),
        ({"audit": "mislabelled", "audit_canaries": 70}, "num = 70: the client has only 56 records to mislabel"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(small_run, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        run(small_run | AUDIT, tmp_path / "run", **changes)


def test_a_node_of_its_own_takes_no_canaries(small_run):
    values = {**small_run, **AUDIT}
    context = next(iter(federation.SimulatedNodes(parse(values)).values()))
    assert run_of(context.run_config, holder_of(context)).audit == "tokens"
    context.node_config.pop("trust-run-config")
    with pytest.raises(RefusedError, match="takes no data from a run"):
        run_of(context.run_config, holder_of(context))


def test_a_person_who_is_a_canary_has_several_records_and_counts_once(small_run, table, tmp_path):
    values = small_run | {"data": str(with_persons(table, tmp_path / "t.csv", 3)), "person_column": "patient"}
    _, told = audited_run(values, tmp_path / "run", audit_repeats=3, rounds=1)
    assert told["audit"]["group_size"] == 1
    assert told["audit"]["claimed_epsilon"] == told["epsilon_local_max"]
    config = parse({**values, **AUDIT, "audit_repeats": 3})
    bench = workbench(config)
    client, own = audited(config, bench, 0), bench.client(0)
    num = int(client.included.sum())
    assert told["clients"][0]["num_records"] == client.num_registered == own.num_units + 60
    assert (len(client.records), client.records.num_units) == (len(own) + 3 * num, own.num_units + num)


def test_a_claim_that_is_understated_is_refuted(small_run):
    """A model that was trained on the canaries alone, without noise, against events that claim much of it."""
    config = parse({**small_run, **AUDIT, "layers": "all", "rank": 16})
    bench = workbench(config)
    clients = [audited(config, bench, place) for place in range(3)]
    lora.write_parameters(bench.model.parameters, bench.initial)
    items = [item for one in clients for item in one.canaries.part(np.flatnonzero(one.included).tolist()).items()]
    optimizer = torch.optim.Adam(bench.model.parameters.values(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        bench.model.predictions(items, cached=False).losses.mean().backward()
        optimizer.step()
    final = lora.read_parameters(bench.model.parameters)
    events = [SubsampledGaussian(noise_multiplier=100.0, sampling_probability=1.0)]
    claim = epsilon_of(events, 1e-5)
    registered = registration(config, bench)
    found = audit_of(config, *run_scores(config, bench, final), registered=registered, events=events, claim=claim)
    assert found["refuted"]
    assert found["epsilon_lower_f_dp"] > claim.epsilon
    without = audit_of(config, *run_scores(config, bench, final), registered=registered, events=[], claim=claim)
    assert "epsilon_lower_f_dp" not in without


def test_coins_that_all_fall_alike_are_refused_before_the_first_round(small_run, monkeypatch):
    config = parse({**small_run, **AUDIT})
    bench = workbench(config)
    alike = [replace(audited(config, bench, place), included=np.ones(60, dtype=bool)) for place in range(3)]
    monkeypatch.setattr(black_box, "_clients", lambda *_: alike)
    with pytest.raises(InputError, match="audit_canaries = 60: by chance all or none of 180"):
        registration(config, bench)
