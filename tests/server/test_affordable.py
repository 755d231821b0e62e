"""A run that nodes' own budgets end too soon is refused before anything is charged, with the rounds that fit."""

import math
from dataclasses import replace

import pytest
import torch
from flwr.app import Error, Message

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import AFFORD, REFUSED
from fedpriv.holder.wire.kinds import Registration
from server.affordable import check_affordable
from server.costs import RoundCosts
from server.exchange import set_message_id
from server.observer import LogObserver
from server.registration import NO_NODE
from simulations.engines.flower_private import task_identity
from tests.wire import answered, request_in

LINK = 1
SHORT = "site 0 (0): 5, site 1 (1): 2, site 2 (2): 5"
SIZES = {0: 400, 1: 300, 2: 300}
ROUNDS = 6
INITIAL = {"head.weight": torch.zeros(2, 4)}
VALUES = {"recipe": "per-sample", "rounds": ROUNDS, "min_clients": 2, "noise_multiplier": 2.0, "train": "head"}


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(LINK):
        yield


class Nodes:
    """A grid whose nodes answer with so many releases, or with an error."""

    def __init__(self, answers, **said):
        self._answers, self._replies, self._said = answers, [], {"reply_seconds": 0.0, "objection": ""} | said
        self.plans = {}

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            set_message_id(message, f"m{number}")
            node_id = message.metadata.dst_node_id
            assert request_in(message).kind == AFFORD
            self.plans[node_id - 100] = request_in(message).fields
            answer = self._answers[node_id - 100]
            # Of site 1 alone, what it says besides.
            said = self._said if node_id == 101 else {"reply_seconds": 0.0, "objection": ""}
            reply = answered(message, {"releases": answer, **said})
            if answer == "":
                reply = Message(Error(REFUSED, "refused: kind = 'afford'"), reply_to=message)
            if answer == "gone":  # Flower's link answers for a node that left
                reply = Message(Error(3, "node unavailable"), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = LINK
            self._replies.append(reply)

    def pull_messages(self, ids):
        here, self._replies = self._replies, []
        return here


class Told(LogObserver):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.notices = []

    def notice(self, text):
        self.notices.append(text)


def checked(answers, *, after=0, missing=(), said=None, **changes):
    target = changes.pop("target_epsilon", None)
    config = replace(parse(VALUES | changes), target_epsilon=target)  # with the noise that it was calibrated to
    nodes = {
        client: (
            NO_NODE if client in missing else 100 + client,
            Registration(client=client, num_records=number, name=f"site {client}", data_set=f"d{client}"),
        )
        for client, number in SIZES.items()
    }
    grid, told = Nodes(answers, **(said or {})), Told()
    grid.times = check_affordable(grid, config, nodes, RoundCosts(config, SIZES, INITIAL), after=after, observer=told)
    return grid, told


def test_a_run_that_fits_is_begun_without_a_word():
    grid, told = checked([6, 6, 6])
    assert not told.notices
    planned = kinds.unpack_plan(grid.plans[1], "local")
    assert sum(number for _, number in planned) == ROUNDS


def test_as_many_nodes_as_the_run_needs_suffice_and_the_others_are_named():
    _, told = checked([6, 2, 6])
    assert told.notices == ["nodes' budgets allow fewer than the 6 rounds of this run: site 1 (1): 2"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([6, 2, 4], "no more than 4 of them fit"),
        ([0, 0, 5], "not one fits"),
        ([-3, 1, 1], "no more than 1 of them fit"),
    ],
)
def test_a_run_that_cannot_end_is_refused_with_what_fits(answers, said):
    with pytest.raises(
        InputError, match=rf"rounds = 6: .*; {said}; nothing was charged; use fewer rounds, or more noise"
    ):
        checked(answers)


def test_a_run_that_asks_some_nodes_a_round_needs_one_round_of_each():
    _, told = checked([2, 2, 2], clients_per_round=2)
    assert told.notices
    with pytest.raises(InputError, match="not one fits"):
        checked([0, 2, 0], clients_per_round=2)


def test_fewer_rounds_are_no_advice_where_noise_follows_from_a_target():
    with pytest.raises(InputError, match=r"use a smaller target_epsilon$"):
        checked([1, 1, 1], target_epsilon=3.0)


@pytest.mark.parametrize("bad", ["", "many", "gone", math.inf, math.nan, 6.0, True])
def test_a_node_that_does_not_say_keeps_no_run_from_beginning(bad):
    _, told = checked([bad, 6, bad])
    assert not told.notices


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"objection": "num_rounds = 6: above this node's maximum 5"},
            r"site 1 \(1\) refuses it: num_rounds = 6: above",
        ),
        ({"reply_seconds": 5793.0}, r"round_seconds = 3600: site 1 \(1\) replies after 5,793 s; .*fewer local_steps"),
    ],
)
def test_what_one_node_would_refuse_or_answer_too_late_costs_no_node_anything(said, why):
    """`min_clients` others are enough for the run, and yet nobody is charged for what one of all can never count in."""
    with pytest.raises(InputError, match=why) as refused:
        checked([6, 6, 6], said=said)
    assert "nothing was charged, at no node" in str(refused.value)
    _, told = checked([4, 4, 4], after=2, said=said)
    assert len(told.notices) == 1, "a run that was begun goes on without the node, whose guard refuses as well"


def test_the_nodes_tell_how_long_their_replies_take():
    grid, _ = checked([6, 6, 6], said={"reply_seconds": 5.5})
    assert grid.times == {0: 0.0, 1: 5.5, 2: 0.0}
    (spec, event), *others = kinds.unpack_specs(grid.plans[1], "local")
    assert not others
    assert (spec.num_rounds, event.count) == (ROUNDS, 3), "three local steps a round"


def test_a_resumed_run_asks_the_nodes_that_are_there_for_the_rounds_that_are_left():
    grid, told = checked([4, 4, 4], after=2, missing=(1,))
    assert grid.plans.keys() == {0, 2}
    assert sum(number for _, number in kinds.unpack_plan(grid.plans[0], "local")) == 4
    assert not told.notices


def test_a_resumed_run_goes_on_whatever_budgets_are_left():
    """A lost round may be paid for, which the nodes do not count, and a run that ends early keeps what it has."""
    _, told = checked([3, 0, 3], after=2)
    assert told.notices == ["nodes' budgets allow fewer than the 6 rounds of this run: " + SHORT]


def test_the_evaluation_after_the_last_round_has_to_fit_too():
    with_evaluation = {"evaluation_noise_multiplier": 4.0, "test_fraction": 0.2}
    with pytest.raises(InputError, match="no more than 5 of them fit"):
        checked([6, 6, 6], **with_evaluation)
    grid, told = checked([7, 7, 7], **with_evaluation)
    assert not told.notices
    assert [number for _, number in kinds.unpack_plan(grid.plans[0], "local")] == [1, ROUNDS]


def test_each_view_has_its_own_prices():
    grid, _ = checked([6, 6, 6], secure_aggregation=True, min_clients=3, local_steps=1)
    local, aggregate = (kinds.unpack_plan(grid.plans[0], view)[0][0] for view in ("local", "aggregate"))
    assert aggregate.noise_multiplier > local.noise_multiplier
