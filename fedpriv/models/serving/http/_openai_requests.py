"""The requests of OpenAI's API that this server knows, and one of the same kind for classes.

What asks for nothing is accepted: a parameter at the value at which it has no effect, and one that is null or empty.
Everything else is refused by name. A refusal names the parameter, its value where that is one number or word, and the
limit.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.refusals import RefusalError, shown
from fedpriv.models.serving.requests import Generate, ServingError, Tokens, TooLongError

# The most likely tokens that are told for each token of an answer, as OpenAI's API allows.
_MOST_OF_A_CHAT, _MOST_OF_A_COMPLETION = 20, 5

# Log-probabilities that count as one input of a request: those of all its answers are about as long as its texts.
_SCORES_OF_AN_INPUT = 256

# OpenAI's own defaults: of `temperature`, and of `max_tokens` for a bare prompt.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16
_PARAMETER, _SUBJECT = re.compile(r"[a-z0-9_.]{1,100}"), re.compile(r"^(Input|String|List) should")

# Values at which a parameter of OpenAI's API, or of vLLM's, asks for nothing that this server does not do anyway.
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "include_obfuscation": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "seed": (-1,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "top_k": (-1,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}

# What is right, in the words of JSON, by the error of a value of another kind.
_RIGHT = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def _as_list(value: Any) -> Any:
    """One text stands for a list of it: errors then name the parameter, not one of two ways to write it."""
    return [value] if isinstance(value, str) else value


def _as_lists(value: Any) -> Any:
    return [value] if isinstance(value, list) and all(isinstance(each, str) for each in value) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_whole(value: Any) -> Any:
    """JSON has one kind of number, and some clients write every one with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_idle(name: str, value: Any, *, is_known: bool) -> bool:
    """Whether a field asks for nothing; a truth value is none of the numbers that it equals."""
    idle = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _IDLE.get(name, ()))
    return idle or (not is_known and (value is None or value in ("", [], {})))


Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1), BeforeValidator(_as_list)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Stops = Annotated[list[Stop], Field(max_length=4), BeforeValidator(_as_list)]
Count = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(_as_whole)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel):
    """Nothing is converted, no field is unknown, no number is infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _asking(cls, fields: Any) -> Any:
        """The fields without those that ask for nothing."""
        if not isinstance(fields, dict):
            return fields
        known = cls.model_fields
        return {name: value for name, value in fields.items() if not _is_idle(name, value, is_known=name in known)}


class ModelRequest(_Strict):
    """The field that all requests have in common."""

    model: Name


class StreamOptions(_Strict):
    """The form of a streamed answer: whether its last event tells the number of tokens."""

    include_usage: bool = False


class _Generation(ModelRequest):
    """The fields that both requests for text have in common."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stops | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def answers_each(self) -> int:
        """Answers to a prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: Texts
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_OF_A_COMPLETION)] | None = None
    suffix: None = None

    @property
    def num_alternatives(self) -> int | None:
        """Likeliest tokens to tell with each token of an answer; None tells no log-probability."""
        return self.logprobs


class TextPart(_Strict):
    """A part of a message; there are no others than text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]
    name: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        """OpenAI's API writes null as the content of an answer that has no text."""
        is_empty = isinstance(fields, dict) and fields.get("role") == "assistant" and fields.get("content", "") is None
        return {**fields, "content": ""} if is_empty else fields

    @property
    def as_pair(self) -> tuple[str, str]:
        """Role and content; templates know `developer` as `system`."""
        return ("system" if self.role == "developer" else self.role), "".join(part.text for part in self.content)


