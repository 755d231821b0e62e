"""Who takes part: every node registers its partition id and N_k once, before the first round."""

from __future__ import annotations

import logging
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedpriv import protocol
from fedpriv.errors import InputError
from fedpriv.protocol import Registration

log = logging.getLogger("flwr")

WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.5


def register_nodes(grid: Grid, *, num_expected: int, wait: float = WAIT_SECONDS) -> dict[int, tuple[int, Registration]]:
    """{partition id: (node id, registration)} of the nodes that have data, ordered by partition id.

    Weights, sampling probabilities and delta come from these numbers from now on; no later reply changes them.

    Args:
        grid: Flower's connection to the nodes.
        num_expected: how many nodes to wait for.
        wait: seconds to wait for them.

    Raises:
        InputError: nodes are missing after the wait, or two nodes claim one partition id.
    """
    deadline = time.monotonic() + wait
    while len(node_ids := list(grid.get_node_ids())) < num_expected:
        if time.monotonic() > deadline:
            raise InputError(f"{len(node_ids)} nodes connected within {wait:.0f} s: the run needs {num_expected}")
        time.sleep(_POLL_SECONDS)
    messages = [Message(RecordDict(), node_id, protocol.REGISTER, group_id="0") for node_id in node_ids]
    registered: dict[int, tuple[int, Registration]] = {}
    for reply in grid.send_and_receive(messages, timeout=wait):
        node_id = reply.metadata.src_node_id
        if reply.has_error():
            log.warning("node %s does not take part: %s", node_id, reply.error.reason)
            continue
        registration = protocol.unpack_registration(reply.content.config_records[protocol.REGISTRATION])
        if registration.client in registered:
            raise InputError(f"partition-id = {registration.client}: two nodes claim it; give each node its own")
        registered[registration.client] = (node_id, registration)
    if not registered:
        raise InputError("no node registered: none has data for this run")
    return dict(sorted(registered.items()))
