"""LMO noise in whole runs: what is charged is what was noised, targets are met, `published` is marked everywhere."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from fedpriv.config import BY_RECIPE, parse
from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging, _guard, holder
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.learning.training.local_update import UpdateSpec, planned_event
from fedpriv.learning.training.noise_plan import calibrated
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledLmo
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from fedpriv.privacy.ledger import statement
from fedpriv.privacy.ledger.reader import reading
from tests.server import parts
from tests.server.parts import run, summary

UNIFORM = '{"combination": "mixture", "uniform": {"weight": 1.0, "low": 0.1, "high": 0.5}}'
PUBLISHED = UNIFORM.replace("{", '{"accounting": "published", ', 1)
PAPERS = {"target_epsilon_published": 3.0, "noise_multiplier": BY_RECIPE, "mechanism_parameters": PUBLISHED}
TARGETED = {"target_epsilon": 3.0, "noise_multiplier": BY_RECIPE}
LMO = {"mechanism": "lmo", "mechanism_parameters": UNIFORM, "noise_multiplier": 2.0}


@pytest.fixture(scope="module")
def once(small_run, tmp_path_factory) -> Path:
    """A run of one round."""
    return run(small_run, tmp_path_factory.mktemp("lmo") / "run", **LMO, rounds=1, clipping="split")


def test_the_ledger_holds_lmo_noise_for_all_values_of_the_adapter_and_its_epsilon_is_the_sound_one(small_run, once):
    values, found = workbench(parse(small_run)).initial, summary(once)
    rows = pd.read_csv(once / "clients.csv")
    charged = parts.events_charged(once / "ledger.sqlite")
    assert len(charged) == 3
    for client in found["clients"]:
        events = charged[client["name"]]
        assert {type(event) for event in events} == {SubsampledLmo}
        for event in events:
            assert event.parameters == LmoParameters.from_json(UNIFORM).scaled(0.5)
            assert event.dimension == sum(tensor.numel() for tensor in values.values())
            assert event.sensitivity == pytest.approx(3**0.5), "split, with a head"
            assert event.sampling_probability == 8 / client["num_records"]
        assert client["epsilon_local"] == pytest.approx(epsilon_of(events, client["delta"]).epsilon)
        assert client["epsilon_rho"] > client["epsilon_local"] > 0
    assert not found["private"], "it is a simulation"
    assert found["epsilon_aggregate_max"] is None
    # Between the Gaussian of the same Fisher information and that of the same variance.
    assert 2 / 3**0.5 < rows.effective_noise_multiplier.iloc[0] < 2 * 40**0.5 / 3**0.5


def test_a_budget_retires_who_would_pass_it(small_run, once, tmp_path):
    budget = 1.05 * summary(once)["epsilon_local_max"]
    found = summary(run(small_run, tmp_path / "run", **LMO, clipping="split", budget_epsilon=budget, rounds=4))
    assert any(client["retired"] for client in found["clients"])
    assert found["epsilon_local_max"] <= budget


def schedule_of(small_run, **changes) -> SubsampledLmo:
    """All releases of a run that is calibrated as these keys say, of one of three clients with 52 records."""
    config = parse({**small_run, **LMO, **changes})
    initial = workbench(parse(small_run)).initial
    found = UpdateSpec.of(calibrated(config, [52] * 3, initial))
    event = planned_event(found, config.sampling_probability or 8 / 52, initial)
    return replace(event, count=config.rounds * event.count)


@pytest.mark.parametrize(
    ("view", "sampling_probability"),
    # Every day all records take part: a step of the search takes far longer where they are sampled.
    [("local", 1.0), *(pytest.param(view, "", marks=pytest.mark.slow) for view in ("local", "rho"))],
)
def test_a_target_epsilon_is_met_and_no_noise_is_wasted(small_run, view, sampling_probability):
    event = schedule_of(small_run, **TARGETED, privacy_view=view, sampling_probability=sampling_probability)
    scale = 3**0.5 if view == "rho" else 1.0
    assert 2.9 < epsilon_of([replace(event, sensitivity=event.sensitivity * scale)], 1e-5).epsilon <= 3.0


def test_the_papers_terms_are_met_by_their_own_figure_and_what_is_proven_of_the_noise_is_more(small_run):
    schedule = schedule_of(small_run, **PAPERS)
    assert 2.99 < epsilon_of([schedule], 1e-5, allow_unproven=True).epsilon <= 3.0
    assert epsilon_of([schedule], 1e-5).epsilon == float("inf")
    assert 6.0 < epsilon_of([schedule.proven], 1e-5).epsilon < float("inf")


def test_published_accounting_is_marked_as_no_guarantee_in_summary_report_log_and_ledger(small_run, tmp_path, caplog):
    public = {**LMO, **PAPERS, "simulate": False, "public_data": True, "baselines": False, "rounds": 1}
    folder = run(small_run, tmp_path / "run", **public)
    found = summary(folder)
    assert (found["private"], found["epsilon_local_max"]) == (False, "inf")
    assert 2.99 < found["epsilon_as_published_max"] <= 3.0
    assert 6.0 < found["epsilon_sound_max"] < float("inf")
    assert "NO privacy guarantee" in caplog.text
    page = (folder / "report.html").read_text()
    assert all(text in page for text in ("Not private", "accounted as published", "what is proven of this noise is"))
    with reading(folder / "ledger.sqlite") as db:
        (first, *_) = statement.statement(db, folder / "ledger.sqlite", "0")
    assert not first["private"]
    assert "NOT A PRIVACY GUARANTEE" in statement.render(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism_parameters": ""}, "needs mechanism_parameters, a file or JSON; fedpriv lmo search finds some"),
        ({"mechanism": "gaussian"}, "mechanism_parameters = .*: mechanism = gaussian takes none"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0"),
        ({"aggregation": "flora", "client_ranks": [2, 4, 8]}, "client_ranks"),
        ({**TARGETED, "mechanism_parameters": PUBLISHED}, "is no privacy guarantee"),
        ({"mechanism_parameters": PUBLISHED, "budget_epsilon": 3.0}, "is no privacy guarantee"),
        ({**PAPERS, "budget_epsilon": 3.0}, "is no privacy guarantee"),
        ({**PAPERS, "target_risk": "mu=1"}, "is no privacy guarantee"),
        ({**PAPERS, "noise_multiplier": 1.0}, "give one of the two"),
        ({**PAPERS, "mechanism_parameters": UNIFORM}, "target_epsilon_published = 3: is of mechanism = lmo with"),
        ({**PAPERS, "mechanism": "gaussian", "mechanism_parameters": ""}, "target_epsilon_published = 3"),
    ],
)
def test_what_does_not_fit_lmo_noise_is_refused_by_name(small_run, changes, message):
    with pytest.raises(InputError, match=message):
        parse({**small_run, **LMO, **changes})


# A deployed coordinator reads its configuration by the first, a node's vault each message's by the second.
@pytest.mark.parametrize("read", [parse, holder.parsed])
def test_a_coordinator_and_a_node_refuse_the_papers_terms(read):
    deployed = {"data": "on-nodes", "labels": "a,b", **LMO, **PAPERS}
    with pytest.raises(InputError, match="for simulations alone; data = on-nodes needs target_epsilon"):
        read(deployed)
    assert read({**deployed, "target_epsilon_published": "", "mechanism_parameters": UNIFORM}).data == "on-nodes"


def test_a_file_without_parameters_is_refused_and_nothing_is_written(small_run, tmp_path):
    (tmp_path / "weights.json").write_text(UNIFORM.replace("1.0", "0.5"))
    for path, message in (("none.json", "cannot be read"), ("weights.json", "must sum to 1")):
        with pytest.raises(InputError, match=message):
            run(small_run, tmp_path / "run", **{**LMO, "mechanism_parameters": str(tmp_path / path)})
    assert not (tmp_path / "run").exists()


SPEC = UpdateSpec.of(parse({"data": "x.csv", **LMO}))
OWN = _charging.NodePolicy(allow_unrecorded=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism_parameters": PUBLISHED}, "is no privacy guarantee"),
        ({"mechanism_parameters": PUBLISHED.replace("published", "wishful")}, "must be one of"),
        ({"mechanism_parameters": "{}"}, "mechanism_parameters: "),
        ({"mechanism_parameters": UNIFORM.replace("1.0", "0.9")}, "must sum to 1"),
    ],
)
def test_a_node_refuses_noise_that_protects_nothing(changes, message):
    _guard.check_instruction(SPEC, OWN, noise_source="secure", num_registered=100)
    with pytest.raises(_charging.RefusedError, match=message):
        _guard.check_instruction(replace(SPEC, **changes), OWN, noise_source="secure", num_registered=100)


def test_a_node_limits_lmo_noise_by_its_gaussian_equal(small_run):
    initial, limits = workbench(parse(small_run)).initial, NodeLimits(min_effective_noise_multiplier=1.0)
    _guard.check_limits(SPEC, planned_event(SPEC, 0.1, initial), 1, limits)
    weak = planned_event(replace(SPEC, noise_multiplier=0.05), 0.1, initial)
    with pytest.raises(_charging.RefusedError, match="its effective value"):
        _guard.check_limits(SPEC, weak, 1, limits)
