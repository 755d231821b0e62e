"""How much of a plan a budget allows: as many releases as the vault then charges. The question charges nothing."""

import json
import math
import secrets
from dataclasses import replace

import pytest

from fedpriv.config import parse, to_flower
from fedpriv.holder.vault import _charging
from fedpriv.holder.vault._charging import RetiredError
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import AFFORD, REFUSED, Request
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.privacy.accounting.events import to_json
from fedpriv.privacy.accounting.filters import CommittedPlan
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.entries import Key
from fedpriv.privacy.ledger.ledger import Ledger
from tests.events import gaussian
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import write_records

pytestmark = pytest.mark.usefixtures("quick_nodes")

NUM_RECORDS = 40


@pytest.fixture
def data(tmp_path):
    rows = [(f"{WORDS[i % 13]} {i}", LABELS[i % 3]) for i in range(NUM_RECORDS)]
    return write_records(tmp_path / "own.csv", rows)


def release(noise_multiplier, sampling_probability=1.0):
    event = gaussian(noise_multiplier, sampling_probability)
    return Release(event=event, rho_bar=1.0, aggregate_scale=1.5, num_readers=1)


def affordable(holder, planned, specs=(), run_config=None):
    return answer(Request.of(kind=AFFORD, run_config=run_config or {}, fields=kinds.pack_plan(planned, specs)), holder)


def charged(holder, planned):
    """How many of the releases the vault charges before it refuses one."""
    policy, number = holder.policy, 0
    with Ledger(policy.ledger) as ledger:
        data_set = ledger.data_set()
    for each in (release for release, count in planned for _ in range(count)):
        key = Key(run=secrets.token_hex(8), round=number + 1, client="0", request="r")
        try:
            _charging.charge(policy, key, each, data_set, noise_source="secure")
        except RetiredError:
            return number
        number += 1
    return number


def releases_in(holder):
    with Ledger(holder.policy.ledger) as ledger:
        return len(ledger.releases(ledger.data_set().id))


PLAN = [(release(8.0), 1), (release(6.0, 0.5), 5), (release(4.0, 0.25), 8), (release(10.0), 1)]


@pytest.mark.parametrize("epsilon", [0.4, 2.5, 20.0, *slow(0.9, 1.5, 4.0)])
@pytest.mark.parametrize("view", ["local", "aggregate"])
def test_as_many_releases_fit_as_are_charged(holder, epsilon, view):
    own = holder(budget_epsilon=epsilon, budget_view=view)
    response = affordable(own, PLAN)
    assert not response.code, response.reason
    assert releases_in(own) == 0
    assert response.fields == {"releases": charged(own, PLAN), "reply_seconds": 0.0, "objection": ""}


def test_what_was_spent_before_counts(holder):
    own = holder(budget_epsilon=1.1)
    whole = affordable(own, PLAN).fields["releases"]
    assert 6 < whole < 14, "the test would prove nothing"
    charged(own, PLAN[:2])
    left = affordable(own, PLAN[2:]).fields["releases"]
    assert left == whole - 6 == charged(own, PLAN[2:])
    assert affordable(own, PLAN[:1]).fields["releases"] == charged(own, PLAN[:1])


def test_the_most_releases_of_the_policy_count(holder):
    own = holder(policy="max_releases = 4\n")
    assert affordable(own, PLAN).fields["releases"] == charged(own, PLAN) == 4


def test_nothing_fits_in_another_unit_or_a_ledger_that_is_not_known_in_full(holder):
    own = holder()
    of_persons = replace(PLAN[0][0], event=replace(PLAN[0][0].event, unit="person"))
    charged(own, [(of_persons, 1)])
    assert affordable(own, PLAN).fields["releases"] == 0
    assert affordable(own, [(of_persons, 3)]).fields["releases"] == 3


def test_slots_of_a_committed_plan_count(holder):
    own = holder(budget_epsilon=20.0)
    slots = [each.event.with_count(count) for each, count in (PLAN[0], (release(6.0, 0.5), 3))]
    with Ledger(own.policy.ledger) as ledger:
        _charging.choose_rule(ledger, ledger.data_set(), CommittedPlan.of(slots, 5e-6), 20.0)
    assert affordable(own, PLAN).fields["releases"] == charged(own, PLAN) == 4


def asked(tiny_bert, **values):
    """What a run asks, its specification and what one release of it costs."""
    run = {"recipe": "per-sample", "data": "on-nodes", "labels": ",".join(LABELS), "rounds": 6, "layers": "last-1"}
    run |= {"model": str(tiny_bert), "num_clients": 2, "batch_size": 4, "noise_multiplier": 2.0} | values
    spec = UpdateSpec.of(parse(run))
    return to_flower(parse(run)), [(spec, release(spec.noise_multiplier, spec.probability(NUM_RECORDS)))]


@pytest.mark.parametrize(
    ("values", "policy", "objection"),
    [
        ({}, "", ""),
        ({}, "max_rounds = 5\n", "num_rounds = 6: above this node's maximum 5"),
        ({"local_steps": 7}, "max_local_steps = 3\n", "local_steps = 7: above this node's maximum 3"),
        ({"noise_multiplier": 0.1}, "", "noise_multiplier: its effective value 0.1 is below this node's minimum 0.3"),
    ],
)
def test_the_policy_and_the_time_are_told_before_anything_is_charged(holder, tiny_bert, values, policy, objection):
    own = holder(policy=policy, reply_seconds=7.0)
    run_config, specs = asked(tiny_bert, **values)
    response = affordable(own, PLAN, specs, run_config)
    assert not response.code, response.reason
    assert response.fields["objection"] == objection
    assert response.fields["reply_seconds"] == (0.0 if objection else 7.0)
    assert releases_in(own) == 0
    events = map(json.loads, own.settings.events.read_text().splitlines())
    told = [each["reason"] for each in events if each["event"] == "refused"]
    assert told == [f"refused: {objection}"][: bool(objection)], "what metrics and statements count"


def test_plans_and_specifications_that_are_none_are_refused_by_name(holder):
    own, events = holder(budget_epsilon=1.0), [to_json(release(1.0).event)] * 2
    plans = [[["an event", "another", 1]], *([[*events, count]] for count in (0, 10**9, math.inf, True))]
    plans += [[[*events, 1]] * 65]
    specs = "none", "[[1, 2, 3]]", json.dumps([[1]] * 65), json.dumps([["", "", {"rounds": 1}]])
    wrong = [("plan", {"plan": text}) for text in ("no JSON", "[" * 100_000, *map(json.dumps, plans))]
    wrong += [("plan", {}), *(("specs", {**kinds.pack_plan(PLAN), "specs": each}) for each in specs)]
    for name, fields in wrong:
        response = answer(Request.of(kind=AFFORD, run_config={}, fields=fields), own)
        assert (response.code, response.reason.startswith(f"refused: {name}: ")) == (REFUSED, True), response.reason
