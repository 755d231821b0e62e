"""The requests and answers of OpenAI's API that this server knows, and one of the same kind for classifiers.

A parameter that is known and has no effect here is accepted at the value at which it has none; everything else is
refused by name. `Answers` stand between the event loop of the connections and the thread of the engine; its events
become one answer, or a stream of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fedpriv.serving.http.refusals import RefusalError, shown
from fedpriv.serving.requests import (
    Classified,
    Classify,
    Event,
    Failed,
    Finished,
    Generate,
    Piece,
    Serving,
    ServingError,
    Ticket,
    Tokens,
    TooLongError,
)

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Stops = Annotated[list[Stop], Field(max_length=4)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Object = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class _Strict(BaseModel):
    """Nothing is converted, no field is unknown, no number is infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """The form of a streamed answer.

    Attributes:
        include_usage: whether the last event tells the number of tokens.
    """

    include_usage: bool = False


class _Generation(_Strict):
    """The fields that both requests for text have in common."""

    model: Name
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> tuple[str, ...]:
        """At least one."""
        return (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)


class TextPart(_Strict):
    """A part of a message; there are no others than text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str, Field(max_length=64)] | None = None

    @property
    def as_pair(self) -> tuple[str, str]:
        """Role and content; templates know `developer` as `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ("system" if self.role == "developer" else self.role), text


class ResponseFormat(_Strict):
    """The form of an answer."""

    type: Literal["text"]


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=512)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None
    response_format: ResponseFormat | None = None


class ClassifyRequest(_Strict):
    """`POST /v1/classify`."""

    model: Name
    input: Text | Annotated[list[Text], Field(min_length=1)]
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """At least one."""
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)


Shape = TypeVar("Shape", bound=_Strict)


def parsed(shape: type[Shape], body: bytes) -> Shape:
    """The request in a body.

    Raises:
        RefusalError: it is not valid JSON, or not such a request; names the first thing that is wrong.
    """
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise RefusalError(400, f"The body: {first['msg']}.", code="invalid_json")
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        raise RefusalError(400, f"{shown(where)}: this server does not know it.", code="unknown_parameter")
    raise RefusalError(400, f"{shown(where)}: {first['msg']}.", code="invalid_value", param=where[:100] or None)


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Numbers of tokens."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def envelope(id_: str, kind: Object, created: int, model: str) -> dict[str, Any]:
    """The first fields of answers and of a stream's events."""
    return {"id": id_, "object": kind, "created": created, "model": model}


def choice(index: int, text: str, finished: Finished, *, is_chat: bool) -> dict[str, Any]:
    """A whole answer."""
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": index, **said, "logprobs": None, "finish_reason": finished.reason}


def piece(index: int, text: str | None, reason: str | None, *, is_chat: bool, is_first: bool = False) -> dict[str, Any]:
    """A part of an answer that is streamed; the last one of a chat has a reason and no text."""
    if is_chat:
        delta = {**({"role": "assistant"} if is_first else {}), **({} if text is None else {"content": text})}
        said: dict[str, Any] = {"delta": delta}
    else:
        said = {"text": text or ""}
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def classified(model: str, labels: Sequence[str], rows: Iterable[Sequence[float]], num_tokens: int) -> dict[str, Any]:
    """The classes of texts, the likeliest first named alone."""
    data = []
    for index, row in enumerate(rows):
        probabilities: Mapping[str, float] = dict(zip(labels, row, strict=True))
        likeliest = max(probabilities, key=lambda label: probabilities[label])
        data.append({"index": index, "label": likeliest, "probabilities": probabilities})
    tokens = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "model": model, "data": data, "usage": tokens}


# OpenAI's own defaults: of `temperature`, and of `max_tokens` for a bare prompt.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16

Asked = CompletionRequest | ChatRequest


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


def engine_requests(
    asked: Asked, prompts: Sequence[Tokens], *, limit: int, max_tokens: int, client: str = ""
) -> list[Generate]:
    """The requests to the engine.

    Args:
        asked: by the client.
        prompts: its prompts, or its chat.
        limit: new tokens of an answer.
        max_tokens: of a prompt and its answer.
        client: who asks.

    Raises:
        TooLongError: a prompt leaves no room for an answer, or not for as many tokens as it asks for.
        ServingError: a prompt has no token.
    """
    wanted, usual = asked.max_tokens, min(limit, _COMPLETION_TOKENS)
    if isinstance(asked, ChatRequest):
        wanted, usual = asked.max_completion_tokens or asked.max_tokens, limit
    return [
        Generate(
            variant=asked.model,
            prompt=prompt,
            max_new_tokens=wanted or min(usual, room),
            temperature=_TEMPERATURE if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            stop=asked.stops,
            client=client,
        )
        for prompt, room in [(prompt, _room(max_tokens, prompt, wanted or 1)) for prompt in prompts]
    ]


def check_length(asked: Asked, limit: int) -> None:
    """Refuse an answer longer than the server's limit.

    Raises:
        RefusalError: it is.
    """
    for name in ("max_tokens", "max_completion_tokens"):
        wanted = getattr(asked, name, None)
        if wanted is not None and wanted > limit:
            raise RefusalError(400, f"{name} = {wanted}: at most {limit} here.", code="too_many_tokens", param=name)


def header(asked: Asked, *, is_streamed: bool) -> dict[str, Any]:
    """The first fields of an answer, or of each event of its stream."""
    is_chat = isinstance(asked, ChatRequest)
    kind: Object = "text_completion" if not is_chat else "chat.completion.chunk" if is_streamed else "chat.completion"
    id_ = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return envelope(id_, kind, int(time.time()), asked.model)


async def collected(answers: Answers, asked: Asked) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ServingError: the engine failed.
    """
    texts, ends = [""] * len(answers.requests), dict[int, Finished]()
    async for index, event in answers.events():
        match event:
            case Piece(text=text):
                texts[index] += text
            case Finished():
                ends[index] = event
    is_chat = isinstance(asked, ChatRequest)
    choices = [choice(i, text, ends[i], is_chat=is_chat) for i, text in enumerate(texts)]
    return {**header(asked, is_streamed=False), "choices": choices, "usage": _usage(answers, list(ends.values()))}


async def streamed(
    answers: Answers, asked: Asked, refusal_of: Callable[[ServingError], RefusalError]
) -> AsyncIterator[str]:
    """The answer as server-sent events; one that fails on the way ends with an event that says so.

    Args:
        answers: submitted.
        asked: by the client.
        refusal_of: what the client is told about an engine's error.
    """
    is_chat, start = isinstance(asked, ChatRequest), header(asked, is_streamed=True)
    nothing_yet = {"usage": None} if asked.includes_usage else {}
    ends: list[Finished] = []

    def event(index: int, text: str | None, reason: str | None = None, *, is_first: bool = False) -> str:
        said = piece(index, text, reason, is_chat=is_chat, is_first=is_first)
        return _sent({**start, "choices": [said], **nothing_yet})

    if is_chat:
        yield event(0, "", is_first=True)
    try:
        async for index, happened in answers.events():
            match happened:
                case Piece(text=text):
                    yield event(index, text)
                case Finished(reason=reason):
                    ends.append(happened)
                    yield event(index, None, reason)
    except ServingError as error:
        yield _sent(refusal_of(error).as_dict())
        return
    if asked.includes_usage:
        yield _sent({**start, "choices": [], "usage": _usage(answers, ends)})
    yield "data: [DONE]\n\n"


def _room(max_tokens: int, prompt: Tokens, least: int) -> int:
    """The number of tokens that may follow a prompt.

    Raises:
        ServingError: it has no token, or leaves less room than this.
    """
    if not prompt:
        raise ServingError("The prompt has no token.")
    room = max_tokens - len(prompt)
    if room < least:
        raise TooLongError(
            f"The prompt has {len(prompt)} tokens and the answer {least}; there is room for {max_tokens}."
        )
    return room


def _usage(answers: Answers, ends: Sequence[Finished]) -> dict[str, int]:
    prompts = sum(len(request.prompt) for request in answers.requests if isinstance(request, Generate))
    return usage(prompts, sum(end.num_new_tokens for end in ends))


def _sent(value: dict[str, Any]) -> str:
    """One event; JSON's escapes leave no line break in it."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"


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
