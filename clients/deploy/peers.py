"""With which other holders the node adds up: each is approved by its operator, by the public key of its vault."""

from __future__ import annotations

from pathlib import Path

from fedpriv.accounting.views import num_readers
from fedpriv.deployment import keys
from fedpriv.errors import InputError
from fedpriv.files import replace_file
from fedpriv.vault import peers
from fedpriv.vault.settings import VaultSettings


def approve(vault: VaultSettings, client: int, key: Path, *, replace_old: bool = False) -> bool:
    """Let the node add up with another holder's, and return whether that is new.

    Args:
        vault: of the node.
        client: partition id of the other holder.
        key: its vault.key.pub, as its operator handed it over.
        replace_old: another key may have been approved for this partition id.

    Raises:
        InputError: the file is no public key of a vault; partition id or key are this node's own or another peer's; or
            another key was approved for this partition id.
    """
    line = keys.read_public_line(key)
    known = peers.approved(vault.peers)
    file = vault.peers / f"{client}{peers.SUFFIX}"
    if client == vault.partition_id:
        raise InputError(f"PARTITION-ID = {client}: is this node's own; approve the others")
    if line == keys.public_line(vault.key):
        raise InputError(f"public key = {key}: is this node's own; give that of partition {client}")
    for peer, approved in known.items():
        if peer != client and approved == line:
            raise InputError(f"public key = {key}: is approved as that of partition {peer}; each holder has its own")
    if client in known and known[client] == line:
        return False
    if client in known and not replace_old:
        raise InputError(f"{file}: exists; ask that holder whether its key was exchanged, then give --replace")
    vault.peers.mkdir(mode=0o700, exist_ok=True)
    replace_file(file, f"{line}\n".encode())  # what an earlier version approved is none
    return True


def check_survivors(vault: VaultSettings) -> None:
    """Refuse sums in which nobody else's noise need count.

    Raises:
        InputError: `min_survivors` leaves no honest node beside this one and those that read the sum.
    """
    least, colluding = vault.min_survivors, vault.colluding_clients
    needed = num_readers(colluding) + 2
    if least < needed:
        raise InputError(
            f"min_survivors = {least}: must be at least {needed} with colluding_clients = {colluding}, so that every "
            "sum has another node's noise, of which none of those who read it knows"
        )


def summary(vault: VaultSettings) -> str:
    """With whom the node adds up, for its operator.

    Raises:
        InputError: fewer are approved than a sum needs beside this node, the threshold leaves no honest peer, a
            file is no public key of a vault, or one key stands for two holders.
    """
    known = peers.approved(vault.peers)
    if old := peers.of_earlier_versions(vault.peers):
        raise InputError(
            f"{old[0]}: is the key of that node's SuperNode, which signs no sums; get its vault.key.pub from its "
            "operator, and run `approve-peer` with that"
        )
    least, colluding = vault.min_survivors, vault.colluding_clients
    check_survivors(vault)
    if len(set(known.values())) < len(known):
        raise InputError(f"{vault.peers}: one key stands for two partitions; remove what is wrong")
    needed = least - 1 if vault.budget_view == "aggregate" else 0
    if len(known) < needed:
        raise InputError(
            f"{vault.peers}: {len(known)} approved, min_survivors = {least} needs at least {needed}; run `approve-peer`"
        )
    if not known:
        return "none: takes part in no secure sum"
    return f"adds up with partitions {', '.join(map(str, known))}, in sums of {least} or more, {colluding} may collude"
