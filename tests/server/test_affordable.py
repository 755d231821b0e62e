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
from server.affordable import check_affordable
from server.costs import RoundCosts
from server.registration import NO_NODE
from tests.notes import Notes
from tests.server.parts import SlowGrid, nodes_of, registered
from tests.wire import answered, given_up, request_in

pytestmark = pytest.mark.usefixtures("as_a_task")

SIZES = {0: 400, 1: 300, 2: 300}
ROUNDS = 6
INITIAL = {"head.weight": torch.zeros(2, 4)}
VALUES = {"recipe": "per-sample", "rounds": ROUNDS, "min_clients": 2, "noise_multiplier": 2.0, "train": "head"}


class Nodes(SlowGrid):
    """A grid whose nodes answer with so many releases, or with an error, and the second one with more."""

    def __init__(self, answers, said):
        super().__init__(lambda message: (self._reply(message), 0))
        self._releases, self._said, self.plans = answers, said, {}

    def _reply(self, message):
        client, request = message.metadata.dst_node_id - 100, request_in(message)
        assert request.kind == AFFORD
        self.plans[client], releases = request.fields, self._releases[client]
        if releases == "":
            return Message(Error(REFUSED, "refused: kind = 'afford'"), reply_to=message)
        if releases == "gone":  # Flower's link answers for a node that left
            return given_up(message)
        said = {"reply_seconds": 0.0, "objection": "", **(self._said if client == 1 else {})}
        return answered(message, {"releases": releases, **said})


def checked(answers, *, after=0, missing=(), said=None, target_epsilon=None, **changes):
    """The grid, with the times that its nodes tell, and what the run's observer is told."""
    config = replace(parse(VALUES | changes), target_epsilon=target_epsilon)  # with the noise it was calibrated to
    nodes = {
        client: (NO_NODE if client in missing else node_id, replace(each, name=f"site {client}"))
        for client, (node_id, each) in nodes_of(registered(SIZES)).items()
    }
    grid, told = Nodes(answers, said or {}), Notes()
    grid.times = check_affordable(grid, config, nodes, RoundCosts(config, SIZES, INITIAL), after=after, observer=told)
    return grid, told.notes


def test_a_run_that_fits_is_begun_without_a_word_and_nodes_tell_how_long_their_replies_take():
    grid, told = checked([6, 6, 6], said={"reply_seconds": 5.5})
    assert not told
    assert grid.times == {0: 0.0, 1: 5.5, 2: 0.0}
    assert sum(number for _, number in kinds.unpack_plan(grid.plans[1], "local")) == ROUNDS
    (spec, event), *others = kinds.unpack_specs(grid.plans[1], "local")
    assert not others
    assert (spec.num_rounds, event.count) == (ROUNDS, 3), "three local steps a round"


WITH_EVALUATION = {"evaluation_noise_multiplier": 4.0, "test_fraction": 0.2}


@pytest.mark.parametrize(
    ("answers", "changes", "said"),
    [
        ([6, 2, 4], {}, "no more than 4 of them fit"),
        ([0, 0, 5], {}, "not one fits"),
        ([-3, 1, 1], {}, "no more than 1 of them fit"),
        ([0, 2, 0], {"clients_per_round": 2}, "not one fits"),
        # The evaluation after the last round has to fit too.
        ([6, 6, 6], WITH_EVALUATION, "no more than 5 of them fit"),
    ],
)
def test_a_run_that_cannot_end_is_refused_with_what_fits(answers, changes, said):
    advice = "nothing was charged; use fewer rounds, or more noise"
    with pytest.raises(InputError, match=rf"rounds = 6: .*; {said}; {advice}"):
        checked(answers, **changes)


def test_fewer_rounds_are_no_advice_where_noise_follows_from_a_target():
    with pytest.raises(InputError, match=r"use a smaller target_epsilon$"):
        checked([1, 1, 1], target_epsilon=3.0)


@pytest.mark.parametrize(
    ("answers", "options", "short"),
    [
        # As many nodes as the run needs suffice, and the others are named.
        ([6, 2, 6], {}, "site 1 (1): 2"),
        # One that asks some nodes a round needs one round of each.
        ([2, 2, 2], {"clients_per_round": 2}, "site 0 (0): 2, site 1 (1): 2, site 2 (2): 2"),
        # A resumed run may have paid for a lost round, which nodes do not count, and keeps what it has if it ends.
        ([3, 0, 3], {"after": 2}, "site 0 (0): 5, site 1 (1): 2, site 2 (2): 5"),
    ],
)
def test_a_run_that_can_go_on_names_whose_budgets_end_sooner(answers, options, short):
    _, told = checked(answers, **options)
    assert told == [f"nodes' budgets allow fewer than the 6 rounds of this run: {short}"]


@pytest.mark.parametrize("bad", ["", "many", "gone", math.inf, math.nan, 6.0, True])
def test_a_node_that_does_not_say_keeps_no_run_from_beginning(bad):
    _, told = checked([bad, 6, bad])
    assert not told


OBJECTION = {"objection": "num_rounds = 6: above this node's maximum 5"}
LATE = r"round_seconds = 3600: site 1 \(1\) replies after 5,793 s; .*fewer local_steps"


@pytest.mark.parametrize(
    ("said", "why"), [(OBJECTION, r"site 1 \(1\) refuses it: num_rounds = 6: above"), ({"reply_seconds": 5793.0}, LATE)]
)
def test_what_one_node_would_refuse_or_answer_too_late_costs_no_node_anything(said, why):
    """`min_clients` others are enough for the run, and yet nobody is charged for what one of all can never count in."""
    with pytest.raises(InputError, match=why) as refused:
        checked([6, 6, 6], said=said)
    assert "nothing was charged, at no node" in str(refused.value)
    _, told = checked([4, 4, 4], after=2, said=said)
    assert len(told) == 1, "a run that was begun goes on without the node, whose guard refuses as well"


@pytest.mark.parametrize(
    ("answers", "options", "planned"),
    [
        # Of a resumed run, the rounds that are left, of the nodes that are there.
        ([4, 4, 4], {"after": 2, "missing": (1,)}, {0: [4], 2: [4]}),
        ([7, 7, 7], WITH_EVALUATION, {client: [1, ROUNDS] for client in SIZES}),
    ],
)
def test_nodes_are_asked_for_what_is_still_to_come(answers, options, planned):
    grid, told = checked(answers, **options)
    plans = {client: kinds.unpack_plan(plan, "local") for client, plan in grid.plans.items()}
    assert {client: [number for _, number in plan] for client, plan in plans.items()} == planned
    assert not told


def test_each_view_has_its_own_prices():
    grid, _ = checked([6, 6, 6], secure_aggregation=True, min_clients=3, local_steps=1)
    local, aggregate = (kinds.unpack_plan(grid.plans[0], view)[0][0] for view in ("local", "aggregate"))
    assert aggregate.noise_multiplier > local.noise_multiplier
