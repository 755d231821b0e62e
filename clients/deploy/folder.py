"""A node's folder: its keys, its policy, its ledger, its vault's settings, and what it knows about the coordinator.

A node that is stopped can get new keys; whatever the old ones have signed of its charges still counts. A ledger that
lacks a charge which the old key has signed gets no new one: else a restored copy would pass as whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from clients.deploy import records
from clients.deploy.admission import agreed_text, check_survivors
from clients.deploy.records import Found
from fedpriv import config
from fedpriv.errors import InputError
from fedpriv.files import new_folder, owner_for, replace_file, write_new
from fedpriv.holder.vault import settings as vault_settings
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.vault.settings import NodeLimits, VaultSettings, models_text, terms_of
from fedpriv.operate import joining
from fedpriv.operate.checks import CA_CERTIFICATE, free_port
from fedpriv.operate.command_line import read_settings, validated
from fedpriv.operate.joining import Application, Invitation
from fedpriv.privacy.ledger import keys, receipts
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.ledger.receipts import chains_of

# Below those that Linux gives to connections by itself.
_LOCAL_PORTS = range(20_000, 30_000)

FILE = "node.toml"

NOT_KEPT = ("tokens.safetensors*", "flower/*", "cache/*", "metrics/*", "working", "*.log", "*.log.*", ".*")
"""Files that no backup has: made again, for a moment alone, or as telling as the records."""

_NODE_HEADER = (
    "# Where the coordinator is, and ports of this machine. What is done with records stands in vault.toml.\n"
)
_VAULT_HEADER = """\
# What this node's operator decides; no coordinator sees or changes it. docs/node.md explains them, among them
# memory_limit_mb, device, reply_seconds and client_user, which have defaults.
"""
_POLICY_HEADER = "# What a coordinator may request from this node; it refuses anything beyond.\n"
_POLICY_COMMENTS: Mapping[str, str] = {
    "min_effective_noise_multiplier": "Minimum noise multiplier, divided by the clipping rule's sensitivity factor.",
    "max_effective_noise_multiplier": "Maximum of the same; a release with more noise would cost next to nothing.",
    "max_releases": "Maximum number of charges on one data set, whatever each of them costs.",
    "max_sampling_probability": "Maximum expected batch size, divided by the registered number of records.",
    "max_local_steps": "Maximum number of noisy steps in a round.",
    "max_rounds": "Maximum number of rounds in a run.",
    "min_clip_norm": "Minimum clip norm; far below it, clipping would work on rounding errors.",
    "max_clip_norm": "Maximum clip norm; with a larger one, clipping would have little effect.",
    "max_learning_rate": "Maximum learning rate and weight decay of the local optimizer.",
    "max_broadcast_value": "Maximum magnitude of any value that the coordinator sends.",
    "max_length": "Maximum number of tokens of a record; longer records are truncated.",
}
_APPROVED_HEADER = "# SHA-256 of each bundle that may run here, one per line; `approve` adds them.\n"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Node:
    """A node's connection to its coordinator, its vault's settings, and the paths of its files.

    Attributes:
        version: of this file.
        superlink: HOST:PORT of the coordinator.
        port: on this machine, for Flower's own processes; it need not be reachable from outside.
        metrics: whether figures for Prometheus are written to a file in the folder.
        vault: what its operator decides.
    """

    version: Literal[1] = 1
    superlink: str
    port: Annotated[int, Field(ge=1, le=65535)] = 9094
    metrics: bool = False
    vault: VaultSettings

    @field_validator("superlink")
    @classmethod
    def _is_address(cls, value: str) -> str:
        _split_address(value, name="superlink")
        return value

    @staticmethod
    def read(folder: Path) -> Node:
        """The settings in a folder that `make` created.

        Raises:
            InputError: there are no settings, or invalid ones.
        """
        return read_settings(Node, folder / FILE, vault=VaultSettings.read(folder))

    @property
    def folder(self) -> Path:
        """Absolute path."""
        return self.vault.folder

    @property
    def superlink_host(self) -> str:
        """The host name or address of the coordinator's machine."""
        return _split_address(self.superlink)[0]

    @property
    def superlink_port(self) -> int:
        """The port that the SuperLink listens on."""
        return _split_address(self.superlink)[1]

    @property
    def ca_certificate(self) -> Path:
        """The certificate of the authority that vouches for the coordinator."""
        return self.folder / CA_CERTIFICATE

    @property
    def key(self) -> Path:
        """The private key with which the SuperNode connects, whose user has a copy: it vouches for nothing else."""
        return self.folder / "node.key"

    @property
    def application(self) -> Path:
        """The file with which the coordinator admits the node."""
        return self.folder / "application.toml"

    @property
    def approved(self) -> Path:
        """The file with the digests of the bundles that may run here."""
        return self.folder / "approved-fabs"

    @property
    def log(self) -> Path | None:
        """The lines of `start`; None where root starts another user's node, who could lead root's file elsewhere."""
        return self.folder / "node.log" if self.folder.stat().st_uid == os.geteuid() else None

    @property
    def flower_home(self) -> Path:
        """Flower's own folder."""
        return self.folder / "flower"

    @property
    def deciding(self) -> list[Path]:
        """The files that decide, and the folders that hold them, there or not; their owner alone may change them."""
        within = [self.folder, *self.folder.glob("*.toml"), self.vault.peers, *self.vault.peers.glob("*")]
        return [*within, self.approved, self.ca_certificate, self.vault.coordinator]

    @property
    def node_config_file(self) -> Path:
        """The file that passes `node_config` to Flower."""
        return self.flower_home / "node-config.toml"

    @property
    def node_config(self) -> dict[str, int | float | str]:
        """All that the ClientApp, which the coordinator ships, is told of the node."""
        return {"vault": str(self.vault.socket), "partition-id": self.vault.partition_id, "name": self.vault.name}


