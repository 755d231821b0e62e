"""All that a node writes, so that a disk that fills up tells nothing of its records.

What a node leaves on its disks has a size that public inputs and paid releases decide, and room for what follows a
charge is taken before it. Requests that nobody pays for add little a day, and on a disk with too little room a node
refuses everything.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedpriv.files import FLOOR_BYTES, Journal, require_room
from fedpriv.holder.vault._charging import RefusedError
from fedpriv.holder.vault.settings import VaultSettings

# SQLite writes a reply to its log of changes, and then to the ledger; its bytes are at most twice those of what was
# broadcast, as 64-bit words of a sum.
_COPIES = 4
# For all else that follows a charge: entries, an event, pages that are half full.
_SLACK_BYTES = 2**20

# Events that a charge pays for, once each.
_PAID = ("charged", "released")
# In place of events beyond the quota, each time that their number has doubled.
BEYOND = "beyond_quota"
_QUOTA_BYTES = 2**19
# Day and name of an event, and the number of those that it counts.
_EVENT = re.compile(rb'\{"time": "([\d-]{10})[^"]*", "event": "(\w+)"(?:.*"number": (\d+)\}$)?')


@dataclass(frozen=True)
class Room:
    """The disks that a node writes to.

    Attributes:
        folders: on them; none in a simulation, which protects nobody.
    """

    folders: tuple[Path, ...] = ()

    @staticmethod
    def of(settings: VaultSettings) -> Room:
        """Those of a node's ledger and of its folder."""
        return Room((settings.folder, settings.ledger.parent))

    def check(self) -> None:
        """Refuse whatever was asked if a disk has less than `FLOOR_BYTES` left.

        Raises:
            RefusedError: it has, or cannot be looked at.
        """
        self.reserve(0).close()

    def reserve_reply(self, num_bytes: int) -> ExitStack:
        """Take the room for all that follows a charge; to be closed just before the reply is stored.

        A process that ends before has closed it: the room is that of files without a name.

        Args:
            num_bytes: of what was broadcast, to which the reply is no more than twice as large.

        Raises:
            RefusedError: less than `FLOOR_BYTES` would be left.
        """
        return self.reserve(_COPIES * num_bytes + _SLACK_BYTES)

    def reserve(self, num_bytes: int) -> ExitStack:
        """Take so many bytes on each disk; raises like `reserve_reply`."""
        with ExitStack() as held:
            try:
                for folder in {each.stat().st_dev: each for each in self.folders if each.is_dir()}.values():
                    require_room(folder, num_bytes)
                    if num_bytes:
                        file = held.enter_context(tempfile.TemporaryFile(dir=folder, prefix="fedpriv-room-"))
                        os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise RefusedError(
                    f"disk: this node needs {num_bytes + FLOOR_BYTES} bytes of room ({error.strerror}); it refuses "
                    "everything until its operator has made some"
                ) from None
            return held.pop_all()


NO_DISK = Room()
"""That of a simulation."""


class NodeJournal(Journal):
    """The events of a node: all that a charge has paid for and, within a quota a day, the others.

    Beyond the quota events are counted, also those of processes that have ended since.
    """

    _day = ""
    _num_bytes = _num_beyond = 0

    def write(self, event: str, **fields: str | int | float | bool | None) -> bool:
        """See `Journal.write`."""
        line, today = self._line(event, fields), f"{datetime.now(UTC):%Y-%m-%d}"
        if event in _PAID:
            self._append(line)
            return True
        if today != self._day:
            self._day, (self._num_bytes, self._num_beyond) = today, self._so_far(today)
        if self._num_bytes + len(line) <= _QUOTA_BYTES:
            self._num_bytes += len(line)
            self._append(line)
            return True
        self._num_beyond += 1
        if self._num_beyond.bit_count() == 1:
            self._append(self._line(BEYOND, {"number": self._num_beyond - self._num_beyond // 2}))
        return False

    def _so_far(self, today: str) -> tuple[int, int]:
        """The bytes of today's events that nobody has paid for, and the number of those beyond the quota."""
        num_bytes = num_beyond = 0
        with suppress(OSError), Path(self._path or os.devnull).open("rb") as file:
            for line in file:
                found = _EVENT.match(line)
                if found is None or found[1].decode() != today or found[2].decode() in _PAID:
                    continue
                if found[2].decode() == BEYOND:
                    num_beyond += int(found[3] or 0)
                else:
                    num_bytes += len(line)
        return num_bytes, num_beyond
