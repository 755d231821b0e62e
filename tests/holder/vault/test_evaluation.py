"""A node's answer to an evaluation: charged before records are read, given whatever they hold, sent again as stored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from clients.app import VAULT_KEY, app
from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault import answer as answering
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, FAILED, REFUSED, RETIRED, TRAIN, Request, Response
from fedpriv.learning.training import private_evaluation, workbench
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_evaluation import EvaluationSpec, NoisedCounts, planned_event
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.mechanisms.sources import SeededSource
from server.exchange import message_to
from simulations.engines.flower_private import task_identity
from tests.holder.vault.running import Running
from tests.marks import slow
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records
from tests.wire import response_in

pytestmark = pytest.mark.usefixtures("quick_nodes", "fresh_benches")

ROWS = [(f"{WORDS[i % len(WORDS)]} {WORDS[i % 7]} {i}", LABELS[i % 3]) for i in range(60)]
Z = 4.0


class Node:
    """A node with the given rows, of which 60 are registered."""

    def __init__(self, folder: Path, model: Path, rows: list[tuple[str, str]], **settings: object) -> None:
        workbench.forget()
        data = write_records(folder.with_suffix(".csv"), rows)
        self.settings = make_vault(folder, data, model, num_records=60, **settings)
        self.holder = Holder.of(self.settings)
        run = {"model": str(model), "layers": "last-1", "rank": 4, "data": ON_NODES, "labels": list(LABELS)}
        self.run_config = to_flower(parse(run | {"num_clients": 3, "evaluation_noise_multiplier": Z}))
        self.initial = bench_of(run_of(self.run_config, self.holder), self.holder).initial

    def request(self, *, round_: int = 11, shift: float = 0.0, arrays=None, **fields: object) -> Request:
        asked = kinds.pack_instruction("run", round_, EvaluationSpec(noise_multiplier=Z)) | fields
        adapter = {name: (tensor + shift).numpy() for name, tensor in self.initial.items()}
        arrays = {kinds.ADAPTER: adapter} if arrays is None else arrays
        return Request.of(kind=EVALUATE, run_config=self.run_config, fields=asked, arrays=arrays)

    def ask(self, **changes: object) -> Response:
        return answer(self.request(**changes), self.holder)

    @property
    def phases(self) -> list[str]:
        with reading(self.settings.ledger) as db:
            return [entry.phase for entry in db.entries()]


@pytest.fixture
def make(tiny_bert, tmp_path):
    def build(rows=ROWS, name: str = "node", **settings: object) -> Node:
        return Node(tmp_path / name, tiny_bert, rows, **settings)

    return build


@pytest.fixture
def same_noise(monkeypatch):
    """Two nodes have the same secrets."""
    monkeypatch.setattr(Ledger, "coin_key", lambda ledger, data_set: b"coins")
    monkeypatch.setattr(answering, "_source", lambda config, client, round_, purpose: SeededSource(5, purpose))


def test_an_evaluation_is_charged_before_records_are_read_and_answered_once(make):
    node, seen = make(), []
    bench = bench_of(run_of(node.run_config, node.holder), node.holder)
    holder = replace(node.holder, before_records=lambda _: seen.append(("data" in vars(bench), node.phases[-1])))
    first, again = answer(node.request(), holder), node.ask()
    assert seen == [(False, "charged")]
    assert first.fields == again.fields
    assert node.phases.count("charged") == node.phases.count("released") == 1
    release = kinds.unpack(kinds.EvaluationRelease, first.fields)
    assert (release.round, release.event) == (11, planned_event(EvaluationSpec(noise_multiplier=Z)))
    for changes in ({"shift": 0.5}, {"round_": 12}, {"noise_multiplier": 5.0}, {"run": "another"}):
        assert node.ask(**changes).fields != first.fields
    assert node.phases.count("charged") == 5
    # 12 records are set aside, so with noise of 4 the counts are near that.
    assert abs(release.counts.hits + release.counts.misses - 12) < 6 * 4 * 2**0.5 + 12


@pytest.mark.parametrize(
    "row",
    [("the skin", LABELS[1]), ("of no class", "measles"), *slow(("", LABELS[0]), ("\0\ud7ff é" * 900, LABELS[2]))],
)
def test_a_record_more_moves_the_counts_by_at_most_one_and_nothing_else(make, same_noise, row):
    responses = [make(rows, name).ask() for rows, name in ((ROWS, "without"), ([row, *ROWS], "with"))]
    fields = [dict(response.fields) for response in responses]
    counts = [np.array([each.pop("hits"), each.pop("misses")]) for each in fields]
    for each in fields:
        each.pop(kinds.RECEIPT)  # signed with each node's own key, and of its own data set
    assert fields[0] == fields[1]
    assert [(response.code, response.reason, response.arrays) for response in responses] == [(0, "", {})] * 2
    # Both sums are rounded to the grid, some 2^-18 of the noise.
    assert np.linalg.norm(counts[0] - counts[1]) <= 1 + 2**-14


def evaluated(node: Node, monkeypatch, **changes: object) -> set[str]:
    """The texts of the records that a node counts in an evaluation of a run with these changes."""
    seen: set[str] = set()
    honest = workbench.Workbench.set_aside

    def set_aside(bench, client):
        data = honest(bench, client)
        seen.update(data.texts)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(workbench.Workbench, "set_aside", set_aside)
        request = replace(node.request(round_=1 + len(node.phases)), run_config={**node.run_config, **changes})
        assert not answer(request, node.holder).code
    return seen


def test_no_run_decides_which_records_are_set_aside(make, monkeypatch):
    """With seeds of its choice a coordinator could set one record aside, and ask whether it is there."""
    node = make()
    aside = evaluated(node, monkeypatch)
    assert 0 < len(aside) < len(ROWS)
    assert evaluated(node, monkeypatch, seed=1) == aside
    smaller, larger = (evaluated(node, monkeypatch, test_fraction=share) for share in (0.05, 0.6))
    assert smaller <= aside <= larger, "a record changes sides"
    workbench.forget()
    assert evaluated(node, monkeypatch) == aside, "another start of the vault, other sides"
    assert evaluated(make(name="other"), monkeypatch) != aside, "another ledger has another secret"


def test_an_evaluation_costs_something_and_releases_are_counted_whatever_they_cost(make):
    """Above a bound noise costs nothing that a ledger would notice, and time all the same."""
    node = make(policy="max_releases = 2\n")
    assert node.ask(noise_multiplier=1000.1).code == REFUSED
    codes = [node.ask(round_=round_, noise_multiplier=1000.0).code for round_ in (1, 2, 3, 2, 4)]
    assert codes == [0, 0, RETIRED, 0, RETIRED], "a stored answer is sent again"
    assert "max_releases = 2" in node.ask(round_=5).reason
    assert node.phases.count("charged") == 2
    with Ledger(node.settings.ledger) as ledger:
        (both,) = ledger.releases(ledger.data_set().id)
    assert epsilon_of([both.event.with_count(1)], 1e-5).epsilon > 1e-3


@pytest.mark.parametrize("harm", ["no file", "no records", "a record kills every pass"])
def test_records_that_cannot_be_used_give_noise_alone(make, same_noise, monkeypatch, harm):
    node = make()
    if harm == "no file":
        node.settings.data.unlink()
    elif harm == "no records":
        node.settings.data.write_text("note,department\n")
    else:
        monkeypatch.setattr(private_evaluation, "_share", lambda *_: 1 / 0)
        monkeypatch.setattr(private_evaluation, "rehearse", lambda *_: 0.01)  # it would notice such a model
    release = kinds.unpack(kinds.EvaluationRelease, node.ask().fields)
    nothing, source = torch.zeros(2, dtype=torch.float64), SeededSource(5, "evaluation")
    noise, _ = private_evaluation.noised(nothing, UpdateSpec.counts(Z), source)
    assert release.counts == NoisedCounts.of(noise)
    assert node.phases[-2:] == ["charged", "released"]


def test_what_the_policy_does_not_allow_or_is_malformed_is_refused_and_costs_nothing(make, monkeypatch):
    node = make()
    for fields, reason in (
        ({"noise_multiplier": 0.0}, "must be > 0 and at most 1e+06"),
        ({"noise_multiplier": float("nan")}, "must be > 0 and at most 1e+06"),
        ({"noise_multiplier": 0.2}, "below this node's minimum 0.3"),
        ({"noise_multiplier": 1.1e6}, ""),  # it would overflow
        ({"noise_multiplier": 1.7e308}, ""),
        ({"round": 0}, "round = 0: must be >= 1"),
    ):
        response = node.ask(**fields)
        assert (response.code, reason in response.reason) == (REFUSED, True), response.reason
    name, tensor = next(iter(node.initial.items()))
    whole = {key: value.numpy() for key, value in node.initial.items()}
    shapes = tensor[:-1].numpy(), np.full(tensor.shape, np.inf, np.float32), np.full(tensor.shape, 1e5, np.float32)
    malformed = [{}, {"adapter": {"unknown": tensor.numpy()}}, {"adapter": {}, "signs": {"signs": tensor.numpy()}}]
    malformed += [{"adapter": whole | {name: array}} for array in shapes]
    for changes in ({"extra": 1}, {"noise_multiplier": "4"}, *({"arrays": each} for each in malformed)):
        assert node.ask(**changes).code, changes
    seeded = replace(node.request(), run_config=dict(node.run_config) | {"simulate": True})
    assert "seeded" in answer(seeded, node.holder).reason
    with monkeypatch.context() as patch:  # a model that fails on synthetic records
        patch.setattr(TrainingModel, "predictions", lambda *_, **__: 1 / 0)
        assert node.ask().code == FAILED
    assert node.phases == ["registered"]


def test_a_charge_without_a_stored_answer_is_answered_by_noise_alone(make, same_noise, monkeypatch):
    node = make()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(private_evaluation, "count", die)
    with pytest.raises(KeyboardInterrupt):
        node.ask()
    assert node.phases[-1] == "charged"
    response = node.ask()  # does not count again, or it would die
    assert not response.arrays
    assert node.phases.count("charged") == 1


def test_the_budget_of_the_node_counts_evaluations(make):
    node = make(budget_epsilon=2.3)  # the filter needs 2.215 for four evaluations, and 2.465 for five
    codes = [node.ask(round_=round_).code for round_ in range(1, 8)]
    assert codes[:4] == [0] * 4
    assert set(codes[4:]) == {RETIRED}
    assert node.phases.count("charged") == 4
    with Ledger(node.settings.ledger) as ledger:
        assert sum(release.event.count for release in ledger.releases(ledger.data_set().id)) == 4


def test_no_train_request_asks_for_counts_under_another_clip_norm(make):
    """Counts move by 1 whatever clip norm is stated, and the noise on them would be as small as that."""
    node = make()
    spec = replace(UpdateSpec.counts(Z), clip_norm=1e-3)
    asked = node.request()
    assert Request.of(TRAIN, fields=asked.fields, arrays=asked.arrays).digest != asked.digest, "two keys"
    for asked in (spec, UpdateSpec.counts(Z)):
        fields = kinds.pack_instruction("run", 1, asked)
        request = Request.of(TRAIN, node.run_config, fields=fields, arrays=node.request().arrays)
        response = answer(request, node.holder)
        assert (response.code, "objective = 'counts'" in response.reason) == (REFUSED, True)
    assert node.phases == ["registered"]


@pytest.mark.slow
def test_an_evaluation_passes_the_pipe_and_the_socket(make):
    node = make()
    vault = Running(node.settings)
    try:
        context = Context(1, 7, {VAULT_KEY: str(node.settings.socket)}, RecordDict(), node.run_config)
        with task_identity(1):
            replies = [app(message_to(7, node.request(), 11), context) for _ in range(2)]
        releases = [kinds.answer_of(EVALUATE, response_in(reply)) for reply in replies]
        assert releases[0] == releases[1]
        assert releases[0].event == planned_event(EvaluationSpec(noise_multiplier=Z))
    finally:
        vault.stop()
