"""The answers of OpenAI's API, and of the same kind for classes.

`Answers` stand between the event loop of the connections and the thread of the engine; its events become one answer, or
a stream of them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fedpriv.models.serving.http._openai_requests import Asked, ChatRequest
from fedpriv.models.serving.http.refusals import RefusalError
from fedpriv.models.serving.requests import (
    Classified,
    Embedded,
    Event,
    Failed,
    Finished,
    Generate,
    Piece,
    Request,
    ScoredToken,
    ServingError,
)

if TYPE_CHECKING:
    from fedpriv.models.serving.scheduler import Scheduler, Ticket


T = TypeVar("T")


def choice(index: int, said: Sequence[Piece], finished: Finished, asked: Asked) -> dict[str, Any]:
    """A whole answer."""
    text, tokens = "".join(piece.text for piece in said), [token for piece in said for token in piece.tokens]
    is_chat = isinstance(asked, ChatRequest)
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": index, **content, "logprobs": _scores(tokens, asked), "finish_reason": finished.reason}


def chunk(
    index: int, said: Piece | None, reason: str | None, asked: Asked, *, is_first: bool = False
) -> dict[str, Any]:
    """A part of an answer that is streamed; the last one has a reason and no text."""
    if isinstance(asked, ChatRequest):
        delta = {**({"role": "assistant"} if is_first else {}), **({} if said is None else {"content": said.text})}
        content: dict[str, Any] = {"delta": delta}
    else:
        content = {"text": said.text if said else ""}
    scores = _scores(said.tokens, asked) if said and said.tokens else None
    return {"index": index, **content, "logprobs": scores, "finish_reason": reason}


def _scores(tokens: Sequence[ScoredToken], asked: Asked) -> dict[str, Any] | None:
    """Log-probabilities as the one or the other request has them; None if they were not asked for."""
    if asked.num_alternatives is None:
        return None
    if isinstance(asked, ChatRequest):
        content = [
            {
                **_score(token.text, token.log_probability),
                "top_logprobs": [_score(*alternative) for alternative in token.alternatives],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens] if asked.num_alternatives else None,
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: ScoredToken) -> dict[str, float]:
    """{text: log-probability} of the likeliest tokens and the chosen one; of tokens with one text the likeliest."""
    found: dict[str, float] = {}
    for text, log_probability in (*token.alternatives, (token.text, token.log_probability)):
        found.setdefault(text, log_probability)
    return found


def _score(text: str, log_probability: float) -> dict[str, Any]:
    is_whole = "\ufffd" not in text
    return {"token": text, "bytes": list(text.encode()) if is_whole else None, "logprob": log_probability}


def classified(model: str, rows: Iterable[Mapping[str, float]], num_tokens: int) -> dict[str, Any]:
    """The classes of texts, {class: probability} of each, the likeliest first named alone."""
    data = []
    for index, probabilities in enumerate(rows):
        likeliest = max(probabilities, key=lambda label: probabilities[label])
        data.append({"index": index, "label": likeliest, "probabilities": probabilities})
    return {"object": "list", "model": model, "data": data, "usage": _usage_of_texts(num_tokens)}


async def chosen(answers: Answers, choices: Sequence[Sequence[str]]) -> tuple[list[dict[str, float]], int]:
    """{choice: exp of its tokens' mean log-probability, over the sum of all} for each text, and the number of tokens.

    Raises:
        ServingError: the engine failed.
    """
    sums = [0.0] * len(answers.requests)
    async for index, event in answers.events():
        if isinstance(event, Piece):
            sums[index] += sum(token.log_probability for token in event.tokens)
    lengths = [len(request.forced) for request in answers.requests if isinstance(request, Generate)]
    means = iter([total / length for total, length in zip(sums, lengths, strict=True)])
    scores = [np.array([next(means) for _ in own]) for own in choices]
    shares = [(each := np.exp(of_text - of_text.max())) / each.sum() for of_text in scores]
    num_tokens = sum(len(r.prompt) + len(r.forced) for r in answers.requests if isinstance(r, Generate))
    return [
        dict(zip(own, of_text.tolist(), strict=True)) for own, of_text in zip(choices, shares, strict=True)
    ], num_tokens


def embedded(model: str, found: Embedded, encoding: str | None) -> dict[str, Any]:
    """The vectors of texts, as lists of numbers or as base64 of little-endian float32."""

    def written(vector: NDArray[np.float32]) -> str | list[float]:
        if encoding == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    data = [{"object": "embedding", "index": i, "embedding": written(own)} for i, own in enumerate(found.vectors)]
    return {"object": "list", "model": model, "data": data, "usage": _usage_of_texts(found.num_tokens)}


def _usage_of_texts(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, what the engine still works on for it is given up."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


def header(asked: Asked, *, is_streamed: bool) -> dict[str, Any]:
    """The first fields of an answer, or of each event of its stream."""
    is_chat = isinstance(asked, ChatRequest)
    kind = "text_completion" if not is_chat else "chat.completion.chunk" if is_streamed else "chat.completion"
    id_ = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": id_, "object": kind, "created": int(time.time()), "model": asked.model}


async def collected(answers: Answers, asked: Asked) -> dict[str, Any]:
    """The whole answer; ServingError if the engine failed."""
    said: list[list[Piece]] = [[] for _ in answers.requests]
    ends: dict[int, Finished] = {}
    async for index, event in answers.events():
        match event:
            case Piece():
                said[index].append(event)
            case Finished():
                ends[index] = event
    choices = [choice(index, pieces, ends[index], asked) for index, pieces in enumerate(said)]
    return {**header(asked, is_streamed=False), "choices": choices, "usage": _usage(answers, asked, ends.values())}


async def streamed(
    answers: Answers, asked: Asked, refusal_of: Callable[[ServingError], RefusalError]
) -> AsyncIterator[str]:
    """The answer as server-sent events; one that fails on the way ends with an event that says so.

    Args:
        refusal_of: what the client is told about an engine's error.
    """
    start = header(asked, is_streamed=True)
    nothing_yet = {"usage": None} if asked.includes_usage else {}
    ends: list[Finished] = []

    def event(index: int, said: Piece | None, reason: str | None = None, *, is_first: bool = False) -> str:
        return _sent({**start, "choices": [chunk(index, said, reason, asked, is_first=is_first)], **nothing_yet})

    if isinstance(asked, ChatRequest):
        for index in range(len(answers.requests)):
            yield event(index, Piece(text=""), is_first=True)
    try:
        async for index, happened in answers.events():
            match happened:
                case Piece():
                    yield event(index, happened)
                case Finished(reason=reason):
                    ends.append(happened)
                    yield event(index, None, reason)
    except ServingError as error:
        yield _sent(refusal_of(error).as_dict())
        return
    if asked.includes_usage:
        yield _sent({**start, "choices": [], "usage": _usage(answers, asked, ends)})
    yield "data: [DONE]\n\n"


def _usage(answers: Answers, asked: Asked, ends: Iterable[Finished]) -> dict[str, int]:
    """Numbers of tokens; those of a prompt count once, however many answers it has."""
    of_prompts = answers.requests[:: asked.answers_each]
    prompts = sum(len(request.prompt) for request in of_prompts if isinstance(request, Generate))
    new = sum(end.num_new_tokens for end in ends)
    return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}


def _sent(value: dict[str, Any]) -> str:
    """One event; JSON's escapes leave no line break in it."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"


class Answers:
    """The answers to the requests of one client, as the engine finds them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tickets: list[Ticket] = []

    def submit_to(self, serving: Scheduler) -> None:
        """Submit all of them, or none; ServingError if the engine refuses one."""
        try:
            for number, request in enumerate(self.requests):
                self._tickets.append(serving.submit(request, partial(self._tell, number)))
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the request, event), until each has had its last one; ServingError if one of them failed."""
        left = len(self.requests)
        while left:
            number, event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Classified | Embedded | Finished)
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
    """The result of the work, which is cancelled if the client leaves; then ClientDisconnect is raised."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    """Returns when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
