"""A node closes if a process of its vault dies while it works on records, or with records in memory.

A marker lies on disk from before the records are touched until the reply may leave, whose time is public. If the vault
ends in between, whatever ended it, its next start finds the marker, and the node is closed until its operator has
looked. Others then learn at most once that it did, and a restart at another time shows them nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fedpriv.files import replace_file, sync_folder
from fedpriv.holder.vault.settings import VaultSettings

log = logging.getLogger(__name__)

_REASON = "a process of its vault was ended or killed while it worked on records"


@dataclass(frozen=True)
class Closing:
    """The files that say that a node works on records, or that it is closed.

    Attributes:
        marker: of work on records.
        closed: closes the node while it exists; it says why.
    """

    marker: Path
    closed: Path

    @staticmethod
    def of(settings: VaultSettings) -> Closing:
        """Those of a node's folder."""
        return Closing(settings.folder / "working", settings.closed)

    def begin(self) -> None:
        """Note durably that records will be touched.

        Raises:
            OSError: that cannot be written, so they must not be.
        """
        replace_file(self.marker, f"{_REASON}\n".encode(), mode=0o600)
        sync_folder(self.marker)

    def end(self) -> None:
        """Take note that a reply may leave, whatever became of the records."""
        self.marker.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the node, durably.

        Raises:
            OSError: that cannot be written, so nothing may be answered any more.
        """
        if not self.marker.exists():  # records were in memory only
            self.begin()
        self.marker.replace(self.closed)
        sync_folder(self.closed)
        log.error("this node is closed: %s; look at its log and its records before you open it again", _REASON)

    def close_if_left(self) -> None:
        """Close the node if its vault ended while it worked on records."""
        if self.marker.exists():
            self.close()
