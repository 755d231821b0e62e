"""What classification and generation share: jobs with their variants, passes that are counted, failures told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedpriv.serving.engine import SharedBase, Weights
from fedpriv.serving.limits import Limits
from fedpriv.serving.paging import Memory, NoRoomError
from fedpriv.serving.requests import Classified, Event, Failed, Finished, ServingError
from fedpriv.serving.waiting import Job, Waiting

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes so far; see `fedpriv.serving.requests.Statistics`."""

    num_passes: int = 0
    num_rows: int = 0
    num_variants: int = 0

    def with_pass(self, rows: Sequence[Weights]) -> Passes:
        """These and one more."""
        return Passes(
            num_passes=self.num_passes + 1,
            num_rows=self.num_rows + len(rows),
            num_variants=self.num_variants + len({row.variant for row in rows}),
        )


class Desk(Protocol):
    """Where jobs of one kind are worked on, by one thread."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, beside what waits."""

    def step(self) -> None:
        """Take in what there is room for and go one pass further with everything."""

    def give_up(self, error: ServingError) -> None:
        """Fail everything under way."""


class Counter:
    """A desk's variants and passes.

    Args:
        base: runs passes.
        memory: has the variants.
        waiting: gives jobs.
        limits: of the server.

    Attributes:
        passes: so far.
    """

    def __init__(self, base: SharedBase, memory: Memory, waiting: Waiting, limits: Limits) -> None:
        self.base, self.memory, self.waiting, self.limits = base, memory, waiting, limits
        self.rows = limits.rows if base.shares_passes else 1
        self.passes = Passes()
        self._is_blocked = False
        self._under_way: set[Job] = set()

    def next(
        self, can_begin: Callable[[Job], bool] = lambda job: True, *, but_of: Collection[str] = ()
    ) -> tuple[Job, Weights] | None:
        """The next job, with its variant, which is to be given back; None if there is none that can begin now.

        Args:
            can_begin: whether there is room for a job.
            but_of: clients that have no turn now.
        """
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
            except ServingError as error:
                tell(job, Failed(error=error))
                continue
            job.begun = True
            self._under_way.add(job)
            return job, weights
        return None

    def give_back(self, job: Job) -> None:
        """A job no longer uses its variant."""
        if job in self._under_way:
            self._under_way.remove(job)
            self.memory.give_back(job.variant)
            self._is_blocked = False

    def fail(self, error: ServingError) -> None:
        """Give up every job that has its variant."""
        for job in list(self._under_way):
            tell(job, Failed(error=error))
            self.give_back(job)

    def count(self, rows: Sequence[Weights]) -> None:
        """A pass of these rows begins."""
        self.passes = self.passes.with_pass(rows)


def tell(job: Job, event: Event) -> None:
    """Tell an event to whom a job belongs, unless it is over; after its last event it is."""
    if job.over:
        return
    job.over = isinstance(event, Classified | Finished | Failed)
    try:
        job.on_event(event)
    except Exception:
        log.exception("whoever asked for %s cannot be told; the request is given up", job.variant)
        job.over = True


def failure(variant: str, error: Exception) -> ServingError:
    """What is told of a pass that failed for a row alone: one line, and nothing of what is inside."""
    log.warning("a request for variant %s has failed: %s", variant, error, exc_info=error)
    return error if isinstance(error, ServingError) else ServingError(f"variant {variant!r} failed on this request")


def check_finite(variant: str, logits: Tensor) -> None:
    """Refuse logits without a largest one.

    Raises:
        ServingError: one of them is no number, or infinite.
    """
    if not logits.amax().isfinite():
        raise ServingError(f"variant {variant!r} gives no finite answer to this request")
