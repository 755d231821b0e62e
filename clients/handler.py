"""A simulated data holder's side of a round, in this process: the vault's functions, behind Flower's messages."""

from __future__ import annotations

from flwr.app import Context, Message

from clients.node import holder_of
from clients.pipe import message_of, request_of
from fedpriv.training.local_update import ClientUpdate, UpdateTask
from fedpriv.vault import answer as vault
from fedpriv.vault.frames import TRAIN, Request
from fedpriv.vault.holder import Holder


def answered(kind: str, message: Message, context: Context) -> Message:
    """The reply to a message of any kind."""
    try:
        return message_of(vault.answer(*_request_and_holder(kind, message, context)), message)
    except Exception as error:  # its text must not leave the node
        return message_of(vault.refused(error), message)


def prepare(message: Message, context: Context) -> UpdateTask:
    """The task that a train message asks for, after the guard has checked and charged it.

    Raises:
        AlreadyReleasedError: the message was answered before; `reply` sends the stored answer again.
        RefusedError: the guard does not allow it.
        LedgerError: the node's ledger cannot be used.
        ValueError: the message is malformed.
    """
    return vault.prepare(*_request_and_holder(TRAIN, message, context))


def reply(message: Message, context: Context, update: ClientUpdate | Exception) -> Message:
    """The upload, once it is stored, or an error that says only that the guard refused or that training failed."""
    try:
        return message_of(vault.settle(*_request_and_holder(TRAIN, message, context), update), message)
    except Exception as error:  # as above
        return message_of(vault.refused(error), message)


def _request_and_holder(kind: str, message: Message, context: Context) -> tuple[Request, Holder]:
    return request_of(kind, message, context), holder_of(context)
