"""A node adds up with holders whose keys its operator has approved, and says what is wrong before it is asked to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clients.deploy import doctor
from clients.deploy.__main__ import app
from clients.deploy.admission import approve_peer
from clients.deploy.folder import Node
from fedpriv.deployment import keys
from fedpriv.errors import InputError
from fedpriv.vault.settings import approved_peers
from simulations.sites import run_in_process


@pytest.fixture
def node(make_node) -> Node:
    """Partition 1, which has approved nobody."""
    return make_node()


@pytest.fixture
def key(tmp_path):
    """Makes another node's public key, in its file."""

    def key(name: str) -> Path:
        keys.make_key_pair(tmp_path / name)
        return tmp_path / f"{name}.pub"

    return key


def approve(node: Node, client: int, file: Path) -> str:
    done = run_in_process(app, "fedpriv node", "approve-peer", node.folder, client, file)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_approved_key_is_what_the_vault_reads(node, key):
    file = key("clara")
    file.write_text(f"{file.read_text().strip()} clara@clinic\n")
    assert "partition 2 is approved as a peer" in approve(node, 2, file)
    assert "was approved before" in approve(node, 2, file)
    assert approved_peers(node.vault.peers) == {2: keys.public_line(file.with_suffix(""))}
    assert node.vault.peers.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("client", "name", "reason"),
    [
        (1, "new", "PARTITION-ID = 1: is this node's own"),
        (3, "clara", "is approved as that of partition 2"),
        (2, "new", "2.pub: exists; ask that holder whether its key was exchanged, then give --replace"),
        (3, "own", "is this node's own; give that of partition 3"),
        (3, "supernode", "is a ecdsa-sha2-nistp384 key, as in a node.key.pub; give the vault.key.pub"),
        (3, "none", "give the node's vault.key.pub"),
    ],
)
def test_what_would_let_one_holder_stand_for_two_is_refused(node, key, tmp_path, client, name, reason):
    files = {"clara": key("clara"), "new": key("new"), "none": tmp_path / "none.pub"}
    files |= dict(zip(("supernode", "own"), node.public_keys, strict=True))
    approve(node, 2, files["clara"])
    done = run_in_process(app, "fedpriv node", "approve-peer", node.folder, client, files[name])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert reason in done.stderr
    assert approved_peers(node.vault.peers).keys() == {2}


def test_a_peer_that_exchanged_its_key_is_approved_again(node, key):
    approve(node, 2, key("clara"))
    done = run_in_process(app, "fedpriv node", "approve-peer", node.folder, 2, key("new"), "--replace")
    assert "is approved as a peer" in done.stdout
    assert approved_peers(node.vault.peers) == {2: keys.public_line(key("other").with_name("new"))}


def test_what_an_earlier_version_approved_approves_nobody_until_it_is_replaced(make_node, own, key):
    node = make_node(**own, budget_view="aggregate")
    node.vault.peers.mkdir()
    (node.vault.peers / "2.pub").write_text(node.public_keys[0].read_text())
    assert approved_peers(node.vault.peers) == {}
    ok, reason = peers_check(node)
    assert (ok, "2.pub: is the key of that node's SuperNode, which signs no sums" in reason) == (False, True)
    approve(node, 2, key("clara"))
    approve(node, 3, key("bob"))
    assert approved_peers(node.vault.peers).keys() == {2, 3}
    assert peers_check(node)[0]


@pytest.mark.parametrize("name", ["clara.pub", "02.pub", "-1.pub", ".pub"])
def test_a_file_that_names_no_partition_is_refused(node, key, name):
    node.vault.peers.mkdir()
    (node.vault.peers / name).write_text(key("clara").read_text())
    with pytest.raises(InputError, match=r"must be named PARTITION-ID\.pub"):
        approved_peers(node.vault.peers)


def peers_check(node: Node, **settings: object) -> tuple[bool, str]:
    """The doctor's line."""
    vault = dataclasses.replace(node.vault, **settings)
    found = {check.name: check for check in doctor.checks(dataclasses.replace(node, vault=vault))}
    return found["peers"].ok, found["peers"].detail


def test_the_doctor_counts_peers_where_the_budget_is_for_sums(make_node, own, key):
    node = make_node(**own)
    assert peers_check(node) == (True, "none: takes part in no secure sum")
    assert peers_check(node, budget_view="aggregate")[1].endswith(
        "0 approved, min_survivors = 3 needs at least 2; run `approve-peer`"
    )
    for client in (0, 2):
        approve_peer(node.vault, client, key(f"peer-{client}"))
    assert peers_check(node, budget_view="aggregate", min_survivors=3) == (
        True,
        "adds up with partitions 0, 2, in sums of 3 or more, 0 may collude",
    )
    assert not peers_check(node, budget_view="aggregate", min_survivors=4)[0]
    ok, reason = peers_check(node, min_survivors=3, colluding_clients=2)
    assert (ok, reason[:34]) == (False, "min_survivors = 3: must be at least 4"[:34])


def test_init_takes_the_terms_of_sums_and_refuses_those_without_an_honest_peer(make_node, own):
    node = make_node("sums", **own, budget_view="aggregate", min_survivors=3, colluding_clients=1)
    vault = Node.read(node.folder).vault
    assert (vault.budget_view, vault.min_survivors, vault.colluding_clients) == ("aggregate", 3, 1)
    with pytest.raises(InputError, match="min_survivors = 3: must be at least 4 with colluding_clients = 2"):
        make_node("alone", **own, colluding_clients=2)
    with pytest.raises(InputError, match=r"min_survivors = 2: .* greater than or equal to 3"):
        make_node("two", **own, min_survivors=2)
    with pytest.raises(InputError, match="budget_view = 'rho'"):
        make_node("wrong", **own, budget_view="rho")
