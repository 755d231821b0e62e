"""The vault and the SuperNode as two users: code that the coordinator ships then cannot open records or ledger.

The folder's owner keeps the vault. The SuperNode's user may pass through the folder to what it needs: the socket, the
coordinator's certificate, the list of approved bundles, and Flower's own folder, which holds a copy of node.key. What
the vault signs with stays closed to it.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clients.deploy import folder
from clients.deploy.folder import Node
from fedpriv.errors import InputError
from fedpriv.files import User, owner_of, replace_file, user_named
from fedpriv.holder.vault import settings as vault_settings
from fedpriv.operate.checks import Check, check_private
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.keys import Kind

# Others may pass through a folder of this mode, and see no list of its files.
_PASSABLE = 0o711

_PROC = Path("/proc")

_PROBE_SECONDS = 120.0
# It names the first file that it cannot open.
_PROBE = """\
import sys
for path in sys.argv[1:]:
    try:
        open(path, "rb").close()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
import clients.deploy.approved_supernode
"""


@dataclass(frozen=True, kw_only=True)
class Users:
    """The users whose processes the vault and the SuperNode are.

    Attributes:
        vault: None stands for the user of this process.
        client: the same, for the SuperNode and the ClientApps that it starts.
        key: the file with node.key that the SuperNode reads.
        home: of the SuperNode, if it has a user of its own.
    """

    vault: User | None = None
    client: User | None = None
    key: Path
    home: Path | None = None

    def client_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of the SuperNode."""
        return {**variables, **({"HOME": str(self.home)} if self.home else {})}


def prepared(node: Node, variables: Mapping[str, str]) -> Users:
    """The users of a node's processes, once its folder is ready for them.

    Args:
        node: whose settings may name a `client_user`.
        variables: environment of the SuperNode.

    Raises:
        InputError: the SuperNode should run as a user that does not exist, or as whom it cannot run.
    """
    name = node.vault.client_user
    if not name:
        return Users(key=node.key)
    client, owner = client_of(node), owner_of(node.folder)
    if os.geteuid() != 0:
        raise InputError(
            f"client_user = {name!r}: only root can start the SuperNode as another user; use root, or none"
        )
    node.folder.chmod(_PASSABLE)
    for path in _read_by_client(node):
        if path != node.ca_certificate:
            _let_read(path, client, owner)
    _give(node.flower_home, client)
    key = client_key(node)
    replace_file(key, node.key.read_bytes(), mode=0o600, owner=client)
    users = Users(vault=owner if owner.uid else None, client=client, key=key, home=node.flower_home)
    _probe(node, client, users.client_variables(variables))
    return users


def can_use(user: User, path: Path, *, search: bool = False) -> bool:
    """Whether a file lets this user read it, or a folder pass through it, were all folders above it open.

    The owner can always change that.
    """
    status = path.stat()
    if user.uid == status.st_uid:
        return True
    bits = (stat.S_IXGRP, stat.S_IXOTH) if search else (stat.S_IRGRP, stat.S_IROTH)
    return bool(status.st_mode & bits[status.st_gid not in user.groups])


def client_of(node: Node) -> User:
    """The `client_user` of a node.

    Raises:
        InputError: it has none, this machine does not know it, or it is root or the folder's owner.
    """
    if not node.vault.client_user:
        raise InputError(
            f"client_user = '': name a user of this machine in {node.folder / vault_settings.FILE}, "
            "as whom the SuperNode runs"
        )
    client = user_named(node.vault.client_user)
    if client.uid in (0, owner_of(node.folder).uid):
        raise InputError(f"client_user = {client.name!r}: must be neither root nor the owner of {node.folder}")
    return client


def client_key(node: Node) -> Path:
    """The copy of node.key that the node's `client_user` reads."""
    return node.flower_home / node.key.name


def check_keys(node: Node) -> Iterator[Check]:
    """Whether the node's two keys can be used, and that of the vault is the vault's alone."""
    yield _check_key(node.key, keys.NODE)
    path, name = node.vault.key, node.vault.client_user
    found = _check_key(path, keys.VAULT)
    if not path.exists():
        detail = f"{path}: is missing; run `fedpriv node new-key {node.folder}`, then `start`"
        found = Check(path.name, False, detail)
    elif path.stat().st_uid != node.folder.stat().st_uid:
        found = Check(path.name, False, f"{path}: must belong to the owner of {node.folder}, who runs the vault")
    elif name and can_use(user_named(name), path):
        found = Check(path.name, False, f"{path}: user {name} can read it; change its owner, then chmod 600")
    yield found


def _runs(arguments: Sequence[str], users: Collection[int]) -> bool:
    """Whether a process of these users has these arguments, one after the other; nobody else's counts as theirs."""
    wanted = b"\0".join([b"", *(os.fsencode(argument) for argument in arguments), b""])
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid in users and wanted in (entry / "cmdline").read_bytes():
                return True
    return False


