"""Folders of finished runs with variants that are random, and what plain peft says of them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from fedpriv.config import RunConfig, parse, to_toml
from fedpriv.learning.adapters import lora
from fedpriv.learning.data.records import TextReading
from fedpriv.learning.training.workbench import load_model
from fedpriv.models.serving._engine import SharedBase
from fedpriv.models.serving.requests import Classify, EngineLimits, Event, Piece, Request
from fedpriv.models.serving.scheduler import Scheduler
from fedpriv.models.serving.sources import find, load
from fedpriv.models.variants import folders
from fedpriv.models.variants.folders import Described
from tests import stores

LABELS = ("cardiology", "dermatology", "neurology")


def save_run(folder: Path, values: dict[str, object], names: tuple[str, ...], *, scale: float = 0.3) -> Path:
    """A run's folder with random variants of its model; nothing was trained."""
    config = parse({"max_length": 32, "base_dtype": "float32", "device": "cpu", **values})
    labels = LABELS if config.task == "SEQ_CLS" else ()
    base, model = load_model(config, labels=labels)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    for number, name in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        shapes = {n: t.shape for n, t in get_peft_model_state_dict(model.peft_model).items()}
        tensors = {n: scale * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        path = folder / "variants" / name
        reading = TextReading.of(config).to_json()
        lora.save(model.peft_model, base, path, adapter=tensors, labels=labels, reading=reading)
        folders.describe(path, described(config, name))
    return folder


def described(config: RunConfig, name: str) -> Described:
    return stores.described(name, 0, architecture=config.model, epsilon_bound=0.0, utility_bound=0.0, deltas={})


def eventually(claim: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it holds within this time."""
    end = time.monotonic() + seconds
    while not claim() and time.monotonic() < end:
        time.sleep(0.01)
    return claim()


@contextmanager
def serving(folder: Path, **limits: int) -> Iterator[Scheduler]:
    """An engine of the variants in a folder."""
    source = find(folder)
    scheduler = Scheduler(source, load(source), replace(EngineLimits(), **limits))
    try:
        yield scheduler
    finally:
        scheduler.close()


class Asked:
    """A request and the events of its answer."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self.pieces: list[Piece] = []
        self.ticket = scheduler.submit(request, self._events.put)

    def next(self, seconds: float = 60.0) -> Event:
        return self._events.get(timeout=seconds)

    def last(self) -> Event:
        """The last event; pieces before it are kept."""
        while isinstance(event := self.next(), Piece):
            self.pieces.append(event)
        return event

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def is_silent(self) -> bool:
        return self._events.empty()


def to_classify(scheduler: Scheduler, variant: str, texts: Sequence[str]) -> Classify:
    """A request for texts, tokenised."""
    return Classify(variant=variant, texts=tuple(map(scheduler.encode, texts)))


def ask_classes(scheduler: Scheduler, variant: str, texts: Sequence[str]) -> Asked:
    """Submit it."""
    return Asked(scheduler, to_classify(scheduler, variant, texts))


def hold(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes the first pass of a classifier wait: (it has begun, let it go on)."""
    stopped, go = threading.Event(), threading.Event()
    classify = SharedBase.classify

    def waits(self: SharedBase, rows: Any, texts: Any) -> Any:
        stopped.set()
        assert go.wait(30)
        return classify(self, rows, texts)

    monkeypatch.setattr(SharedBase, "classify", waits)
    return stopped, go
