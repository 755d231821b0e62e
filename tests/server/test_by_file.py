"""A run's mailbox, and a grid of which some nodes are reached through it."""

import threading
import time

import pytest
from flwr.app import Context, Message, RecordDict

from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import FAILED, REGISTER, TRAIN, Request, Response
from fedpriv.holder.wire.kinds import Registration
from server.by_file import MixedGrid
from server.exchange import Exchange, message_to
from server.mailbox import Mailbox
from server.registration import register_nodes
from simulations.engines.grid import LocalGrid
from tests.server.deploy.conftest import deploy
from tests.wire import answered

pytestmark = pytest.mark.usefixtures("as_a_task")

BY_NETWORK, BY_FILE = 7, 8


def says_who(message: Message, _context: Context) -> Message:
    return answered(message, kinds.pack(Registration(client=0, num_records=40, name="", data_set="a")))


@pytest.fixture
def config(tmp_path):
    return parse({"out": str(tmp_path / "run"), "node_keys": str(tmp_path / "co" / "vaults")})


@pytest.fixture
def grid(config) -> MixedGrid:
    network = LocalGrid({BY_NETWORK: Context(1, BY_NETWORK, {}, RecordDict(), {})}, None, says_who)
    return MixedGrid(network, {BY_FILE: 1}, {"rounds": 3}, Mailbox.begun(config, "b" * 64))


def ids(messages: list[Message]) -> list[str]:
    return [message.metadata.message_id for message in messages]


def test_each_message_takes_its_nodes_way_and_a_vault_is_handed_what_flower_would_bring(grid):
    assert grid.get_node_ids() == [BY_NETWORK, BY_FILE]
    own = {kinds.RECEIPT: "its newest"}
    request = Request.of(TRAIN, fields={"x": 1}, own=own)
    messages = [message_to(node_id, request, 2) for node_id in (BY_NETWORK, BY_FILE)]
    grid.push_messages(messages)
    (reply,) = grid.pull_messages(ids(messages))
    assert reply.metadata.src_node_id == BY_NETWORK
    ((number, asked),) = grid.mailbox.asked().items()
    handed = Request.unpacked(grid.mailbox.content(number)[0])
    assert (asked.client, handed.kind, handed.fields, handed.own) == (1, TRAIN, {"x": 1}, own)
    assert handed.run_config == {"rounds": 3}
    assert grid.mailbox.answer(number, Response.of(fields={"y": 2}).frame, "digest")
    assert not grid.mailbox.answer(number, b"another", "other")
    (reply,) = grid.pull_messages(ids(messages))
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (BY_FILE, ids(messages)[1])
    assert list(grid.pull_messages(ids(messages))) == [], "each is handed out once"


def test_a_request_is_over_once_the_node_is_asked_again_and_an_answer_in_between_is_counted_as_late(grid):
    exchange = Exchange()
    first = [message_to(BY_FILE, Request.of(TRAIN), 1)]
    assert list(exchange.replies(grid, first, 0.0)) == []
    grid.mailbox.answer(1, Response.of().frame, "digest")
    assert list(exchange.replies(grid, [message_to(BY_FILE, Request.of(TRAIN), 2)], 0.0)) == []
    assert exchange.pop_num_late() == 1
    assert list(exchange.replies(grid, [message_to(BY_FILE, Request.of(TRAIN), 3)], 0.0)) == []
    assert {number: asked.state for number, asked in grid.mailbox.asked().items()} == {1: "over", 2: "over", 3: "open"}
    assert not grid.mailbox.answer(2, b"late", "digest")


def test_who_is_left_is_the_links_word_and_registration_goes_on_without(grid):
    (message,) = messages = [message_to(BY_FILE, Request.of(TRAIN), 1)]
    grid.push_messages(messages)
    grid.mailbox.leave(1)
    (reply,) = grid.pull_messages(ids(messages))
    assert (reply.error.code, reply.metadata.src_node_id) == (FAILED, 1)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    begin = time.monotonic()
    leaving = threading.Timer(1.0, lambda: grid.mailbox.leave(2))
    leaving.start()
    assert register_nodes(grid, num_expected=2, wait=600, goes_on=grid.goes_on).keys() == {0}
    assert time.monotonic() - begin < 300


def test_a_run_that_goes_on_waits_for_nothing_that_was_asked_before_and_counts_on(grid, config):
    grid.push_messages([message_to(BY_FILE, Request.of(REGISTER))])
    grid.mailbox.post(1, b"a key", b"a file")
    assert grid.mailbox.path.stat().st_mode & 0o777 == 0o600
    again = Mailbox.begun(config, "c" * 64)
    assert (again.run, again.bundle) == (grid.mailbox.run, "c" * 64)
    (asked,) = again.asked().values()
    assert (asked.state, asked.key) == ("over", None)
    assert b"a key" not in again.path.read_bytes()
    again.ask({"m": (1, b"content")})
    assert list(again.asked()) == [1, 2]
    again.end()
    assert again.is_over
    assert {asked.state for asked in again.asked().values()} == {"over"}


def test_a_folder_without_such_a_run_is_named(tmp_path):
    with pytest.raises(InputError, match="is no run that has asked nodes without a network"):
        Mailbox.of(tmp_path / "no-run")
    for command, option in (("post", "--to"), ("collect", "--from")):
        done = deploy(command, tmp_path / "no-run", option, tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"RUN = {tmp_path / 'no-run'}: is no run" in done.stderr
