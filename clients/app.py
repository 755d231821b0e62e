"""The Flower ClientApp of a data holder: it carries frames to the vault, which alone reads records and releases.

The coordinator ships this code, so it must not matter what it does: it sees only what it may send anyway. Neither torch
nor anything that reads records is loaded here. On a node without a vault, as in a simulation, the vault's functions
answer in this process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

import fedpriv
from fedpriv.holder.wire.frame import FAILED, OWN, Request, Response, Scalars, ask, carried, frame_in

log = logging.getLogger("flwr")

# The key of a node's configuration that names the vault's socket.
VAULT_KEY = "vault"

app = ClientApp()


@app.train()
@app.query()
def answered(message: Message, context: Context) -> Message:
    """The node's answer to a message, whatever it asks."""
    if message.metadata.group_id == "0":  # before the first round
        log.info("clients use %s", fedpriv.__file__)
    try:
        request = request_of(message, context)
        if VAULT_KEY in context.node_config:
            return message_of(ask(Path(str(context.node_config[VAULT_KEY])), request), message)
        from clients import node  # loads torch, which a carrier does without

        return message_of(node.answered(request, context), message)
    except (OSError, ValueError) as error:
        log.error("failed: %s", error)
        reason = "failed; this node's vault does not answer, its log says why"
        return message_of(Response.of(code=FAILED, reason=reason), message)


def request_of(message: Message, context: Context) -> Request:
    """The request that a message carries, beside what Flower and the server tell this node.

    Raises:
        FrameError: the message carries no frame.
    """
    content = message.content if message.has_content() else RecordDict()
    # Flower's records may also hold lists and bytes, which no frame carries and no server tells.
    own = cast("Scalars", dict(content.config_records[OWN]) if OWN in content.config_records else {})
    return Request(frame=frame_in(content), run_config=dict(context.run_config), own=own)


def message_of(response: Response, message: Message) -> Message:
    """The reply to a message that carries a response."""
    if response.code:
        return Message(Error(response.code, response.reason), reply_to=message)
    content = RecordDict({name: ConfigRecord(record) for name, record in carried(response.frame).items()})
    return Message(content, reply_to=message)
