"""A coordinator that leaves out, doubles, reweights or replaces an upload is named by the node whose upload it is."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import ArrayRecord, Message

from clients.app import message_of, request_of
from clients.deploy.__main__ import app
from fedpriv.config import ON_NODES, RunConfig, parse, to_flower
from fedpriv.errors import TooFewClientsError
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import TRAIN, Response
from fedpriv.learning.training.workbench import workbench
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.evidence import Exhibit, write_evidence
from fedpriv.privacy.ledger.inclusion import InclusionProof, Leaf, Sum, digest_of_sum, kept_in, proofs_in
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.runs import ClientRow
from server import inclusion
from server.bookkeeping import Books
from server.exchange import set_message_id
from server.inclusion import Inclusions
from server.registration import register_nodes
from server.strategy import RuleStrategy
from simulations.sites import run_in_process
from tests.marks import slow
from tests.privacy.ledger.test_evidence import failures, verified
from tests.tiny import LABELS, WORDS
from tests.vaults import make_vault, write_records

pytestmark = pytest.mark.usefixtures("quick_nodes", "as_a_task")

SIZES = {0: 30, 1: 42, 2: 54, 3: 66}
VICTIM, OTHER = 1, 2
VALUES = {
    **{"data": ON_NODES, "labels": ",".join(LABELS), "num_clients": 4, "layers": "last-1", "rank": 2, "rounds": 3},
    **{"local_steps": 1, "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 6, "clip_norm": 1.0},
    **{"noise_multiplier": 40.0, "max_length": 32, "min_clients": 3, "round_seconds": 600.0, "comparison": False},
}


class Link:
    """Flower's connection to nodes, whose messages reach their vaults; some never reach the coordinator."""

    def __init__(self, vaults: dict[int, VaultSettings], config: RunConfig, lost: Sequence[tuple[int, int]]) -> None:
        self.vaults, self.context, self.lost = vaults, SimpleNamespace(run_config=to_flower(config)), lost
        self.messages: dict[str, Message] = {}
        self.replies: defaultdict[int, list[Response]] = defaultdict(list)
        self.reasons: dict[int, str] = {}
        self.shown: dict[tuple[int, str], str] = {}

    def get_node_ids(self) -> list[int]:
        return [100 + client for client in self.vaults]

    def push_messages(self, messages) -> list[str]:
        for message in messages:
            set_message_id(message, str(len(self.messages)))
            self.messages[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids) -> list[Message]:
        return [*filter(None, (self._reply(self.messages[id_]) for id_ in message_ids))]

    def _reply(self, message: Message) -> Message | None:
        client, request = message.metadata.dst_node_id - 100, request_of(message, self.context)
        reply = answer(request, Holder.of(self.vaults[client]))
        if request.kind == TRAIN:
            self.shown[client, message.metadata.group_id] = str(request.own.get(kinds.INCLUDED, ""))
            self.reasons[client] = reply.reason
            self.replies[client].append(reply)
            if (client, int(message.metadata.group_id)) in self.lost:
                return None
        return message_of(reply, message)


@dataclass(frozen=True, eq=False)
class Site:
    """A federation of four vaults, each of which knows its coordinator's key."""

    folder: Path
    config: RunConfig
    vaults: dict[int, VaultSettings]

    def run(self, rounds: int = 2, lost: Sequence[tuple[int, int]] = ()) -> tuple[Link, dict[int, dict[int, str]]]:
        """The link, and {round: {client: how it ended}}, under the coordinator's own registration and strategy."""
        link, ended = Link(self.vaults, self.config, lost), defaultdict(dict)

        def on_round(row: object, clients: list[ClientRow]) -> None:
            for each in clients:
                ended[each.round][each.client] = each.status

        node_keys, start = self.folder / "vaults", workbench(self.config).initial
        nodes = register_nodes(
            link,
            num_expected=4,
            wait=30,
            node_keys=node_keys,
            secure_aggregation=self.config.secure_aggregation,
        )
        with Ledger(self.folder / "ledger.sqlite") as ledger:
            strategy = RuleStrategy(
                self.config,
                nodes,
                books=Books(self.config, "run", [each for _, each in nodes.values()], initial=start, ledger=ledger),
                run="run",
                initial=start,
                evaluate=lambda _: None,
                on_round=on_round,
                inclusions=Inclusions.of(self.config, "run", self.folder, ledger),
            )
            with suppress(TooFewClientsError):
                strategy.start(link, ArrayRecord(start), num_rounds=rounds, timeout=0)
        return link, ended

    @property
    def sums(self) -> list[Sum]:
        """The coordinator's records."""
        return [*kept_in(self.folder / "inclusions.jsonl", Sum)]

    def not_confirmed(self, client: int | None = None) -> list[str]:
        """The lines on what the verifier finds wrong in the evidence of the coordinator, or of a node."""
        node = None if client is None else self.vaults[client]
        source = Exhibit(
            ledger=node.ledger if node else self.folder / "ledger.sqlite",
            receipts=(node.receipts,) if node else (),
            inclusions=node.inclusions if node else self.folder / "inclusions.jsonl",
            coordinator=keys.public_line(self.folder / "coordinator.key"),
            config={} if node else {"client_weights": "records"},
        )
        bundle = self.folder / f"{client}-{len(list(self.folder.glob('*.zip')))}.zip"
        write_evidence(bundle, {"part": source})
        return failures(verified(bundle)[1])

    def charged(self, client: int) -> int:
        with reading(self.vaults[client].ledger) as db:
            return sum(entry.phase == "charged" for entry in db.entries())


