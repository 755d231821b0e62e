"""What a charge buys: one attempt, on the data that it was made for, within a budget; and N_k is never for sale."""

from functools import partial

import pytest

from fedpriv.holder.wire import frame
from tests.adversary.exchanges import N_K, ROWS
from tests.adversary.nodes import (
    ask,
    make_node,
    register_data,
    registering,
    restart,
    run_config,
    spent,
    training,
    write_rows,
)
from tests.adversary.stand_ins import Killed, StandIns, standing_in
from tests.tiny import LABELS

EVERYONE = partial(StandIns, watched=len(ROWS))


def test_a_charge_buys_one_attempt(approved, starts, tmp_path):
    """After a crash the records are not drawn again for the same charge."""
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    question = training(run_config(), starts["tiny"])
    with standing_in(EVERYONE(killed_at=1)), pytest.raises(Killed):
        ask(node, question)
    paid = spent(node)
    restart()
    with standing_in(EVERYONE()) as seen:
        assert ask(node, question).code == 0
    assert spent(node) == paid > 0
    assert all(not sum_.values.any() for sum_ in seen.sums), "the records were used again"


def test_a_charge_pays_for_the_data_that_it_was_made_for(approved, starts, tmp_path):
    """Charged, killed, other data registered: the same request may not read them for the old charge."""
    node = make_node(tmp_path / "node", ROWS, num_registered=N_K, models=approved)
    question = training(run_config(), starts["tiny"])
    with standing_in(EVERYONE(killed_at=1)), pytest.raises(Killed):
        ask(node, question)
    write_rows(node.records, [("a cough", LABELS[2])] * N_K)
    register_data(node, N_K, note="other patients")
    restart()
    with standing_in(EVERYONE()) as seen:
        answer = ask(node, question)
    assert answer.code in (0, frame.REFUSED)
    assert spent(node) > 0 or all(not sum_.values.any() for sum_ in seen.sums), "read, and not paid for"


def test_a_node_without_a_budget_answers_nothing(approved, starts, tmp_path):
    """What the default policy permits in this round costs epsilon 574."""
    run = run_config(batch_size=12, local_steps=100, noise_multiplier=0.3)
    node = make_node(tmp_path / "node", ROWS, num_registered=24, models=approved, budget_epsilon=None)
    answer = ask(node, training(run, starts["tiny"]))
    assert (spent(node), answer.code) == (0, frame.REFUSED)


def test_a_budget_is_not_overdrawn_by_such_a_round(approved, starts, tmp_path):
    run = run_config(batch_size=12, local_steps=100, noise_multiplier=0.3)
    node = make_node(tmp_path / "node", ROWS, num_registered=24, models=approved, budget_epsilon=10.0)
    answer = ask(node, training(run, starts["tiny"]))
    assert (spent(node), answer.code) == (0, frame.RETIRED)


def test_the_runs_labels_do_not_count_records(approved, tmp_path):
    """Where the holder has not registered, no run makes the node register a count by the coordinator's filter."""
    node = make_node(tmp_path / "node", ROWS, num_registered=None, models=approved)
    for labels in (f"{LABELS[0]},{LABELS[1]}", ",".join(LABELS)):
        assert ask(node, registering(run_config(), labels=labels)).code == frame.REFUSED
    register_data(node, N_K)
    answer = ask(node, registering(run_config()))
    assert answer.response.fields["num_records"] == N_K
