"""Invites institutions, and admits the nodes with whose keys they answer.

Flower admits a node by the one key, and runs check by the other what its vault says. The coordinator's operator
compares the latter's fingerprint with the institution; the signature in an application binds the former to it.
"""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpriv import config
from fedpriv.apps import FLOWER_APP
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import read_text, replace_file, software
from fedpriv.learning import adapters
from fedpriv.operate import approvals, joining
from fedpriv.operate.command_line import validated
from fedpriv.operate.joining import Application, Invitation, Member, Roster
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.keys import NODE, VAULT, Kind, fingerprint
from server.deploy.folder import CONNECTION, Coordinator
from server.mailbox import BY_FILE

# What Flower answers to who registers a key again, and to who takes out a node that is out.
_IN_USE, _GONE = "Public key already in use", "not found"
_LIVE = ("registered", "online", "offline")


def invite(coordinator: Coordinator, names: Sequence[str]) -> dict[Path, Invitation]:
    """Write an invitation for each institution, and return them; one of a known name is written again.

    Args:
        coordinator: that invites.
        names: of the institutions.

    Raises:
        InputError: a name or the planned run cannot be used, or its model is not on this machine; nothing was written.
        FlowerError: this checkout cannot be bundled.
    """
    names = list(dict.fromkeys(unicodedata.normalize("NFC", " ".join(name.split())) for name in names))
    known = {invitation.name: id_ for id_, invitation in invited(coordinator).items()}
    new = [name for name in names if name not in known]
    left = keys.files_of_nodes(coordinator.vaults, keys.EARLIER)
    first = max([-1, *known.values(), *coordinator.registered(), *left]) + 1
    ids = known | {name: first + place for place, name in enumerate(new)}
    asked: dict[str, Any] = {"superlink": coordinator.address, "ca": read_text(coordinator.ca_certificate)}
    asked |= {
        "key": keys.public_line(coordinator.key),
        "software": software(),
        "bundle": approvals.bundle_digest(FLOWER_APP),
    }
    asked |= {"contact": coordinator.contact} if coordinator.contact else {}
    if planned := coordinator.planned:
        asked["model"] = adapters.model_digest(adapters.model_folder(config.parse(planned).model))
        asked["run"] = {key: value for key, value in planned.items() if key not in _own_keys()}
    made = [validated(Invitation, {"name": name, "partition_id": ids[name], **asked}) for name in names]
    found = {coordinator.invitations / f"{invitation.partition_id}.toml": invitation for invitation in made}
    for path, invitation in found.items():
        header = f"{invitation.name} is invited to a federation: fedpriv node init DIR --invite FILE --data RECORDS ..."
        replace_file(path, joining.text(invitation, header).encode())
    return found


def _own_keys() -> frozenset[str]:
    """Keys that concern the coordinator's machine alone."""
    located = config.RunConfig.keys_with(config.Fact.LOCATION)
    return frozenset(located) | {"test_data", "track", "text_column", "text_pair_column", "label_column"}


def invited(coordinator: Coordinator) -> dict[int, Invitation]:
    """The invitations, by partition id."""
    found = [joining.read(Invitation, path) for path in coordinator.invitations.glob("*.toml")]
    return {invitation.partition_id: invitation for invitation in sorted(found, key=lambda each: each.partition_id)}


def read_application(coordinator: Coordinator, path: Path) -> Application:
    """The application in a file, of an institution that was invited.

    Raises:
        InputError: the file is no application that its vault signed, or nobody of this name and id was invited.
    """
    application = joining.read(Application, path)
    application.check(path)
    invitation = invited(coordinator).get(application.partition_id)
    if invitation is None:
        raise InputError(f"{path}: partition {application.partition_id} was not invited")
    if invitation.name != application.name:
        raise InputError(
            f"{path}: is of {application.name!r} for partition {application.partition_id}, which was invited as "
            f"{invitation.name!r}"
        )
    return application