@pytest.fixture(params=[False, True], ids=["uploads", "sums"])
def site(request, tiny_bert, table, tmp_path) -> Site:
    (tmp_path / "vaults").mkdir()
    keys.make_key_pair(tmp_path / "coordinator.key")
    vaults = {}
    for client, size in SIZES.items():
        rows = [(f"{WORDS[i % 13]} {WORDS[(i + client) % 7]} {LABELS[i % 3]}", LABELS[i % 3]) for i in range(size)]
        data = write_records(tmp_path / f"own-{client}.csv", rows)
        vaults[client] = make_vault(tmp_path / f"node-{client}", data, tiny_bert, partition_id=client)
        shutil.copy(tmp_path / "coordinator.key.pub", vaults[client].coordinator)
        (tmp_path / "vaults" / f"{client}.pub").write_text(keys.public_line(vaults[client].key))
    for vault in vaults.values():
        vault.peers.mkdir()
        for peer in vaults.keys() - {vault.partition_id}:
            shutil.copy(tmp_path / "vaults" / f"{peer}.pub", vault.peers)
    values = {**VALUES, "secure_aggregation": request.param, "model": str(tiny_bert), "test_data": str(table)}
    return Site(tmp_path, parse({**values, "node_keys": str(tmp_path / "vaults")}), vaults)


Leaves = list[Leaf]
HONEST = Sum.of


@pytest.fixture
def lying(monkeypatch) -> Callable[..., None]:
    """Lets the coordinator sign other leaves, or another record, than what it has summed."""

    def lie(about: Callable[[Leaves], Leaves], **changes: object) -> None:
        def of(leaves, *, key, **said):
            made = HONEST(about(list(leaves)), key=key, **said)
            record = replace(made.record, **changes)
            return replace(made, record=replace(record, signature=keys.sign(key, record.statement)))

        monkeypatch.setattr(inclusion.Sum, "of", staticmethod(of))

    return lie


def at_victim(**changes: object) -> Callable[[Leaves], Leaves]:
    return lambda leaves: [replace(leaf, **changes) if leaf.position == VICTIM else leaf for leaf in leaves]


def copied(leaves: Leaves) -> Leaves:
    """The victim's upload stands at another's position too."""
    return [replace(leaves[VICTIM], position=OTHER) if leaf.position == OTHER else leaf for leaf in leaves]


def appended(leaves: Leaves) -> Leaves:
    return [*leaves, replace(leaves[VICTIM], position=len(leaves))]


ALL = (0, 1, 2, 3)
LIES = {
    "left out": (at_victim(reply="", weight=0.0), [VICTIM], "left out, and no reason is given"),
    "counted twice": (
        lambda leaves: at_victim(weight=2 * leaves[VICTIM].weight)(leaves),
        [VICTIM],
        "this node's upload has weight",
    ),
    "counted less": (at_victim(weight=1.0), [VICTIM], "this node's upload has weight 1, agreed is"),
    "replaced": (at_victim(reply="ab" * 32), [VICTIM], "another upload stands in place of this node's"),
    "in another's place": (copied, [OTHER], "another upload stands in place of this node's"),
    "at a further position": (appended, ALL, "is this node's, and the record shows another"),
}


