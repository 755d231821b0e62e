"""A node's records come from its own configuration, unless it trusts the run's; a failure tells nothing of them."""

import csv
import shutil
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from clients import node
from clients.app import app, request_of
from clients.node import TRUST_KEY, TRUST_VARIABLE
from fedpriv.config import parse, to_flower
from fedpriv.errors import InputError
from fedpriv.holder.vault.answer import settle
from fedpriv.holder.vault.holder import bench_of, run_of
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import FAILED, REFUSED, REGISTER, TRAIN
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from tests.tiny import LABELS
from tests.vaults import make_vault, write_records
from tests.wire import arrays_of, asked, response_in

pytestmark = pytest.mark.usefixtures("as_a_task", "quick_nodes")


@pytest.fixture
def records(table: Path, tmp_path: Path) -> Path:
    """The records of one site, with columns that are called otherwise."""
    with table.open(newline="") as file:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(file) if row["site"] == "site-1"]
    return write_records(tmp_path / "own.csv", rows)


@pytest.fixture
def settings(records, tiny_bert, tmp_path) -> VaultSettings:
    return make_vault(tmp_path / "node", records, tiny_bert)


@pytest.fixture
def context(run_on_nodes, settings) -> Context:
    config = to_flower(parse(run_on_nodes))
    return Context(1, 7, {node.FOLDER_KEY: str(settings.folder)}, RecordDict(), config)


def refusal(context: Context, **changes: object) -> str:
    """Why a node refuses to register in a run with these changes."""
    moved = Context(1, 7, dict(context.node_config), RecordDict(), {**context.run_config, **changes})
    reply = app(asked(REGISTER), moved)
    assert reply.error.code == REFUSED
    return reply.error.reason


def registration(context: Context) -> kinds.Registration:
    reply = app(asked(REGISTER), context)
    assert not reply.has_error(), reply.error
    return kinds.answer_of(REGISTER, response_in(reply))


def test_the_node_registers_its_own_records_and_signs(context, records, settings):
    registered = registration(context)
    with records.open() as file:
        assert registered.num_records == len(file.readlines()) - 1
    assert (registered.client, registered.name, registered.keeps_replies) == (1, "St. Anna", True)
    public = keys.public_line(settings.key)
    assert keys.verify(public, registered.signed, registered.signature)
    assert registration(context).data_set == registered.data_set


def test_it_trains_on_them_and_notes_what_it_did(context, settings):
    bench = bench_of(run_of(context.run_config, node.holder_of(context)), node.holder_of(context))
    spec = UpdateSpec.of(parse(dict(context.run_config)))
    fields, arrays = kinds.pack_instruction("run", 1, spec), {kinds.ADAPTER: arrays_of(bench.initial)}
    message = asked(TRAIN, fields=fields, arrays=arrays)
    assert "data" not in vars(bench), "nothing reads records before the charge"
    prepared = node.prepare(request_of(message, context), context)
    assert len(prepared.task.data) == registration(context).num_records
    response = settle(prepared, execute_one_by_one(bench.model, [prepared.task])[0])
    assert kinds.ADAPTER in response.arrays
    with Ledger(settings.ledger) as ledger:
        assert [key.round for key, _ in ledger.releases_of(ledger.data_set().id, "run")] == [1]
    events = settings.events.read_text()
    assert [event in events for event in ("registered", "charged", "released")] == [True] * 3


def test_a_run_decides_nothing_that_its_operator_has_decided(context):
    for values, reason in (
        ({"data": "embedded"}, "holds records of its own"),
        ({"data": "other.csv"}, "holds records of its own"),
        ({"num_clients": 1}, "partition-id = 1: must lie in 0..0"),
        ({"labels": ",".join(LABELS[::-1])}, "labels: are not those"),
        ({"labels": "cardiology,measles"}, "labels: are not those"),
        ({"model": "all-MiniLM-L6-v2"}, "has not approved it"),
        ({"max_length": 513}, "above this node's maximum 512"),
        ({"task": "CAUSAL_LM"}, "does not suit this node's records"),
    ):
        assert reason in refusal(context, **values)
    moved = {**context.run_config, "text_column": "department"}  # the node's own counts
    holder = node.holder_of(context)
    assert not set(bench_of(run_of(moved, holder), holder).data.clients[0].texts) & set(LABELS)


def test_a_node_without_records_takes_no_part_in_such_a_run(context):
    assert "no records of its own" in refusal(Context(1, 7, {node.CLIENT_KEY: 1}, RecordDict(), context.run_config))


def test_a_node_that_its_operator_has_not_finished_takes_no_part(context, settings, tiny_bert):
    settings.closed.write_text("a record killed the vault")
    assert "closed: this node takes part" in refusal(context)
    settings.closed.unlink()
    approved = settings.models.read_text()
    settings.models.unlink()
    assert "has not approved it" in refusal(context)
    settings.models.write_text(approved)
    make_vault(settings.folder, settings.data, tiny_bert, budget_epsilon=None)
    assert "but no budget" in refusal(context)
    make_vault(settings.folder, settings.data, tiny_bert)
    for path in settings.folder.glob("ledger.sqlite*"):
        path.unlink()
    assert "operator has registered none" in refusal(context)


def test_a_model_whose_files_changed_since_it_was_approved_is_not_run(context, settings, tiny_bert, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_bert, copy)
    make_vault(settings.folder, settings.data, copy)
    (copy / "tokenizer.json").write_text("{}")
    assert "changed since this node's operator approved them" in refusal(context, model=str(copy))


def test_the_run_needs_classes(context):
    with pytest.raises(InputError, match="needs labels, the classes"):
        parse({**context.run_config, "labels": ""})


# Nodes without records of their own.


def ask_of_the_runs_data(values: dict[str, object], kind: str, **node_config: object) -> Message:
    context = Context(1, 7, {"partition-id": 0, **node_config}, RecordDict(), to_flower(parse(values)))
    return app(asked(kind), context)


def test_registration_states_public_numbers_alone(small_run):
    reply = ask_of_the_runs_data(small_run, REGISTER, **{TRUST_KEY: True})
    response = response_in(reply)
    registration = kinds.answer_of(REGISTER, response)
    assert (registration.client, registration.name) == (0, "site-0")
    assert not response.arrays


@pytest.mark.parametrize("kind", [TRAIN, REGISTER])
def test_a_failure_is_told_without_its_cause(small_run, tmp_path, kind):
    secret = tmp_path / "secret.csv"
    secret.write_text("text,label,site\nJane Doe has a rash,only-one-label,s\n")
    reply = ask_of_the_runs_data({**small_run, "data": str(secret)}, kind, **{TRUST_KEY: True})
    assert reply.error.code == FAILED
    assert "log" in reply.error.reason
    assert not any(word in reply.error.reason for word in ("secret", "label", "Jane", "Traceback"))


@pytest.mark.parametrize("kind", [TRAIN, REGISTER])
def test_a_node_takes_no_data_path_from_the_coordinator(small_run, monkeypatch, kind):
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    reply = ask_of_the_runs_data(small_run, kind)
    assert reply.error.code == REFUSED
    assert "takes no data from a run's configuration" in reply.error.reason
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert not ask_of_the_runs_data(small_run, REGISTER).has_error()
    reply = ask_of_the_runs_data(small_run, REGISTER, **{"partition-id": 9})
    assert (reply.error.code, "partition-id = 9: must lie in 0..2" in reply.error.reason) == (REFUSED, True)