def is_known(coordinator: Coordinator, application: Application) -> bool:
    """Whether the node is registered with this key of its vault."""
    file = coordinator.registered(VAULT).get(application.partition_id)
    return file is not None and keys.read_public_line(file) == application.vault_key


def missing(coordinator: Coordinator) -> list[str]:
    """The names of the institutions that were invited and are not admitted with the key of a vault."""
    admitted = coordinator.registered(VAULT)
    return [each.name for id_, each in invited(coordinator).items() if id_ not in admitted]


def write_roster(coordinator: Coordinator) -> Roster:
    """Write the file with the keys of all admitted vaults, and return what it holds."""
    names = {id_: invitation.name for id_, invitation in invited(coordinator).items()}
    members = [
        Member(partition_id=id_, name=names.get(id_, f"node-{id_}"), vault_key=keys.read_public_line(file))
        for id_, file in sorted(coordinator.registered(VAULT).items())
    ]
    roster = Roster(members=tuple(members))
    header = "The vaults' keys: fedpriv node approve-peers DIR FILE. Compare each with its institution by telephone."
    replace_file(coordinator.roster, joining.text(roster, header).encode())
    return roster


def unregister(coordinator: Coordinator, name: str) -> int:
    """Take a node out of the federation for good, and return its partition id, which no other node gets.

    What its vault has signed goes on to show how much it was charged. Doing it again after a crash does no harm.

    Args:
        coordinator: whose SuperLink is running.
        name: of the institution, as it was invited.

    Raises:
        InputError: nobody has this name, or Flower's id of the node is not noted.
        FlowerError: the SuperLink cannot be reached; the node's vault is out all the same.
    """
    named = {invitation.name: id_ for id_, invitation in invited(coordinator).items()}
    if name not in named:
        raise InputError(f"NAME = {name!r}: is none of {', '.join(named) or 'the invited, of whom there are none'}")
    id_ = named[name]
    node, vault = coordinator.nodes / f"{id_}.pub", coordinator.vaults / f"{id_}.pub"
    reach(coordinator, id_, by_file=False)
    if vault.exists():
        keys.add_line(vault.with_suffix(keys.EARLIER), keys.read_public_line(vault))
        vault.unlink()
    if node.exists():
        _unregister_at_superlink(coordinator, _old_id(coordinator, id_))
        keys.add_line(node.with_suffix(keys.EARLIER), keys.read_public_line(node, NODE))
        node.unlink()
        _id_file(coordinator, id_).unlink()
    (coordinator.invitations / f"{id_}.toml").unlink(missing_ok=True)
    return id_


def _unregister_at_superlink(coordinator: Coordinator, id_: str) -> None:
    try:
        coordinator.flwr("supernode", "unregister", id_, CONNECTION)
    except FlowerError as error:
        if _GONE not in str(error):
            raise


def register(coordinator: Coordinator, partition_id: int, node: str, vault: str, *, replace_old: bool = False) -> bool:
    """Register a node's key with the SuperLink, keep both its keys, and return whether one of them is new.

    What a key has signed that is replaced goes on to show how much its node was charged.

    Args:
        coordinator: whose SuperLink is running.
        partition_id: of the node, >= 0.
        node: the public line of its node.key.
        vault: that of its vault.key.
        replace_old: the id may have had other keys.

    Raises:
        InputError: the id has another key, or the key another id, or an earlier key of the node comes back.
        FlowerError: the SuperLink cannot be reached, or refused; nothing was kept.
    """
    old_node = _known(coordinator, NODE, partition_id, node, replace_old=replace_old)
    old_vault = _known(coordinator, VAULT, partition_id, vault, replace_old=replace_old)
    node_file, vault_file = coordinator.nodes / f"{partition_id}.pub", coordinator.vaults / f"{partition_id}.pub"
    for file, line in ((node_file, node), (vault_file, vault)):
        if line in keys.read_lines(file.with_suffix(keys.EARLIER)):
            raise InputError(
                f"{keys.kind_of(line)} key {fingerprint(line)}: was exchanged for a newer one; ask the institution for "
                "its newest application"
            )
    old_id = _old_id(coordinator, partition_id) if old_node not in (None, node) else ""
    new_id = _register_at_superlink(coordinator, partition_id, node)
    if old_id:
        _unregister_at_superlink(coordinator, old_id)
        keys.add_line(node_file.with_suffix(keys.EARLIER), str(old_node))
    # In this order: after a crash between the two, the old id belongs to a key that is none of the node's any more.
    replace_file(node_file, f"{node}\n".encode())
    replace_file(_id_file(coordinator, partition_id), f"{new_id}\n".encode())
    if old_vault is not None and old_vault != vault:
        keys.add_line(vault_file.with_suffix(keys.EARLIER), old_vault)
    replace_file(vault_file, f"{vault}\n".encode())
    return (old_node, old_vault) != (node, vault)


