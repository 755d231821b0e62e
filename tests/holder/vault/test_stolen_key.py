"""A thief has every file that the user of the coordinator's code may read: it plays no peer of anybody with them."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from clients.deploy import separate_users
from clients.deploy.folder import Node
from fedpriv.config import parse
from fedpriv.errors import InputError
from fedpriv.holder.sums import Session, Terms
from fedpriv.holder.sums import server as sums
from fedpriv.holder.vault import _summed
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import ADVERTISE, REFUSED, REGISTER, SHARE, Request
from fedpriv.holder.wire.kinds import Registration
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.receipts import Receipt
from server.registration import read_registration
from simulations.engines.flower_private import task_identity
from tests.holder.vault.running import AS_NOBODY, other_python, passable_folder
from tests.holder.vault.sums import VALUES, Coordinator, Refused, make_vaults, text, vector
from tests.server.test_registration import reply_with

VICTIM = 1

# What the thief's process prints: each of these files that it can open, in base64.
READ = """
import base64, json, sys
found = {}
for path in sys.argv[1:]:
    try:
        found[path] = base64.b64encode(open(path, "rb").read()).decode()
    except OSError:
        pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tiny_bert, table) -> Iterator[Coordinator]:
    """Three vaults that have approved each other, in a folder that every user may pass through."""
    config = parse({**VALUES, "model": str(tiny_bert), "test_data": str(table)})
    with passable_folder() as folder:
        vaults = make_vaults(folder, tiny_bert, dict.fromkeys(range(3), 30), client_user="nobody")
        yield Coordinator(config, vaults)


def loot_of(vault: VaultSettings, folder: Path) -> dict[str, Path]:
    """{public line: private key} that the thief finds in a node's folder, as a user of its own where that is possible.

    Elsewhere it has what that user is given: the copy of the key that Flower's SuperNode reads.
    """
    node = Node(superlink="127.0.0.1:9093", vault=vault)
    node.flower_home.mkdir(exist_ok=True)
    contents = [(vault.folder / "node.key").read_bytes()]
    if (python := other_python()) is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(separate_users, "_probe", lambda *_: None)
            separate_users.prepared(node, os.environ)
        files = [str(path) for path in vault.folder.rglob("*") if path.is_file()]
        done = subprocess.run([python, "-c", READ, *files], capture_output=True, text=True, check=True, **AS_NOBODY)
        found = json.loads(done.stdout)
        assert any(path.endswith("flower/node.key") for path in found), "what the SuperNode authenticates with"
        contents = [base64.b64decode(content) for content in found.values()]
    folder.mkdir()
    stolen = {}
    for number, content in enumerate(contents):
        path = folder / str(number)
        path.write_bytes(content)
        try:
            stolen[keys.public_line(path)] = path
        except InputError:
            continue
    return stolen


@pytest.fixture(scope="module")
def stolen(site, tmp_path_factory) -> dict[int, dict[str, Path]]:
    """{peer of the victim: the private keys that a thief has of it}, of which none is of a vault."""
    folder = tmp_path_factory.mktemp("thief")
    found = {c: loot_of(vault, folder / str(c)) for c, vault in site.vaults.items() if c != VICTIM}
    for client, keys_of_peer in found.items():
        assert keys_of_peer.keys() == {keys.public_line(site.vaults[client].folder / "node.key")}
    return found


