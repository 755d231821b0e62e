"""The Flower ClientApp of a data holder: messages in, messages out, over fedpriv."""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedpriv
from clients import handler
from clients.node import bench_of, configuration
from fedpriv.training.stacked import execute_one_by_one

log = logging.getLogger("flwr")

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local update."""
    try:
        task = handler.prepare(message, context)
    except Exception as error:  # its text must not leave the node as Flower's traceback
        return handler.reply(message, context, error)
    model = bench_of(configuration(context), context).model
    return handler.reply(message, context, execute_one_by_one(model, [task])[0])


@app.query("register")
def register(message: Message, context: Context) -> Message:
    """The node's registration, before the first round."""
    log.info("clients use %s", fedpriv.__file__)
    try:
        return handler.register(message, context)
    except Exception as error:  # as above, since it may name a column or a label
        return handler.reply(message, context, error)
