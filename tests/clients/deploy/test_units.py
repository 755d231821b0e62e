"""The units of a node: the vault reaches no network, the SuperNode no record, and systemd understands both."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clients.deploy.folder import Made, Node
from clients.deploy.supernode import units
from fedpriv.errors import InputError
from tests.clients.deploy.conftest import kit


@pytest.fixture
def node(tmp_path: Path, make: Callable[..., Made]) -> Node:
    """A node in a folder whose name systemd would expand and split, if it were not quoted."""
    made = make("a %h $HOME node", client_user="daemon")
    data = tmp_path / "records.csv"
    data.write_text("text,label\n")
    return replace(made.node, vault=replace(made.node.vault, data=data, labels=("a", "b"), budget_epsilon=1.0))


def test_the_vault_has_no_network_and_the_supernode_sees_neither_records_nor_ledger(node: Node) -> None:
    vault, supernode = (unit.text().splitlines() for unit in units(node))
    assert {"PrivateNetwork=yes", "RestrictAddressFamilies=AF_UNIX", "OOMPolicy=continue"} <= set(vault)
    assert f'ReadOnlyPaths="{node.vault.data}"' in vault
    folder = str(node.folder).replace("%", "%%")
    own = (f"{folder}/{name}" for name in ("ledger.sqlite", "node.key", "vault.key", "policy.toml"))
    for secret in (node.vault.data, *own):
        assert f'InaccessiblePaths="-{secret}"' in supernode
    assert [line for line in supernode if line.startswith("ReadWritePaths")] == [f'ReadWritePaths="{folder}/flower"']
    assert "User=daemon" in supernode
    assert "User=daemon" not in vault
    # The SuperNode waits for its registration, and its unit holds nothing that changes: `move` writes none.
    assert {"Restart=on-failure", "StartLimitIntervalSec=0"} <= set(supernode)
    text = units(node)[1].text()
    assert (' "-m" "clients.deploy" "supernode" "/' in text, node.superlink in text) == (True, False)


def test_of_other_disks_the_vault_may_write_its_counter_file_and_the_folder_of_its_ledger(node: Node) -> None:
    elsewhere = {"counter_file": Path("/mnt/other/counter"), "ledger_file": Path("/mnt/shared/ledger.sqlite")}
    moved = units(replace(node, vault=replace(node.vault, **elsewhere)))
    vault, supernode = (unit.text().splitlines() for unit in moved)
    writable = [line for line in vault if line.startswith("ReadWritePaths")]
    assert sorted(writable[1:]) == ['ReadWritePaths="/mnt/other/counter"', 'ReadWritePaths="/mnt/shared"']
    assert 'InaccessiblePaths="-/mnt/shared/ledger.sqlite"' in supernode


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(node: Node, tmp_path: Path) -> None:
    files = []
    for unit in units(node):
        files.append(tmp_path / f"{unit.name}.service")
        files[-1].write_text(unit.text())
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "fedpriv" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    for file in files:
        command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", file]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-300:]  # an exposure below 3.0 of 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_user": ""}, "client_user = '': name a user"),
        ({"client_user": "root"}, "must be neither root nor the owner"),
        ({"client_user": "10002"}, r"client_user = '10002': systemd knows users, .* by name alone"),
        ({"data": Path("/tmp/x\nUser=root")}, "holds a control character"),  # no directive of its own
    ],
)
def test_without_a_user_and_paths_that_units_can_name_there_are_none(node: Node, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        units(replace(node, vault=replace(node.vault, **changes)))[1].text()


def test_units_are_written_once_or_not_at_all(node: Node, tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    said = kit("units", node.folder, "--out", tmp_path / "units")
    names = sorted(path.name for path in (tmp_path / "units").iterdir())
    place = str(tmp_path).strip("/").replace("/", "-")
    assert names == [f"fedpriv-{each}-{place}-a--h--HOME-node.service" for each in ("supernode", "vault")]
    assert f"systemctl enable --now fedpriv-vault-{place}-a--h--HOME-node" in said
    assert "exists; give another folder" in kit("units", node.folder, "--out", tmp_path / "units", code=2)
    assert sys.executable in (tmp_path / "units" / names[0]).read_text()
