"""Where the time of a run goes: the library's functions are timed from outside, for as long as a benchmark runs."""

from __future__ import annotations

import functools
import importlib
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PARTS: Mapping[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""{part: the functions whose time it is}"""


class Clock:
    """Adds up the wall-clock seconds of each part, in every thread; a part within a part stops the outer one's clock.

    Attributes:
        seconds: {part: so far, without parts that are under way}.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._of_thread = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context it is this part's time."""
        outer = getattr(self._of_thread, "within", 0.0)
        self._of_thread.within = 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[name] += taken - self._of_thread.within
            self._of_thread.within = outer + taken

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is this part's."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*arguments, **options)

        return run


@contextmanager
def measured() -> Iterator[Clock]:
    """A clock that runs for all `PARTS` within this context.

    Raises:
        AttributeError, ImportError: a function is not where `PARTS` says.
    """
    clock = Clock()
    with ExitStack() as patches:
        for part, places in PARTS.items():
            for place in places:
                module, _, path = place.partition(":")
                *names, last = path.split(".")
                owner = functools.reduce(getattr, names, importlib.import_module(module))
                timed = clock.timed(part, getattr(owner, last))
                patches.enter_context(mock.patch.object(owner, last, timed))
        yield clock


@functools.cache
def of_process() -> Clock:
    """A clock that runs from now on until the process ends."""
    return _forever.enter_context(measured())


_forever = ExitStack()


def shown(seconds: Mapping[str, float], total: float | None = None) -> str:
    """The parts that took 0.05 seconds or more, in the order of `PARTS`, and what no part had."""
    lines = [f"{part} {seconds[part]:.1f}" for part in PARTS if seconds.get(part, 0.0) >= 0.05]
    rest = [] if total is None else [f"other {max(0.0, total - sum(seconds.values())):.1f}"]
    return ", ".join([*lines, *rest])
