"""Who carries the files between a coordinator and a node can withhold them, and nothing else."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict

from clients.app import app as client_app
from clients.deploy import admission
from clients.deploy.by_file import _node_key
from fedpriv.config import parse, to_flower
from fedpriv.errors import FlowerError, InputError
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import FAILED, REFUSED, REGISTER, TRAIN, Request, Response, frame_in
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import workbench
from fedpriv.operate import sealed
from fedpriv.privacy.ledger.reader import reading
from server.deploy.by_file import _server_key
from simulations.engines.grid import LocalGrid
from tests.couriers import BUNDLE, Carried, make_coordinator, make_node, node_id
from tests.holder.vault.running import Running
from tests.tiny import LABELS

pytestmark = pytest.mark.usefixtures("as_a_task")

REPLY_SECONDS = 1.5


@pytest.fixture(scope="module")
def site(tmp_path_factory, table, tiny_bert):
    """A coordinator, and two nodes with the same records, of which the vault of the first runs."""
    folder = tmp_path_factory.mktemp("c")
    coordinator = make_coordinator(folder / "co")
    own = {"data": table, "labels": LABELS, "budget_epsilon": 1e6, "reply_seconds": REPLY_SECONDS, "device": "cpu"}
    nodes = [make_node(folder / f"n{client}", coordinator, client, **own, other_runs="allow") for client in range(2)]
    for node in nodes:
        admission.approve_model(node.vault, str(tiny_bert), name=str(tiny_bert))
    return coordinator, nodes


@pytest.fixture(scope="module")
def vault(site) -> Iterator[Running]:
    running = Running(site[1][0].vault)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def run_config(run_on_nodes) -> dict[str, object]:
    return to_flower(parse({**run_on_nodes, "num_clients": 2}))


@pytest.fixture
def carried(site, run_config, tmp_path) -> Carried:
    network = LocalGrid({7: Context(1, 7, {}, RecordDict(), {})}, None, client_app)
    return Carried.of(site[0], tmp_path, run_config, network)


@pytest.fixture
def node(site):
    return site[1][0]


REGISTERS = Request.of(REGISTER)


@pytest.fixture(scope="module")
def trains(run_config):
    """Builds a request for an update in a round."""
    config = parse(dict(run_config))
    arrays = {kinds.ADAPTER: {name: tensor.numpy() for name, tensor in workbench(config).initial.items()}}

    def build(round_: int = 1, run: str = "a run") -> Request:
        return Request.of(TRAIN, fields=kinds.pack_instruction(run, round_, UpdateSpec.of(config)), arrays=arrays)

    return build


def charges(node) -> int:
    with reading(node.vault.ledger) as db:
        return sum(entry.phase == "charged" for entry in db.entries())


def forged(carried, node, request, frame: bytes, name: str, **header: object) -> None:
    """A reply by the node's key, or what is given, to a request."""
    letter = sealed.read(request)
    told = {"kind": "reply", **{key: letter.header[key] for key in ("run", "number", "client")}} | header
    reader = sealed.Public.from_encoded_point(sealed.CURVE, bytes.fromhex(letter.header["answer_to"]))
    file = sealed.seal(told, frame, reader=reader, writer=_node_key(node.key))
    (carried.folder / f"{name}.reply").write_bytes(file)


ANSWER = Response.of(code=REFUSED, reason="refused: a forgery").frame


def test_an_answer_by_file_is_the_vaults_and_repeating_it_costs_nothing(carried, node, vault, trains):
    before = charges(node)
    request = carried.ask({0: trains(run="told twice")})[0]
    first, second = carried.answer(node, request), carried.answer(node, request, "again")
    assert charges(node) == before + 1
    assert "Clinic 0 (0), request 1: answers" in carried.collect()
    (reply,) = carried.arrived()
    released = kinds.answer_of(TRAIN, Response(frame_in(reply.content)))
    assert (reply.metadata.src_node_id, released.round) == (node_id(0), 1)
    assert len(first.read_bytes()) == len(second.read_bytes()), "the same stored bytes, sealed anew"
    with pytest.raises(InputError, match="has asked nobody by file for 0 s"):
        carried.post()