def _sees(users: Collection[int]) -> bool:
    """Whether /proc shows this process those of these users, which `hidepid` keeps it from."""
    return set(users) <= {os.geteuid()} or os.access(_PROC / "1" / "cmdline", os.R_OK)


def program(node: Node) -> list[str]:
    """The program to start, without the arguments of Flower's SuperNode; it runs approved bundles only."""
    return [sys.executable, "-m", f"{__package__}.approved_supernode", str(node.approved)]


def is_running(node: Node) -> bool | None:
    """Whether a SuperNode of this node runs, by `start` or as a unit; None if /proc does not show its user's."""
    users = user_ids(node)
    return _runs(program(node)[1:], users) or (False if _sees(users) else None)


def user_ids(node: Node) -> set[int]:
    """The users whose processes those of a node may be."""
    client = {client_of(node).uid} if node.vault.client_user else set()
    return {os.geteuid(), node.folder.stat().st_uid} | client


def checked_way(node: Node) -> str:
    """A line on the way of the node's `client_user` to what it needs, as `start` finds it.

    Raises:
        InputError: the user does not exist, or cannot pass through a folder, or read a file; says what to run.
    """
    client = client_of(node)
    # The folder itself is opened when the node starts.
    above = [folder for path in (node.folder, Path(sys.executable)) for folder in path.parents]
    if closed := [folder for folder in dict.fromkeys(above) if not can_use(client, folder, search=True)]:
        raise InputError(
            f"client_user = {client.name!r}: cannot pass through {closed[0]}; run chmod a+x "
            f"{shlex.join(map(str, closed))}, or keep the node elsewhere"
        )
    if not can_use(client, path := node.ca_certificate):  # the others that it reads are opened when the node starts
        raise InputError(f"client_user = {client.name!r}: cannot read {path}; run chmod a+r {path}")
    return f"{client.name} reaches the node's folder, this Python, and the files that it reads"


def _read_by_client(node: Node) -> list[Path]:
    """The files in a node's folder that its SuperNode reads."""
    settings = (node.folder / folder.FILE, node.folder / vault_settings.FILE)
    return [node.ca_certificate, node.approved, *settings]


def check_deciding(node: Node) -> Check:
    """Whether nobody but the folder's owner and root can change what decides on this node."""
    owner, found = node.folder.stat().st_uid, {path: path.stat() for path in node.deciding if path.exists()}
    if foreign := [str(path) for path, status in found.items() if status.st_uid not in (0, owner)]:
        detail = f"{foreign[0]}: must belong to the owner of {node.folder}; run chown {owner} {shlex.join(foreign)}"
        return Check("decisions", False, detail)
    shared = [str(path) for path, status in found.items() if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    if shared:
        return Check("decisions", False, f"{shared[0]}: others can change it; run chmod go-w {shlex.join(shared)}")
    return Check("decisions", True, f"{len(found)} files and folders, which their owner alone can change")


def _check_key(path: Path, kind: Kind) -> Check:
    """Whether a private key of a node can be used and is of its kind, and only its owner can read it."""
    try:
        line = keys.public_line(path)
    except InputError as error:
        return Check(path.name, False, str(error))
    if keys.kind_of(line) != kind:
        return Check(path.name, False, f"{path}: is a key `{keys.kind_of(line)}`, must be `{kind}`")
    private = check_private(path)
    return Check(path.name, private.ok, f"{path}: {keys.fingerprint(line)}" if private.ok else private.detail)


def _let_read(path: Path, client: User, owner: User) -> None:
    """Let the group of the SuperNode's user read a file of the node's, and nobody else."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # not there, or a link to what may be another's: `_probe` says whether it can be read
        return
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_uid in (0, owner.uid) and status.st_nlink == 1:
            os.fchown(file, -1, client.gid)
            os.fchmod(file, 0o640)
    finally:
        os.close(file)


def _give(folder: Path, user: User) -> None:
    """Make a folder and all that it holds the user's, unless it is already: then what it holds is the user's affair."""
    if folder.stat().st_uid == user.uid:
        return
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / name for name in (*folders, *files)):
            if path.is_dir() or path.lstat().st_nlink == 1:  # another name of a file may be of somebody else's
                os.chown(path, user.uid, user.gid, follow_symlinks=False)
    os.chown(folder, user.uid, user.gid)


def _probe(node: Node, client: User, variables: Mapping[str, str]) -> None:
    """Refuse a user who cannot run this Python and checkout, or reach the folder."""
    paths = [str(path) for path in _read_by_client(node)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *paths],
            cwd="/",
            env=dict(variables),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_PROBE_SECONDS,
            **client.popen_options,
        )
        code, said = done.returncode, done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired):
        code, said = 1, ""
    if code and said.startswith(tuple(f"{path}: " for path in paths)):
        raise InputError(
            f"client_user = {client.name!r}: cannot read {said}; run chmod a+r on it, and a+x on the folders above"
        )
    if code:
        raise InputError(
            f"client_user = {client.name!r}: cannot run {sys.executable} with this checkout; "
            "install both where that user may read"
        )
