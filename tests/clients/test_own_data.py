"""A node with records of its own: they come from its own configuration, and no run's configuration moves it."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from clients import handler, node
from clients.app import app
from fedpriv import protocol
from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.deployment import keys
from fedpriv.errors import InputError
from fedpriv.ledger.ledger import Ledger
from fedpriv.training.local_update import UpdateSpec
from fedpriv.training.stacked import execute_one_by_one
from simulations.engines.flower_private import task_identity
from tests.tiny import LABELS


@pytest.fixture(autouse=True)
def _identity():
    with task_identity(1):
        yield


@pytest.fixture
def records(table: Path, tmp_path: Path) -> Path:
    """The records of one site, with columns that are called otherwise."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "site-1"]
    path = tmp_path / "own.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["note", "department"], *([row["text"], row["label"]] for row in rows)])
    return path


@pytest.fixture
def context(small_run, table, records, tmp_path) -> Context:
    keys.make_key_pair(tmp_path / "node.key")
    config = parse(
        {
            **{key: value for key, value in small_run.items() if key != "client_column"},
            **{"data": ON_NODES, "test_data": str(table), "labels": ",".join(LABELS), "num_clients": 3},
            "simulate": False,
        }
    )
    own = {
        node.CLIENT_KEY: 1,
        node.NAME_KEY: "St. Anna",
        node.DATA_KEY: str(records),
        "text-column": "note",
        "label-column": "department",
        node.LEDGER_KEY: str(tmp_path / "node.sqlite"),
        node.IDENTITY_KEY: str(tmp_path / "node.key"),
        node.EVENTS_KEY: str(tmp_path / "events.jsonl"),
    }
    return Context(1, 7, own, RecordDict(), to_flower(config))


def registration(context: Context) -> protocol.Registration:
    reply = app(Message(RecordDict(), 7, protocol.REGISTER, group_id="0"), context)
    assert not reply.has_error(), reply.error
    return protocol.unpack_registration(reply.content[protocol.REGISTRATION])


def test_the_node_registers_its_own_records_and_signs(context, records, tmp_path):
    registered = registration(context)
    with records.open() as file:
        assert registered.num_records == len(file.readlines()) - 1
    assert (registered.client, registered.name, registered.keeps_replies) == (1, "St. Anna", True)
    public = keys.public_line(tmp_path / "node.key")
    assert keys.verify(public, protocol.statement_of(registered), registered.signature)
    assert registration(context).data_set == registered.data_set


def test_it_trains_on_them_and_notes_what_it_did(context, tmp_path):
    config = node.configuration(context)
    bench = node.bench_of(config, context)
    content = RecordDict(
        {
            protocol.ADAPTER: ArrayRecord(dict(bench.initial)),
            protocol.INSTRUCTION: ConfigRecord(protocol.pack_instruction("run", 1, UpdateSpec.of(config))),
        }
    )
    message = Message(content, 7, "train", group_id="1")
    execute = partial(execute_one_by_one, bench.model)
    task = handler.prepare(message, context)
    assert len(task.data) == registration(context).num_records
    reply = handler.reply(message, context, execute([task])[0])
    assert protocol.ADAPTER in reply.content
    with Ledger(tmp_path / "node.sqlite") as ledger:
        assert [key.round for key, _ in ledger.releases_of(ledger.data_set().id, "run")] == [1]
    events = (tmp_path / "events.jsonl").read_text()
    assert [event in events for event in ("registered", "charged", "released")] == [True] * 3


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"data": "embedded"}, "holds records of its own"),
        ({"data": "other.csv"}, "holds records of its own"),
        ({"num_clients": 1}, "partition-id = 1: must lie in 0..0"),
    ],
)
def test_a_run_cannot_move_it_to_other_records(context, values, reason):
    moved = Context(1, 7, dict(context.node_config), RecordDict(), {**context.run_config, **values})
    reply = app(Message(RecordDict(), 7, protocol.REGISTER, group_id="0"), moved)
    assert reply.error.code == protocol.REFUSED
    assert reason in reply.error.reason


def test_the_runs_columns_do_not_choose_the_nodes(context):
    moved = Context(1, 7, dict(context.node_config), RecordDict(), {**context.run_config, "text_column": "department"})
    bench = node.bench_of(node.configuration(moved), moved)
    assert not set(bench.data.clients[0].texts) & set(LABELS)


def test_a_node_without_records_takes_no_part_in_such_a_run(context):
    bare = {key: value for key, value in context.node_config.items() if key != node.DATA_KEY}
    reply = app(
        Message(RecordDict(), 7, protocol.REGISTER, group_id="0"), Context(1, 7, bare, RecordDict(), context.run_config)
    )
    assert reply.error.code == protocol.REFUSED
    assert "names no data" in reply.error.reason


@pytest.mark.parametrize(
    ("missing", "message"), [("test_data", "needs test_data"), ("labels", "needs labels, the classes")]
)
def test_the_run_needs_a_test_set_and_classes(context, missing, message):
    with pytest.raises(InputError, match=message):
        parse({**context.run_config, missing: ""})
