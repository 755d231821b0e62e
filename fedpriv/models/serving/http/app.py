"""The application: which address answers what, for whom. `Entrance` has decided what may be asked at all."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from fedpriv.models.serving.http._openai_answers import (
    Answers,
    EventStream,
    chosen,
    classified,
    collected,
    embedded,
    streamed,
    unless_hung_up,
)
from fedpriv.models.serving.http._openai_requests import (
    Asked,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    Shape,
    checked,
    engine_requests,
    parsed,
)
from fedpriv.models.serving.http.cards import PUBLIC_BASE, Catalogue
from fedpriv.models.serving.http.limits import (
    CONTENT_TYPE,
    Entrance,
    InFlight,
    RequestLimits,
    ServerMetrics,
    ThreadTurns,
)
from fedpriv.models.serving.http.refusals import RefusalError, of_engine
from fedpriv.models.serving.http.tokens import ANYONE, Token, Tokens
from fedpriv.models.serving.requests import Classified, Classify, Embed, Embedded, Generate, ServingError
from fedpriv.models.serving.requests import Request as EngineRequest
from fedpriv.models.serving.requests import Tokens as Encoded

if TYPE_CHECKING:
    from fedpriv.models.serving.http.cards import Cards
    from fedpriv.models.serving.scheduler import Scheduler

T = TypeVar("T")

_Chat = tuple[tuple[str, str], ...]
"""A role and a content each."""

_ENDPOINTS = {"CAUSAL_LM": "/v1/completions or /v1/chat/completions", "SEQ_CLS": "/v1/classify"}

_Of = TypeVar("_Of", Classified, Embedded)


def create_app(
    serving: Scheduler, cards: Cards, tokens: Tokens, limits: RequestLimits, aliases: Mapping[str, str] | None = None
) -> FastAPI:
    """The ASGI application of a server, with {other name: variant}; InputError if an alias cannot stand for its one."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    in_flight = InFlight(limits.requests_per_token, limits.inputs_per_token)
    metrics = ServerMetrics(serving.statistics, lambda: in_flight.num_requests)
    app.add_middleware(Entrance, tokens=tokens, limits=limits, in_flight=in_flight, metrics=metrics)
    _Routes(serving, Catalogue(serving, aliases or {}), cards, limits, metrics).add_to(app)
    app.add_exception_handler(RefusalError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_exception_handler(Exception, _failed)
    return app


class _Routes:
    def __init__(
        self, serving: Scheduler, catalogue: Catalogue, cards: Cards, limits: RequestLimits, metrics: ServerMetrics
    ) -> None:
        self._serving, self._catalogue, self._cards, self._limits = serving, catalogue, cards, limits
        self._metrics = metrics
        # Costs wait for each other, never a request for an answer.
        self._texts, self._accountant = ThreadTurns("texts"), ThreadTurns("costs")

    def add_to(self, app: FastAPI) -> None:
        """Add them."""
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("GET", "/", self.page),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/v1/reader", self.reader),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/classify", self.classify),
            ("POST", "/v1/embeddings", self.embeddings),
        )
        for method, path, endpoint in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def page(self) -> Response:
        """The page: the same for everybody."""
        return Response(page_content(), media_type="text/html", headers={"Content-Security-Policy": page_policy()})

    async def health(self) -> Response:
        """Whether the server accepts requests, and nothing else, since a stranger may ask."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The metrics for Prometheus, for tokens that may read them."""
        if not _token(request).metrics:
            raise RefusalError(403, "This token may not read metrics.", code="no_metrics")
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """The variants that the token may use."""
        data = self._catalogue.entries(_token(request))
        labels = {"labels": list(self._serving.labels)} if self._serving.labels else {}
        task = {"task": self._serving.task, "base_model": self._serving.model_name, **labels}
        return JSONResponse({"object": "list", "data": data, **task})

    async def model(self, request: Request) -> Response:
        """The card of a variant; with `?with=NAME,NAME`, also the cost of reading all of them together."""
        token, name = _token(request), _name_in_path(request)
        others = [other for value in request.query_params.getlist("with") for other in value.split(",")]
        variant, *further = [self._catalogue.resolve(token, each) for each in (name, *others)]
        card = {**self._catalogue.entry(name), **await self._card(request, variant)}
        if others:
            names = sorted({variant, *further})
            card["together"] = {"models": names, **await self._together(request, names)}
        return JSONResponse(card)

    async def _card(self, request: Request, variant: str) -> Mapping[str, Any]:
        if self._catalogue.is_base(variant):
            return PUBLIC_BASE
        card = await self._computed(request, lambda: self._cards.card(variant))
        # A base of a variant may be one that the token may not know of.
        bases = card["ancestors"]["bases"]
        seen = [base for base in bases if self._catalogue.may(_token(request), base)]
        return {**card, "ancestors": {**card["ancestors"], "bases": seen, "num_bases": len(bases)}}

    async def _together(self, request: Request, names: Sequence[str]) -> Mapping[str, Any]:
        """The cost of reading these variants; the base adds nothing to it."""
        trained = [name for name in names if not self._catalogue.is_base(name)]
        if names and not trained:
            return PUBLIC_BASE
        return await self._computed(request, lambda: self._cards.together(trained))

    async def reader(self, request: Request) -> Response:
        """The cost of reading all variants that the token may use."""
        names = self._catalogue.allowed(_token(request))
        cost = await self._together(request, names)
        return JSONResponse({"object": "reader", "token": _token(request).name, "models": names, **cost})

    async def classify(self, request: Request) -> Response:
        """Labels with probabilities, for each text."""
        asked = await self._resolved(request, ClassifyRequest)
        if asked.choices is not None or self._serving.task != "SEQ_CLS":
            return await self._chosen(request, asked)
        found = await self._of_texts(request, asked, Classify, Classified)
        rows = [dict(zip(self._serving.labels, row, strict=True)) for row in found.probabilities]
        return JSONResponse(classified(asked.model, rows, found.num_tokens))

    async def _chosen(self, request: Request, asked: ClassifyRequest) -> Response:
        """The likeliest of a text's choices, for each text, by a language model."""
        if asked.choices is None or self._serving.task == "SEQ_CLS" or not self._serving.instructs:
            self._check_task("SEQ_CLS")
            message = "choices: are for language models; those here classify texts by labels of their own."
            raise RefusalError(400, message, code="wrong_task", param="choices")
        choices = asked.choices * len(asked.input) if len(asked.choices) == 1 else asked.choices
        if len(choices) != len(asked.input) or any(
            len({c.strip() for c in own} - {""}) < max(2, len(own)) for own in choices
        ):
            message = "choices: a list for all texts, or one for each, of two or more texts, none twice and none empty."
            raise RefusalError(400, message, code="invalid_value", param="choices")
        self._check_inputs(num := sum(map(len, choices)), "choices")
        request.scope["count_inputs"](num)
        pairs = [(text, choice) for text, own in zip(asked.input, choices, strict=True) for choice in own]
        works = [partial(self._serving.encode_choice, *pair) for pair in pairs]
        tokens = await self._at_turns(request, asked.model, works)
        if (longest := max(len(choice) for _, choice in tokens)) > (limit := self._limits.max_new_tokens):
            message = f"choices: one has {longest} tokens; at most {limit} here."
            raise RefusalError(400, message, code="too_many_tokens", param="choices")
        of_all: dict[str, Any] = {"variant": asked.model, "num_alternatives": 0, "client": _client(request)}
        made = [Generate(prompt=text, forced=own, max_new_tokens=len(own), **of_all) for text, own in tokens]
        answers = self._submitted(asked.model, lambda: made)
        found, num_tokens = await self._answered(request, answers, asked.model, chosen(answers, choices))
        return JSONResponse(classified(asked.model, found, num_tokens))

    async def embeddings(self, request: Request) -> Response:
        """A vector for each text."""
        asked = await self._resolved(request, EmbeddingRequest)
        found = await self._of_texts(request, asked, Embed, Embedded)
        if asked.dimensions not in (None, width := found.vectors.shape[1]):
            message = f"dimensions = {asked.dimensions}: vectors of this model have {width}; leave it out."
            raise RefusalError(400, message, code="invalid_value", param="dimensions")
        return JSONResponse(embedded(asked.model, found, asked.encoding_format))

    async def _of_texts(
        self, request: Request, asked: ClassifyRequest, wanted: type[Classify | Embed], answer: type[_Of]
    ) -> _Of:
        self._check_inputs(len(asked.input), "input")
        self._check_task("SEQ_CLS")
        if wanted is Embed and not self._serving.embeds:
            message = "The models here pool no text into one vector: POST /v1/classify."
            raise RefusalError(400, message, code="wrong_task", param="model")
        request.scope["count_inputs"](len(asked.input))
        texts = await self._encoded(request, asked.model, asked.input)
        made = wanted(variant=asked.model, texts=texts, client=_client(request))
        answers = self._submitted(asked.model, lambda: [made])
        return await self._answered(request, answers, asked.model, _first(answers, answer))

    async def completions(self, request: Request) -> Response:
        """Prompts continued."""
        asked = await self._resolved(request, CompletionRequest)
        self._check_inputs(len(asked.prompt), "prompt")
        return await self._generated(request, asked)

    async def chat(self, request: Request) -> Response:
        """A chat's next turn."""
        return await self._generated(request, await self._resolved(request, ChatRequest))

    async def _generated(self, request: Request, asked: Asked) -> Response:
        num_inputs = checked(asked, self._limits)
        self._check_task("CAUSAL_LM")
        request.scope["count_inputs"](num_inputs)
        said = [tuple(m.as_pair for m in asked.messages)] if isinstance(asked, ChatRequest) else asked.prompt
        prompts = await self._encoded(request, asked.model, said)
        limit, most = self._limits.max_new_tokens, self._serving.max_tokens
        answers = self._submitted(
            asked.model, lambda: engine_requests(asked, prompts, limit=limit, max_tokens=most, client=_client(request))
        )
        if asked.stream:
            return EventStream(answers, streamed(answers, asked, lambda error: of_engine(error, asked.model)))
        return JSONResponse(await self._answered(request, answers, asked.model, collected(answers, asked)))

    async def _resolved(self, request: Request, shape: type[Shape]) -> Shape:
        """The request in the body, with the name of the variant for which its model stands."""
        body = await request.body()
        asked = await self._texts.run(_token(request).name, lambda: parsed(shape, body))
        return asked.model_copy(update={"model": self._catalogue.resolve(_token(request), asked.model)})

    async def _encoded(self, request: Request, name: str, said: Sequence[str | _Chat]) -> tuple[Encoded, ...]:
        """The tokens of texts or chats."""
        encode, encode_chat = self._serving.encode, self._serving.encode_chat
        works = [partial(encode, each) if isinstance(each, str) else partial(encode_chat, each) for each in said]
        return await self._at_turns(request, name, works)

    async def _at_turns(self, request: Request, name: str, works: Sequence[Callable[[], T]]) -> tuple[T, ...]:
        """The results of works on texts, each at a turn of the token's own."""

        async def all_of_them() -> tuple[T, ...]:
            return tuple([await self._texts.run(_token(request).name, work) for work in works])

        try:
            return await unless_hung_up(request.receive, all_of_them())
        except ServingError as error:
            raise of_engine(error, name) from None

    def _submitted(self, name: str, make: Callable[[], Sequence[EngineRequest]]) -> Answers:
        try:
            answers = Answers(make())
            answers.submit_to(self._serving)
        except ServingError as error:
            raise of_engine(error, name) from None
        return answers

    async def _answered(self, request: Request, answers: Answers, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, unless the client leaves; then, or if it fails, nothing goes on for it."""
        try:
            return await unless_hung_up(request.receive, work)
        except ServingError as error:
            raise of_engine(error, name) from None
        finally:
            answers.cancel()

    async def _computed(self, request: Request, compute: Callable[[], T]) -> T:
        """Compute apart from the event loop what may take seconds, at a turn of the token's own."""
        return await unless_hung_up(request.receive, self._accountant.run(_token(request).name, compute))

    def _check_inputs(self, num_inputs: int, param: str) -> None:
        if num_inputs > (most := self._limits.num_inputs):
            raise RefusalError(
                400, f"{param}: {num_inputs} texts; at most {most}.", code="too_many_inputs", param=param
            )

    def _check_task(self, task: str) -> None:
        if self._serving.task != task:
            kind = "classify texts" if self._serving.task == "SEQ_CLS" else "continue texts"
            message = f"The models here {kind}: POST {_ENDPOINTS[self._serving.task]}."
            raise RefusalError(400, message, code="wrong_task", param="model")


async def _first(answers: Answers, kind: type[_Of]) -> _Of:
    async for _, event in answers.events():
        if isinstance(event, kind):
            return event
    raise ServingError("The engine ended without an answer.")


def _token(request: Request) -> Token:
    token: Token = request.scope["token"]
    return token


def _name_in_path(request: Request) -> str:
    """The model's name to its last character; the route's own pattern leaves out a line break at the end."""
    path: str = request.scope["path"]
    return path.removeprefix("/v1/models/")


def _client(request: Request) -> str:
    """The name by which callers take turns at the engine; empty on a server without tokens."""
    token = _token(request)
    return "" if token is ANYONE else token.name


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    request.scope["refused"] = error.code
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    code, message = ("wrong_method", "This address takes another method.")
    if status == 404:
        code, message = "not_found", "There is nothing at this address."
    headers = dict(getattr(error, "headers", None) or {})
    return await _refused(request, RefusalError(status, message, code=code, headers=headers))


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    """An error of this program. The server's own log has the traceback; the client learns that it happened."""
    return await _refused(request, RefusalError(500, "The server failed; its log says why.", code="internal_error"))


@cache
def page_content() -> bytes:
    """The page at `/`, which needs no network; the same for everybody, so it says nothing of the variants."""
    return (resources.files("fedpriv.models.serving.http") / "page.html").read_bytes()


@cache
def page_policy() -> str:
    """The Content-Security-Policy of the page: its own style and script, by digest, and requests to this server."""
    text = page_content().decode()
    style, script = (_digests(text, tag) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(text: str, tag: str) -> str:
    """The digests of what stands between the tags, as the policy writes them."""
    inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inner)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