def reach(coordinator: Coordinator, partition_id: int, *, by_file: bool) -> None:
    """Note how runs that begin from now on reach an admitted node: by file or by network."""
    path = coordinator.vaults / f"{partition_id}{BY_FILE}"
    if by_file:
        replace_file(path, _id_file(coordinator, partition_id).read_bytes())
    else:
        path.unlink(missing_ok=True)


def _known(coordinator: Coordinator, kind: Kind, partition_id: int, line: str, *, replace_old: bool) -> str | None:
    """The key of this kind that the partition id has; None if it has none."""
    known = {id_: keys.read_public_line(file, kind) for id_, file in coordinator.registered(kind).items()}
    if known.get(partition_id, line) != line and not replace_old:
        raise InputError(
            f"partition id = {partition_id}: is registered with another {kind} key than {fingerprint(line)}; if the "
            "institution exchanged its keys, give --replace"
        )
    if other_ids := [id_ for id_, other in known.items() if other == line and id_ != partition_id]:
        raise InputError(f"{kind} key {fingerprint(line)}: is registered for partition id {other_ids[0]} already")
    return known.get(partition_id)


def _register_at_superlink(coordinator: Coordinator, partition_id: int, line: str) -> str:
    """Register the key, unless it is, and return Flower's id of its node.

    A crash may have come first, or state.db may have been lost. Flower never takes a key again that was taken out.

    Raises:
        InputError: the key was taken out, or a crash left several nodes of which nobody knows whose they are.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fedpriv-key-") as folder:
            file = Path(folder, "node.key.pub")
            file.write_text(f"{line}\n", encoding="utf-8")
            return str(coordinator.flwr("supernode", "register", str(file), CONNECTION)["node-id"])
    except FlowerError as error:
        if _IN_USE not in str(error):
            raise
    listed = coordinator.flwr("supernode", "list", CONNECTION)["nodes"]
    live = {str(node["node-id"]) for node in listed if node["status"] in _LIVE}
    ids = {id_: read_text(file).strip() for id_, file in keys.files_of_nodes(coordinator.nodes, ".id").items()}
    public = coordinator.nodes / f"{partition_id}.pub"
    if ids.get(partition_id) in live and public.exists() and keys.read_public_line(public, NODE) == line:
        return ids[partition_id]
    unknown = live - set(ids.values())
    if len(unknown) != 1:
        raise InputError(
            f"{NODE} key {fingerprint(line)}: was taken out of the federation; let the institution run `new-key --node`"
        )
    return unknown.pop()


def _old_id(coordinator: Coordinator, partition_id: int) -> str:
    """Flower's id of the node that is registered with the partition id, by which its key is taken out.

    Raises:
        InputError: it is not noted.
    """
    file = _id_file(coordinator, partition_id)
    if not file.is_file():
        raise InputError(
            f"{file}: is missing; write Flower's id of this node's old key into "
            f"it, as `FLWR_HOME={coordinator.flower_home} flwr supernode list {CONNECTION}` shows it"
        )
    return read_text(file).strip()


def _id_file(coordinator: Coordinator, partition_id: int) -> Path:
    return coordinator.nodes / f"{partition_id}.id"
