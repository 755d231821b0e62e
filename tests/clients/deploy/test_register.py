"""How an operator says what enforces the budget: a filter or plans, noted in the ledger and shown by doctor."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from clients.deploy.folder import Node
from fedpriv.errors import InputError
from fedpriv.holder.vault import _charging
from fedpriv.holder.vault.holder import Holder
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.filters import CommittedPlan, CommittedPlans, RenyiFilter, to_json
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import reader, statement
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs.plan import budget
from server.costs import RoundCosts
from tests.cli import inputs
from tests.cli.command_line import as_json, fedpriv
from tests.clients.deploy.conftest import charge, check, kit
from tests.tiny import with_persons

NUM_RECORDS = 240  # of the table
STEP = SubsampledGaussian(noise_multiplier=8.0, sampling_probability=0.5)


@pytest.fixture
def node(make_node, own) -> Node:
    return make_node(**own)


@pytest.fixture
def plan_of(tmp_path, node):
    """Writes a plan for the node, partition 1, of so many steps."""

    def write(count: int, **changes: object) -> Path:
        event = {"version": 1, "kind": "subsampled_gaussian", **STEP.with_count(count).to_fields()}
        client = {"client": 1, "num_records": NUM_RECORDS, "delta": 5e-6, "events": [event]} | changes
        path = tmp_path / f"plan-{count}.json"
        path.write_text(json.dumps({"view": "local", "clients": [client]}))
        return path

    return write


def register(node: Node, *options: object, code: int = 0) -> str:
    return kit("register", node.folder, *options, code=code)


def enforced(node: Node) -> str:
    found = check(node, "enforced")
    assert found.ok, found
    return found.detail


def test_an_old_ledger_takes_the_derived_order_with_its_history_at_the_next_charge(node):
    with Ledger(node.vault.ledger) as ledger:  # as before there were filters
        old = ledger.register("1", 60, 1e-5, note="another")
    policy = Holder.of(node.vault).policy
    with sqlite3.connect(node.vault.ledger) as db:
        db.execute("PRAGMA user_version = 1")
    assert enforced(node).startswith("by a Renyi filter of order")
    charge(node, 1, STEP)
    derived = RenyiFilter.derived(4.0, 1e-5)
    with Ledger(node.vault.ledger) as ledger:
        assert ledger.bounds(old.id) == [to_json(derived, (4.0, "local"))]
        assert ledger._db.execute("PRAGMA user_version").fetchone() == (3,)
    # The order stays though the operator changes the budget.
    data_set = _charging.registered_data_set(policy, "1", None)
    key = Key(run="run", client="1", round=2, request="2")
    raised = replace(policy, budget_epsilon=9.0)
    _charging.charge(raised, key, Release(event=STEP, rho_bar=1.0), data_set, noise_source="secure")
    with Ledger(node.vault.ledger) as ledger:
        assert ledger.bounds(old.id) == [to_json(derived, (epsilon, "local")) for epsilon in (4.0, 9.0)]


def test_history_counts_under_the_filter(node):
    with Ledger(node.vault.ledger) as ledger:
        data_set = ledger.register("1", 60, 1e-5, note="another")
        spent = SubsampledGaussian(noise_multiplier=1.12, sampling_probability=1.0)
        composed = [spent, replace(STEP, sampling_probability=1.0)]
        assert epsilon_of(composed, 1e-5).epsilon < 4.0, "allowed before there were filters"
        inputs.charge(ledger, data_set.id, Release(event=spent, rho_bar=1.0), client="1", run="old")
    with pytest.raises(_charging.RetiredError):
        charge(node, 1, composed[1])


def test_a_new_node_has_the_derived_filter_and_another_can_be_named_until_something_is_charged(node):
    with Ledger(node.vault.ledger) as ledger:
        data_set = ledger.data_set()
        derived = RenyiFilter.derived(4.0, data_set.delta)
        assert ledger.bounds(data_set.id) == [to_json(derived)]
    assert enforced(node) == f"by {derived}, 0% of it used"
    assert register(node, "--filter", "renyi:5") == "the budget is enforced by a Renyi filter of order 5\n"
    assert register(node, "--filter", "gaussian") == "the budget is enforced by a filter of Gaussian DP\n"
    charge(node, 1, STEP)
    assert not enforced(node).endswith(", 0% of it used")
    assert "something is charged to it" in register(node, "--filter", "renyi:5", code=2)


def test_a_committed_plan_is_all_that_a_node_releases_and_statements_say_so(node, plan_of):
    assert "a plan committed for epsilon" in register(node, "--plan", plan_of(2))
    charge(node, 1, STEP)
    with reader.reading(node.vault.ledger) as db:
        (page,) = statement.statement(db, node.vault.ledger, "1")
        (row,) = statement.spending(db, budget_epsilon=4.0)
    text, (shown, _) = " ".join(statement.render(page).split()), fedpriv("ledger", "show", node.vault.ledger)
    assert "Enforced by a plan committed for epsilon" in text
    assert "Each epsilon so far is an odometer" in text
    assert row["remaining_rounds"] == 1
    assert ("enforced by a plan committed" in shown, "is an odometer" in shown) == (True, True)
    with pytest.raises(_charging.RefusedError, match=r"allows no such release, of q = 0\.5 and effective noise 7"):
        charge(node, 2, replace(STEP, noise_multiplier=7.0))
    charge(node, 3, STEP)
    with pytest.raises(_charging.RetiredError):
        charge(node, 4, STEP)
    assert enforced(node).endswith("100% of it used")


def test_a_later_plan_adds_its_epsilon_and_delta(node, plan_of):
    one = epsilon_of([STEP.with_count(2)], 5e-6).epsilon
    register(node, "--plan", plan_of(2))
    charge(node, 1, STEP)
    shown = register(node, "--plan", plan_of(2))
    assert f"2 plans committed for epsilon {2 * one:.4f} at delta 1e-05" in shown
    assert "above this data set's epsilon 4 at delta 1e-05" in register(node, "--plan", plan_of(2), code=2)
    for number in (2, 3, 4):
        charge(node, number, STEP)
    with pytest.raises(_charging.RetiredError):
        charge(node, 5, STEP)


def test_what_is_no_rule_of_this_node_or_allows_nothing_is_refused_by_name(node, plan_of, make_node, own, tmp_path):
    before, ledger = enforced(node), tmp_path / "ledger.sqlite"
    with pytest.raises(InputError, match=r"budget_epsilon = 0\.0001: a Renyi filter of order 1024 allows nothing"):
        make_node("poor", **own | {"budget_epsilon": 1e-4, "ledger_file": ledger})
    assert not ledger.exists()
    for options, message in (
        ((), "give --plan FILE, --filter"),
        (("--filter", "gaussian", "--plan", "nowhere.json"), "either --plan FILE or --filter"),
        (("--filter", "renyi:64"), "filter = 'renyi:64': must be gaussian, or renyi:ORDER"),
        (("--filter", "pld"), "filter = 'pld'"),
        (("--filter", "renyi:2"), "allows nothing at delta 1e-05; set at least 10.1"),
        (("--plan", "nowhere.json"), "nowhere.json: No such file"),
        (("--plan", plan_of(2, num_records=1)), "num_records = 1: this node has"),
        (("--plan", plan_of(3, client=0)), "plans nothing for client 1"),
        (("--plan", plan_of(4, events=[])), "holds no release"),
        (("--plan", plan_of(5, delta=2.0)), "must be a plan"),
        (("--plan", plan_of(6, events=[{"kind": "trust"}])), "must be a plan"),
    ):
        assert message in register(node, *options, code=2)
    assert enforced(node) == before


@pytest.mark.parametrize(("unit", "schedule"), [("record", ""), ("person", "[[5,1],[3,1],[2,1],[1,1]]")])
def test_a_file_of_fedpriv_plan_is_what_a_node_commits(make_node, own, table, tmp_path, unit, schedule):
    of_persons = []
    if unit == "person":
        own = own | {"data": with_persons(table, tmp_path / "persons.csv", 2), "person_column": "patient"}
        of_persons = ["--max-records-per-person", "2"]
    node = make_node(**own)
    with Ledger(node.vault.ledger) as ledger:
        num_records = ledger.data_set().num_records
    out = tmp_path / "plan.json"
    asked = ["plan", "--records", 500, "--records", num_records, "--epsilon", 3.9, "--rounds", 4]
    asked += ["--train", "head", "--records-per-second", 60, "--out", out]
    asked += ["--noise-schedule", schedule] if schedule else []
    values = as_json(*asked, *of_persons)
    assert 3.9 < values["filtered_epsilon"] < 1.2 * 3.9
    if schedule:
        scales = [z / shape for (z, _), shape in zip(values["noise_schedule"], (5, 3, 2, 1), strict=True)]
        assert scales == pytest.approx([scales[0]] * 4)
    assert "a plan committed for epsilon 3.9000" in register(node, "--plan", out)
    other = "person" if unit == "record" else "record"
    out.write_text(out.read_text().replace(f'"unit": "{unit}"', f'"unit": "{other}"'))
    wrong = f"of persons = {unit == 'record'}: this node has {unit == 'person'}"
    assert wrong in register(node, "--plan", out, code=2)


def test_a_plan_that_costs_all_of_the_budget_is_committed_and_releases(node, plan_of):
    """To the last digit of delta, and of an epsilon that a calibration has rounded."""
    with Ledger(node.vault.ledger) as ledger:
        data_set = ledger.data_set()
    cost = epsilon_of([STEP.with_count(2)], data_set.delta_for_releases).epsilon
    file = node.folder / "vault.toml"
    file.write_text(file.read_text().replace("budget_epsilon = 4.0", f"budget_epsilon = {cost * (1 - 5e-10)!r}"))
    exact = Node.read(node.folder)
    assert "a plan committed for epsilon" in register(exact, "--plan", plan_of(2, delta=data_set.delta))
    for number in (1, 2):
        charge(exact, number, STEP)
    with pytest.raises(_charging.RetiredError):
        charge(exact, 3, STEP)


@pytest.mark.parametrize("view", ["local", "aggregate"])
def test_a_run_by_the_plan_finds_a_slot_for_each_round_on_each_node(view):
    sizes = (500, 300, 300)
    found = budget.plan(budget.Setting.of(sizes, epsilon=2.0, view=view, rounds=6, delta=1e-5))
    costs = RoundCosts(found.setting.config, dict(enumerate(sizes)), found.setting.adapter)
    for client in range(len(sizes)):
        plans = CommittedPlans(plans=(CommittedPlan.of(found.releases(client), 1e-5),))
        assert plans.epsilon <= 2.0
        history = []
        for round_ in range(1, 7):
            event = costs.worst(round_, range(3), beside=range(3))[client].charged_on(view)
            assert plans.remaining(history, event, epsilon=2.0, delta=1e-5) >= 1, (client, round_)
            history.append(event)
        assert plans.used(history, epsilon=2.0, delta=1e-5) == 1.0
