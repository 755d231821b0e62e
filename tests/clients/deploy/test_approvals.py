"""Peers and models are what an operator has approved: by the fingerprint of a key, by these very files, never code."""

import dataclasses
import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import typer

from clients.deploy import doctor
from clients.deploy.admission import approve_model
from clients.deploy.folder import Node
from fedpriv.errors import InputError
from fedpriv.holder.vault.settings import approved_model, approved_peers, is_unchanged_model, read_models
from fedpriv.privacy.ledger import keys
from tests.clients.deploy.conftest import kit


@pytest.fixture
def key(tmp_path):
    """Makes another node's public key, in its file."""

    def key(name: str) -> Path:
        keys.make_key_pair(tmp_path / name)
        return tmp_path / f"{name}.pub"

    return key


def roster(node: Node, **files: Path | str) -> Path:
    """A roster with this node and others: name `clara_2` for partition 2, with the public line in a file."""
    own = {"partition_id": 1, "name": "clinic", "vault_key": keys.public_line(node.vault.key)}
    members = [own]
    for name, file in files.items():
        who, _, client = name.partition("_")
        members.append({"partition_id": int(client), "name": who, "vault_key": keys.read_public_line(Path(file))})
    path = node.folder.with_name("roster.toml")
    path.write_text(tomli_w.dumps({"version": 1, "members": members}))
    return path


def approve(node: Node, file: Path, *told: Path, options: tuple[str, ...] = (), code: int = 0) -> str:
    """What `approve-peers` says, with the fingerprints of these keys."""
    fingerprints = [f"--fingerprint={keys.fingerprint(keys.read_public_line(each)).lower()}" for each in told]
    return kit("approve-peers", node.folder, file, *fingerprints, *options, code=code)


def test_keys_whose_fingerprints_were_told_are_what_the_vault_reads(node, key):
    clara, bob = key("clara"), key("bob")
    assert "bob, partition 3, is approved" in approve(node, roster(node, clara_2=clara, bob_3=bob), clara, bob)
    assert approved_peers(node.vault.peers) == {2: keys.read_public_line(clara), 3: keys.read_public_line(bob)}
    assert node.vault.peers.stat().st_mode & 0o777 == 0o700
    dora = key("dora")
    said = approve(node, roster(node, clara_2=clara, bob_3=bob, dora_4=dora), dora)
    assert ("clara" in said, "dora, partition 4, is approved" in said) == (False, True)


def test_a_key_that_the_coordinator_made_up_approves_nobody(node, key):
    """The attack: the roster has a key of the coordinator's in place of Clara's, or a member who does not exist."""
    clara, bob, forged = key("clara"), key("bob"), key("forged")
    refused = approve(node, roster(node, clara_2=forged, bob_3=bob), clara, bob, code=2)
    assert f"--fingerprint = {keys.fingerprint(keys.read_public_line(clara))}: nothing here has it" in refused
    refused = approve(node, roster(node, clara_2=clara, bob_3=bob, dora_4=forged), clara, bob, code=2)
    assert "--fingerprint: let dora (partition 4) read it to you" in refused
    refused = approve(node, roster(node, clara_2=clara), code=2)
    assert "--fingerprint: let clara (partition 2) read it to you" in refused
    assert approved_peers(node.vault.peers) == {}


