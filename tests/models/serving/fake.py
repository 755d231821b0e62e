"""An engine without a model: its answers follow from variant and text, and it is slow or fails when asked to.

    python -m tests.models.serving.fake SECONDS ARGUMENTS-OF-FEDPRIV-SERVE

serves as `fedpriv serve` does, in a process of its own: the engine alone is replaced.
"""

import hashlib
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedpriv.models.serving import requests
from fedpriv.models.serving.requests import Classify, Embed, Event, Generate, Piece, Request, ScoredToken, Statistics

NAMES = ("global", "client-0", "client-1", "round-3", "secret-variant")
LABELS = ("cardiology", "neurology", "urology")


def probabilities(variant: str, text: str) -> tuple[float, ...]:
    """What the fake classifier says."""
    raw = [1 + byte for byte in hashlib.sha256(f"{variant}\0{text}".encode()).digest()[: len(LABELS)]]
    return tuple(each / sum(raw) for each in raw)


def vector(variant: str, text: str) -> np.ndarray:
    """What the fake encoder says: of length 1."""
    raw = np.frombuffer(hashlib.sha256(f"{variant}\0{text}".encode()).digest(), np.uint8)[:8].astype(np.float32)
    return raw / np.linalg.norm(raw)


def words(variant: str, prompt: str, num: int) -> list[str]:
    """What the fake language model says."""
    return [f"{variant}:{prompt[-8:]}:{number} " for number in range(num)]


def scores(request: Generate, said: list[str], number: int) -> tuple[ScoredToken, ...]:
    """What the fake language model says of a word: it comes first of as many as were asked for."""
    if request.num_alternatives is None:
        return ()
    others = [
        (said[number] if not place else f"other-{place}", -0.5 - place) for place in range(request.num_alternatives)
    ]
    offset = sum(map(len, said[:number]))
    return (ScoredToken(text=said[number], log_probability=-0.5, offset=offset, alternatives=tuple(others)),)


@dataclass
class FakeTicket:
    """Remembers whether it was cancelled."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeServing:
    """Implements `Serving` with a thread for each request.

    Attributes:
        seconds: before each event.
        max_waiting: requests at once.
        damaged: variants that fail.
        tickets: of all requests, so far.
        asked: these requests.
        padding: spaces after each piece of text.
        broken: raise an error of the program itself.
        go: while it is not set, every answer waits.
    """

    task: Literal["SEQ_CLS", "CAUSAL_LM"] = "CAUSAL_LM"
    names: tuple[str, ...] = NAMES
    model_name: str = "fake-base"
    origin: str = "nowhere"
    has_base: bool = False
    max_tokens: int = 512
    seconds: float = 0.0
    max_waiting: int = 1000
    damaged: tuple[str, ...] = ()
    padding: int = 0
    broken: bool = False
    tickets: list[FakeTicket] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    finished: int = 0
    go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.labels = LABELS if self.task == "SEQ_CLS" else ()
        self.embeds = self.task == "SEQ_CLS"
        self._threads: list[threading.Thread] = []
        self.go.set()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        if messages[-1][0] != "user":
            raise requests.ServingError("The last message must be the user's.")
        return self.encode("|".join(f"{role}={content}" for role, content in messages))

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> FakeTicket:
        if self.broken:
            raise ZeroDivisionError("/srv/private/path of secret-variant")
        if request.variant not in self.names:
            raise requests.UnknownVariantError(request.variant)
        if isinstance(request, Classify | Embed) and any(len(text) > self.max_tokens for text in request.texts):
            raise requests.TooLongError("A text has too many tokens.")
        if sum(thread.is_alive() for thread in self._threads) >= self.max_waiting:
            raise requests.BusyError("full")
        ticket = FakeTicket()
        self.tickets.append(ticket)
        self.asked.append(request)
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(target=self._work, args=(request, ticket, on_event), daemon=True)
        self._threads.append(thread)
        thread.start()
        return ticket

    def statistics(self) -> Statistics:
        return Statistics(
            num_passes=3, num_rows=12, num_variants_of_passes=6, hits=self.finished, misses=2, bytes_read=7
        )

    def close(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    def _work(self, request: Request, ticket: FakeTicket, on_event: Callable[[Event], None]) -> None:
        for event in self._events(request):
            self.go.wait()
            if ticket.cancelled.wait(self.seconds) if self.seconds else ticket.cancelled.is_set():
                return
            on_event(event)
        self.finished += 1

    def _events(self, request: Request) -> Any:
        if request.variant in self.damaged:
            yield requests.Failed(error=requests.UnreadableVariantError(f"/srv/{request.variant}/blocks.3.npy"))
        elif isinstance(request, Classify):
            rows = tuple(probabilities(request.variant, bytes(text).decode()) for text in request.texts)
            yield requests.Classified(probabilities=rows, num_tokens=sum(map(len, request.texts)))
        elif isinstance(request, Embed):
            vectors = np.stack([vector(request.variant, bytes(text).decode()) for text in request.texts])
            yield requests.Embedded(vectors=vectors, num_tokens=sum(map(len, request.texts)))
        else:
            said = words(request.variant, bytes(request.prompt).decode(), request.max_new_tokens)
            for number, word in enumerate(said):
                yield Piece(text=word + " " * self.padding, tokens=scores(request, said, number))
            yield requests.Finished(reason="length", num_new_tokens=len(said))


@dataclass
class FakeCards:
    """Every variant costs 1, and each further one half."""

    def card(self, name: str) -> dict[str, Any]:
        bases = ["secret-variant", "global"] if name == "client-1" else []
        return {**self.together([name]), "accuracy": 0.8, "ancestors": {"num_uploads": 4, "bases": bases}, "run": {}}

    def together(self, names: Any) -> dict[str, Any]:
        return {"epsilon": 0.5 + 0.5 * len(set(names)), "delta": 1e-5, "unit": "record", "view": "local"}


def main() -> None:
    """Serve."""
    seconds, *arguments = sys.argv[1:]
    module = types.ModuleType("fedpriv.models.serving.scheduler")
    module.open_serving = lambda source, **options: FakeServing(seconds=float(seconds))  # type: ignore[attr-defined]
    sys.modules["fedpriv.models.serving.scheduler"] = module
    from fedpriv.cli.main import main as fedpriv

    fedpriv(["serve", *arguments])


if __name__ == "__main__":
    main()
