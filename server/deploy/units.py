"""The coordinator's systemd unit: the SuperLink, which starts the server app of each run."""

from __future__ import annotations

import sys

from fedpriv.deployment.command_line import Unit, unit_name
from fedpriv.deployment.users import owner_of
from server.deploy.folder import ROOT, Coordinator


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
            command=[sys.executable, "-m", "server.deploy", "start", str(folder)],
            folder=ROOT,
            user=owner_of(folder).name,
            variables={"PYTHONUNBUFFERED": "1", "FEDPRIV_CACHE": str(folder / "cache")},
            writable=[folder],
            read_only=[coordinator.ca_certificate, coordinator.nodes],
            hidden=[coordinator.ca_key],
        )
    ]
