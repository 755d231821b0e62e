"""The private names of Flower 1.42 that the in-process engine needs, and its log lines kept out of what a user sees."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.supercore.logger import update_console_handler
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Run", "colours_on_a_terminal_alone", "empty_run", "task_identity"]

SERVER_NODE_ID = 1


def colours_on_a_terminal_alone() -> None:
    """Keep the codes for colours out of Flower's log lines where these go into a file or a pipe."""
    update_console_handler(colored=sys.stderr.isatty())


def empty_run(run_id: int) -> Run:
    """Flower's record of a run, without a bundle or an account."""
    return Run.create_empty(run_id)


@contextmanager
def task_identity(run_id: int) -> Iterator[None]:
    """Within this context messages can be made: Flower reads their sender from process-wide state."""
    before = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = run_id, run_id, SERVER_NODE_ID
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before


def leave_output_to_display() -> None:
    """Show Flower's warnings alone; importing Flower, which sets a level of its own, takes seconds."""
    colours_on_a_terminal_alone()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = False