@plain_dataclass(frozen=True)
class Made:
    """A new node, what its file holds, and how it is registered; both None if it has no records of its own."""

    node: Node
    found: Found | None
    data_set: DataSet | None


def make(
    folder: Path, invitation: Invitation, *, port: int | None = None, metrics: bool = False, **settings: Any
) -> Made:
    """Create a node's folder, with its key pairs, the coordinator's certificate and a policy; register its records.

    Args:
        folder: does not exist or is empty.
        invitation: of the coordinator.
        port: on this machine; None chooses one that is free.
        metrics: as in `Node`.
        settings: fields of `VaultSettings`; None stands for a field's default, and for the labels of the planned run.

    Raises:
        InputError: a setting or the data cannot be used; nothing was written.
        LedgerError: the ledger cannot be used.
    """
    values = {"version": 1, "partition_id": invitation.partition_id, "name": invitation.name}
    values |= {key: value for key, value in settings.items() if value is not None}
    connection = {"version": 1, "superlink": invitation.superlink}
    connection |= {"port": free_port(_LOCAL_PORTS) if port is None else port, **({"metrics": True} if metrics else {})}
    vault = validated(VaultSettings, values, folder=folder.absolute())
    node = validated(Node, connection, vault=vault)
    records.check_terms(vault)
    check_survivors(vault)
    agreed = [terms_of(plan)] if (plan := invitation.plan) else []
    found = records.find(vault) if vault.data else None
    with new_folder(node.folder) as new:
        keys.make_key_pair(new / node.key.name, keys.NODE)
        keys.make_key_pair(new / vault.key.name)
        write_new(new / node.application.name, _application(node, new).encode())
        write_new(new / node.ca_certificate.name, invitation.ca.encode())
        write_new(new / vault.coordinator.name, f"{invitation.key}\n".encode())
        write_new(new / FILE, (_NODE_HEADER + tomli_w.dumps(connection)).encode(), mode=0o600)
        write_new(new / vault_settings.FILE, (_VAULT_HEADER + tomli_w.dumps(_plain(values))).encode(), mode=0o600)
        write_new(new / vault.policy.name, policy_text().encode(), mode=0o600)
        write_new(new / vault.models.name, models_text(()).encode(), mode=0o600)
        write_new(new / vault.agreed.name, agreed_text(agreed).encode(), mode=0o600)
        write_new(new / node.approved.name, _APPROVED_HEADER.encode(), mode=0o600)
        (new / node.flower_home.name).mkdir(mode=0o700)
        ledger = vault.ledger_file or new / vault.ledger.name
        data_set = records.register(vault, ledger, found) if found else None
        if vault.counter_file is not None:
            watch = ReceiptWatch(new / vault.key.name, vault.receipts, vault.receipts_of_peers, vault.counter_file)
            watch.begin_counter_file(ledger)
    return Made(node, found, data_set)


