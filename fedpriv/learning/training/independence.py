"""The independence of records: what is computed of one depends on nothing that another holds.

A record that fails counts as nothing; it never decides whether others count. A trial asks whether the records of a pass
touch each other: they are permuted, joined, replaced and dropped, and one is watched. One list of changes asks every
model. A model of one's own is also told where the dependence arises: the states of a record are compared layer by
layer, in the order of the pass.

Independent work is shared out among forked processes of one thread each, which leave their results in shared memory. A
worker owns whole records, and torch has one thread in it: how a library shares a tensor out among threads cannot change
a result. Workers are forked when there is work and end with it, so each has the model, the records and the caches as
they are, in the same pages.

How far work is depends on which records were drawn, so a process that owns all records is told if it asks, and nobody
else: a simulation sets a model's `tell`, a vault never does, and nothing writes it to a file or a message.
"""

import ctypes
import logging
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedpriv.errors import InputError, first_line, is_memory_failure
from fedpriv.files import trace_without_message

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# True where records are synthetic.
_failures_are_raised: ContextVar[bool] = ContextVar("failures_are_raised", default=False)
_must_be_finite: ContextVar[bool] = ContextVar("must_be_finite", default=False)

Record = TypeVar("Record")

LOSSES = "losses"
"""Stands for the name of a layer where it is the losses that couple records."""

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

Work = Callable[[int, int], None]
"""Does the job of this number in the worker of this number, and leaves the result in shared memory."""

Told = ParamSpec("Told")

Tell = Callable[[str, float, float], None]
"""Takes what is being done, how much of it is done, and how much there is, in units of its own."""

TRAINING = "training"
"""In steps of a client."""

READING = "reading records"
"""In records whose states below the first trained layer are computed once and kept."""

FEATURES = "computing features"
"""In records whose features, which a head reads, are computed."""

TESTING = "testing"
"""In records of the server's test set."""


@contextmanager
def raising_failures(*, also_of_numbers: bool = False) -> Iterator[None]:
    """Within this context `isolated` raises, and `finite` if asked: on synthetic records, no failure is a record's."""
    tokens = _failures_are_raised.set(True), _must_be_finite.set(also_of_numbers)
    try:
        yield
    finally:
        _failures_are_raised.reset(tokens[0])
        _must_be_finite.reset(tokens[1])


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Within this context a failure, which no record has caused, refuses a model of this type, and is logged."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # libraries raise anything on a model that they do not fit
        log.warning("a %s model fails on synthetic records", kind, exc_info=error)
        raise InputError(
            f"model: a {kind} model cannot train here ({first_line(error)}); bert, roberta, gpt2 or llama can"
        ) from error


def finite(values: Tensor) -> Tensor:
    """The values; NaN or infinite ones count as zero, or are a ValueError where failures of numbers are raised."""
    if _must_be_finite.get() and not bool(values.isfinite().all()):
        raise ValueError("its losses or gradients are NaN or infinite")
    return values


def isolated(
    compute: Callable[[list[int]], Result], positions: Sequence[int]
) -> Iterator[tuple[list[int], Result | None]]:
    """Positions with their result: all at least one together or, if that fails, each alone, None where it fails again.

    Raises:
        Exception: memory ran out for one record alone. What else is in memory would decide whether that counts.
    """
    try:
        results: list[tuple[list[int], Result | None]] = [(list(positions), compute(list(positions)))]
    except Exception as error:  # whatever it is: if a record can cause it, nothing but its own gradient may show it
        if _failures_are_raised.get():
            raise
        if len(positions) > 1:
            results = [one for position in positions for one in isolated(compute, [position])]
        elif is_memory_failure(error):
            raise
        else:
            log.warning("a record could not be computed and counts as zero: %s", trace_without_message(error))
            results = [(list(positions), None)]
    yield from results


@dataclass(frozen=True, kw_only=True)
class Change(Generic[Record]):
    """A change to what else is in a pass.

    Attributes:
        name: of the change, as `replaced`.
        items: the records of the changed pass.
        positions: where the records stand that are watched, in their order.
    """

    name: str
    items: Sequence[Record]
    positions: Sequence[int]


def watched(records: Sequence[Record]) -> Sequence[Record]:
    """The records whose results are watched; the others may be replaced."""
    return records[::2]


