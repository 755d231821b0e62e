"""A coordinator's folder: its certificates, the admitted nodes, Flower's state and the runs."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedpriv.deployment import certificates, keys
from fedpriv.deployment.flower import CONNECTION
from fedpriv.deployment.keys import Kind
from fedpriv.deployment.settings import join_address, read_settings, validated
from fedpriv.errors import InputError
from fedpriv.files import new_folder, replace_file

# This checkout, which a run bundles for the nodes.
ROOT = Path(__file__).resolve().parents[2]

DEFAULT_PORT = 9093

# A new authority would have to be sent to every node; a new server certificate does not.
_CA_DAYS = 3650


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
        return join_address(self.host, self.port)

    @property
    def bind_host(self) -> str:
        """Where the SuperLink listens: on every address, or on loopback if the whole federation is on this machine."""
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
        return self.folder / certificates.CA_CERTIFICATE

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
