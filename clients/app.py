"""The Flower ClientApp of a data holder: a pipe to the vault, which alone reads records, charges and releases.

The coordinator ships this code, so it must not matter what it does: it sees only what it may send anyway. Neither torch
nor anything that reads records is loaded here. On a node without a vault, as in a simulation, the vault's functions
answer in this process.
"""

from __future__ import annotations

import logging
from functools import partial

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedpriv
from clients.pipe import VAULT_KEY, carry
from fedpriv.holder.wire import frames

log = logging.getLogger("flwr")

_QUERIES = (
    frames.REGISTER,  # the node's registration, before the first round
    frames.AFFORD,  # how much of the planned run the node's budget allows, before the first round
    frames.EVALUATE,  # noised counts of hits and misses, after the last round
    # Secure aggregation, in each round; `train` comes before the last two.
    frames.ADVERTISE,  # fresh keys for an attempt at a sum
    frames.SHARE,  # sealed shares of the node's seeds for its peers
    frames.CHECK,  # whose shares the node cannot use
    frames.CONFIRM,  # the node's signature of the list of survivors
    frames.REVEAL,  # shares of what the sum is still masked by
)


def _answered(kind: str, message: Message, context: Context) -> Message:
    if kind == frames.REGISTER:
        log.info("clients use %s", fedpriv.__file__)
    if VAULT_KEY in context.node_config:
        return carry(kind, message, context)
    from clients import node  # loads torch, which a pipe does without

    return node.answered(kind, message, context)


app = ClientApp()
app.train()(partial(_answered, frames.TRAIN))
for query in _QUERIES:
    app.query(query)(partial(_answered, query))
