"""How far the clients of a round are, as engines tell it: everything here is public to whoever simulates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedpriv.training.local_update import ClientUpdate, Execute, UpdateTask
from fedpriv.training.model import TrainingModel
from fedpriv.training.progress import TRAINING, unfailing
from server.observer import Follow, RunProgress


class Followed:
    """An `Execute` whose follower is told how many of the round's client steps are done.

    Args:
        execute: trains the tasks.
        follow: is told, until it raises; models tell while they compute records, where an error would be a record's.
    """

    def __init__(self, execute: Execute, follow: Follow) -> None:
        self._execute, self._follow = execute, unfailing(follow)
        self._round = self._total = 0
        self._done = 0.0

    def __call__(self, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
        """Train the tasks, which are all of one round."""
        self._round = tasks[0].round
        self._total, self._done = sum(task.spec.local_steps for task in tasks), 0.0
        return self._execute(tasks)

    def tell(self, what: str, done: float, total: float) -> None:
        """Pass on what a model tells: of training, the stacks of a round one after the other; of other things, alone.

        A stack that fails is trained again, client by client, and counts from where it began.
        """
        if what != TRAINING:
            self._follow(RunProgress(what=what, done=done, total=total))
            return
        self._follow(RunProgress(what=what, done=self._done + done, total=self._total, round=self._round))
        if done == total:
            self._done += total


@contextmanager
def following(model: TrainingModel, execute: Execute, follow: Follow) -> Iterator[Followed]:
    """Within this context the model tells the follower what it does, and so does what it trains."""
    followed = Followed(execute, follow)
    model.tell = followed.tell
    try:
        yield followed
    finally:
        del model.tell