def test_1_a_replayed_reply_counts_once(carried, node, vault):
    kept = carried.answer(node, carried.ask({0: REGISTERS})[0])
    carried.collect()
    assert len(carried.arrived()) == 1
    carried.ask({0: REGISTERS})
    shutil.copy(kept, carried.folder / "0002-node-0.reply")
    said = carried.collect()
    assert "0002-node-0.reply: of Clinic 0 (0), request 1, was taken before" in said
    assert "the run waits for Clinic 0 (0), request 2" in said
    assert carried.arrived() == []


def test_2_a_reply_of_another_round_under_another_number_is_refused(carried, node, vault, trains):
    first = carried.answer(node, carried.ask({0: trains(1)})[0])
    kept = first.read_bytes()
    first.unlink()
    carried.ask({0: trains(2)})
    first.write_bytes(kept.replace(b'"number": 1', b'"number": 2'))
    assert "was changed on its way" in carried.collect()
    first.write_bytes(kept)
    assert "request 1, is late" in carried.collect()
    assert carried.arrived() == []


@pytest.mark.parametrize("place", [0, 18, 22, 26, 60, 200, -97, -50, -1])
def test_3_an_altered_byte_is_refused_and_the_vault_not_asked(carried, node, vault, trains, place):
    before, request = charges(node), carried.ask({0: trains(run=f"altered {place}")})[0]
    whole = bytearray(request.read_bytes())
    whole[place] ^= 1
    request.write_bytes(whole)
    with pytest.raises(InputError, match=re.escape(str(request))):
        carried.answer(node, request)
    assert charges(node) == before
    request = carried.ask({0: REGISTERS})[0]
    forged(carried, node, request, ANSWER, "altered")
    file = carried.folder / "altered.reply"
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1
    file.write_bytes(whole)
    assert carried.collect().startswith("refused: ")
    assert carried.arrived() == []


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_4_a_truncated_or_half_copied_file_is_named_and_counts_once_it_is_whole(carried, node, share):
    request = carried.ask({0: REGISTERS})[0]
    forged(carried, node, request, ANSWER, "half")
    file = carried.folder / "half.reply"
    whole, asked = file.read_bytes(), request.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert re.match(
        "refused: .*half.reply: (is no file|has .* of .* bytes; wait until it is copied)", carried.collect()
    )
    request.write_bytes(asked[: int(share * len(asked))])
    with pytest.raises(InputError, match=r"not whole|wait until it is copied"):
        carried.answer(node, request)
    file.write_bytes(whole)
    assert "request 1: refuses: refused: a forgery" in carried.collect()
    assert [reply.error.code for reply in carried.arrived()] == [REFUSED]


def test_5_what_is_swapped_between_nodes_is_refused_at_either_side(carried, site, vault):
    requests, (zero, one) = carried.ask({0: REGISTERS, 1: REGISTERS}), site[1]
    with pytest.raises(InputError, match="is sealed for another reader"):
        carried.answer(zero, requests[1])
    forged(carried, zero, requests[1], ANSWER, "as-one")  # a node that had the other's request could write so much
    forged(carried, one, requests[0], ANSWER, "as-zero", client=0)
    said = carried.collect()
    assert said.count("is signed by another key") == 2
    forged(carried, one, requests[0], ANSWER, "for-zero", client=1)
    assert "for-zero.reply: answers no request of this run to this node" in carried.collect()
    assert carried.arrived() == []


def test_6_an_answer_to_another_runs_request_is_refused(carried, site, run_config, tmp_path, vault):
    other = Carried.of(site[0], tmp_path / "other", run_config, carried.grid._network)
    foreign = other.answer(site[1][0], other.ask({0: REGISTERS})[0])
    carried.ask({0: REGISTERS})
    shutil.copy(foreign, carried.folder)
    assert "answers no request of this run to this node" in carried.collect()
    assert carried.arrived() == []
    assert ": answers" in other.collect()


