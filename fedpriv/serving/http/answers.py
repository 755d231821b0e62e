"""Between the event loop of the connections and the thread of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from fedpriv.serving.requests import Classified, Classify, Event, Failed, Finished, Generate, Serving, Ticket

T = TypeVar("T")
Request = Classify | Generate


class HungUpError(Exception):
    """The client has left; nobody reads an answer."""


class Answers:
    """The answers to the requests of one client, as the engine finds them.

    Attributes:
        requests: that were submitted together.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tickets: list[Ticket] = []

    def submit_to(self, serving: Serving) -> None:
        """Submit all of them, or none.

        Raises:
            ServingError: the engine refuses one.
        """
        try:
            for number, request in enumerate(self.requests):
                self._tickets.append(serving.submit(request, partial(self._tell, number)))
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the request, event), until each has had its last one.

        Raises:
            ServingError: one of them failed.
        """
        left = len(self.requests)
        while left:
            number, event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Classified | Finished)
            yield number, event

    def cancel(self) -> None:
        """Give up what is still under way."""
        for ticket in self._tickets:
            ticket.cancel()

    def _tell(self, number: int, event: Event) -> None:
        """Called from the engine's thread; a loop that was closed has nobody to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client leaves.

    Raises:
        HungUpError: it left.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    """Returns when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
