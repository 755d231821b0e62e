"""The coordinator's ServerApp, which halts before an exchange where a file says so; a bundle of its own holds it."""

import time
from pathlib import Path

from server.honest_app import app  # what this file takes the place of

from fedpriv.holder.wire.frame import Request, frame_in
from server.exchange import Exchange

__all__ = ["app"]

HALTS = Path("FOLDER")
LONGEST_SECONDS = 180

send = Exchange.replies


def halting(self, grid, messages, seconds):
    """Halt while the file ROUND-KIND.reached exists, if there is a file ROUND-KIND."""
    metadata = messages[0].metadata
    name = f"{metadata.group_id}-{Request(frame=frame_in(messages[0].content)).kind}"
    reached, deadline = HALTS / f"{name}.reached", time.monotonic() + LONGEST_SECONDS
    if (HALTS / name).exists():
        (HALTS / name).rename(reached)
    while reached.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    yield from send(self, grid, messages, seconds)


Exchange.replies = halting