def victims_vector(site: Coordinator, terms: Terms, private: Mapping[int, Path]) -> np.ndarray:
    """What the coordinator and the thief learn of the victim, whose peers are played with these keys.

    Raises:
        Refused: the victim refuses.
    """
    anything = lambda *_: True  # noqa: E731
    shown = {VICTIM: text(site.advertise(VICTIM, terms))}
    begin = partial(Session, terms, approved=None, verify=anything)
    peers = {c: begin(c, sign=partial(keys.sign, key)) for c, key in private.items()}
    shown |= {c: peer.advertisement for c, peer in peers.items()}
    advertised = sums.collect_advertisements(terms, shown, verify=anything)
    dealt = {VICTIM: text(site.step(VICTIM, SHARE, terms, advertised.message()))}
    dealt |= {c: peer.share(advertised.message()) for c, peer in peers.items()}
    shares = sums.collect_shares(advertised, dealt)
    nothing = np.zeros(terms.dimension, dtype=np.int64)
    words = {c: peer.mask(shares.message(c), nothing) for c, peer in peers.items()}
    words[VICTIM] = vector(site.train(VICTIM, terms, shares.message(VICTIM)))
    masked = sums.collect_masked(shares, words)
    confirmed = {c: peer.confirm(masked.message()) for c, peer in peers.items()}
    signed = sums.collect_signatures(masked, confirmed, verify=anything)
    return sums.recover(signed, {c: peer.reveal(signed.message()) for c, peer in peers.items()}).values


def test_the_thief_finds_no_key_of_a_vault_and_plays_no_peer_of_a_victim(site, stolen, monkeypatch):
    """Where the vaults signed with node.key, every value of the victim's own vector was read in this way."""
    sent = []
    monkeypatch.setattr(_summed, "integers", lambda *a, whole=_summed.integers: sent.append(whole(*a)) or sent[-1])
    private = {client: next(iter(found.values())) for client, found in stolen.items()}
    with pytest.raises(Refused, match="its registered key did not sign these keys for these terms"):
        victims_vector(site, site.terms("stolen"), private)
    assert not sent
    assert site.charges(VICTIM, "stolen") == []


def test_a_key_that_a_supernode_reads_is_no_identity_even_if_it_was_approved(site, stolen):
    """Such a key approves nobody: terms that name it are refused."""
    vault = site.vaults[VICTIM]
    lines = {client: next(iter(found)) for client, found in stolen.items()}
    terms = site.terms("approved")
    values = json.loads(terms.text())
    for entry in values["participants"]:
        entry["identity"] = lines.get(entry["client"], entry["identity"])
    honest = {client: (vault.peers / f"{client}.pub").read_text() for client in lines}
    try:
        for client, line in lines.items():
            (vault.peers / f"{client}.pub").write_text(f"{line}\n")
        for named in (json.dumps(values), terms.text()):
            answer = site.ask(VICTIM, Request.of(ADVERTISE, own={kinds.TERMS: named}))
            assert answer.code == REFUSED
            assert ("identity = " in answer.reason) == (named != terms.text()), answer.reason
        assert "approved" in answer.reason
    finally:
        for client, line in honest.items():
            (vault.peers / f"{client}.pub").write_text(line)


def test_a_registration_under_the_stolen_key_counts_for_nothing(site, stolen, tmp_path):
    client, found = next(iter(stolen.items()))
    (line, key), vault = next(iter(found.items())), site.vaults[client]
    (tmp_path / f"{client}.pub").write_text(keys.public_line(vault.key))
    forged = Registration(client=client, num_records=10**6, name="", data_set="none", identity=line)
    forged = replace(forged, signature=keys.sign(key, forged.signed))
    told = Receipt(data_set="none", counter=10**6).signed(key)
    assert ReceiptWatch.of(vault).lost([], shown=told.text()) is None
    with task_identity(1), pytest.raises(ValueError, match=f"not signed with {client}.pub"):
        read_registration(reply_with(forged), tmp_path)


def test_a_vault_without_a_key_of_its_own_takes_part_in_nothing_and_says_what_to_run(site, tmp_path):
    """Even a plain run would leave no receipts."""
    terms = site.terms("old")
    moved = [path.rename(tmp_path / path.name) for path in site.vaults[VICTIM].folder.glob("vault.key*")]
    try:
        for answer in (site.advertise(VICTIM, terms), site.ask(VICTIM, Request.of(REGISTER))):
            assert answer.code == REFUSED
            assert "stop it and run `fedpriv node new-key`" in answer.reason
    finally:
        for path in moved:
            path.rename(site.vaults[VICTIM].folder / path.name)
