"""The Flower ClientApp of a data holder: a pipe to the vault, which alone reads records, charges and releases.

The coordinator ships this code, so it must not matter what it does: it sees only what it may send anyway. Neither torch
nor anything that reads records is loaded here. On a node without a vault, as in a simulation, the vault's functions
answer in this process.
"""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedpriv
from clients.pipe import VAULT_KEY, carry
from fedpriv.vault.frames import (
    ADVERTISE,
    AFFORD,
    CHECK,
    CONFIRM,
    EVALUATE,
    REGISTER,
    REVEAL,
    SHARE,
    TRAIN,
)

log = logging.getLogger("flwr")

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local update."""
    return _answered(TRAIN, message, context)


@app.query("register")
def register(message: Message, context: Context) -> Message:
    """The node's registration, before the first round."""
    log.info("clients use %s", fedpriv.__file__)
    return _answered(REGISTER, message, context)


@app.query("afford")
def afford(message: Message, context: Context) -> Message:
    """How much of the planned run the node's budget allows, before the first round."""
    return _answered(AFFORD, message, context)


@app.query("evaluate")
def evaluate(message: Message, context: Context) -> Message:
    """Noised counts of hits and misses, after the last round."""
    return _answered(EVALUATE, message, context)


@app.query("advertise")
def advertise(message: Message, context: Context) -> Message:
    """Fresh keys for an attempt at a sum; this and the next exchanges are secure aggregation."""
    return _answered(ADVERTISE, message, context)


@app.query("share")
def share(message: Message, context: Context) -> Message:
    """Sealed shares of the node's seeds for its peers, before `train`."""
    return _answered(SHARE, message, context)


@app.query("check")
def check(message: Message, context: Context) -> Message:
    """Whose shares the node cannot use, before `train`."""
    return _answered(CHECK, message, context)


@app.query("confirm")
def confirm(message: Message, context: Context) -> Message:
    """The node's signature of the list of survivors, after `train`."""
    return _answered(CONFIRM, message, context)


@app.query("reveal")
def reveal(message: Message, context: Context) -> Message:
    """Shares of what the sum is still masked by."""
    return _answered(REVEAL, message, context)


def _answered(kind: str, message: Message, context: Context) -> Message:
    if VAULT_KEY in context.node_config:
        return carry(kind, message, context)
    from clients import node  # loads torch, which a pipe does without

    return node.answered(kind, message, context)
