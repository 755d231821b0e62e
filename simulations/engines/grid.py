"""A Flower Grid whose nodes live in this process: the unchanged apps run without a transport between them."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from clients.app import message_of, request_of
from clients.node import failed, prepare
from fedpriv.holder.vault.answer import Prepared, settle
from fedpriv.holder.wire.frame import TRAIN, Request, Response
from fedpriv.learning.training.local_update import Execute
from server.exchange import set_message_id
from simulations.engines.flower_private import Run, empty_run

# Requests and tasks that exist at a time: enough to fill stacked passes and Ray's actors.
_MOST_AT_ONCE = 250


class LocalGrid(Grid):
    """Answers messages in batches, training all clients of a batch by one `execute`.

    Unlike Flower it keeps no context: whatever a node writes there must be kept by the mapping.

    Args:
        contexts: {node: its context}, at least one; each is asked for when a message to the node is answered.
        execute: trains a batch of tasks; None leaves training to the app, one message at a time.
        evaluate: the ClientApp, which answers every other message.
        begins: is told how many messages are about to be answered.
        ends: is told that these were.
    """

    def __init__(
        self,
        contexts: Mapping[int, Context],
        execute: Execute | None,
        evaluate: Callable[[Message, Context], Message],
        begins: Callable[[int], None] = lambda num: None,
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        self._contexts = contexts
        self._execute = execute
        self._evaluate = evaluate
        self._begins, self._ends = begins, ends
        self._run = empty_run(contexts[next(iter(contexts))].run_id)
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Set the run that this grid works for."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid works for."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, in the order of their contexts."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages and keep the replies for `pull_messages`."""
        messages = list(messages)
        ids = [uuid.uuid4().hex for _ in messages]
        for message, message_id in zip(messages, ids, strict=True):
            set_message_id(message, message_id)
        self._begins(len(messages))
        for begin in range(0, len(messages), _MOST_AT_ONCE):
            batch = slice(begin, begin + _MOST_AT_ONCE)
            self._replies.update(zip(ids[batch], self._answer(messages[batch]), strict=True))
        self._ends()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to the given messages; each is handed out once."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver the messages and return all replies at once; the timeout has no effect."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        """One reply for each message, in order; a failing task is one error reply."""
        replies: dict[int, Message] = {}
        prepared: dict[int, Prepared] = {}
        asked: dict[Hashable, Request] = {}
        contexts = [self._contexts[message.metadata.dst_node_id] for message in messages]
        for position, (message, context) in enumerate(zip(messages, contexts, strict=True)):
            try:
                if self._execute is None or message.metadata.message_type != TRAIN:
                    # Strategies put one RecordDict into every message, and an app that is not ours may change its copy.
                    asks = copy.deepcopy(message) if self._execute is None else message
                    replies[position] = self._evaluate(asks, context)
                    continue
                request = request_of(message, context)
                # What all are asked alike is parsed once.
                alike = request.frame, frozenset(request.own.items()), id(context.run_config)
                answer = prepare(asked.setdefault(alike, request), context)
            except Exception as error:  # one node's failure must not end the round
                answer = failed(error)
            if isinstance(answer, Response):
                replies[position] = message_of(answer, message)
            else:
                prepared[position] = answer
        tasks = [each.task for each in prepared.values()]
        updates = self._execute(tasks) if self._execute is not None and tasks else []
        for (position, each), update in zip(prepared.items(), updates, strict=True):
            replies[position] = message_of(settle(each, update), messages[position])
        return [replies[position] for position in range(len(messages))]
