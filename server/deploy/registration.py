"""Which nodes may take part: their public keys, by partition id."""

from __future__ import annotations

from pathlib import Path

from fedpriv.deployment import keys
from fedpriv.deployment.files import write_new
from fedpriv.deployment.flower import CONNECTION, FlowerError, flwr
from fedpriv.errors import InputError
from server.deploy.folder import Coordinator

_IN_USE = "Public key already in use"


def register(coordinator: Coordinator, partition_id: int, public_key: Path) -> bool:
    """Register a node's key with the SuperLink, keep it as nodes/PARTITION_ID.pub, and return whether the node is new.

    Args:
        coordinator: whose SuperLink is running.
        partition_id: of the node, >= 0.
        public_key: the node's .pub file.

    Raises:
        InputError: the file is not a public key, the id has another key, or the key another id.
        FlowerError: the SuperLink cannot be reached, or refused; nothing was kept.
    """
    if partition_id < 0:
        raise InputError(f"partition id = {partition_id}: must be >= 0")
    line = keys.read_public_line(public_key)
    known = {id_: keys.read_public_line(file) for id_, file in coordinator.registered().items()}
    if known.get(partition_id, line) != line:
        raise InputError(f"partition id = {partition_id}: is registered with another key; give the node another id")
    if other_ids := [id_ for id_, other in known.items() if other == line and id_ != partition_id]:
        raise InputError(f"public key = {public_key}: is registered for partition id {other_ids[0]}; use that one")
    _register_at_superlink(coordinator, public_key)
    if partition_id in known:
        return False
    write_new(coordinator.nodes / f"{partition_id}.pub", f"{line}\n".encode())
    return True


def _register_at_superlink(coordinator: Coordinator, public_key: Path) -> None:
    """Register the key, even if it was before: a crash may have come first, or state.db may have been lost."""
    try:
        flwr(
            coordinator.flower_home,
            ["supernode", "register", str(public_key.absolute()), CONNECTION],
            folder=coordinator.folder,
        )
    except FlowerError as error:
        if _IN_USE not in str(error):
            raise
