"""A node charges its own ledger first, answers a repeated message with the same bytes, and retires itself."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from clients import node as node_keys
from clients.app import message_of, request_of
from clients.node import answered, prepare
from fedpriv.config import parse, to_flower
from fedpriv.files import Journal
from fedpriv.holder.vault import _charging, refused
from fedpriv.holder.vault.answer import Prepared, settle
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import FAILED, REFUSED, REGISTER, RETIRED, TRAIN, Response
from fedpriv.learning.training import workbench as workbench_module
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.stacked import execute_one_by_one
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger import head_file
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading, verify_with_head
from tests.wire import arrays_of, asked, request_in, response_in

pytestmark = pytest.mark.usefixtures("as_a_task", "quick_nodes")


class Node:
    """One node of a run on private data, with secure noise and a ledger of its own."""

    def __init__(self, values: dict[str, object], ledger: Path, **node_config: object) -> None:
        self.config = parse(values | {"simulate": False, "comparison": False})
        self.ledger = ledger
        keys = {"partition-id": 0, node_keys.TRUST_KEY: True, node_keys.LEDGER_KEY: str(ledger), **node_config}
        self.context = Context(1, 7, keys, RecordDict(), to_flower(self.config))
        self.execute = partial(execute_one_by_one, workbench(self.config).model)

    def message(self, round_: int = 1, *, run: str = "run", shift: float = 0.0, **changes: object) -> Message:
        adapter = {name: tensor + shift for name, tensor in workbench(self.config).initial.items()}
        fields = {**kinds.pack_instruction(run, round_, UpdateSpec.of(self.config)), **changes}
        return asked(TRAIN, fields=fields, arrays={kinds.ADAPTER: arrays_of(adapter)})

    def ask(self, message: Message) -> Message:
        prepared = self.prepare(message)
        if isinstance(prepared, Response):
            return message_of(prepared, message)
        return message_of(settle(prepared, self.execute([prepared.task])[0]), message)

    def prepare(self, message: Message) -> Prepared | Response:
        return prepare(request_of(message, self.context), self.context)

    @property
    def num_charged(self) -> int:
        with reading(self.ledger) as db:
            verify_with_head(db, self.ledger)
            return sum(entry.phase == "charged" for entry in db.entries())


@pytest.fixture
def node(small_run, tmp_path, monkeypatch) -> Node:
    monkeypatch.setattr(head_file, "_LOCK_SECONDS", 0.1)
    return Node(small_run, tmp_path / "node.sqlite")


def uploaded(reply: Message) -> bytes:
    assert not reply.has_error(), reply.error
    return response_in(reply).frame


def test_a_message_replayed_ten_times_gets_ten_identical_replies_for_one_charge_and_any_other_is_another(node):
    replies = {uploaded(node.ask(node.message())) for _ in range(10)}
    assert len(replies) == node.num_charged == 1
    for changes in ({}, {"run": "other"}, {"shift": 1e-3}, {"learning_rate": 0.25}):
        replies.add(uploaded(node.ask(node.message(round_=2, **changes))))
    assert len(replies) == node.num_charged == 5


def test_a_task_that_failed_after_its_charge_is_noise_alone_and_never_computed_again(node):
    message = node.message()
    prepared = node.prepare(message)
    assert len(prepared.task.data)
    failed = uploaded(message_of(settle(prepared, RuntimeError("out of memory")), message))
    assert uploaded(node.ask(message)) == failed
    assert node.num_charged == 1


def test_two_computations_of_one_charge_release_one_result_once_it_is_stored(node):
    message = node.message()
    prepared = [node.prepare(message) for _ in range(2)]
    updates = node.execute([each.task for each in prepared])
    assert not torch.equal(*(next(iter(update.adapter.values())) for update in updates)), "noise differs"
    with Ledger(node.ledger):
        assert settle(prepared[0], updates[0]).code == REFUSED, "it cannot be stored"
    replies = [message_of(settle(each, update), message) for each, update in zip(prepared, updates, strict=True)]
    assert len(set(map(uploaded, replies))) == 1
    assert node.num_charged == 1


def test_a_reply_that_is_no_longer_kept_is_refused_not_recomputed(node):
    for round_ in (1, 2):
        uploaded(node.ask(node.message(round_)))
    reply = node.ask(node.message(1))
    assert reply.error.code == REFUSED
    assert "no longer kept" in reply.error.reason
    assert node.num_charged == 2


def test_the_node_retires_by_itself_and_never_passes_its_budget(small_run, tmp_path):
    node = Node(small_run, tmp_path / "node.sqlite", **{node_keys.BUDGET_KEY: 2.0})
    codes = []
    for round_ in range(1, 20):
        reply = node.ask(node.message(round_, num_rounds=30))
        codes.append(reply.error.code if reply.has_error() else 0)
    with reading(node.ledger) as db:
        (data_set,) = db.data_sets()
        assert epsilon_of([release.event for release in db.releases(data_set.id)], data_set.delta).epsilon <= 2.0
    assert set(codes) == {0, RETIRED}
    assert codes == sorted(codes), "once retired, always retired"
    assert node.num_charged == codes.count(0)
    # A coordinator that asks for less noise, or under the name of another run, gets no more.
    assert node.ask(node.message(1, run="again")).error.code == RETIRED


def test_a_budget_that_bounds_nothing_stops_the_node(small_run, tmp_path):
    for budget in (0.0, -1.0, float("nan"), float("inf")):
        node = Node(small_run, tmp_path / "node.sqlite", **{node_keys.BUDGET_KEY: budget})
        assert node.ask(node.message()).error.code == FAILED
        assert not node.ledger.exists()


def test_the_registered_number_of_records_stays_when_the_file_changes(small_run, tmp_path):
    table = tmp_path / "records.csv"
    table.write_text(Path(str(small_run["data"])).read_text())
    node = Node(small_run | {"data": str(table)}, tmp_path / "node.sqlite")
    ask = partial(answered, request_of(asked(REGISTER), node.context))
    first = kinds.answer_of(REGISTER, ask(node.context))
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-40]))
    workbench_module.forget()
    second = kinds.answer_of(REGISTER, ask(node.context))
    assert second == first
    uploaded(node.ask(node.message()))
    with reading(node.ledger) as db:
        assert [entry.phase for entry in db.entries()].count("changed") == 2
        (data_set,) = db.data_sets()
        (release,) = db.releases(data_set.id)
        assert release.event.sampling_probability == node.config.batch_size / first.num_records
    workbench_module.forget()


def test_only_a_node_that_trusts_the_runs_configuration_leaves_limits_and_account_to_the_server(small_run, tmp_path):
    node = Node(small_run, tmp_path / "node.sqlite")
    del node.context.node_config[node_keys.LEDGER_KEY]
    for trusts, limits in ((True, None), (False, NodeLimits())):
        node.context.node_config[node_keys.TRUST_KEY] = trusts
        policy = node_keys.holder_of(node.context).policy
        assert (policy.allow_unrecorded, policy.limits) == (trusts, limits)


@pytest.mark.parametrize("harm", ["locked", "damaged", "edited"])
def test_a_ledger_that_cannot_be_used_stops_every_release(node, harm, caplog):
    uploaded(node.ask(node.message(1)))
    content = node.ledger.read_bytes()
    assert content.count(b"subsampled_gaussian") >= 1
    if harm == "damaged":
        node.ledger.write_bytes(content[:5000])
    if harm == "edited":
        node.ledger.write_bytes(content.replace(b"subsampled_gaussian", b"subsampled_gaussiam"))
    with Ledger(node.ledger) if harm == "locked" else nullcontext():
        reply = node.ask(node.message(2))
    assert reply.error.code == REFUSED
    assert reply.error.reason == "refused: this node's ledger cannot be used; its log says why"
    assert str(node.ledger) in caplog.text


def test_a_coordinator_that_asks_for_less_privacy_is_refused_and_nothing_is_charged(small_run, tmp_path):
    """By a policy file, which holds also where the node takes its data from the run's configuration."""
    file = tmp_path / "policy.toml"
    file.write_text("max_sampling_probability = 0.3\n")
    node = Node(small_run, tmp_path / "node.sqlite", **{node_keys.POLICY_KEY: str(file)})
    assert not node.ask(node.message(run="honest")).has_error()
    beyond = {"num_rounds": 1, "round": 2}
    less = {"noise_multiplier": 0.0}, {"batch_size": 52}, {"local_steps": 200}, {"clip_norm": 1e9}, {"codec": "pickle"}
    for changes in (*less, beyond):
        assert node.ask(node.message(**changes)).error.code == REFUSED, changes
    assert node.num_charged == 1