def test_7_a_strangers_request_is_refused_before_the_vault(carried, site, tmp_path, node):
    request = carried.ask({0: REGISTERS})[0]
    letter, coordinator = sealed.read(request), site[0]
    stranger = make_coordinator(tmp_path / "stranger")
    own = _node_key(node.key)

    def written(certificate: str, writer: sealed.Private) -> None:
        header = {**letter.header, "certificate": certificate}
        request.write_bytes(sealed.seal(header, REGISTERS.packed(), reader=own.public_key(), writer=writer))

    written(stranger.server_certificate.read_text(), _server_key(stranger))
    with pytest.raises(InputError, match=r"is of somebody whom .*ca\.crt does not vouch for as 127"):
        carried.answer(node, request)
    written(coordinator.server_certificate.read_text(), _server_key(stranger))
    with pytest.raises(InputError, match="is signed by another key"):
        carried.answer(node, request)
    written(stranger.ca_certificate.read_text(), ec.generate_private_key(sealed.CURVE))
    with pytest.raises(InputError, match="does not vouch for"):
        carried.answer(node, request)
    assert not (node.folder / "answered-by-file.json").exists() or letter.header["run"] not in json.loads(
        (node.folder / "answered-by-file.json").read_text()
    )


def test_8_a_reply_that_is_sealed_for_another_key_is_refused(carried, node):
    request = carried.ask({0: REGISTERS})[0]
    header = {"kind": "reply", **{key: sealed.read(request).header[key] for key in ("run", "number", "client")}}
    other = ec.generate_private_key(sealed.CURVE).public_key()
    file = sealed.seal(header, ANSWER, reader=other, writer=_node_key(node.key))
    (carried.folder / "x.reply").write_bytes(file)
    assert "is sealed for another reader" in carried.collect()
    assert carried.arrived() == []


def test_9_of_two_answers_the_first_counts(carried, node):
    request = carried.ask({0: REGISTERS})[0]
    forged(carried, node, request, ANSWER, "a")
    forged(carried, node, request, Response.of(code=FAILED, reason="another").frame, "b")
    said = carried.collect()
    assert "a.reply: Clinic 0 (0), request 1: refuses" in said
    assert "b.reply: is another answer of Clinic 0 (0), request 1; the first counts" in said
    assert [reply.error.code for reply in carried.arrived()] == [REFUSED]
    assert "is another answer" in carried.collect()


def test_10_a_late_answer_is_refused_and_the_run_has_gone_on_without_the_node(carried, node):
    request = carried.ask({0: REGISTERS, 1: REGISTERS})[0]
    forged(carried, node, request, ANSWER, "late")
    kept = carried.folder / "kept"
    (carried.folder / "late.reply").rename(kept)
    assert "the run goes on without Clinic 0 (0), request 1" in carried.collect(goes_on=True)
    replies = carried.arrived()
    assert {(reply.metadata.src_node_id, reply.error.code) for reply in replies} == {(1, FAILED)}, "the link's word"
    assert carried.grid.goes_on()
    kept.rename(carried.folder / "late.reply")
    assert "request 1, is late" in carried.collect()


def test_11_no_file_is_there_before_the_replys_public_time(carried, node, vault, trains):
    request = carried.ask({0: trains(run="timed")})[0]
    seen: list[tuple[float, int]] = []
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(carried.answer, node, request)
        while not answering.done():
            seen.append((time.time(), len(list(carried.folder.iterdir()))))
            time.sleep(0.01)
    out = answering.result()
    events = [json.loads(line) for line in node.vault.events.read_text().splitlines()]
    (charged,) = (event for event in events if event["event"] == "charged" and event["run"] == "timed")
    leaves = datetime.fromisoformat(charged["time"]).timestamp() + REPLY_SECONDS
    assert len(seen) > 5
    assert {number for at, number in seen if at < leaves - 0.05} == {1}, "nothing but the request, not even in part"
    assert out.stat().st_mtime >= leaves - 0.05


