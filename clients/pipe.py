"""The pipe between messages and the vault: requests from messages, and replies from the vault's answers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fedpriv.holder.wire.carrier import CARRIER, packed, unpacked
from fedpriv.holder.wire.frames import FAILED, Request, Response, Scalar, ask

log = logging.getLogger("flwr")

# The key of a node's configuration that names the vault's socket.
VAULT_KEY = "vault"

# Names of a message's records, as in fedpriv/holder/wire/protocol.py, which loads torch.
_INSTRUCTION = "instruction"
_ADAPTER = "adapter"


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
    arrays = {name: unpacked(record) for name, record in content.array_records.items()}
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
        records[_ADAPTER] = ArrayRecord({CARRIER: Array(**packed(response.arrays))})
    return Message(RecordDict(records), reply_to=message)
