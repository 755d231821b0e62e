"""What an operator agreed to binds: a run that differs is refused or waits, and a request is held to what its run says.

The coordinator that sends another run here is one that the node has admitted; it may lie about everything.
"""

import logging
import re

import pytest

from clients.deploy import admission
from fedpriv.config import parse
from fedpriv.holder.vault import _charging
from fedpriv.holder.vault.settings import agreed_runs, differences, terms_of
from fedpriv.holder.wire.frame import REFUSED, WAITING
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import default_delta
from tests.adversary.nodes import ask, make_node, num_charges, registering, run_config, training
from tests.events import gaussian
from tests.tiny import LABELS, WORDS
from tests.vaults import UNTIMED

pytestmark = pytest.mark.usefixtures("quick_nodes", "fresh_benches")

ROWS = [(f"{WORDS[i % 13]} {i}", LABELS[i % 3]) for i in range(40)]
SUMS = {"secure_aggregation": True, "min_clients": 3, "sampling_probability": 1.0}


@pytest.fixture
def node(tiny_bert, tmp_path):
    """Builds a node that has agreed to a run."""

    def build(agreed=None, **settings):
        own = {"num_registered": 40, "models": {"tiny": tiny_bert}, "settings": UNTIMED | settings}
        made = make_node(tmp_path / "node", ROWS, **own)
        if agreed is not None:
            made.settings.agreed.write_text(admission.agreed_text([terms_of(agreed)]))
        return made

    return build


@pytest.mark.parametrize(("other_runs", "code"), [("ask", WAITING), ("refuse", REFUSED), ("allow", 0)])
def test_a_run_that_differs_is_refused_or_waits_by_name_as_the_operator_chose(node, other_runs, code):
    own = node(run_config(), other_runs=other_runs)
    for changes in ({}, {"num_clients": 9, "min_clients": 2, "round_seconds": 60.0, "seed": 4, "out": "/elsewhere"}):
        assert ask(own, registering(run_config(**changes))).code == 0
    for changes, differing in (
        ({"rounds": 4}, "rounds = 4, agreed was 3"),
        ({"noise_multiplier": 0.9}, "noise_multiplier = 0.9, agreed was 1.0"),
        ({"noise_schedule": [3.0, 2.0, 1.0]}, 'noise_schedule = "3.0,2.0,1.0", agreed was ""'),
        ({"purpose": "marketing"}, 'purpose = "marketing", agreed was ""'),
        ({"until": "2999-01-01"}, 'until = "2999-01-01", agreed was ""'),
        (SUMS, "secure_aggregation = true, agreed was false"),
    ):
        assert not own.settings.waiting.exists()
        answer = ask(own, registering(run_config(**changes)))
        assert (answer.code, code == 0 or differing in answer.response.reason) == (code, True), answer
        assert own.settings.waiting.exists() == (code == WAITING)
        own.settings.waiting.unlink(missing_ok=True)


def test_a_run_that_waits_is_taken_once_the_operator_agrees_and_so_is_the_first(node):
    first, other = run_config(purpose="wards"), run_config(purpose="wards", rounds=5)
    own = node(first)
    assert ask(own, registering(other)).code == WAITING
    asked, differing = admission.waiting_run(own.settings)
    assert differing == ["rounds = 5, agreed was 3"]
    admission.approve_run(own.settings, asked)
    assert [ask(own, registering(run)).code for run in (first, other)] == [0, 0]
    assert ask(own, registering(run_config(purpose="wards", rounds=6))).code == WAITING
    assert len(agreed_runs(own.settings.agreed)) == 2
    assert not differences(terms_of(other), agreed_runs(own.settings.agreed))


def test_a_run_ends_for_a_node_on_the_day_that_it_names(node):
    over = run_config(until="2020-02-29")
    assert "until = 2020-02-29: is over" in ask(node(over), registering(over)).response.reason
    for until in ("2026-02-30", "tomorrow"):
        with pytest.raises(ValueError, match="until"):
            parse({"until": until})