def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_charged(node):
    request = request_in(node.message())
    adapter = request.arrays[kinds.ADAPTER]
    name, array = next(iter(adapter.items()))
    without = {other: adapter[other] for other in adapter if other != name}
    for arrays in (
        {kinds.ADAPTER: adapter | {name: array.T}},
        {kinds.ADAPTER: without},
        {kinds.ADAPTER: adapter, kinds.MERGED: {"no.such.layer.left": array}},
    ):
        assert node.ask(asked(TRAIN, fields=request.fields, arrays=arrays)).error.code == FAILED
    assert node.num_charged == 0
    assert not node.ask(node.message()).has_error()


def test_a_refusal_quotes_no_more_than_a_line_of_what_was_sent():
    response = refused(_charging.RefusedError("clipping = " + "x" * 10**6), Journal(None))
    assert response.code == REFUSED
    assert len(response.reason) == 300


def test_a_charge_without_a_reply_is_honoured_with_noise_alone_and_not_by_another_data_set(node):
    """A crash in between may have had its cause in a record; and other data would pay for what does not touch them."""
    for round_ in (1, 2):
        message = node.message(round_)
        assert len(node.prepare(message).task.data)
        assert not len(node.prepare(message).task.data)
    assert uploaded(node.ask(node.message(1)))
    assert node.num_charged == 2
    with Ledger(node.ledger) as ledger:
        ledger.register("0", 52, 1e-3, note="a new study, no record in common")
    reply = node.ask(message)
    assert reply.error.code == REFUSED
    assert "was charged to another data set" in reply.error.reason
