"""The vault beside a SuperNode, of another user where asked, and units of which none sees both network and records."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tomli_w

from clients.deploy import separate_users, supernode
from clients.deploy.folder import Made, Node
from clients.deploy.supernode import units
from fedpriv.errors import FlowerError, InputError
from tests.clients.deploy.conftest import kit

READY = "vault: vault listens on"


class Lines:
    """What was said, by any thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._more:
            self.lines.append(line)
            self._more.notify_all()

    def wait_for(self, text: str, times: int = 1, seconds: float = 60) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.count(text) >= times, seconds), (text, self.lines)

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


def vault_of(node: Node) -> psutil.Process:
    """The vault's process, not the child that it keeps."""
    wanted = ["fedpriv.holder.vault", "--with-parent", str(node.folder)]
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if child.is_running() and child.cmdline()[-3:] == wanted)


def run(node: Node, say: Lines):
    return supernode.running_vault(node, say, variables=os.environ, user=None)


@pytest.mark.slow
def test_a_vault_that_is_killed_is_started_again_and_ends_with_the_block(node):
    say = Lines()
    with run(node, say):
        assert say.count(READY) == 1, "it can be asked before the block runs"
        first = vault_of(node)
        first.kill()
        say.wait_for(READY, times=2)
        assert say.count("vault: ended with code -9; it is started again in 2 s") == 1
        second = vault_of(node)
        assert second.pid != first.pid
    assert not second.is_running()
    assert not node.vault.socket.exists()
    assert say.count(READY) == 2


def test_a_vault_that_never_listens_or_cannot_be_started_is_not_tried_again(node, monkeypatch):
    node.vault.folder.joinpath("vault.toml").write_text("partition_id = -1\n")
    invalid, missing = Lines(), Lines()
    with pytest.raises(FlowerError, match="ended before it could be asked"), run(node, invalid):
        pytest.fail("the block must not run")
    assert (invalid.count("partition_id = -1"), invalid.count("started again")) == (1, 0)
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(FlowerError, match="ended before it could be asked"), run(node, missing):
        pytest.fail("the block must not run")
    assert missing.lines == ["vault: cannot be started (No such file or directory)"]


def test_what_a_vault_writes_only_its_user_reads_and_a_signal_before_the_supernode_starts_ends_the_vault_too(node):
    # Its port is free and its key is sound, but nobody answers, so the kit waits between attempts.
    (node.folder / "node.toml").write_text(tomli_w.dumps({"superlink": "127.0.0.1:1", "port": node.port}))
    command = [sys.executable, "-m", "clients.deploy", "start", str(node.folder)]
    kit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert kit.stdout is not None
    for line in kit.stdout:
        if READY in line:
            break
    (vault,) = [child for child in psutil.Process(kit.pid).children() if "fedpriv.holder.vault" in child.cmdline()]
    assert "Umask:\t0077" in Path(f"/proc/{vault.pid}/status").read_text()
    kit.send_signal(signal.SIGTERM)
    kit.communicate(timeout=60)
    assert kit.returncode == 0
    assert not vault.is_running()


def with_client_user(node: Node, name: str) -> Node:
    values = {"partition_id": 1, "name": "clinic", "client_user": name}
    (node.folder / "vault.toml").write_text(tomli_w.dumps(values))
    return Node.read(node.folder)


WRONG_USERS = {
    **dict.fromkeys(["-1", "+1", "1e3", " 1", "\u0661", "1x", str(2**31), "9" * 30], "client_user = "),
    **dict.fromkeys(["root", "0", "00", str(os.geteuid())], "must be neither root nor the owner"),
    "nobody-of-that-name": "client_user = 'nobody-of-that-name': this machine has no such user",
}


