"""The Flower ClientApp of a data holder: a pipe to the vault, which alone reads records, charges and releases.

The coordinator ships this code, so it must not matter what it does: it sees only what it may send anyway. Neither torch
nor anything that reads records is loaded here. On a node without a vault, as in a simulation, the vault's functions
answer in this process.
"""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedpriv
from fedpriv.vault.frames import (
    ADVERTISE,
    CHECK,
    CONFIRM,
    EVALUATE,
    FAILED,
    REGISTER,
    REVEAL,
    SHARE,
    TRAIN,
    Request,
    Response,
    Scalar,
    ask,
    check_arrays,
)

log = logging.getLogger("flwr")

app = ClientApp()


# The key of a node's configuration that names the vault's socket.
VAULT_KEY = "vault"

# Names of a message's records, as in fedpriv/protocol.py, which loads torch.
_INSTRUCTION = "instruction"
_ADAPTER = "adapter"


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local update."""
    return _answered(TRAIN, message, context)


@app.query("register")
def register(message: Message, context: Context) -> Message:
    """The node's registration, before the first round."""
    log.info("clients use %s", fedpriv.__file__)
    return _answered(REGISTER, message, context)


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


def carry(kind: str, message: Message, context: Context) -> Message:
    """The vault's answer to a message.

    Args:
        kind: of the request.
        message: from the server.
        context: whose node configuration names the vault's socket.
    """
    try:
        response = ask(Path(str(context.node_config[VAULT_KEY])), request_of(kind, message, context))
    except (OSError, ValueError) as error:
        log.error("failed: %s", error)
        response = Response(code=FAILED, reason="failed; this node's vault does not answer, its log says why")
    return message_of(response, message)


def request_of(kind: str, message: Message, context: Context) -> Request:
    """The request that a message makes.

    Raises:
        ValueError: an array is malformed; names it.
    """
    content = message.content if message.has_content() else RecordDict()
    arrays = {record: _arrays(named) for record, named in content.array_records.items()}
    fields = dict(content.config_records[_INSTRUCTION]) if _INSTRUCTION in content.config_records else {}
    return Request(
        kind=kind,
        run_config=dict(context.run_config),
        # Flower's records may also hold lists and bytes, which no frame carries and no instruction has.
        fields=cast("dict[str, Scalar]", fields),
        arrays=arrays,
    )


def message_of(response: Response, message: Message) -> Message:
    """The reply to a message that a response makes."""
    if response.code:
        return Message(Error(response.code, response.reason), reply_to=message)
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        response.record: ConfigRecord(dict(response.fields))
    }
    if response.arrays:
        records[_ADAPTER] = ArrayRecord({name: Array(array) for name, array in response.arrays.items()})
    return Message(RecordDict(records), reply_to=message)


def _arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    check_arrays({name: array.data for name, array in record.items()})
    return {name: np.load(BytesIO(array.data), allow_pickle=False) for name, array in record.items()}
