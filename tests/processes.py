"""What tests with processes of their own share."""

from __future__ import annotations

import os
import random
import socket

# Below those that Linux hands out by itself and above those of Ray's workers; each of pytest's workers has its own.
FIRST_PORT, PORTS_OF_A_WORKER, MOST_WORKERS = 20_000, 3_000, 4


def free_port() -> int:
    """A port of loopback that nothing listens on and that no other worker of this test run is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    first = FIRST_PORT + worker * PORTS_OF_A_WORKER
    while True:
        port = random.SystemRandom().randrange(first, first + PORTS_OF_A_WORKER)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