@pytest.mark.parametrize("name", [*list(LIES)[:4], *slow(*list(LIES)[4:])])
def test_a_lie_about_an_upload_is_named_by_the_node_whose_place_it_takes(site, lying, name):
    lie, victims, said = LIES[name]
    lying(lie)
    link, ended = site.run()
    assert set(ended[1].values()) == {"ok"}
    assert {client: status for client, status in ended[2].items() if status != "ok"} == dict.fromkeys(
        victims, "refused"
    )
    for client in ALL:
        assert site.charged(client) == (1 if client in victims else 2)
        assert (f"refused: included: round 1: position {client}" in link.reasons[client]) == (client in victims)
        assert (said in link.reasons[client]) == (client in victims)
    named = site.not_confirmed()
    at = [len(ALL)] if name == "at a further position" else victims
    assert {line.partition(" position ")[2].split()[0] for line in named} == {*map(str, at)}, "by the auditor as well"


def test_an_inflated_total_is_named_by_every_node(site, lying):
    """It would make every upload count for less."""
    lying(lambda leaves: leaves, weight=1e6)
    link, _ = site.run()
    assert {site.charged(client) for client in ALL} == {1}
    assert all("is of other uploads, or of another total" in link.reasons[client] for client in ALL)
    assert "round 1 of run run: its sum of 4 is signed by ssh-ed25519" in site.not_confirmed()[0]


@pytest.mark.parametrize("lie", ["another key", "nothing shown", "an older run's"])
def test_what_another_key_signed_or_is_not_shown_stops_every_node(site, monkeypatch, tmp_path, lie):
    if lie == "another key":
        keys.make_key_pair(tmp_path / "other.key")
        for vault in site.vaults.values():
            shutil.copy(tmp_path / "other.key.pub", vault.coordinator)
    elif lie == "nothing shown":
        monkeypatch.setattr(Inclusions, "shown_to", lambda *_: {})
    else:
        monkeypatch.setattr(inclusion.Sum, "of", staticmethod(lambda *a, **said: HONEST(*a, **said | {"run": "old"})))
    link, _ = site.run()
    key = "its record is not signed with the coordinator's key"
    said = key if lie == "another key" else "no record says whether this node's upload is in the sum"
    assert all(f"refused: included: round 1: {said}" in link.reasons[client] for client in ALL)
    assert {site.charged(client) for client in ALL} == {1}


def test_an_honest_run_goes_on_and_each_node_keeps_what_it_was_shown(site):
    link, ended = site.run(rounds=3)
    assert {status for each in ended.values() for status in each.values()} == {"ok"}
    assert [made.record.included for made in site.sums] == [4, 4, 4]
    for client, vault in site.vaults.items():
        kept = [*kept_in(vault.inclusions, InclusionProof)]
        assert [each.record.round for each in kept] == [1, 2], "the last one's comes with no request"
        for proof, made in zip(kept, site.sums, strict=False):
            proof.check(keys.public_line(site.folder / "coordinator.key"))
            assert proof == made.proof(client)
            assert proof.leaf.weight / proof.record.weight == SIZES[client] / sum(SIZES.values())
        assert len(link.shown[client, "3"]) < 1000, "a round's proof alone"
    assert site.not_confirmed() == site.not_confirmed(VICTIM) == []
    lines = site.vaults[VICTIM].inclusions.read_text()
    for old, new in (('"weight":42.0', '"weight":84.0'), ('"round":1', '"round":9'), ('"included":4', '"included":5')):
        assert old in lines
        site.vaults[VICTIM].inclusions.write_text(lines.replace(old, new))
        assert site.not_confirmed(VICTIM), old


def test_the_sum_can_be_computed_again_from_the_uploads_and_from_no_others(site):
    """As an auditor does who has the replies: under masks the words of the vectors, else the adapters."""
    link, _ = site.run(rounds=1)
    (made,) = site.sums
    uploads = []
    for client in ALL:
        (reply,) = link.replies[client]
        assert made.leaves[client].reply == reply.digest
        arrays = reply.arrays[kinds.ADAPTER]
        words = {name: a.view(a.dtype.str.replace("i", "u")) if name == kinds.SUM else a for name, a in arrays.items()}
        uploads.append((words, made.leaves[client].weight))
    assert digest_of_sum(uploads) == made.record.sum
    for others in (uploads[1:], [*uploads, uploads[VICTIM]], [uploads[0], *uploads[2:], uploads[2]]):
        assert digest_of_sum(others) != made.record.sum