def move(node: Node, invitation: Invitation) -> None:
    """Let a node find the coordinator where an invitation says, know it by the certificate in that, and take its run.

    Raises:
        InputError: the invitation is another node's, or its address cannot be used; nothing was written.
    """
    if invitation.partition_id != node.vault.partition_id:
        raise InputError(
            f"partition_id = {invitation.partition_id}: the invitation is another's, this node is partition "
            f"{node.vault.partition_id}"
        )
    connection = config.read(node.folder / FILE) | {"superlink": invitation.superlink}
    validated(Node, connection, vault=node.vault)
    if plan := invitation.plan:
        replace_file(
            node.vault.agreed, agreed_text([terms_of(plan)]).encode(), mode=0o600, owner=owner_for(node.folder)
        )
    replace_file(node.ca_certificate, invitation.ca.encode(), owner=owner_for(node.folder))
    replace_file(node.vault.coordinator, f"{invitation.key}\n".encode(), owner=owner_for(node.folder))
    file = (_NODE_HEADER + tomli_w.dumps(connection)).encode()
    replace_file(node.folder / FILE, file, mode=0o600, owner=owner_for(node.folder))


def _application(node: Node, folder: Path) -> str:
    """The text of the file with which a node's operator asks the coordinator to admit it.

    Args:
        node: that asks.
        folder: where its keys are.
    """
    node_key, vault_key = folder / node.key.name, folder / node.vault.key.name
    values = {"name": node.vault.name, "partition_id": node.vault.partition_id}
    values |= {"node_key": keys.public_line(node_key), "vault_key": keys.public_line(vault_key)}
    made = validated(Application, values)
    return joining.text(made.signed(vault_key), f"{node.vault.name} applies: fedpriv coordinator admit DIR FILE")


def policy_text() -> str:
    """The text of a policy file with every limit at its default, and its meaning."""
    defaults = NodeLimits()
    parts = [f"# {_POLICY_COMMENTS[f.name]}\n{f.name} = {getattr(defaults, f.name)}\n" for f in fields(NodeLimits)]
    return "\n".join([_POLICY_HEADER, *parts])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def replace_vault_key(node: Node, sources: Sequence[Path]) -> None:
    """Give a node's vault a new key, also in place of one that was lost.

    Args:
        node: that is stopped.
        sources: of receipts, besides those in the node's folder and its counter file; see `receipts.missing`.

    Raises:
        InputError: the old key or a source cannot be used, or the ledger lacks what the old key has signed.
        LedgerError: the ledger or the counter file cannot be used.
    """
    vault = node.vault
    watch = ReceiptWatch.in_folder(vault)
    if vault.ledger.exists():
        with reading(vault.ledger) as db:
            chains = chains_of(db)
            if chains and (watch.lost(chains) or any(receipts.missing(db, sources, watch.signers))):
                raise InputError(
                    f"{vault.ledger}: lacks charges that the node has signed; first run `fedpriv ledger recover` on it "
                    f"with --key {keys.public_path(vault.key)}, see `doctor`"
                )
    owner = owner_for(node.folder)
    keys.add_line(vault.earlier_keys, watch.signer, owner=owner)
    keys.make_key_pair(vault.key, keys.VAULT, owner=owner, replaces=True)
    _apply_again(node)


def replace_node_key(node: Node) -> None:
    """Give a node's SuperNode a new key.

    Raises:
        InputError: the vault's key is missing, which signs for the new one.
    """
    if not node.vault.key.exists():
        raise InputError(f"{node.vault.key}: is missing; run `new-key` without --node first")
    keys.make_key_pair(node.key, keys.NODE, owner=owner_for(node.folder), replaces=True)
    _apply_again(node)


def _apply_again(node: Node) -> None:
    """Write the application of a node whose keys have changed."""
    replace_file(node.application, _application(node, node.folder).encode(), owner=owner_for(node.folder))


def _split_address(address: str, *, name: str = "address") -> tuple[str, int]:
    """Host and port of HOST:PORT, where an IPv6 address is in brackets.

    Args:
        address: HOST:PORT.
        name: what error messages call it.

    Raises:
        InputError: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InputError(f"{name} = {address!r}: must be HOST:PORT, for instance fl.example.org:9093")
    if (":" in bare) != host.startswith("["):
        raise InputError(f"{name} = {address!r}: an IPv6 address must be in brackets, as in [::1]:9093")
    return bare, int(port)
