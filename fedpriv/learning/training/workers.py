"""Independent work on records, in forked processes of one thread each, which leave their results in shared memory.

A worker owns whole records, and torch has one thread in it: how a library shares a tensor out among threads cannot
change a result. Workers are forked when there is work and end with it, so each has the model, the records and the
caches as they are, in the same pages.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
from collections.abc import Callable
from functools import partial
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from fedpriv.errors import is_memory_failure
from fedpriv.files import trace_without_message
from fedpriv.learning.training._isolation import failures_are_raised

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def compute_alike() -> None:
    """Have this process, and those that it forks, compute the same of a record each time, whatever came before.

    One thread, no kernel chosen by timing, none that adds up in a random order or in less precision than its inputs,
    and no executor that replaces code after its first runs.
    """
    torch.set_num_threads(1)
    # Subnormal numbers, which a broadcast may hold or lead to, take a hundred times longer: a reply's public time would
    # not suffice.
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a module class
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch._C._jit_set_profiling_executor(False)


Work = Callable[[int, int], None]
"""Does the job of this number in the worker of this number, and leaves the result in shared memory."""


def shared(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros, at the beginning of a page, in memory that this process shares with those that it forks."""
    memory = mmap.mmap(-1, dtype.itemsize * max(1, prod(shape)))
    return torch.frombuffer(memory, dtype=dtype)[: prod(shape)].view(shape)


def num_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def side_by_side(work: Work, num_jobs: int, num_workers: int) -> None:
    """Do each of the jobs once, shared out among workers; where there may be one alone, it is this process.

    Args:
        work: the job; its order among others must not matter.
        num_jobs: >= 0, numbered from 0.
        num_workers: at most so many, >= 1.

    Raises:
        Exception: what a job raises, where this process does it; a worker's is logged and ends as RuntimeError.
    """
    if num_workers <= 1:
        for job in range(num_jobs):
            work(job, 0)
        return
    children: list[int] = []
    try:
        for worker in range(min(num_workers, num_jobs)):
            children.append(forked(partial(_do, work, range(worker, num_jobs, num_workers), worker)))
    except OSError:  # no further process: those that there are must not go on by themselves
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    killed = next((-code for code in codes if code < 0), None)
    if killed is not None:  # as if this process had done the job: whoever watches it decides what that means
        log.error("a worker was ended by signal %d", killed)
        die()
    if any(codes):
        raise RuntimeError("a worker failed; the log says why")


def _do(work: Work, jobs: range, worker: int) -> None:
    for job in jobs:
        work(job, worker)


def forked(run: Callable[[], object]) -> int:
    """The process that runs this; it ends with this one, with exit code 1 if that raises.

    If memory runs out it is killed, by itself if not by the system: what else is in memory must not decide what becomes
    of a record. A rehearsal, which has no records, fails instead.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Ends with the parent, whose death must be seen at once by whoever watches it.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        if os.getppid() == parent:
            run()
        code = 0
    except BaseException as error:  # it must not run what the parent would run next
        log.error("failed: %s", trace_without_message(error))
        if is_memory_failure(error) and not failures_are_raised():
            die()
    finally:
        os._exit(code)


def die() -> NoReturn:
    """End this process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL ends a process")
