"""A server's engine: requests of any thread, one thread that runs passes. It is what HTTP talks to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from fedpriv.config import BaseFormat
from fedpriv.models.serving import requests, sources
from fedpriv.models.serving._classification import Classification
from fedpriv.models.serving._engine import SharedBase
from fedpriv.models.serving._generation import Generation
from fedpriv.models.serving._jobs import PassCounter, ServingJob, Waiting, tell
from fedpriv.models.serving._texts import Tokenizing
from fedpriv.models.serving.sources import LoadedBase, Source, VariantMemory

log = logging.getLogger(__name__)

_CLOSED = "the server stopped before it had answered"


def open_serving(
    source: Path,
    *,
    memory_bytes: int,
    max_waiting: int,
    base_dtype: BaseFormat = "auto",
    model: str = "",
    check: Callable[[Collection[str]], None] = lambda names: None,
) -> Scheduler:
    """The variants in the folder of a run or in a store, ready to answer.

    Args:
        max_waiting: requests that no pass has begun with.
        base_dtype: of the frozen base; `auto` leaves it to the run's configuration.
        check: is told the names of the variants before the base is loaded; what it raises ends this.

    Raises:
        InputError, StoreError: the source cannot be served; see `sources.find` and `sources.load`.
    """
    found = sources.find(source, model=model)
    check(found.readers.keys())
    if base_dtype != "auto":
        found = replace(found, config=replace(found.config, base_dtype=base_dtype))
    return Scheduler(found, sources.load(found), requests.EngineLimits(memory_bytes=memory_bytes, waiting=max_waiting))


class Scheduler:
    """Answers requests for the variants of one model.

    Args:
        loaded: their base, which belongs to this scheduler from now on.

    Attributes:
        names: of the variants, `global` first where there is one, and last `BASE`, unless a variant has that name or
            the base can do nothing by itself.
        has_base: whether `BASE` is among them and means the base.
        labels: of a classifier, in the order of its probabilities; none for a causal model.
        embeds: whether they turn texts into vectors.
        origin: the folder that the variants are read from, for people.
        max_tokens: that a prompt and its answer may have together, or a text to classify.
        encode, encode_chat, encode_choice: the tokens of a text, of a chat up to its answer, and of an answer that is
            given as well; see `Tokenizing`.
        instructs: whether they were trained on prompts with responses.
    """

    def __init__(self, source: Source, loaded: LoadedBase, limits: requests.EngineLimits) -> None:
        like = source.like
        names = like.reading.encoder.names(loaded.tokenizer, pairs=False, max_length=like.reading.max_length)
        base = SharedBase(loaded.model, has_types="token_type_ids" in names)
        self._num_embeddings = base.num_embeddings
        self.task, self.labels = like.task, like.labels
        self.embeds = self.task == "SEQ_CLS" and base.embeds
        readers = dict(source.readers)
        self.has_base = requests.BASE not in readers and (self.embeds or self.task == "CAUSAL_LM")
        if self.has_base:
            readers[requests.BASE] = lambda _: base.no_variant
        self.names = tuple(readers)
        self.model_name, self.origin = like.model, source.origin
        most = like.reading.max_length if self.task == "SEQ_CLS" else limits.cached_tokens
        room = (most, base.most_positions, getattr(loaded.tokenizer, "model_max_length", None))
        self.max_tokens = min(tokens for tokens in room if tokens is not None)
        tokenizing = Tokenizing(
            loaded.tokenizer, self.model_name, like.reading.chat, self.max_tokens, cuts=self.task == "SEQ_CLS"
        )
        self.encode, self.encode_chat = tokenizing.encode, tokenizing.encode_chat
        self.encode_choice = tokenizing.encode_choice
        self.instructs = like.reading.instructs
        self._memory = VariantMemory(readers, base.weights, limits.memory_bytes)
        self._waiting = Waiting(limits.waiting)
        self._counter = PassCounter(base, self._memory, self._waiting, limits)
        self._desk: Classification | Generation = (
            Classification(self._counter)
            if self.task == "SEQ_CLS"
            else Generation(self._counter, loaded.tokenizer, loaded.ends)
        )
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="passes", daemon=True)
        self._thread.start()

    def submit(self, request: requests.Request, on_event: Callable[[requests.Event], None]) -> Ticket:
        """Put a request with those that wait; passes take up rows of all variants as they come.

        Args:
            on_event: is told each event, in order, from the engine's thread; must return at once and raise nothing.

        Raises, before it waits:
            UnknownVariantError: there is no such variant.
            TooLongError: it has more tokens than there is room for.
            BusyError: the queue is full, or the engine is closed.
            ServingError: a token or a text is none that the model reads, or a draw is not possible as asked.
        """
        # Looked up among known names alone: whatever a name holds, it never becomes a path.
        if request.variant not in self.names:
            raise requests.UnknownVariantError(f"there is no variant {request.variant[:100]!r}")
        if isinstance(request, requests.Generate) != (self.task == "CAUSAL_LM"):
            raise requests.ServingError(f"model {self.model_name} does not {type(request).__name__.lower()}")
        if isinstance(request, requests.Embed) and not self.embeds:
            raise requests.ServingError(f"model {self.model_name} pools no text into one vector")
        if isinstance(request, requests.Classify) and request.variant == requests.BASE and self.has_base:
            raise requests.ServingError("the base has no head that was trained for classes; ask it for embeddings")
        texts = (request.prompt,) if isinstance(request, requests.Generate) else request.texts
        further = _checked(request) if isinstance(request, requests.Generate) else 0
        for text in texts:
            self._check(text, further)
        job = ServingJob(request=request, texts=texts, on_event=on_event)
        self._waiting.add(job)
        return Ticket(job, self._waiting)

    def statistics(self) -> requests.Statistics:
        """At this moment."""
        passes = self._counter
        return requests.Statistics(
            num_waiting=self._waiting.num_new,
            num_passes=passes.num_passes,
            num_rows=passes.num_rows,
            num_variants_of_passes=passes.num_variants,
            **vars(self._memory.statistics),
        )

    def close(self) -> None:
        """Give up what is under way and free the memory."""
        self._is_closing.set()
        self._waiting.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while not self._is_closing.is_set():
            if self._desk.is_idle and not self._waiting.wait():
                break
            try:
                self._desk.step()
            except Exception:
                log.exception("a step has failed; what was under way is given up")
                self._desk.give_up(requests.ServingError("the server failed"))
        closed = requests.ServingError(_CLOSED)
        self._desk.give_up(closed)
        while (job := self._waiting.take()) is not None:
            tell(job, requests.Failed(error=closed))
        self._memory.clear()

    def _check(self, text: requests.Tokens, further: int) -> None:
        if not text:
            raise requests.ServingError("a text or prompt has no token")
        if len(text) + further > self.max_tokens:
            answer = f" and {further} for the answer" if further else ""
            raise requests.TooLongError(f"more than {self.max_tokens} tokens: the text has {len(text)} or more{answer}")
        if min(text) < 0 or max(text) >= self._num_embeddings:
            raise requests.ServingError(f"a token is none of the model's, which are 0 to {self._num_embeddings - 1}")


class Ticket:
    """A request under way."""

    def __init__(self, job: ServingJob, waiting: Waiting) -> None:
        self._job, self._waiting = job, waiting

    def cancel(self) -> None:
        """Give it up: nobody reads the answer. No event follows once this has returned, or one that is under way."""
        self._job.over = True
        self._waiting.remove(self._job)


def _checked(request: requests.Generate) -> int:
    """The most tokens of the answer."""
    if request.max_new_tokens < 1:
        raise requests.ServingError(f"max_new_tokens = {request.max_new_tokens}: must be at least 1")
    if not 0 <= request.temperature < float("inf"):
        raise requests.ServingError(f"temperature = {request.temperature}: must be at least 0")
    if request.top_k < 0:
        raise requests.ServingError(f"top_k = {request.top_k}: must be at least 0")
    if not 0 < request.top_p <= 1:
        raise requests.ServingError(f"top_p = {request.top_p}: must be above 0 and at most 1")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(request, name) <= 2:
            raise requests.ServingError(f"{name} = {getattr(request, name)}: must be at least -2 and at most 2")
    if not 0 <= (request.num_alternatives or 0) <= 20:
        raise requests.ServingError(f"num_alternatives = {request.num_alternatives}: must be at least 0 and at most 20")
    return request.max_new_tokens
