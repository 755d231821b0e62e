"""The SuperLink of a federation: it runs in the foreground or as a systemd unit, and reports how many nodes are online.

It starts the server app of each run. `checks` looks at the machine on which it runs.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from fedpriv.apps import CHECKOUT, FLOWER_APP
from fedpriv.errors import FlowerError, InputError
from fedpriv.files import owner_of, read_text
from fedpriv.operate.checks import (
    Check,
    check_disk,
    check_port_free,
    check_private,
    check_programs,
    check_server,
    check_tls,
)
from fedpriv.operate.command_line import Unit, unit_name
from fedpriv.operate.flower import (
    Log,
    environment,
    python_path,
    run_and_explain,
)
from fedpriv.operate.processes import only_start
from fedpriv.privacy.ledger.keys import VAULT
from server.deploy import certificates, metrics
from server.deploy.folder import CONNECTION, Coordinator

# How many nodes are online is asked when the log says that one came or went, and for those that vanish after this time.
_UNTOLD_SECONDS = 30.0
_COME_OR_GONE = re.compile(r"\.(Activate|Deactivate|Register|Unregister)Node\]")

# Where Linux says which user holds which connection.
_SOCKETS = Path("/proc/net/tcp")

# What it runs died, and what became of that.
_DIED = re.compile(r"ended with exit code|ended by signal")

# One line per poll of each node would drown out the others.
_POLL_LINE = re.compile(r'"(GET|POST|HEAD) \S+ HTTP/[\d.]+" 2\d\d')

_MIN_DISK_BYTES = 2**30


def command(coordinator: Coordinator) -> list[str]:
    """The command that starts the SuperLink, behind its door."""
    return [sys.executable, "-m", f"{__package__}.guarded_superlink", str(coordinator.folder)]


def variables(coordinator: Coordinator) -> dict[str, str]:
    """The SuperLink's environment, with this checkout's modules."""
    return environment(coordinator.flower_home, **python_path(CHECKOUT))


def start(coordinator: Coordinator, say: Callable[[str], None]) -> int:
    """Run the SuperLink until a signal or an error ends it, and return its exit code.

    What a killed `start` of the folder left behind is ended first.

    Args:
        coordinator: whose SuperLink to run.
        say: prints a line: when it answers, how many nodes are online whenever that changes, what that it started
            died, and why it ended.

    Raises:
        FlowerError: its port is taken.
        InputError: another `start` of the folder runs, its certificate is missing or has expired, the authority's key
            is not encrypted, or this is no Linux.
    """
    with only_start(coordinator.folder, {os.geteuid()}, say) as mark:
        return _start(coordinator, say, {**variables(coordinator), **mark})


def _start(coordinator: Coordinator, say: Callable[[str], None], environ: Mapping[str, str]) -> int:
    """Run the SuperLink in this environment."""
    if not _SOCKETS.exists():
        raise InputError(f"{_SOCKETS}: no such file; the SuperLink needs Linux, to know which user of a machine asks")
    if not (key := check_authority(coordinator)).ok:
        raise InputError(f"key = {key.detail}")
    if certificates.valid_until(coordinator.server_certificate) < datetime.now(UTC):
        cure = certificates.cure(coordinator.folder)
        raise InputError(f"certificate = {coordinator.server_certificate}: has expired; {cure}")
    if not (port := check_port_free(coordinator.bind_host, coordinator.port)).ok:
        raise FlowerError(f"port = {port.detail}")
    if warning := expiry_warning(coordinator):
        say(f"warning: {warning}")
    say(f"starting the SuperLink; its log: {coordinator.log}")
    nodes = _Nodes(coordinator, say)
    nodes.start()
    metrics.write(coordinator, lambda: nodes.num_online, say)
    log = Log(None, coordinator.log)

    def on_line(line: str) -> None:
        if not _POLL_LINE.search(line):
            log(line)
        if _DIED.search(line):
            say(line)
        if _COME_OR_GONE.search(line):
            nodes.changed()

    code, meaning = run_and_explain(
        [*command(coordinator), "--with-parent"],
        variables=environ,
        folder=coordinator.folder,
        on_line=on_line,
    )
    nodes.end()
    say(f"SuperLink ended with exit code {code}{meaning}; its log: {coordinator.log}")
    return code


def check_authority(coordinator: Coordinator) -> Check:
    """Whether no code that runs here can sign with the authority's key."""
    key = coordinator.ca_key
    if not os.access(key, os.R_OK):
        return Check("ca.key", True, "kept elsewhere; `renew --ca-key FILE` takes it from there")
    if not certificates.is_encrypted(key):
        folder = shlex.quote(str(coordinator.folder))
        return Check("ca.key", False, f"{key}: the code of a run could read it; run `new-authority {folder}`")
    return Check("ca.key", True, f"{key}: encrypted; it may also be kept elsewhere")


def expiry_warning(coordinator: Coordinator) -> str:
    """A warning if the server certificate expires soon, else an empty string."""
    until = certificates.valid_until(coordinator.server_certificate)
    if not certificates.is_ending(until):
        return ""
    return f"the certificate is valid until {until:%Y-%m-%d %H:%M} UTC only; {certificates.cure(coordinator.folder)}"