def changes(records: Sequence[Record], others: Sequence[Record]) -> list[Change[Record]]:
    """The changes of a pass of the `watched` records, two at least, that must leave their results as they are.

    As many others take the places of those that are not watched.
    """
    kept, everyone = watched(records), range(len(records))
    replaced = [records[i] if i % 2 == 0 else others[i] for i in everyone]
    return [
        Change(name="repeated", items=kept, positions=range(len(kept))),
        Change(name="permuted", items=kept[::-1], positions=range(len(kept))[::-1]),
        Change(name="joined", items=records, positions=everyone[::2]),
        Change(name="replaced", items=replaced, positions=everyone[::2]),
        Change(name="dropped", items=kept[:1], positions=(0,)),
    ]


def dependence(
    results: Callable[[Sequence[Record]], Tensor],
    records: Sequence[Record],
    others: Sequence[Record],
    equal: Callable[[Tensor, Tensor], bool],
) -> Change[Record] | None:
    """The first change that alters a watched record's result; None if none does.

    Args:
        results: [records, values] of the records, in their order.
        equal: whether two results count as the same, to the bit or up to rounding.
    """
    expected = results(watched(records))
    for change in changes(records, others):
        found = results(change.items)[list(change.positions)]
        if not equal(found, expected[: len(found)]):
            return change
    return None


def culprit(
    module: nn.Module,
    losses: Callable[[Sequence[Record]], Tensor],
    records: Sequence[Record],
    others: Sequence[Record],
    change: Change[Record],
    *,
    close: Callable[[Tensor, Tensor], bool],
) -> str | None:
    """The layer, by its name, in which a watched record's state first differs; None if it is the backward pass.

    It is `LOSSES` if no layer's states differ, and empty for the module itself, which computes between its layers.

    Args:
        losses: runs the pass of the records, with one loss for each.
        close: whether states count as the same.
    """
    by_name = {each.name: each for each in changes(records, others)}
    joined, replaced, kept = by_name["joined"], by_name["replaced"], by_name["repeated"]
    for one, other in ((joined, replaced), (kept, change)):
        found = _first_difference(module, losses, one, other, close)
        if found is not None:
            return found
    return None


def _first_difference(
    module: nn.Module,
    losses: Callable[[Sequence[Record]], Tensor],
    one: Change[Record],
    other: Change[Record],
    same: Callable[[Tensor, Tensor], bool],
) -> str | None:
    before, after = (_states(module, losses, each.items) for each in (one, other))
    num = min(len(one.positions), len(other.positions))
    places = [list(each.positions)[:num] for each in (one, other)]
    for first, second in zip(before, after, strict=False):
        values = (first.value, second.value)
        if [len(value) if value.dim() else 0 for value in values] != [len(one.items), len(other.items)]:
            continue  # its rows are no records
        if not same(*(value[at].reshape(num, -1) for value, at in zip(values, places, strict=True))):
            # An input that differs was made between layers, in the module that calls this one.
            return first.layer if first.is_output else first.layer.rpartition(".")[0]
    return None


@dataclass(frozen=True)
class _State:
    """An input or output of a layer."""

    layer: str
    is_output: bool
    value: Tensor


@torch.no_grad()
def _states(module: nn.Module, losses: Callable[[Sequence[Record]], Tensor], items: Sequence[Record]) -> list[_State]:
    """The states of a pass, the losses last."""
    with _recording(module) as states:
        values = losses(items)
    return [*states, _State(LOSSES, True, values)]


@contextmanager
def _recording(module: nn.Module) -> Iterator[list[_State]]:
    """Within this context the inputs and outputs of all layers are recorded, in the order of the pass."""
    states: list[_State] = []

    def keep(name: str, values: object, *, is_output: bool) -> None:
        leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        states.extend(_State(name, is_output, leaf.detach().clone()) for leaf in leaves)

    handles = []
    for name, layer in module.named_modules():
        before = layer.register_forward_pre_hook(lambda _, given, name=name: keep(name, given, is_output=False))
        after = layer.register_forward_hook(lambda _, __, made, name=name: keep(name, made, is_output=True))
        handles += [before, after]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


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
        if is_memory_failure(error) and not _failures_are_raised.get():
            die()
    finally:
        os._exit(code)


def die() -> NoReturn:
    """End this process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL ends a process")


def unfailing(tell: Callable[Told, None]) -> Callable[Told, None]:
    """The same, which is told no more once it raised: a failing display must not look like a failing record."""
    failed = False

    def told(*args: Told.args, **kwargs: Told.kwargs) -> None:
        nonlocal failed
        if failed:
            return
        try:
            tell(*args, **kwargs)
        except Exception as error:  # whatever it is: what is only shown decides nothing
            failed = True
            log.warning("progress is shown no more: %s", trace_without_message(error))

    return told


def silent(what: str, done: float, total: float) -> None:
    """Tells nobody."""