def test_who_the_supernodes_user_may_be(node):
    users = separate_users.prepared(node, os.environ)
    assert (users.vault, users.client, users.key) == (None, None, node.key), "none: it reads the node's own key"
    assert node.folder.stat().st_mode & 0o777 == 0o700
    user = separate_users.client_of(with_client_user(node, "10002"))
    assert (user.name, user.uid, user.gid, user.groups) == ("10002", 10002, 10002, (10002,))
    for name, message in WRONG_USERS.items():
        with pytest.raises(InputError, match=message):
            separate_users.client_of(with_client_user(node, name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may start processes of any user")
def test_only_root_starts_processes_of_another_user(node):
    with pytest.raises(InputError, match="only root can start"):
        separate_users.prepared(with_client_user(node, "nobody"), os.environ)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@needs_root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no other Python")
def test_a_user_who_cannot_run_this_checkout_or_reach_the_folder_is_told_so(node, monkeypatch):
    node = with_client_user(node, "nobody")
    monkeypatch.setattr(sys, "executable", str(node.vault.key))  # nobody may run it
    with pytest.raises(InputError, match="client_user = 'nobody': cannot run"):
        separate_users.prepared(node, os.environ)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # anyone may run it
    node.folder.parent.chmod(0o700)
    with pytest.raises(InputError, match=r"cannot read /.*/ca\.crt: Permission denied; run chmod a\+r on it, and a\+x"):
        separate_users.prepared(node, os.environ)


@needs_root
def test_the_supernodes_user_owns_flowers_folder_and_reads_nothing_else(node, monkeypatch):
    # Whether that user can run this Python depends on the machine, so the probe is left out here.
    monkeypatch.setattr(separate_users, "_probe", lambda *_: None)
    node = with_client_user(node, "nobody")
    # Links that this user left are not followed.
    secret = node.folder / "ledger.sqlite"
    secret.write_text("mine")
    for name in ("node.key", "link"):
        (node.flower_home / name).symlink_to(secret)
    users = separate_users.prepared(node, os.environ)
    assert (secret.read_text(), secret.stat().st_uid) == ("mine", os.geteuid())
    assert not (node.flower_home / "node.key").is_symlink()
    nobody = pwd.getpwnam("nobody")
    assert users.key.read_bytes() == node.key.read_bytes()
    owners = users.client.uid, users.key.stat().st_uid, node.flower_home.stat().st_uid
    assert owners == (nobody.pw_uid,) * 3
    assert node.folder.stat().st_mode & 0o777 == 0o711
    files = f"{node.key} {node.vault.key} {users.key}"
    script = f"for file in {files}; do head -c 1 $file > /dev/null; echo $?; done"
    options = {"cwd": "/", "capture_output": True, "text": True, **users.client.popen_options}
    opened = subprocess.run(["sh", "-c", script], **options)
    *own, copy = opened.stdout.split()
    assert "0" not in own
    if all(parent.stat().st_mode & 0o001 for parent in node.folder.parents):
        assert copy == "0", opened.stderr


def test_a_process_of_the_supernodes_user_becomes_a_supernode_that_runs_approved_bundles_alone(node, monkeypatch):
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *asked: became.append(asked))
    monkeypatch.chdir(node.folder)
    node = with_client_user(node, "10002")
    # Not of the vault's own, which would run what the coordinator ships where records and ledger are open.
    with pytest.raises(InputError, match=f"client_user = '10002': this user's number is {os.geteuid()}, must be 10002"):
        supernode.become(node)
    monkeypatch.setattr(os, "geteuid", lambda: 10002)
    with pytest.raises(InputError, match=r"flower/node\.key: no such file; run `fedpriv node prepare .*` as root"):
        supernode.become(node)
    separate_users.client_key(node).write_bytes(node.key.read_bytes())
    supernode.become(node)
    ((program, arguments, variables),) = became
    assert program == arguments[0] == sys.executable
    assert arguments == supernode.command(node, separate_users.client_key(node))
    assert str(node.approved) in arguments
    assert variables["HOME"] == variables["FLWR_HOME"] == str(node.flower_home) == str(Path.cwd())
    assert variables["NO_PROXY"].endswith("127.0.0.1,localhost,::1"), "its own processes need no proxy"


def test_what_a_bundle_leaves_in_flowers_folder_never_runs_by_itself(node):
    """Attack: a package of the name of one that the SuperNode's program imports, for later starts."""
    (node.flower_home / "clients").mkdir()
    (node.flower_home / "clients" / "__init__.py").write_text("raise SystemExit(77)\n")
    command = [*supernode.program(node), "--help"]
    variables = supernode._environment(node)
    done = subprocess.run(command, cwd=node.flower_home, env=variables, capture_output=True, check=False)
    assert done.returncode != 77
    assert done.stderr.startswith(b"usage: approved_supernode.py")


@pytest.fixture
def odd_node(tmp_path: Path, make: Callable[..., Made]) -> Node:
    """A node in a folder whose name systemd would expand and split, if it were not quoted."""
    made = make("a %h $HOME node", client_user="daemon")
    data = tmp_path / "records.csv"
    data.write_text("text,label\n")
    return replace(made.node, vault=replace(made.node.vault, data=data, labels=("a", "b"), budget_epsilon=1.0))


def test_the_vault_has_no_network_and_the_supernode_sees_neither_records_nor_ledger(odd_node: Node) -> None:
    vault, supernode = (unit.text().splitlines() for unit in units(odd_node))
    assert {"PrivateNetwork=yes", "RestrictAddressFamilies=AF_UNIX", "OOMPolicy=continue"} <= set(vault)
    assert f'ReadOnlyPaths="{odd_node.vault.data}"' in vault
    folder = str(odd_node.folder).replace("%", "%%")
    own = (f"{folder}/{name}" for name in ("ledger.sqlite", "node.key", "vault.key", "policy.toml"))
    for secret in (odd_node.vault.data, *own):
        assert f'InaccessiblePaths="-{secret}"' in supernode
    assert [line for line in supernode if line.startswith("ReadWritePaths")] == [f'ReadWritePaths="{folder}/flower"']
    assert "User=daemon" in supernode
    assert "User=daemon" not in vault
    # The SuperNode waits for its registration, and its unit holds nothing that changes: `move` writes none.
    assert {"Restart=on-failure", "StartLimitIntervalSec=0"} <= set(supernode)
    text = units(odd_node)[1].text()
    assert (' "-m" "clients.deploy" "supernode" "/' in text, odd_node.superlink in text) == (True, False)


def test_of_other_disks_the_vault_may_write_its_counter_file_and_the_folder_of_its_ledger(odd_node: Node) -> None:
    elsewhere = {"counter_file": Path("/mnt/other/counter"), "ledger_file": Path("/mnt/shared/ledger.sqlite")}
    moved = units(replace(odd_node, vault=replace(odd_node.vault, **elsewhere)))
    vault, supernode = (unit.text().splitlines() for unit in moved)
    writable = [line for line in vault if line.startswith("ReadWritePaths")]
    assert sorted(writable[1:]) == ['ReadWritePaths="/mnt/other/counter"', 'ReadWritePaths="/mnt/shared"']
    assert 'InaccessiblePaths="-/mnt/shared/ledger.sqlite"' in supernode


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(odd_node: Node, tmp_path: Path) -> None:
    files = []
    for unit in units(odd_node):
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
def test_without_a_user_and_paths_that_units_can_name_there_are_none(odd_node: Node, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        units(replace(odd_node, vault=replace(odd_node.vault, **changes)))[1].text()


def test_units_are_written_once_or_not_at_all(odd_node: Node, tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    said = kit("units", odd_node.folder, "--out", tmp_path / "units")
    names = sorted(path.name for path in (tmp_path / "units").iterdir())
    place = str(tmp_path).strip("/").replace("/", "-")
    assert names == [f"fedpriv-{each}-{place}-a--h--HOME-node.service" for each in ("supernode", "vault")]
    assert f"systemctl enable --now fedpriv-vault-{place}-a--h--HOME-node" in said
    assert "exists; give another folder" in kit("units", odd_node.folder, "--out", tmp_path / "units", code=2)
    assert sys.executable in (tmp_path / "units" / names[0]).read_text()