def test_a_request_that_its_own_run_does_not_make_is_refused_uncharged(node, start):
    """The configuration is the one agreed to, and the instruction is not its own."""
    own = node(run_config())
    for fields, agreed in (
        ({"noise_multiplier": 0.5}, "1.0"),
        ({"num_rounds": 30}, "3"),
        ({"local_steps": 2}, "1"),
        ({"sampling_probability": 1.0}, "0.0"),
    ):
        ((name, value),) = fields.items()
        answer = ask(own, training(run_config(), start, fields=fields))
        expected = f"{name} = {value}: round 1 of the run agreed to asks for {agreed}"
        assert (answer.code, expected in answer.response.reason) == (REFUSED, True), answer
    assert num_charges(own) == 0
    assert ask(own, training(run_config(), start)).code == 0


def test_a_round_has_the_noise_that_the_schedule_has_for_it_and_not_that_of_another(node, start):
    run = run_config(noise_schedule="[[3, 0.5], [1, 1], [2, 0.5]]")
    own = node(run)
    for round_, z, q, reason in (
        (1, 3.0, 0.5, ""),
        (2, 1.0, 1.0, ""),
        (1, 1.0, 0.5, "noise_multiplier = 1.0: round 1 of the run agreed to asks for 3.0"),
        (1, 3.0, 1.0, "sampling_probability = 1.0: round 1 of the run agreed to asks for 0.5"),
        (4, 2.0, 0.5, "round = 4: the run agreed to has rounds = 3"),
    ):
        noise = {"noise_multiplier": z, "sampling_probability": q}
        answer = ask(own, training(run, start, round_=round_, fields=noise))
        assert (answer.code, reason in answer.response.reason) == (REFUSED if reason else 0, True), answer
    assert num_charges(own) == 2


def test_a_run_and_a_charge_have_a_line_each_in_the_log(node, start, caplog, monkeypatch):
    run = run_config(purpose="triage", out="/srv/runs/spring")
    own = node(run, budget_epsilon=9.0)
    with caplog.at_level(logging.INFO):
        ask(own, registering(run))
        assert not ask(own, training(run, start)).code
        monkeypatch.setattr(_charging, "spent_so_far", lambda *_: 1 / 0)
        assert not ask(own, training(run, start, round_=2)).code, "a line is nothing that a paid release waits for"
    lines = [record.getMessage() for record in caplog.records if "spring" in record.getMessage()]
    assert lines[0] == "run spring (triage) registers this node: 3 rounds of single uploads, z = 1.0"
    assert re.match(
        r"charged: run spring \(triage\), round 1 of 3, alone, effective noise 1; now epsilon \d\.\d+ on the "
        r"local view at delta 1e-05 of 9; \d+% of the budget is used up by the rule that enforces it",
        lines[1],
    ), lines[1]
    assert "round 2 of 3, alone, effective noise 1; what is spent by now is not known" in lines[2]


@pytest.mark.parametrize("settings", [{}, {"require_secure_sums": True}], ids=["of the run", "of the operator"])
def test_where_sums_were_agreed_no_upload_leaves_alone(node, start, settings):
    sums = run_config(**SUMS)
    own = node(None if settings else sums, **settings)
    answer = ask(own, training(sums, start))
    assert "no terms of a sum under masks" in answer.response.reason
    plain = ask(own, registering(run_config()))
    assert plain.code, "nor in a run that has no sums at all"
    assert num_charges(own) == 0


def test_noise_that_follows_from_a_target_is_held_to_it(node, start):
    """The agreed epsilon pays for two rounds at noise 1; a round that is asked again is for the budget to bound."""
    two = epsilon_of([gaussian(1.0, 6 / 40, 2)], default_delta(40)).epsilon
    run = run_config(target_epsilon=1.01 * two, noise_multiplier="by recipe")
    own, noise = node(run), {"noise_multiplier": 1.0}
    answers = [ask(own, training(run, start, round_=round_, fields=noise)) for round_ in (1, 2, 3)]
    assert [each.code for each in answers] == [0, 0, REFUSED]
    assert "this run's rounds would cost more than that, as was agreed" in answers[-1].response.reason
    moved = {name: tensor + 1 for name, tensor in start.items()}
    assert [ask(own, training(run, moved, round_=2, fields=noise)).code, num_charges(own)] == [0, 3]
    assert ask(own, training(run, start, run="another run", fields=noise)).code == 0
