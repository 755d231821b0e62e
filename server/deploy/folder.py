"""A coordinator's folder: its certificates, the admitted nodes, Flower's state and the runs.

Each admitted node has two public keys, by partition id: Flower admits its SuperNode by the one, and runs check by the
other what its vault says.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedpriv.deployment import keys
from fedpriv.deployment.checks import CA_CERTIFICATE
from fedpriv.deployment.command_line import read_settings, validated
from fedpriv.deployment.flower import CONNECTION, flwr
from fedpriv.deployment.keys import NODE, VAULT, Kind
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import new_folder, replace_file
from server.deploy import certificates

DEFAULT_PORT = 9093

# A new authority would have to be sent to every node; a new server certificate does not.
_CA_DAYS = 3650

_IN_USE = "Public key already in use"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Coordinator:
    """A coordinator's settings and the paths of its files.

    Attributes:
        folder: absolute path.
        addresses: DNS names and IP addresses of the machine; the nodes use the first.
        port: of the SuperLink.
    """

    folder: Path
    addresses: Annotated[tuple[str, ...], Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_PORT

    @staticmethod
    def read(folder: Path) -> Coordinator:
        """The settings in a folder that `make` created.

        Raises:
            InputError: there are no settings, or invalid ones.
        """
        return read_settings(Coordinator, folder / "coordinator.toml", folder=folder.absolute())

    @property
    def host(self) -> str:
        """The address that the nodes use."""
        return self.addresses[0]

    @property
    def address(self) -> str:
        """HOST:PORT, as the nodes use it."""
        return _join_address(self.host, self.port)

    @property
    def bind_host(self) -> str:
        """The address on which the SuperLink listens: every one, or loopback if the federation is on this machine."""
        try:
            address = ipaddress.ip_address("127.0.0.1" if self.host == "localhost" else self.host)
        except ValueError:
            return "0.0.0.0"
        if address.is_loopback:
            return str(address)
        return "::" if address.version == 6 else "0.0.0.0"

    @property
    def local_host(self) -> str:
        """The address at which this machine itself reaches the SuperLink, independent of any routers."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind_host, self.bind_host)

    @property
    def ca_certificate(self) -> Path:
        """The certificate by which every node recognises the SuperLink."""
        return self.folder / CA_CERTIFICATE

    @property
    def ca_key(self) -> Path:
        """The authority's private key."""
        return self.folder / certificates.CA_KEY

    @property
    def server_certificate(self) -> Path:
        """The SuperLink's certificate."""
        return self.folder / certificates.SERVER_CERTIFICATE

    @property
    def server_key(self) -> Path:
        """The SuperLink's private key."""
        return self.folder / certificates.SERVER_KEY

    @property
    def flower_home(self) -> Path:
        """Flower's own folder, with the connection to the SuperLink."""
        return self.folder / "flower"

    @property
    def connection_file(self) -> Path:
        """The file that tells `flwr` how this machine's own user reaches the running SuperLink."""
        return self.flower_home / "config.toml"

    def connect(self, address: str) -> None:
        """Let `flwr` find the SuperLink at this address, from now on; other connections in the file stay.

        Raises:
            InputError: the file is no TOML.
        """
        try:
            known = tomllib.loads(self.connection_file.read_text()) if self.connection_file.exists() else {}
        except ValueError:
            raise InputError(f"{self.connection_file}: is not valid TOML; delete it") from None
        own = {"address": address, "root-certificates": str(self.ca_certificate)}
        superlinks = {**known.get("superlink", {}), "default": CONNECTION, CONNECTION: own}
        replace_file(self.connection_file, tomli_w.dumps({**known, "superlink": superlinks}).encode())

    @property
    def approved(self) -> Path:
        """The file with the digests of the bundles that may run here; `run` adds that of its own checkout."""
        return self.folder / "approved-fabs"

    @property
    def database(self) -> Path:
        """The SuperLink's state, which survives a restart."""
        return self.folder / "state.db"

    @property
    def log(self) -> Path:
        """The SuperLink's log."""
        return self.folder / "superlink.log"

    @property
    def nodes(self) -> Path:
        """The keys by which Flower admits the registered nodes, PARTITION_ID.pub, with the ids that it gave them."""
        return self.folder / "nodes"

    @property
    def vaults(self) -> Path:
        """The keys by which runs check what the vaults of registered nodes say, PARTITION_ID.pub."""
        return self.folder / "vaults"

    @property
    def runs(self) -> Path:
        """The folders of the runs."""
        return self.folder / "runs"

    def registered(self, kind: Kind = keys.NODE) -> dict[int, Path]:
        """The file with the public key of this kind of each registered node, by partition id."""
        folder = self.nodes if kind == keys.NODE else self.vaults
        return {int(file.stem): file for file in folder.glob("*.pub") if file.stem.isdigit()}


def make(folder: Path, *, addresses: Sequence[str], port: int, days: int, passphrase: str) -> Coordinator:
    """Create a coordinator's folder, with an authority and a server certificate.

    Args:
        folder: does not exist or is empty.
        addresses: DNS names and IP addresses of this machine, starting with the one that nodes use.
        port: for the SuperLink.
        days: of validity of the server certificate.
        passphrase: that encrypts the authority's key.

    Raises:
        InputError: a value cannot be used; nothing was written.
    """
    for address in addresses:
        certificates.check_host(address)
    settings = {"addresses": list(addresses), "port": port}
    coordinator = validated(Coordinator, settings, folder=folder.absolute())
    with new_folder(coordinator.folder) as new:
        certificates.make_ca(new, max(days, _CA_DAYS), passphrase=passphrase)
        certificates.make_server_certificate(new, coordinator.addresses, days, passphrase=passphrase)
        for part in (coordinator.flower_home, coordinator.nodes, coordinator.vaults, coordinator.runs):
            (new / part.name).mkdir()
        (new / coordinator.approved.name).touch()
        (new / "coordinator.toml").write_text(tomli_w.dumps(settings))
    coordinator.connect(coordinator.address)  # where nothing answers `flwr`, until `start` says otherwise
    return coordinator


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


def _join_address(host: str, port: int) -> str:
    """HOST:PORT, where an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
