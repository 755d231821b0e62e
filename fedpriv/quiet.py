"""Silence libraries, so that our own one-line error says what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hide the Hub client's messages about every retry of a connection."""
    log = huggingface_hub.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
