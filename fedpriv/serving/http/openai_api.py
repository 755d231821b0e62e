"""The requests and answers of OpenAI's API that this server knows, and one of the same kind for classifiers.

What is known and has no effect here is accepted at the value at which it has none; everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpriv.serving.http.refusals import RefusalError, shown
from fedpriv.serving.requests import Finished

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
    """How an answer is streamed.

    Attributes:
        include_usage: whether the last event tells the number of tokens.
    """

    include_usage: bool = False


class _Generation(_Strict):
    """What both ways of asking for text have in common."""

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


class Message(_Strict):
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

    messages: Annotated[list[Message], Field(min_length=1, max_length=512)]
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
    """What answers and the events of a stream begin with."""
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
