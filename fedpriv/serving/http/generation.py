"""From a request for text to the engine's, and from the engine's events to one answer or to a stream of them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fedpriv.serving.http import openai_api
from fedpriv.serving.http.answers import Answers
from fedpriv.serving.http.openai_api import ChatRequest, CompletionRequest, Object
from fedpriv.serving.http.refusals import RefusalError
from fedpriv.serving.requests import Finished, Generate, Piece, ServingError, Tokens, TooLongError

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
    """What the engine is asked.

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
    """What an answer, or each event of its stream, begins with."""
    is_chat = isinstance(asked, ChatRequest)
    kind: Object = "text_completion" if not is_chat else "chat.completion.chunk" if is_streamed else "chat.completion"
    id_ = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return openai_api.envelope(id_, kind, int(time.time()), asked.model)


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
    choices = [openai_api.choice(i, text, ends[i], is_chat=is_chat) for i, text in enumerate(texts)]
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
        said = openai_api.piece(index, text, reason, is_chat=is_chat, is_first=is_first)
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
    """How many tokens may follow a prompt.

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
    return openai_api.usage(prompts, sum(end.num_new_tokens for end in ends))


def _sent(value: dict[str, Any]) -> str:
    """One event; JSON's escapes leave no line break in it."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"
