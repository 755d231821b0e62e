"""Messages to clients and their replies, over a link on which a reply may be late, repeated or missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedpriv.deployment.flower import seconds_to_pause

log = logging.getLogger("flwr")

# A reply that is pulled before its arrays have arrived costs Flower's own pause of 1 s, and they take about 0.05 s: so
# the mean delay, p / 2 + 0.05 / p * 1 s, is least at p = 0.3 s.
_SHORTEST_PAUSE_SECONDS = 0.3
_LONGEST_PAUSE_SECONDS = 1.0


class Exchange:
    """Collects each round's replies until its deadline, and remembers which messages are still unanswered after it."""

    def __init__(self) -> None:
        self._overdue: set[str] = set()
        self._num_late = 0

    def replies(self, grid: Grid, messages: Sequence[Message], seconds: float) -> Iterator[Message]:
        """Send the messages and yield their replies as they arrive, until all are there or the time is up.

        A reply that arrives later is fetched by a later exchange, which counts and discards it.
        """
        started = time.monotonic()
        grid.push_messages(messages)
        unanswered = {message.metadata.message_id for message in messages}
        while unanswered:
            # Before the pull, in which Flower may wait minutes for arrays that a dying node announced: one more pull
            # then fetches what the others sent in time.
            waited = time.monotonic() - started
            for reply in grid.pull_messages(unanswered | self._overdue):
                message_id, node_id = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
                if message_id in self._overdue:
                    self._overdue.discard(message_id)
                    self._num_late += 1
                    log.warning("a late reply of node %s to an earlier round is discarded", node_id)
                elif message_id not in unanswered:
                    log.warning("a repeated reply of node %s is discarded", node_id)
                else:
                    unanswered.discard(message_id)
                    yield reply
            if not unanswered or waited >= seconds:
                break
            time.sleep(seconds_to_pause(waited, shortest=_SHORTEST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS))
        self._overdue |= unanswered

    def pop_num_late(self) -> int:
        """How many late replies were discarded since the last call."""
        num_late, self._num_late = self._num_late, 0
        return num_late
