"""A coordinator's folder: its certificates, the planned run, the admitted nodes, Flower's state and the runs.

Each admitted node has two public keys, by partition id: Flower admits its SuperNode by the one, and runs check by the
other what its vault says.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from fedpriv import config
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import new_folder, read_text, replace_file, write_new
from fedpriv.operate.checks import CA_CERTIFICATE
from fedpriv.operate.command_line import read_settings, validated
from fedpriv.operate.flower import environment, program_folder
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.keys import Kind
from server.deploy import certificates

DEFAULT_PORT = 9093

CONNECTION = "federation"

_ANSWER_SECONDS = 120.0

NOT_KEPT = ("flower/*", "cache/*", "metrics/*", "*.log", "*.log.*", "*.tmp/*", ".*", "*/.*")
"""Files that no backup has: made again, or for a moment alone."""

_PLAN_HEADER = "# The planned run: invitations show it, and `run` adds its own -c to these keys.\n"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Coordinator:
    """A coordinator's settings and the paths of its files.

    Attributes:
        version: of coordinator.toml.
        folder: absolute path.
        addresses: DNS names and IP addresses of the machine; the nodes use the first.
        port: of the SuperLink.
        metrics: whether figures for Prometheus are written to a file in the folder.
        contact: whom institutions ask, as invitations show it.
    """

    version: Literal[1] = 1
    folder: Path
    addresses: Annotated[tuple[str, ...], Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_PORT
    metrics: bool = False
    contact: Annotated[str, Field(max_length=200)] = ""

    @field_validator("addresses")
    @classmethod
    def _in_one_form(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Addresses as certificates have them: `2001:DB8::5` is `2001:db8::5`."""
        return tuple(certificates.host_in_one_form(address) for address in value)

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
        """The address on which the SuperLink listens: loopback if the federation is on this machine, or else every one.

        A name may stand for IPv4, IPv6 or both, and elsewhere for others than here.
        """
        host = "127.0.0.1" if self.host == "localhost" else self.host
        with suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                return host
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"

    @property
    def local_host(self) -> str:
        """The address at which this machine itself reaches the SuperLink, independent of any routers."""
        return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(self.bind_host, self.bind_host)

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
            known = tomllib.loads(read_text(self.connection_file)) if self.connection_file.exists() else {}
        except ValueError:
            raise InputError(f"{self.connection_file}: is not valid TOML; delete it") from None
        own = {"address": address, "root-certificates": str(self.ca_certificate)}
        superlinks = {**known.get("superlink", {}), "default": CONNECTION, CONNECTION: own}
        replace_file(self.connection_file, tomli_w.dumps({**known, "superlink": superlinks}).encode())

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """The answer of Flower's command line, at the running SuperLink.

        Args:
            arguments: of `flwr`.

        Raises:
            FlowerError: the SuperLink cannot be reached, or refused.
        """
        return flwr(self.flower_home, arguments, folder=self.folder)

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
    def key(self) -> Path:
        """The private key that signs what each round's sum was made of; invitations show its public line."""
        return keys.coordinators(self.vaults)

    @property
    def plan(self) -> Path:
        """The configuration of the planned run."""
        return self.folder / "run.toml"

    @property
    def planned(self) -> dict[str, Any]:
        """The keys of the planned run, not yet checked."""
        return config.read(self.plan)

    @property
    def invitations(self) -> Path:
        """The invitations, PARTITION_ID.toml."""
        return self.folder / "invitations"

    @property
    def roster(self) -> Path:
        """The file that every node is sent when all are admitted."""
        return self.folder / "roster.toml"

    @property
    def ledger(self) -> Path:
        """The ledger of all runs, unless one has another: what an institution has spent is spent in the next one too.

        Next to it is the log of what the nodes have signed.
        """
        return self.folder / "ledger.sqlite"

    @property
    def runs(self) -> Path:
        """The folders of the runs."""
        return self.folder / "runs"

    def registered(self, kind: Kind = keys.NODE) -> dict[int, Path]:
        """The file with the public key of this kind of each registered node, by partition id."""
        folder = self.nodes if kind == keys.NODE else self.vaults
        return keys.files_of_nodes(folder)


def flwr(home: Path, arguments: Sequence[str], *, folder: Path) -> dict[str, Any]:
    """The answer of `flwr ARGUMENTS --format json`.

    Args:
        home: Flower's own folder, with its connections.

    Raises:
        FlowerError: it reports a failure, or does not answer in time.
    """
    command = [str(program_folder() / "flwr"), *arguments, "--format", "json"]
    # Rich wraps at the terminal's width, which would split a long reason.
    variables = environment(home, COLUMNS="10000", NO_COLOR="1")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FlowerError(f"flwr {arguments[0]}: no answer within {_ANSWER_SECONDS:g} s") from None
    return _answer(done.stdout, done.stderr, arguments)


def _answer(stdout: str, stderr: str, arguments: Sequence[str]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(stdout[stdout.index("{") :])
    except ValueError:
        raise FlowerError(f"flwr {arguments[0]}: {_one_line(stderr or stdout) or 'no answer'}") from None
    if not answer.get("success"):
        raise FlowerError(f"flwr {arguments[0]}: {_one_line(str(answer.get('error-message', answer)))}")
    return answer


def _one_line(text: str) -> str:
    """The reason, without the lines in which flwr announces what it is about to do."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Using SuperLink:") and line[-3:] != "...")


def make(
    folder: Path,
    *,
    addresses: Sequence[str],
    port: int,
    days: int,
    passphrase: str,
    planned: Mapping[str, Any] | None = None,
    metrics: bool = False,
    contact: str = "",
) -> Coordinator:
    """Create a coordinator's folder, with an authority and a server certificate.

    Args:
        folder: does not exist or is empty.
        addresses: DNS names and IP addresses of this machine, starting with the one that nodes use.
        port: for the SuperLink.
        days: of validity of the server certificate.
        passphrase: that encrypts the authority's key.
        planned: keys of the configuration of the planned run.
        metrics: as in `Coordinator`.
        contact: as in `Coordinator`.

    Raises:
        InputError: a value cannot be used; nothing was written.
    """
    config.parse(planned or {})
    settings = {"version": 1, "addresses": list(addresses), "port": port, **({"metrics": True} if metrics else {})}
    settings |= {"contact": contact} if contact else {}
    coordinator = validated(Coordinator, settings, folder=folder.absolute())
    with new_folder(coordinator.folder) as new:
        certificates.make_ca(new, max(days, certificates.AUTHORITY_DAYS), passphrase=passphrase)
        certificates.make_server_certificate(new, coordinator.addresses, days, passphrase=passphrase)
        keys.make_key_pair(new / coordinator.key.name)
        parts = (coordinator.flower_home, coordinator.invitations, coordinator.nodes, coordinator.vaults)
        for part in (*parts, coordinator.runs):
            (new / part.name).mkdir(mode=0o755)
        write_new(new / coordinator.plan.name, (_PLAN_HEADER + tomli_w.dumps(planned or {})).encode(), mode=0o600)
        write_new(new / coordinator.approved.name, b"", mode=0o600)
        write_new(new / "coordinator.toml", tomli_w.dumps(settings).encode(), mode=0o600)
    coordinator.connect(coordinator.address)  # where nothing answers `flwr`, until `start` says otherwise
    return coordinator


def _join_address(host: str, port: int) -> str:
    """HOST:PORT, where an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