@pytest.mark.parametrize("lost", [[(VICTIM, 1)], [(VICTIM, 1), (VICTIM, 2)]])
def test_a_node_whose_reply_came_late_is_told_so_and_goes_on(site, lost):
    _, ended = site.run(rounds=3, lost=lost)
    late = [round_ for _, round_ in lost]
    assert [made.leaves[VICTIM].reason for made in site.sums][: len(late)] == ["no reply within 600 s"] * len(late)
    assert ended[3][VICTIM] == "ok", "after two rounds in silence it has registered again"
    kept = {each.record.round: each.leaf.reason for each in kept_in(site.vaults[VICTIM].inclusions, InclusionProof)}
    assert [kept[round_] for round_ in late] == ["no reply within 600 s"] * len(late)
    assert kept.keys() == {1, 2}, "it was shown again what it may not have got"
    noted = [json.loads(line) for line in site.vaults[VICTIM].events.read_text().splitlines()]
    told = [(each["round"], each["reason"]) for each in noted if each["event"] == "left_out"]
    assert told == [(round_, "no reply within 600 s") for round_ in late]


def test_a_false_reason_stops_nothing_and_stands_signed_beside_what_the_node_knows(site, lying):
    """The reply was in time, and the node cannot prove that: its own ledger says when it was stored."""
    lying(at_victim(reply="", weight=0.0, reason="no reply within 600 s"))
    _, ended = site.run()
    assert set(ended[2].values()) == {"ok"}
    (kept,) = kept_in(site.vaults[VICTIM].inclusions, InclusionProof)
    kept.check(keys.public_line(site.folder / "coordinator.key"))
    with reading(site.vaults[VICTIM].ledger) as db:
        released = [entry for entry in db.entries() if entry.phase == "released"]
    with reading(site.folder / "ledger.sqlite") as db:
        ends = {(e.client, e.round): e.reply for e in db.entries() if e.phase == "released"}
    assert ends[str(VICTIM), 1] == released[0].reply, "the coordinator's own ledger contradicts its record"
    assert kept.leaf.reason == "no reply within 600 s"
    named = site.not_confirmed()
    assert {line.partition(" position ")[2].split()[0] for line in named} == {str(VICTIM)}
    assert site.not_confirmed(VICTIM) == []


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_coordinator_that_was_restarted_shows_what_a_node_may_not_have_seen(site):
    site.run(rounds=2, lost=[(VICTIM, 2)])
    with Ledger(site.folder / "ledger.sqlite") as ledger:
        again = Inclusions.of(site.config, "run", site.folder, ledger)
        assert Inclusions.of(site.config, "another run", site.folder, ledger).shown_to(VICTIM) == {}
    shown = {client: proofs_in(again.shown_to(client)[kinds.INCLUDED]) for client in ALL}
    assert {client: [proof.record.round for proof in proofs] for client, proofs in shown.items()} == {
        client: [1, 2] if client == VICTIM else [2] for client in ALL
    }


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_nodes_operator_sees_each_round_and_takes_the_last_ones_record_from_the_coordinators_file(site, tmp_path):
    site.run(rounds=3, lost=[(VICTIM, 2)])
    vault = site.vaults[VICTIM]
    (vault.folder / "node.toml").write_text('version = 1\nsuperlink = "127.0.0.1:9093"\n')

    def included(*more: object, code: int = 0) -> list[str]:
        done = run_in_process(app, "fedpriv node", "included", vault.folder, *more)
        assert done.returncode == code, done.stderr
        return (done.stdout if code == 0 else done.stderr).splitlines()

    first, second, third = included()
    assert (
        f"run run, round 1: in the sum of 4 replies, weight 42 of 192, 21.9%, root {site.sums[0].record.root}" in first
    )
    assert "round 2: NOT in the sum of 3 replies: no reply within 600 s; this node stored its reply " in second
    assert second.endswith(" s after its charge")
    assert "round 3: no record yet, it comes with the next request, or by --from; this node stored its" in third
    lines = (site.folder / "inclusions.jsonl").read_text().splitlines()
    forged = tmp_path / "forged.jsonl"
    forged.write_text(lines[2].replace('"weight": 42.0', '"weight": 84.0'))
    (refused,) = included("--from", forged, code=2)
    assert "run run, round 3: its record is of other uploads, or of another total" in refused
    assert included("--from", site.folder / "inclusions.jsonl")[0].startswith("1 records of ")
    assert "round 3: in the sum of 4 replies, weight 42 of 192" in included("run")[2]
    assert "has paid for nothing in it" in included("another", code=2)[0]
