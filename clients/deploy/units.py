"""A data holder's systemd units: the vault, which has no network, and the SuperNode, which sees no record."""

from __future__ import annotations

import os
import sys

from clients.deploy import separate_users, supernode
from clients.deploy.folder import ROOT, Node
from fedpriv.deployment.command_line import Unit, unit_name
from fedpriv.deployment.flower import program_folder
from fedpriv.deployment.users import owner_of
from fedpriv.errors import InputError


def units(node: Node) -> list[Unit]:
    """The services of a node's machine: the vault as the folder's owner, the SuperNode as `client_user`.

    Raises:
        InputError: there is no `client_user`, or it is root or the owner.
    """
    vault, folder = node.vault, node.folder
    if not vault.client_user:
        raise InputError(
            f"client_user = '': name a user of this machine in {folder / 'vault.toml'}, as whom the SuperNode runs"
        )
    client = separate_users.client_of(node)
    name = unit_name("vault", folder)
    data = [vault.data] if vault.data else []
    path = os.pathsep.join([str(program_folder()), os.defpath])  # Flower starts its programs by name
    return [
        Unit(
            name=name,
            description=f"fedpriv vault of {folder}",
            command=[sys.executable, "-m", "fedpriv.vault", str(folder)],
            folder=folder,
            user=owner_of(folder).name,
            variables={"PYTHONUNBUFFERED": "1", "FEDPRIV_CACHE": str(folder / "cache")},
            writable=[folder, *([vault.counter_file] if vault.counter_file else [])],
            read_only=data,
            networked=False,
        ),
        Unit(
            name=unit_name("supernode", folder),
            description=f"fedpriv SuperNode of {folder}",
            command=supernode.command(node, separate_users.client_key(node)),
            prepared_by=[sys.executable, "-m", "clients.deploy", "prepare", str(folder)],
            folder=ROOT,
            user=client.name,
            variables={"HOME": str(node.flower_home), "PATH": path, **supernode.variables(node)},
            writable=[node.flower_home],
            hidden=[*data, vault.ledger, vault.tokens, node.key, vault.key, vault.policy, vault.events, vault.receipts],
            after=[f"{name}.service"],
        ),
    ]
