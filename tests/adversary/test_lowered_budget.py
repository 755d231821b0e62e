"""A lowered budget takes back nothing: what is told of a data set holds for the largest one that was ever in force."""

from pathlib import Path

import pytest

from fedpriv.holder.vault import NodePolicy, RetiredError, charge
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import delta_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.filters import GaussianFilter, RenyiFilter
from fedpriv.privacy.accounting.risk import risk_of
from fedpriv.privacy.accounting.views import PlannedView, Release
from fedpriv.privacy.ledger import reading, statement_text
from fedpriv.privacy.ledger.entries import DataSet, Key
from fedpriv.privacy.ledger.evidence import Exhibit, write_evidence
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.statement import spending
from fedpriv.texts import percent_up
from tests.cli.command_line import as_json, fedpriv
from tests.privacy.ledger.test_evidence import failures, verified

DELTA, LARGE, SMALL = 1e-5, 8.0, 1.0
QUIET = SubsampledGaussian(noise_multiplier=40.0, sampling_probability=1.0)
LOUD = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=1.0)


def made(folder: Path, rule: RenyiFilter | GaussianFilter) -> tuple[Path, DataSet]:
    """The ledger of a node with this rule."""
    with Ledger(folder / "ledger.sqlite") as ledger:
        return folder / "ledger.sqlite", ledger.register("0", 100, DELTA, bound=filters.to_json(rule))


def charged(
    path: Path, data_set: DataSet, epsilon: float, event: SubsampledGaussian, view: PlannedView = "local"
) -> None:
    """One further release under this budget, which the operator's settings have from then on."""
    (path.parent / "vault.toml").write_text(f'budget_epsilon = {epsilon}\nbudget_view = "{view}"\n')
    policy = NodePolicy(ledger=path, budget_epsilon=epsilon, budget_view=view)
    with reading(path) as db:
        number = len(db.charges(data_set.id))
    release = Release(event=event, rho_bar=1.0, aggregate_scale=2.0)
    charge(policy, Key(run="run", client="0", round=number, request="x"), release, data_set, noise_source="secure")


def shares_found(path: Path) -> set[float]:
    """The shares that an attacker finds at 1 % wrongly accused, wherever they are told."""
    (shown,) = as_json("ledger", "show", path)["data_sets"]
    (page,) = as_json("ledger", "statement", path, "--client", "0")["statements"]
    told = {each["tpr_at_fpr"]["0.01"] for each in (shown, page)}
    (share,) = {percent_up(each) for each in told}
    assert share in fedpriv("ledger", "show", path)[0]
    assert f"at most {share}" in " ".join(statement_text(path, "0").split())
    return told


@pytest.mark.parametrize("rule", [RenyiFilter(order=16), GaussianFilter()])
def test_risk_is_told_of_the_largest_budget_ever_in_force(rule, tmp_path):
    """Before, the operator read 2.1 % where the Renyi filter's guarantee allows 99.9 % and one strategy finds 7.2 %; of
    Gaussian DP 2.0 %, where it allows 25.5 % and one finds 25.2 %."""
    path, data_set = made(tmp_path, rule)
    charged(path, data_set, LARGE, QUIET)
    charged(path, data_set, SMALL, QUIET)
    told = shares_found(path)
    allowed = {"epsilon": LARGE, "delta": data_set.delta_for_releases}
    assert told == {rule.risk([QUIET.with_count(2)], **allowed).tpr_at_fpr["0.01"]}
    # The coordinator could have had other releases before the budget was lowered.
    most = rule.remaining([], LOUD, **allowed)
    strategy = risk_of([LOUD.with_count(most)], DELTA).tpr_at_fpr["0.01"]
    of_small = rule.risk([QUIET.with_count(2)], epsilon=SMALL, delta=data_set.delta_for_releases)
    assert of_small.tpr_at_fpr["0.01"] < strategy <= min(told)


def test_evidence_states_and_confirms_the_risk_of_the_largest_budget(tmp_path):
    for number, rule in enumerate((RenyiFilter(order=16), GaussianFilter())):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, data_set = made(folder, rule)
        charged(path, data_set, LARGE, QUIET)
        charged(path, data_set, SMALL, QUIET)
        write_evidence(folder / "bundle.zip", {"node": Exhibit(ledger=path, budget=(SMALL, "local"))})
        code, lines = verified(folder / "bundle.zip")
        assert (code, failures(lines)) == (0, [])
        (told,) = shares_found(path)
        assert any(line.endswith(f"found at 0.01 is {told:.6g}") for line in lines)


def test_a_budget_is_noted_before_the_first_charge_under_it_and_only_when_it_changes(tmp_path):
    path, data_set = made(tmp_path, RenyiFilter(order=16))
    for epsilon in (LARGE, LARGE, SMALL, SMALL, LARGE):
        charged(path, data_set, epsilon, QUIET)
    with reading(path) as db:
        phases = [entry.phase for entry in db.entries()]
        notes = db.bounds(data_set.id)
        assert spending(db)[0]["enforced_by"].endswith("order 16 for epsilon 8, the largest budget in force so far")
    assert phases == [
        *("registered", "bounded", "bounded", "charged", "charged", "bounded", "charged", "charged"),
        *("bounded", "charged"),
    ]
    rule = RenyiFilter(order=16)
    assert notes[1:] == [filters.to_json(rule, (epsilon, "local")) for epsilon in (LARGE, SMALL, LARGE)]
    assert filters.rule_of(notes) == rule


def test_a_budget_on_sums_bounds_nothing_of_single_uploads(tmp_path):
    path, data_set = made(tmp_path, RenyiFilter(order=16))
    charged(path, data_set, LARGE, QUIET, "aggregate")
    charged(path, data_set, SMALL, QUIET, "local")
    with reading(path) as db:
        notes = db.bounds(data_set.id)
    assert (filters.largest_budget(notes, "aggregate"), filters.largest_budget(notes, "local")) == (LARGE, SMALL)
    assert filters.largest_budget([], "local") is None


def test_the_largest_budget_is_what_a_coordinator_can_use_up(tmp_path):
    """What both budgets let pass together is within the larger one, by dp-accounting's losses."""
    path, data_set = made(tmp_path, RenyiFilter(order=16))
    for epsilon in (SMALL, LARGE, SMALL):
        try:
            while True:
                charged(path, data_set, epsilon, SubsampledGaussian(noise_multiplier=8.0, sampling_probability=1.0))
        except RetiredError:
            continue
    with reading(path) as db:
        events = [each.event for each in db.releases(data_set.id)]
        assert filters.largest_budget(db.bounds(data_set.id), "local") == LARGE
    assert delta_of(events, LARGE) <= DELTA < delta_of(events, SMALL)
