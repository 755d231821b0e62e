"""Requests that wait for a pass.

Clients take turns, and so do the variants of each: many requests of one client hold up no other's, and many for one
variant no other's of the same client.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
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


_Turns = OrderedDict[str, deque[Job]]
"""The jobs of one client by variant, in the order of their turns."""


class Waiting:
    """A bounded queue of jobs for each client and variant. Safe to use from any thread.

    No client may have more new jobs than there are places left: one alone has half of them, of two each has a third.

    Args:
        most: jobs that no pass has begun with.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_client: OrderedDict[str, _Turns] = OrderedDict()
        self._num_new: Counter[str] = Counter()
        self._open = True
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return sum(len(of_variant) for turns in self._by_client.values() for of_variant in turns.values())

    @property
    def num_new(self) -> int:
        """Jobs that no pass has begun with."""
        return self._num_new.total()

    def add(self, job: Job) -> None:
        """Let a new job wait.

        Raises:
            BusyError: as many of this client wait as may, or no more are accepted.
        """
        with self._changed:
            if not self._open:
                raise BusyError("the server is about to stop; ask again later")
            own = self._num_new[job.request.client]
            if own >= self._most - self._num_new.total():
                raise BusyError(f"{own} of your requests wait already; ask again later")
            self._num_new[job.request.client] += 1
            self._put(job)

    def put_back(self, job: Job, *, first: bool = False) -> None:
        """Let a job wait that was taken: behind the others of its client and variant, or before all others."""
        with self._changed:
            self._num_new[job.request.client] += not job.begun
            self._put(job, first=first)

    def _put(self, job: Job, *, first: bool = False) -> None:
        turns = self._by_client.setdefault(job.request.client, OrderedDict())
        of_variant = turns.setdefault(job.variant, deque())
        if first:
            of_variant.appendleft(job)
            turns.move_to_end(job.variant, last=False)
            self._by_client.move_to_end(job.request.client, last=False)
        else:
            of_variant.append(job)
        self._changed.notify_all()

    def take(self, *, but_of: Collection[str] = ()) -> Job | None:
        """The next job of the client, and of its variant, whose turn it is; None if nothing waits.

        Args:
            but_of: clients that have no turn now.
        """
        with self._changed:
            client = next((client for client in self._by_client if client not in but_of), None)
            if client is None:
                return None
            turns = self._by_client[client]
            variant, of_variant = next(iter(turns.items()))
            job = of_variant.popleft()
            turns.move_to_end(variant)
            self._by_client.move_to_end(client)
            self._forget_empty(job)
            self._count_out(job)
            return job

    def remove(self, job: Job) -> None:
        """Forget a job, if it waits."""
        with self._changed:
            of_variant = self._by_client.get(job.request.client, OrderedDict()).get(job.variant, deque())
            if job in of_variant:
                of_variant.remove(job)
                self._count_out(job)
                self._forget_empty(job)
            self._changed.notify_all()

    def _count_out(self, job: Job) -> None:
        client = job.request.client
        self._num_new[client] -= not job.begun
        if not self._num_new[client]:
            del self._num_new[client]

    def _forget_empty(self, job: Job) -> None:
        """Forget the client and the variant of a job that was taken out, if nothing else of theirs waits."""
        turns = self._by_client[job.request.client]
        if not turns[job.variant]:
            del turns[job.variant]
        if not turns:
            del self._by_client[job.request.client]

    def wait(self) -> bool:
        """Return when a job waits, or none will: False."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_client or not self._open)
            return bool(self._by_client)

    def stop(self) -> None:
        """Accept no new jobs."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