def test_on_a_terminal_each_key_is_asked_about(node, key, monkeypatch):
    file = roster(node, clara_2=key("clara"), bob_3=key("bob"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answers = iter([True, False, True, True])
    monkeypatch.setattr(typer, "confirm", lambda question: next(answers))
    approve(node, file, code=2)
    assert approved_peers(node.vault.peers) == {}
    approve(node, file)
    assert set(approved_peers(node.vault.peers)) == {2, 3}


def test_what_would_let_one_holder_stand_for_two_is_refused_until_a_key_that_was_exchanged_is_replaced(node, key):
    clara, new, own = key("clara"), key("new"), keys.public_path(node.vault.key)
    approve(node, roster(node, clara_2=clara), clara)
    for listed, reason in (
        ({"clara_3": clara}, "roster: the key of partition 3 is approved as that of partition 2"),
        ({"own_1": own, "clara_2": clara}, "partition_id = 1 stands there 2 times"),
        ({"own_3": own}, "stands there 2 times; each node has its own"),
        ({"clara_2": new}, "partition 2 (clara) has another key than is approved"),
    ):
        assert reason in approve(node, roster(node, **listed), code=2)
    assert approved_peers(node.vault.peers) == {2: keys.read_public_line(clara)}
    said = approve(node, roster(node, clara_2=new), new, options=("--replace",))
    assert "clara, partition 2, is approved" in said
    assert approved_peers(node.vault.peers) == {2: keys.read_public_line(new)}


def test_a_roster_with_another_key_for_this_node_or_that_of_a_supernode_is_refused(node, key):
    path = roster(node, clara_2=key("clara"))
    (own, clara), other = tomllib.loads(path.read_text())["members"], keys.read_public_line(key("other"))
    tell = f"whose vault.key has {keys.fingerprint(keys.public_line(node.vault.key))}; tell the coordinator"
    for members, reason in (
        ([clara], tell),
        ([own | {"vault_key": other}, clara], tell),
        ([own, clara | {"vault_key": keys.public_line(node.key)}], "must be one line `ssh-ed25519 ...`"),
    ):
        path.write_text(tomli_w.dumps({"version": 1, "members": members}))
        assert reason in approve(node, path, code=2)


def test_what_an_earlier_version_approved_approves_nobody_until_it_is_replaced(make_node, own, key):
    node = make_node(**own, budget_view="aggregate")
    node.vault.peers.mkdir()
    (node.vault.peers / "2.pub").write_text(keys.public_path(node.key).read_text())
    assert approved_peers(node.vault.peers) == {}
    ok, reason = peers_check(node)
    assert (ok, "2.pub: is the key of that node's SuperNode, which signs no sums" in reason) == (False, True)
    clara, bob = key("clara"), key("bob")
    approve(node, roster(node, clara_2=clara, bob_3=bob), clara, bob)
    assert approved_peers(node.vault.peers).keys() == {2, 3}
    assert peers_check(node)[0]


def test_a_file_that_names_no_partition_is_refused(tmp_path):
    for name in ("clara.pub", "02.pub", "-1.pub", ".pub"):
        (peers := tmp_path / f"with {name}").mkdir()
        (peers / name).touch()
        with pytest.raises(InputError, match=r"must be named PARTITION-ID\.pub"):
            approved_peers(peers)


def peers_check(node: Node, **settings: object) -> tuple[bool, str]:
    """The doctor's line."""
    vault = dataclasses.replace(node.vault, **settings)
    found = {check.name: check for check in doctor.checks(dataclasses.replace(node, vault=vault))}
    return found["peers"].ok, found["peers"].detail


def test_the_doctor_counts_peers_where_the_budget_is_for_sums(make_node, own, key):
    node = make_node(**own)
    assert peers_check(node) == (True, "none: takes part in no secure sum")
    few = "0 approved, min_survivors = 3 needs 2 or more; run `approve-peers`"
    assert peers_check(node, budget_view="aggregate")[1].endswith(few)
    peers = key("peer-0"), key("peer-2")
    approve(node, roster(node, anna_0=peers[0], clara_2=peers[1]), *peers)
    first, second = (keys.fingerprint(keys.read_public_line(peer)) for peer in peers)
    assert peers_check(node, budget_view="aggregate", min_survivors=3) == (
        True,
        f"adds up with partitions 0 ({first}), 2 ({second}), in sums of 3 or more, 0 may collude",
    )
    assert not peers_check(node, budget_view="aggregate", min_survivors=4)[0]
    ok, reason = peers_check(node, min_survivors=3, colluding_clients=2)
    assert (ok, reason.startswith("min_survivors = 3: must be at least")) == (False, True)


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


@pytest.fixture
def vault(node):
    return node.vault


@pytest.fixture
def model(tiny_bert, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "tiny"))


def test_a_folder_is_approved_by_its_path_and_its_digest(vault, model):
    said = kit("approve-model", vault.folder, model)
    approval = approve_model(vault, str(model))
    assert not approval.is_new
    assert approval.num_bytes == sum(file.stat().st_size for file in model.rglob("*"))
    (known,) = read_models(vault.models)
    assert known == approval.model
    assert f"{model} is approved: digest {known.digest}, " in said
    assert known.name == known.folder == str(model)
    assert approved_model(known.digest, (known,)) == known
    assert is_unchanged_model(known)


def test_a_name_stands_for_other_files_only_on_demand(vault, model):
    first = approve_model(vault, str(model), name="ours").model
    (model / "vocab.txt").open("a").write("more\n")
    assert not is_unchanged_model(first)
    with pytest.raises(InputError, match=r"model = 'ours': is approved with other files, .* --replace"):
        approve_model(vault, str(model), name="ours")
    assert read_models(vault.models) == (first,)
    second = approve_model(vault, str(model), name="ours", replace_old=True).model
    assert read_models(vault.models) == (second,)
    assert second.digest != first.digest
    other = approve_model(vault, str(model), name="another").model
    assert read_models(vault.models) == (second, other)


@pytest.mark.parametrize("spoil", ["code", "auto_map", "tokenizer", "pickle", "no config"])
def test_code_pickles_and_halves_of_models_are_refused(vault, model, spoil):
    config = json.loads((model / "config.json").read_text())
    if spoil == "code":
        (model / "sub").mkdir()
        (model / "sub" / "modeling.py").write_text("")
    elif spoil == "auto_map":
        (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling.Mine"}}))
    elif spoil == "tokenizer":
        (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
    elif spoil == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    else:
        (model / "config.json").unlink()
    with pytest.raises(InputError, match="model = "):
        approve_model(vault, str(model))
    assert read_models(vault.models) == ()


def test_the_bundled_encoder_is_found_by_its_name_and_any_other_without_the_hub_is_one_line(vault, monkeypatch):
    known = approve_model(vault, "all-MiniLM-L6-v2").model
    assert known.name == "all-MiniLM-L6-v2"
    assert (Path(known.folder) / "model.safetensors").is_file()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="model = 'nobody/has-this': neither a folder nor a model") as caught:
        approve_model(vault, "nobody/has-this")
    assert "\n" not in str(caught.value)
