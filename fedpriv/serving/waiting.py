"""Requests that wait for a pass: variants take turns, so that many requests for one hold up no other's."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fedpriv.serving.requests import BusyError, Classify, Event, Generate, Tokens


@dataclass(eq=False, kw_only=True)
class Job:
    """A request under way.

    Attributes:
        request: as it was submitted.
        texts: its tokens: those to classify, or one prompt.
        on_event: is told what happens.
        begun: whether a pass has begun with it.
        over: whether it was answered, has failed or was given up: nothing is told any more.
    """

    request: Classify | Generate
    texts: tuple[Tokens, ...]
    on_event: Callable[[Event], None]
    begun: bool = False
    over: bool = field(default=False)

    @property
    def variant(self) -> str:
        """The name of its variant."""
        return self.request.variant


class Waiting:
    """A bounded queue of jobs for each variant. Safe to use from any thread.

    Args:
        most: jobs that no pass has begun with.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_variant: OrderedDict[str, deque[Job]] = OrderedDict()
        self._num_new = 0
        self._open = True
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._by_variant.values()))

    @property
    def num_new(self) -> int:
        """Jobs that no pass has begun with."""
        return self._num_new

    def add(self, job: Job) -> None:
        """Let a new job wait.

        Raises:
            BusyError: as many wait as may, or no more are accepted.
        """
        with self._changed:
            if not self._open:
                raise BusyError("the server is about to stop; ask again later")
            if self._num_new >= self._most:
                raise BusyError(f"{self._most} requests wait already; ask again later")
            self._num_new += 1
            self._put(job)

    def put_back(self, job: Job, *, first: bool = False) -> None:
        """Let a job wait that was taken: behind the others of its variant, or before all others."""
        with self._changed:
            self._num_new += not job.begun
            self._put(job, first=first)

    def _put(self, job: Job, *, first: bool = False) -> None:
        of_variant = self._by_variant.setdefault(job.variant, deque())
        if first:
            of_variant.appendleft(job)
            self._by_variant.move_to_end(job.variant, last=False)
        else:
            of_variant.append(job)
        self._changed.notify_all()

    def take(self) -> Job | None:
        """The next job of the variant whose turn it is; None if nothing waits."""
        with self._changed:
            if not self._by_variant:
                return None
            variant, of_variant = next(iter(self._by_variant.items()))
            job = of_variant.popleft()
            if of_variant:
                self._by_variant.move_to_end(variant)
            else:
                del self._by_variant[variant]
            self._num_new -= not job.begun
            return job

    def remove(self, job: Job) -> None:
        """Forget a job, if it waits."""
        with self._changed:
            of_variant = self._by_variant.get(job.variant, deque())
            if job in of_variant:
                of_variant.remove(job)
                self._num_new -= not job.begun
                if not of_variant:
                    del self._by_variant[job.variant]
            self._changed.notify_all()

    def wait(self) -> bool:
        """Return when a job waits, or none will: False."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_variant or not self._open)
            return bool(self._by_variant)

    def stop(self) -> None:
        """Accept no new jobs."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