class TextFormat(_Strict):
    """Any text: no answer is held to JSON or to a schema."""

    type: Literal["text"]


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=512)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_OF_A_CHAT)] | None = None
    response_format: TextFormat | None = None

    @property
    def num_alternatives(self) -> int | None:
        """Likeliest tokens to tell with each token of an answer; None tells no log-probability."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ClassifyRequest(ModelRequest):
    """`POST /v1/classify`; of a language model with the choices of all texts, or of each, of which it finds one."""

    input: Texts
    user: Annotated[str, Field(max_length=512)] | None = None
    choices: Annotated[list[list[Text]], Field(min_length=1), BeforeValidator(_as_lists)] | None = None


class EmbeddingRequest(ClassifyRequest):
    """`POST /v1/embeddings`."""

    choices: None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


Asked = CompletionRequest | ChatRequest
Shape = TypeVar("Shape", bound=ModelRequest)


def parsed(shape: type[Shape], body: bytes) -> Shape:
    """The request in a body; a RefusalError names the first thing that is wrong in what is none."""
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise RefusalError(400, f"The body: {first['msg']}.", code="invalid_json")
    where = ".".join(map(str, first["loc"]))
    is_name = _PARAMETER.fullmatch(where)
    if first["type"] == "extra_forbidden":
        message, param = f"{shown(where)}: this server does not know it; leave it out.", where if is_name else None
        raise RefusalError(400, message, code="unknown_parameter", param=param)
    name = where if is_name else shown(where) if where else "The body"
    raise RefusalError(400, f"{name}{_wrong(first)}.", code="invalid_value", param=where[:100] or None)


def _wrong(error: ErrorDetails) -> str:
    """The value, where it is short, and the right ones."""
    value, context = error["input"], error.get("ctx", {})
    if error["type"] == "too_long" and not context["max_length"]:
        return ": this server takes none; leave it out"
    if error["type"] == "too_long":
        return f" has {context['actual_length'] or 'too many'} entries: at most {context['max_length']}"
    if error["type"] == "missing":
        return ": is missing"
    # Python writes no integer of thousands of digits.
    is_short = isinstance(value, (str, float, bool)) or (isinstance(value, int) and value.bit_length() < 64)
    said = f" = {shown(value) if isinstance(value, str) else json.dumps(value)}" if is_short else ""
    if error["type"] == "list_type":
        return f"{said}: must be a {'list' if error['loc'][-1] == 'messages' else 'text or a list'}"
    if error["type"] == "literal_error":
        right = re.sub("True|False|None", lambda word: _WORDS[word[0]], context["expected"])
        return f"{said}: must be {right}"
    return f"{said}: {_RIGHT.get(error['type']) or _SUBJECT.sub('must', error['msg'])}"


def checked(asked: Asked, limits: RequestLimits) -> int:
    """The number of inputs that a request counts for: answers, or more for many scores; RefusalError beyond limits."""
    for name in ("max_tokens", "max_completion_tokens"):
        wanted = getattr(asked, name, None)
        if wanted is not None and wanted > limits.max_new_tokens:
            message = f"{name} = {wanted}: at most {limits.max_new_tokens} here."
            raise RefusalError(400, message, code="too_many_tokens", param=name)
    if asked.stream_options is not None and not asked.stream:
        raise RefusalError(400, "stream_options: only with stream.", code="invalid_value", param="stream_options")
    if isinstance(asked, ChatRequest) and asked.top_logprobs is not None and not asked.logprobs:
        message = f"top_logprobs = {asked.top_logprobs}: only with logprobs = true."
        raise RefusalError(400, message, code="invalid_value", param="top_logprobs")
    num_prompts = 1 if isinstance(asked, ChatRequest) else len(asked.prompt)
    num_answers = num_prompts * asked.answers_each
    if num_answers > limits.num_inputs:
        message = f"n = {asked.answers_each}: {num_answers} answers in all; at most {limits.num_inputs}."
        raise RefusalError(400, message, code="too_many_inputs", param="n")
    if asked.num_alternatives is None:
        return num_answers
    wanted, usual = _lengths(asked, limits.max_new_tokens)
    num_scores = num_answers * (wanted or usual) * (1 + asked.num_alternatives)
    if num_scores > (most := limits.num_inputs * _SCORES_OF_AN_INPUT):
        name = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
        message = (
            f"{name} = {asked.num_alternatives}: {num_scores} log-probabilities, of {num_answers} answers of up to "
            f"{wanted or usual} tokens; at most {most}."
        )
        raise RefusalError(400, message, code="too_many_inputs", param=name)
    return max(num_answers, -(-num_scores // _SCORES_OF_AN_INPUT))


def engine_requests(
    asked: Asked, prompts: Sequence[Tokens], *, limit: int, max_tokens: int, client: str = ""
) -> list[Generate]:
    """The requests to the engine: the answers of the first prompt, then those of the next.

    The first answer of a prompt is drawn with the seed that was given, as if it were the only one, and each further one
    with the next seed.

    Args:
        limit: new tokens of an answer.
        max_tokens: of a prompt and its answer.

    Raises:
        TooLongError: a prompt leaves no room for an answer, or not for as many tokens as it asks for.
        ServingError: a prompt has no token.
    """
    wanted, usual = _lengths(asked, limit)
    return [
        Generate(
            variant=asked.model,
            prompt=prompt,
            max_new_tokens=wanted or min(usual, room),
            temperature=_TEMPERATURE if asked.temperature is None else asked.temperature,
            top_k=asked.top_k or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            num_alternatives=asked.num_alternatives,
            seed=None if asked.seed is None else asked.seed + number,
            stop=tuple(asked.stop or ()),
            client=client,
        )
        for prompt, room in [(prompt, _room(max_tokens, prompt, wanted or 1)) for prompt in prompts]
        for number in range(asked.answers_each)
    ]


def _lengths(asked: Asked, limit: int) -> tuple[int | None, int]:
    """The tokens of an answer that were asked for, and those that it may have if none were."""
    if isinstance(asked, ChatRequest):
        return asked.max_completion_tokens or asked.max_tokens, limit
    return asked.max_tokens, min(limit, _COMPLETION_TOKENS)


def _room(max_tokens: int, prompt: Tokens, least: int) -> int:
    """The number of tokens that may follow a prompt."""
    if not prompt:
        raise ServingError("The prompt has no token.")
    room = max_tokens - len(prompt)
    if room < least:
        raise TooLongError(
            f"The prompt has {len(prompt)} tokens and the answer {least}; there is room for {max_tokens}."
        )
    return room
