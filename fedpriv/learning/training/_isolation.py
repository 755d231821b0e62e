"""A record that fails counts as nothing; it never decides whether others count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

from fedpriv.errors import InputError, first_line, is_memory_failure
from fedpriv.files import trace_without_message

Result = TypeVar("Result")
log = logging.getLogger(__name__)

_failures_are_raised: ContextVar[bool] = ContextVar("failures_are_raised", default=False)
_must_be_finite: ContextVar[bool] = ContextVar("must_be_finite", default=False)


@contextmanager
def raising_failures(*, also_of_numbers: bool = False) -> Iterator[None]:
    """Within this context `isolated` raises: on synthetic records, no failure is a record's.

    Args:
        also_of_numbers: whether `finite` raises too, for which a device is waited for.
    """
    tokens = _failures_are_raised.set(True), _must_be_finite.set(also_of_numbers)
    try:
        yield
    finally:
        _failures_are_raised.reset(tokens[0])
        _must_be_finite.reset(tokens[1])


def failures_are_raised() -> bool:
    """Whether records are synthetic here."""
    return _failures_are_raised.get()


@contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Within this context a failure refuses a model: no record has caused it.

    Args:
        kind: type of the model.

    Raises:
        InputError: something failed; one line that names the type. Where it failed is logged.
    """
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
    """The values. A record's may be NaN or infinite, and then count as zero; of synthetic ones none may.

    Raises:
        ValueError: some value is not finite, and failures of numbers are raised.
    """
    if _must_be_finite.get() and not bool(values.isfinite().all()):
        raise ValueError("its losses or gradients are NaN or infinite")
    return values


def isolated(
    compute: Callable[[list[int]], Result], positions: Sequence[int]
) -> Iterator[tuple[list[int], Result | None]]:
    """The result for all positions together or, if that fails, for each alone; None for one that fails alone.

    Args:
        compute: of records at the given positions.
        positions: at least one.

    Yields:
        Positions, and their result.

    Raises:
        Exception: memory ran out for one record alone. What else is in memory would decide whether that counts.
    """
    try:
        results: list[tuple[list[int], Result | None]] = [(list(positions), compute(list(positions)))]
    except Exception as error:  # whatever it is: if a record can cause it, nothing but its own gradient may show it
        if failures_are_raised():
            raise
        if len(positions) > 1:
            results = [one for position in positions for one in isolated(compute, [position])]
        elif is_memory_failure(error):
            raise
        else:
            log.warning("a record could not be computed and counts as zero: %s", trace_without_message(error))
            results = [(list(positions), None)]
    yield from results
