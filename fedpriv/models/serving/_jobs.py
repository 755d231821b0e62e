"""Jobs: requests that wait for a pass, have their variant in memory, are counted in passes and told of failures.

Clients take turns, and so do the variants of each: many requests of one client hold up no other's, and many for one
variant no other's of the same client.
"""

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedpriv.models.serving import requests
from fedpriv.models.serving._engine import SharedBase, Weights
from fedpriv.models.serving.sources import NoRoomError, VariantMemory

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class ServingJob:
    """A request under way, its texts' tokens, and whether it is over: answered, failed or given up."""

    request: requests.Request
    texts: tuple[requests.Tokens, ...]
    on_event: Callable[[requests.Event], None]
    begun: bool = False
    over: bool = False

    @property
    def variant(self) -> str:
        """The name of its variant."""
        return self.request.variant


_Turns = OrderedDict[str, deque[ServingJob]]
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

    def add(self, job: ServingJob) -> None:
        """Let a new job wait; BusyError if as many of this client wait as may, or no more are accepted."""
        with self._changed:
            if not self._open:
                raise requests.BusyError("the server is about to stop; ask again later")
            own = self._num_new[job.request.client]
            if own >= self._most - self._num_new.total():
                raise requests.BusyError(f"{own} of your requests wait already; ask again later")
            self._num_new[job.request.client] += 1
            self._put(job)

    def put_back(self, job: ServingJob, *, first: bool = False) -> None:
        """Let a job wait that was taken: behind the others of its client and variant, or before all others."""
        with self._changed:
            self._num_new[job.request.client] += not job.begun
            self._put(job, first=first)

    def _put(self, job: ServingJob, *, first: bool = False) -> None:
        turns = self._by_client.setdefault(job.request.client, OrderedDict())
        of_variant = turns.setdefault(job.variant, deque())
        if first:
            of_variant.appendleft(job)
            turns.move_to_end(job.variant, last=False)
            self._by_client.move_to_end(job.request.client, last=False)
        else:
            of_variant.append(job)
        self._changed.notify_all()

    def take(self, *, but_of: Collection[str] = ()) -> ServingJob | None:
        """The next job of the client, and of its variant, whose turn it is; None if nothing waits."""
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

    def remove(self, job: ServingJob) -> None:
        """Forget a job, if it waits."""
        with self._changed:
            of_variant = self._by_client.get(job.request.client, OrderedDict()).get(job.variant, deque())
            if job in of_variant:
                of_variant.remove(job)
                self._count_out(job)
                self._forget_empty(job)
            self._changed.notify_all()

    def _count_out(self, job: ServingJob) -> None:
        client = job.request.client
        self._num_new[client] -= not job.begun
        if not self._num_new[client]:
            del self._num_new[client]

    def _forget_empty(self, job: ServingJob) -> None:
        """Forget the client and the variant of a job that was taken out, if nothing else of theirs waits."""
        turns = self._by_client[job.request.client]
        if not turns[job.variant]:
            del turns[job.variant]
        if not turns:
            del self._by_client[job.request.client]

    def wait(self) -> bool:
        """Return when a job waits, or none will come: False."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_client or not self._open)
            return bool(self._by_client)

    def stop(self) -> None:
        """Accept no new jobs."""
        with self._changed:
            self._open = False
            self._changed.notify_all()


class PassCounter:
    """A desk's variants and passes so far; its numbers are those of `fedpriv.models.serving.requests.Statistics`."""

    def __init__(
        self, base: SharedBase, memory: VariantMemory, waiting: Waiting, limits: requests.EngineLimits
    ) -> None:
        self.base, self.memory, self.waiting, self.limits = base, memory, waiting, limits
        self.rows = limits.rows if base.shares_passes else 1
        self.num_passes = self.num_rows = self.num_variants = 0
        self._is_blocked = False
        self._under_way: set[ServingJob] = set()

    def next(
        self, can_begin: Callable[[ServingJob], bool] = lambda job: True, *, but_of: Collection[str] = ()
    ) -> tuple[ServingJob, Weights] | None:
        """The next job, with its variant, which is to be given back; None if there is none that can begin now."""
        while not self._is_blocked and (job := self.waiting.take(but_of=but_of)) is not None:
            if job.over:
                continue
            # Nobody overtakes it: else small requests for other variants could keep it waiting for ever.
            if not can_begin(job):
                self.waiting.put_back(job, first=True)
                return None
            try:
                weights = self.memory.take(job.variant, again=job.begun)
            except NoRoomError:
                self._is_blocked = True  # until a variant is given back
                self.waiting.put_back(job, first=True)
                return None
            except requests.ServingError as error:
                tell(job, requests.Failed(error=error))
                continue
            job.begun = True
            self._under_way.add(job)
            return job, weights
        return None

    def give_back(self, job: ServingJob) -> None:
        """A job no longer uses its variant."""
        if job in self._under_way:
            self._under_way.remove(job)
            self.memory.give_back(job.variant)
            self._is_blocked = False

    def fail(self, error: requests.ServingError) -> None:
        """Give up every job that has its variant."""
        for job in list(self._under_way):
            tell(job, requests.Failed(error=error))
            self.give_back(job)

    def count(self, rows: Sequence[Weights]) -> None:
        """A pass of these rows begins."""
        self.num_passes += 1
        self.num_rows += len(rows)
        self.num_variants += len({row.variant for row in rows})


def tell(job: ServingJob, event: requests.Event) -> None:
    """Tell an event to whom a job belongs, unless it is over; after its last event it is."""
    if job.over:
        return
    job.over = isinstance(event, requests.Classified | requests.Embedded | requests.Finished | requests.Failed)
    try:
        job.on_event(event)
    except Exception:
        log.exception("the client that asked for %s cannot be told; the request is given up", job.variant)
        job.over = True


def failure(variant: str, error: Exception) -> requests.ServingError:
    """The error to be told of a pass that failed for a row alone: one line, and nothing of what is inside."""
    log.warning("a request for variant %s has failed: %s", variant, error, exc_info=error)
    return (
        error
        if isinstance(error, requests.ServingError)
        else requests.ServingError(f"variant {variant!r} failed on this request")
    )


def checked(variant: str, output: Tensor) -> Tensor | requests.ServingError:
    """Logits or a vector; the error to be told instead where one of the numbers is none, or infinite."""
    if output.amax().isfinite():
        return output
    return requests.ServingError(f"variant {variant!r} gives no finite answer to this request")