class _Nodes(threading.Thread):
    """Reports when the SuperLink answers, and then how many nodes are online.

    Attributes:
        num_online: None as long as nobody knows.
    """

    def __init__(self, coordinator: Coordinator, say: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._coordinator, self._say = coordinator, say
        self._changed, self._ended = threading.Event(), threading.Event()
        self.num_online: int | None = None

    def changed(self) -> None:
        """A node came or went."""
        self._changed.set()

    def end(self) -> None:
        """Report nothing more."""
        self._ended.set()
        self._changed.set()

    def run(self) -> None:
        coordinator = self._coordinator
        while not check_tls(coordinator.local_host, coordinator.port, coordinator.ca_certificate).ok:
            if self._ended.wait(0.5):
                return
        until = certificates.valid_until(coordinator.server_certificate)
        self._say(f"SuperLink answers at https://{coordinator.address}, certificate valid until {until:%Y-%m-%d}")
        last_reported = ""
        while not self._ended.is_set():
            self._changed.clear()
            if (state := self._online()) != last_reported and not self._ended.is_set():
                self._say(state)
                last_reported = state
            self._changed.wait(_UNTOLD_SECONDS)

    def _online(self) -> str:
        try:
            self.num_online = _num_online(self._coordinator)
        except FlowerError as error:
            self.num_online = None
            return f"nodes online: unknown ({error})"
        return f"nodes online: {self.num_online} of {len(self._coordinator.registered())} registered"


def units(coordinator: Coordinator) -> list[Unit]:
    """The services of a coordinator's machine, as the folder's owner.

    Raises:
        InputError: the owner has no name on this machine.
    """
    folder = coordinator.folder
    return [
        Unit(
            name=unit_name("superlink", folder),
            description=f"fedpriv SuperLink of {folder}",
            command=[sys.executable, "-m", __package__, "start", str(folder)],
            folder=FLOWER_APP,
            user=owner_of(folder).name,
            variables={"PYTHONUNBUFFERED": "1", "FEDPRIV_CACHE": str(folder / "cache")},
            port=coordinator.port,
            writable=[folder, *_planned_elsewhere(coordinator)],
            read_only=[coordinator.ca_certificate, coordinator.nodes],
            hidden=[coordinator.ca_key],
        )
    ]


def _planned_elsewhere(coordinator: Coordinator) -> list[Path]:
    """The folders outside of the coordinator's own in which the planned run makes its files."""
    planned = [Path(str(coordinator.planned.get(key) or coordinator.runs)) for key in ("ledger", "out")]
    found = {next(parent for parent in path.absolute().parents if parent.is_dir()) for path in planned}
    return sorted(path for path in found - {Path("/")} if not path.is_relative_to(coordinator.folder))


def checks(coordinator: Coordinator) -> Iterator[Check]:
    """The checks of this machine; without its SuperLink no federation can run."""
    yield from check_programs()
    yield Check.of("certificate", lambda: _certificate(coordinator))
    yield check_authority(coordinator)
    yield check_private(coordinator.server_key)
    free = check_port_free(coordinator.bind_host, coordinator.port)
    if free.ok:
        yield Check("superlink", False, f"not running ({free.detail}); start it with `start`, then ask again")
        yield Check.of("nodes", lambda: _nodes(coordinator, ""))
    else:
        yield from check_server(coordinator.host, coordinator.port, coordinator.ca_certificate)
        yield _connection(coordinator)
        yield Check.of("nodes", lambda: _nodes(coordinator, f"{_num_online(coordinator)} online of "))
    yield check_disk(coordinator.folder, _MIN_DISK_BYTES)


def _certificate(coordinator: Coordinator) -> str:
    until = certificates.valid_until(coordinator.server_certificate)
    hosts = certificates.hosts_of(coordinator.server_certificate)
    if until < datetime.now(UTC):
        raise InputError(f"expired on {until:%Y-%m-%d}; {certificates.cure(coordinator.folder)}")
    if missing := [address for address in coordinator.addresses if address not in hosts]:
        raise InputError(f"not valid for {missing[0]}; {certificates.cure(coordinator.folder)}")
    if warning := expiry_warning(coordinator):
        raise InputError(warning)
    return f"for {', '.join(coordinator.addresses)} until {until:%Y-%m-%d}"


def _private_address(coordinator: Coordinator) -> str | None:
    """Where `flwr` reaches the SuperLink; None if the connection's file does not say."""
    try:
        return str(tomllib.loads(read_text(coordinator.connection_file))["superlink"][CONNECTION]["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _connection(coordinator: Coordinator) -> Check:
    file, address = coordinator.connection_file, _private_address(coordinator)
    if address is None:
        return Check("connection", False, f"{file}: must define connection {CONNECTION}; `start` writes it")
    if address == coordinator.address:
        return Check("connection", False, f"{file}: address = {address!r}: is the nodes' own; `start` writes another")
    return Check("connection", True, f"FLWR_HOME={coordinator.flower_home} flwr ... {CONNECTION}, at {address}")


def _num_online(coordinator: Coordinator) -> int:
    """The number of nodes that are online.

    Raises:
        FlowerError: the SuperLink cannot be asked.
    """
    from server.deploy.guarded_superlink import num_online  # deferred: loads Flower

    return num_online(coordinator, _private_address(coordinator) or coordinator.address)


def _nodes(coordinator: Coordinator, online: str) -> str:
    """The number of nodes that are registered, and whether each is with both its keys."""
    known = coordinator.registered()
    if without := sorted(known.keys() - coordinator.registered(VAULT).keys()):
        named = ", ".join(map(str, without))
        raise InputError(f"partitions {named}: have no key of their vaults; `admit` them again")
    return f"{online}{len(known)} registered"
