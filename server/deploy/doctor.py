"""Checks of a coordinator's machine."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime

from fedpriv.deployment import certificates
from fedpriv.deployment.checks import (
    Check,
    check_clock,
    check_disk,
    check_door,
    check_port_free,
    check_private,
    check_python,
    check_tls,
    check_versions,
)
from fedpriv.deployment.flower import CONNECTION, FlowerError, num_online
from fedpriv.deployment.keys import VAULT
from fedpriv.errors import InputError
from server.deploy.folder import Coordinator
from server.deploy.superlink import check_authority, expiry_warning

_MIN_DISK_BYTES = 2**30


def checks(coordinator: Coordinator) -> Iterator[Check]:
    """The checks of this machine; without its SuperLink no federation can run."""
    yield check_python()
    yield check_versions()
    yield _certificate(coordinator)
    yield check_authority(coordinator)
    yield check_private(coordinator.server_key)
    free = check_port_free(coordinator.bind_host, coordinator.port)
    if free.ok:
        yield Check("superlink", False, f"not running ({free.detail}); start it with `start`, then ask again")
        yield _nodes(coordinator, "")
    else:
        yield check_tls(coordinator.host, coordinator.port, coordinator.ca_certificate)
        yield check_clock(coordinator.host, coordinator.port, coordinator.ca_certificate)
        yield check_door(coordinator.host, coordinator.port, coordinator.ca_certificate)
        yield _connection(coordinator)
        yield _online(coordinator)
    yield check_disk(coordinator.folder, _MIN_DISK_BYTES)


def _certificate(coordinator: Coordinator) -> Check:
    try:
        until = certificates.valid_until(coordinator.server_certificate)
        hosts = certificates.hosts_of(coordinator.server_certificate)
    except InputError as error:
        return Check("certificate", False, str(error))
    if until < datetime.now(UTC):
        return Check("certificate", False, f"expired on {until:%Y-%m-%d}; run `renew` and restart the SuperLink")
    if missing := [address for address in coordinator.addresses if address not in hosts]:
        return Check("certificate", False, f"not valid for {missing[0]}; run `renew`")
    if warning := expiry_warning(coordinator):
        return Check("certificate", False, warning)
    return Check("certificate", True, f"for {', '.join(coordinator.addresses)} until {until:%Y-%m-%d}")


def _connection(coordinator: Coordinator) -> Check:
    file = coordinator.connection_file
    try:
        address = tomllib.loads(file.read_text())["superlink"][CONNECTION]["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return Check("connection", False, f"{file}: must define connection {CONNECTION}; `start` writes it")
    if address == coordinator.address:
        return Check("connection", False, f"{file}: address = {address!r}: is the nodes' own; `start` writes another")
    return Check("connection", True, f"FLWR_HOME={coordinator.flower_home} flwr ... {CONNECTION}, at {address}")


def _online(coordinator: Coordinator) -> Check:
    try:
        online = num_online(coordinator.flower_home, folder=coordinator.folder)
    except FlowerError as error:
        return Check("nodes", False, str(error))
    return _nodes(coordinator, f"{online} online of ")


def _nodes(coordinator: Coordinator, online: str) -> Check:
    """How many nodes are registered, and whether each is with both its keys."""
    known = coordinator.registered()
    if without := sorted(known.keys() - coordinator.registered(VAULT).keys()):
        named = ", ".join(map(str, without))
        detail = f"partitions {named}: are registered without the key of their vaults; `register` them with it"
        return Check("nodes", False, detail)
    return Check("nodes", True, f"{online}{len(known)} registered")
