"""Which nodes may take part: their public keys, by partition id.

Each node has two: Flower admits its SuperNode by the one, and runs check by the other what its vault says.
"""

from __future__ import annotations

from pathlib import Path

from fedpriv.deployment import keys
from fedpriv.deployment.flower import CONNECTION, FlowerError, flwr
from fedpriv.deployment.keys import NODE, VAULT, Kind
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from server.deploy.folder import Coordinator

_IN_USE = "Public key already in use"


def register(
    coordinator: Coordinator, partition_id: int, node_key: Path, vault_key: Path, *, replace_old: bool = False
) -> bool:
    """Register a node's key with the SuperLink, keep both its keys, and return whether one of them is new.

    A node that an earlier version admitted by its Flower key alone gets its other key in the same way. What a key has
    signed that is replaced goes on to show how much its node was charged.

    Args:
        coordinator: whose SuperLink is running.
        partition_id: of the node, >= 0.
        node_key: the node's node.key.pub.
        vault_key: its vault.key.pub.
        replace_old: the id may have had other keys.

    Raises:
        InputError: a file is not a public key of its kind, the id has another key, or the key another id.
        FlowerError: the SuperLink cannot be reached, or refused; nothing was kept.
    """
    if partition_id < 0:
        raise InputError(f"partition id = {partition_id}: must be >= 0")
    node, vault = keys.read_public_line(node_key, NODE), keys.read_public_line(vault_key, VAULT)
    old_node = _known(coordinator, NODE, partition_id, node, node_key, replace_old=replace_old)
    old_vault = _known(coordinator, VAULT, partition_id, vault, vault_key, replace_old=replace_old)
    old_id = _old_id(coordinator, partition_id) if old_node not in (None, node) else ""
    new_id = _register_at_superlink(coordinator, node_key)
    if old_id:
        flwr(coordinator.flower_home, ["supernode", "unregister", old_id, CONNECTION], folder=coordinator.folder)
    if new_id:
        replace_file(_id_file(coordinator, partition_id), f"{new_id}\n".encode())
    replace_file(coordinator.nodes / f"{partition_id}.pub", f"{node}\n".encode())
    file = coordinator.vaults / f"{partition_id}.pub"
    file.parent.mkdir(exist_ok=True)
    signed = old_vault or old_node  # one key was both, before there were two
    if signed is not None and signed != vault:
        keys.add_line(file.with_suffix(keys.EARLIER), signed)
    replace_file(file, f"{vault}\n".encode())
    return (old_node, old_vault) != (node, vault)


def _known(
    coordinator: Coordinator, kind: Kind, partition_id: int, line: str, path: Path, *, replace_old: bool
) -> str | None:
    """The key of this kind that the partition id has; None if it has none."""
    known = {id_: keys.read_public_line(file, kind) for id_, file in coordinator.registered(kind).items()}
    if known.get(partition_id, line) != line and not replace_old:
        raise InputError(
            f"partition id = {partition_id}: is registered with another key than {path}; give the node another id, or "
            "exchange its keys with --replace"
        )
    if other_ids := [id_ for id_, other in known.items() if other == line and id_ != partition_id]:
        raise InputError(f"public key = {path}: is registered for partition id {other_ids[0]}; use that one")
    return known.get(partition_id)


def _register_at_superlink(coordinator: Coordinator, public_key: Path) -> str:
    """Register the key, even if it was before: a crash may have come first, or state.db may have been lost.

    Returns the id that Flower gives the node; empty if it has one.
    """
    try:
        answer = flwr(
            coordinator.flower_home,
            ["supernode", "register", str(public_key.absolute()), CONNECTION],
            folder=coordinator.folder,
        )
    except FlowerError as error:
        if _IN_USE not in str(error):
            raise
        return ""
    return str(answer["node-id"])


def _old_id(coordinator: Coordinator, partition_id: int) -> str:
    """Flower's id of the node that is registered with the partition id, by which its key is taken out.

    Raises:
        InputError: an earlier version registered it, and did not note the id.
    """
    file = _id_file(coordinator, partition_id)
    if not file.is_file():
        raise InputError(
            f"{file}: is missing, since an earlier version registered this node; write Flower's id of its old key into "
            f"it, as `FLWR_HOME={coordinator.flower_home} flwr supernode list {CONNECTION}` shows it"
        )
    return file.read_text().strip()


def _id_file(coordinator: Coordinator, partition_id: int) -> Path:
    return coordinator.nodes / f"{partition_id}.id"
