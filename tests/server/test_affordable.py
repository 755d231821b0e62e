"""A run that nodes' own budgets end too soon is refused before anything is charged, with the rounds that fit."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedpriv import protocol
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.protocol import Registration
from fedpriv.vault.frames import REFUSED
from server.affordable import check_affordable
from server.costs import RoundCosts
from server.observer import LogObserver
from server.registration import NO_NODE
from simulations.engines.flower_private import set_message_id, task_identity

SIZES = {0: 400, 1: 300, 2: 300}
ROUNDS = 6
INITIAL = {"head.weight": torch.zeros(2, 4)}
VALUES = {"recipe": "dp-lora-paper", "rounds": ROUNDS, "min_clients": 2, "noise_multiplier": 2.0, "train": "head"}


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(1):
        yield


class Nodes:
    """A grid whose nodes answer with so many releases, or with an error."""

    def __init__(self, answers):
        self._answers, self._replies = answers, []
        self.plans = {}

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            set_message_id(message, f"m{number}")
            node_id = message.metadata.dst_node_id
            assert message.metadata.message_type == protocol.AFFORD
            self.plans[node_id - 100] = message.content.config_records[protocol.INSTRUCTION]
            answer = self._answers[node_id - 100]
            content = RecordDict({protocol.AFFORDABLE: ConfigRecord({"releases": answer})}) if answer != "" else None
            reply = Message(content or Error(REFUSED, "refused: kind = 'afford'"), reply_to=message)
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


def checked(answers, *, after=0, missing=(), **changes):
    config = parse(VALUES | changes)
    nodes = {
        client: (
            NO_NODE if client in missing else 100 + client,
            Registration(client=client, num_records=number, name=f"site {client}", data_set=f"d{client}"),
        )
        for client, number in SIZES.items()
    }
    grid, told = Nodes(answers), Told()
    check_affordable(grid, config, nodes, RoundCosts(config, SIZES, INITIAL), after=after, observer=told)
    return grid, told


def test_a_run_that_fits_is_begun_without_a_word():
    grid, told = checked([6, 6, 6])
    assert not told.notices
    planned = protocol.unpack_plan(grid.plans[1], "local")
    assert sum(number for _, number in planned) == ROUNDS


def test_as_many_nodes_as_the_run_needs_suffice_and_the_others_are_named():
    _, told = checked([6, 2, 6])
    assert told.notices == ["nodes' budgets allow fewer than the 6 rounds of this run: site 1 (1): 2"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [([6, 2, 4], "at most 4 rounds fit"), ([0, 0, 5], "not one fits"), ([-3, 1, 1], "at most 1 rounds fit")],
)
def test_a_run_that_cannot_end_is_refused_with_what_fits(answers, said):
    with pytest.raises(InputError, match=rf"rounds = 6: .*; nothing was charged; {said}"):
        checked(answers)


def test_a_run_that_asks_some_nodes_a_round_needs_one_round_of_each():
    _, told = checked([2, 2, 2], clients_per_round=2)
    assert told.notices
    with pytest.raises(InputError, match="not one fits"):
        checked([0, 2, 0], clients_per_round=2)


@pytest.mark.parametrize("bad", ["", "many"])
def test_a_node_that_does_not_say_keeps_no_run_from_beginning(bad):
    _, told = checked([bad, 6, bad])
    assert not told.notices


def test_a_resumed_run_asks_the_nodes_that_are_there_for_the_rounds_that_are_left():
    grid, _ = checked([4, 4, 4], after=2, missing=(1,))
    assert grid.plans.keys() == {0, 2}
    assert sum(number for _, number in protocol.unpack_plan(grid.plans[0], "local")) == 4


def test_the_evaluation_after_the_last_round_has_to_fit_too():
    with pytest.raises(InputError, match="at most 5 rounds fit"):
        checked([6, 6, 6], evaluation_noise_multiplier=4.0, test_fraction=0.2)


def test_each_view_has_its_own_prices():
    grid, _ = checked([6, 6, 6], secure_aggregation=True, min_clients=3, local_steps=1)
    local, aggregate = (protocol.unpack_plan(grid.plans[0], view)[0][0] for view in ("local", "aggregate"))
    assert aggregate.noise_multiplier > local.noise_multiplier
