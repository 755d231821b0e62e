"""A node's folder is made whole or not at all; its data, its code and its settings are what its operator said."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args

from clients.deploy import supernode
from clients.deploy.__main__ import app
from clients.deploy.folder import Node
from fedpriv.deployment import approvals, keys
from fedpriv.deployment.flower import FlowerError
from fedpriv.errors import InputError
from fedpriv.vault.settings import NodeLimits, read_models
from simulations.sites import run_in_process
from tests.tiny import LABELS

ROOT = Path(__file__).resolve().parents[3]


def deploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_in_process(app, "fedpriv node", *arguments)


def options(ca: Path, **more: object) -> list[object]:
    values = {"superlink": "127.0.0.1:9093", "ca": ca, "partition-id": 1} | more
    return [part for key, value in values.items() for part in (f"--{key}", value)]


def test_init_makes_keys_settings_and_policy(tmp_path, ca):
    command = [sys.executable, "-m", "clients.deploy", "init", tmp_path / "node"]
    command += [*map(str, options(ca, **{"budget-epsilon": 4}))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    node = Node.read(tmp_path / "node")
    vault = node.vault
    assert (vault.partition_id, vault.name, vault.budget_epsilon, vault.data) == (1, "node-1", 4.0, None)
    assert node.ca_certificate.read_bytes() == ca.read_bytes()
    assert NodeLimits.read(vault.policy) == NodeLimits()
    assert read_models(vault.models) == ()
    assert approvals.approved(node.approved) == frozenset()
    for key, kind in ((node.key, keys.NODE), (vault.key, keys.VAULT)):
        assert keys.public_line(key) in done.stdout
        assert keys.kind_of(keys.public_line(key)) == kind
        assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"superlink": "127.0.0.1"}, "superlink = '127.0.0.1': must be HOST:PORT"),
        ({"partition-id": -1}, "partition_id = -1"),
        ({"delta": 2}, "delta = 2.0"),
        ({"budget-epsilon": "nan"}, "budget_epsilon = nan"),
        ({"ca": "/none/ca.crt"}, "certificate = /none/ca.crt"),
        ({"data": "/none/records.csv", "labels": "a,b", "budget-epsilon": 4}, "/none/records.csv"),
        ({"name": ""}, "name = ''"),
    ],
)
def test_init_writes_nothing_when_something_is_wrong(tmp_path, ca, wrong, message):
    done = deploy("init", tmp_path / "node", *options(**({"ca": ca} | wrong)))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_all_that_the_client_app_is_told_is_the_socket_the_partition_and_the_name(make_node, table):
    node = make_node("no de\"'=1", data=table, labels=LABELS, budget_epsilon=4, delta=1e-6)
    node.node_config_file.write_text(tomli_w.dumps(node.node_config))
    read = parse_config_args([str(node.node_config_file)])
    assert read == node.node_config
    assert read == {"vault": str(node.folder / "vault.sock"), "partition-id": 1, "name": "clinic"}


def test_no_setting_stands_in_two_files(make_node, table):
    node = make_node(data=table, labels=LABELS, budget_epsilon=4)
    connection, own = (tomllib.loads((node.folder / name).read_text()) for name in ("node.toml", "vault.toml"))
    assert set(connection) == {"superlink", "port"}
    assert set(own) == {"partition_id", "name", "data", "labels", "budget_epsilon"}


def test_a_folder_of_an_earlier_version_says_what_to_do(make_node):
    node = make_node()
    (node.folder / "vault.toml").unlink()
    with pytest.raises(InputError, match=r"earlier version; make a new folder with `init`, .* --ledger"):
        Node.read(node.folder)


@pytest.mark.slow
def test_bundle_has_one_digest_and_it_is_flowers_own(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "clients", checkout / "clients", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "server", checkout / "server", copy_function=shutil.copyfile)  # other times and modes
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    digest = approvals.bundle_digest(checkout)
    assert digest == hashlib.sha256(build_fab_from_disk(ROOT)).hexdigest()
    (checkout / "clients" / "more.py").write_text("")
    assert approvals.bundle_digest(checkout) != digest


def test_checkout_that_cannot_be_bundled_is_one_line(tmp_path):
    with pytest.raises(FlowerError, match="flwr build: ") as caught:
        approvals.bundle_digest(tmp_path)
    assert "\n" not in str(caught.value)


def test_digest_is_approved_once(make_node):
    node, digest = make_node(), "a" * 64
    assert approvals.approve(node.approved, digest)
    assert not approvals.approve(node.approved, digest)
    node.approved.write_text(node.approved.read_text().rstrip("\n"))
    assert approvals.approve(node.approved, "b" * 64)
    assert approvals.approved(node.approved) == {digest, "b" * 64}


@pytest.mark.parametrize("digest", ["", "a" * 63, "A" * 64, "g" * 64])
def test_what_is_no_digest_is_never_approved(make_node, digest):
    node = make_node()
    with pytest.raises(InputError, match="64 lowercase hex digits"):
        approvals.approve(node.approved, digest)
    assert approvals.approved(node.approved) == frozenset()


def test_file_of_approvals_with_another_line_is_named(make_node):
    node = make_node()
    node.approved.write_text("# mine\nanything\n")
    with pytest.raises(InputError, match="line 2 = 'anything'"):
        approvals.approved(node.approved)


@pytest.mark.parametrize("arguments", [[], ["a" * 64, "--this-checkout"]])
def test_approve_wants_one_of_two(make_node, arguments):
    done = deploy("approve", make_node().folder, *arguments)
    assert (done.returncode, "either FAB_HASH or --this-checkout" in done.stderr) == (2, True)


def test_start_refuses_a_taken_port_and_an_open_key(make_node):
    node = make_node()
    with socket.create_server(("127.0.0.1", node.port)), pytest.raises(InputError, match="cannot listen there"):
        supernode.start(node, print)
    node.vault.key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        supernode.start(node, print)


def test_only_approved_bundles_run(make_node):
    node = make_node()
    command = supernode.command(node, node.key)
    assert "clients.deploy.approved_supernode" in command
    assert str(node.approved) in command


def test_settings_file_with_a_wrong_value_is_named(make_node):
    node = make_node()
    (node.folder / "vault.toml").write_text('partition_id = "one"\nname = "n"\n')
    with pytest.raises(InputError, match=r"vault\.toml: partition_id = 'one': "):
        Node.read(node.folder)
    (node.folder / "vault.toml").write_text('partition_id = 1\nname = "n"\n')
    (node.folder / "node.toml").write_text('superlink = "h.org:1"\ndata = "x.csv"\n')
    with pytest.raises(InputError, match=r"node\.toml: data = 'x.csv': "):
        Node.read(node.folder)
