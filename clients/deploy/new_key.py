"""New keys for a node that is stopped; whatever the old ones have signed of its charges still counts.

A ledger that lacks a charge which the old key has signed gets no new one: else a restored copy would pass as whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clients.deploy.folder import Node
from fedpriv.deployment import keys
from fedpriv.deployment.users import User, owner_of
from fedpriv.errors import InputError
from fedpriv.ledger import recovery
from fedpriv.ledger.reader import reading
from fedpriv.ledger.receipts import chains_of
from fedpriv.vault.rollback import Watch


def replace_vault_key(node: Node, sources: Sequence[Path]) -> None:
    """Give a node's vault a new key; the node of an earlier version, which signed with node.key, gets its first.

    Args:
        node: that is stopped.
        sources: of receipts, besides those in the node's folder and its counter file; see `recovery.missing`.

    Raises:
        InputError: the old key or a source cannot be used, or the ledger lacks what the old key has signed.
        LedgerError: the ledger or the counter file cannot be used.
    """
    vault = node.vault
    old = vault.key if vault.key.exists() else node.key
    watch = Watch.signed_by(old, vault)
    if vault.ledger.exists():
        with reading(vault.ledger) as db:
            if (chains := chains_of(db)) and (watch.lost(chains) or any(recovery.missing(db, sources, watch.signers))):
                raise InputError(
                    f"{vault.ledger}: lacks charges that the node has signed; first run `fedpriv ledger recover` on it "
                    f"with --key {keys.public_path(old)}, see `doctor`"
                )
    owner = _owner(node)
    keys.add_line(vault.earlier_keys, watch.signer, owner=owner)
    keys.replace_key_pair(vault.key, keys.VAULT, owner=owner)


def replace_node_key(node: Node) -> None:
    """Give a node's SuperNode a new key.

    Raises:
        InputError: the node of an earlier version still signs with the old one.
    """
    if not node.vault.key.exists():
        raise InputError(f"{node.vault.key}: is missing; run `new-key` without --node first, or receipts would be lost")
    keys.replace_key_pair(node.key, keys.NODE, owner=_owner(node))


def _owner(node: Node) -> User | None:
    """Whose the files are to be, if root makes them."""
    return owner_of(node.folder) if os.geteuid() == 0 else None