def test_12_links_devices_and_huge_claims_are_refused_unread(carried, node, tmp_path):
    request = carried.ask({0: REGISTERS})[0]
    (tmp_path / "secret").write_bytes(b"of the coordinator's disk")
    (carried.folder / "a-link.reply").symlink_to(tmp_path / "secret")
    os.mkfifo(carried.folder / "b-pipe.reply")
    (carried.folder / "c-folder.reply").mkdir()
    forged(carried, node, request, ANSWER, "d-huge")
    whole = (carried.folder / "d-huge.reply").read_bytes()
    place = len(sealed._MARK)
    (carried.folder / "d-huge.reply").write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
    with (carried.folder / "e-sparse.reply").open("wb") as file:
        file.truncate(2**40)
    for name, header in (("f-deep", b"[" * 16_000), ("g-digits", b"9" * 16_000)):
        lengths = sealed._LENGTHS.pack(len(header), 97)
        (carried.folder / f"{name}.reply").write_bytes(sealed._MARK + lengths + header + bytes(97 + 96))
    lines = carried.collect().splitlines()
    told = ("no link", "is no file of", "must be a file", "which no file of", "is no file of", "not JSON", "not JSON")
    for line, said in zip(lines, told, strict=False):
        assert line.startswith("refused: ")
        assert said in line
    assert len(lines) == len(told) + 1
    link = tmp_path / "link.request"
    link.symlink_to(request)
    with pytest.raises(InputError, match="no link"):
        carried.answer(node, link)


def test_13_names_lead_nowhere_and_control_no_terminal(carried, node, tmp_path):
    target = tmp_path / "mine"
    target.write_text("keep me")
    (carried.folder / "0001-node-0.request").symlink_to(target)
    request = carried.ask({0: REGISTERS})[0]
    assert target.read_text() == "keep me"
    assert not request.is_symlink()
    forged(carried, node, request, ANSWER, "\x1b[2J\n..\\..\\etc", run="../../x")
    said = carried.collect()
    assert "answers no request" in said
    assert "\x1b" not in said
    assert len(said.splitlines()) == 2
    occupied = carried.folder / "0001-node-0.reply"
    occupied.symlink_to(target)
    with pytest.raises(InputError, match="must be a new file"):
        carried.answer(node, request)
    assert target.read_text() == "keep me"


def test_14_an_old_request_after_a_newer_one_is_refused_uncharged(carried, node, vault, trains):
    old = carried.ask({0: trains(1, "reordered")})[0]
    before = charges(node)
    carried.answer(node, carried.ask({0: REGISTERS})[0])
    with pytest.raises(InputError, match="is request 1, and this node has answered request 2 of the run"):
        carried.answer(node, old)
    assert charges(node) == before


def test_15_a_lost_stick_shows_who_was_asked_how_often_and_sizes(carried, site, vault, trains):
    """No node's key opens a reply, its own writer's neither, and the coordinator's opens no request."""
    request = carried.ask({0: trains(run="of the lost stick")})[0]
    reply, (zero, one) = carried.answer(site[1][0], request), site[1]
    for file in (request, reply):
        content = file.read_bytes()
        for secret in (
            b"of the lost stick",
            b"lora_A",
            b"num_records",
            LABELS[0].encode(),
            b"receipt",
            b"learning_rate",
        ):
            assert secret not in content
        letter = sealed.read(file)
        assert set(letter.header) <= {"kind", "run", "number", "client", "bundle", "answer_to", "certificate"}
    writer = _node_key(zero.key)
    for own in (zero.key, one.key):
        with pytest.raises(InputError, match="for another reader"):
            sealed.read(reply).opened(_node_key(own), writer.public_key())
    server = _server_key(site[0])
    with pytest.raises(InputError, match="for another reader"):
        sealed.read(request).opened(server, server.public_key())


def test_a_bundle_that_is_not_approved_is_refused_in_words_that_the_run_gets(carried, site):
    one = site[1][1]
    kept = one.approved.read_text()
    one.approved.write_text(kept.replace(BUNDLE, "c" * 64))
    carried.answer(one, carried.ask({1: REGISTERS})[1])
    one.approved.write_text(kept)
    assert "refuses: refused: the bundle bbbb" in carried.collect()
    (reply,) = carried.arrived()
    assert (reply.error.code, reply.metadata.src_node_id) == (REFUSED, node_id(1))


def test_without_a_vault_nothing_is_written_and_the_request_can_be_answered_later(carried, site):
    request = carried.ask({1: REGISTERS})[1]
    with pytest.raises(FlowerError, match="no vault answers; start it with `fedpriv node start DIR --by-file`"):
        carried.answer(site[1][1], request)
    assert [file.name for file in carried.folder.iterdir()] == [request.name]
    assert carried.post()[1].read_bytes() == request.read_bytes(), "posting again carries the same"
