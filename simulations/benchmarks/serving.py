"""Many variants in shared passes of one base, compared with what plain peft offers for the same requests.

    python -m simulations.benchmarks.serving [--variants 50] [--requests 200] [--tokens 32 12] [--repeats 3]

MiniLM classifiers with random LoRA (r = 8 on query and value in all layers) and random heads; requests of one text each
for random variants, all given at once. The server's arm runs through its queue and thread, and tokenises as the others
do. Rivals: peft's `set_adapter`, a request at a time; peft's mixed batches (`adapter_names`) of 32; and the bare base
in batches of 32, which knows no variant. The arms take turns, and each ratio is of
the least times, since whatever else a machine does only adds to them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import get_peft_model_state_dict

from fedpriv.config import parse, to_toml
from fedpriv.learning import adapters
from fedpriv.learning.adapters import load_base, lora
from fedpriv.learning.training.workbench import load_model
from fedpriv.models.serving.requests import Classified, Classify, EngineLimits, Event, Generate, Piece
from fedpriv.models.serving.scheduler import Scheduler
from fedpriv.models.serving.sources import find, load
from fedpriv.models.variants import folders
from fedpriv.models.variants.composition import History
from simulations.benchmarks._measuring import alternate, claim, seconds_of

MINILM = "all-MiniLM-L6-v2"
LABELS = ("a", "b", "c", "d")
BATCH = 32
# Single tokens of MiniLM's vocabulary.
WORDS = ("patient", "pain", "chest", "skin", "head", "cough", "blood", "heart", "doctor", "night", "water", "sleep")
TARGETS = {"set_adapter": 2.0, "adapter_names": 1.2}

Ask = Callable[[int], None]
"""Sends the request of a number and returns once it is answered."""


@dataclass(frozen=True, kw_only=True)
class ServingQuery:
    """One request of a benchmark."""

    variant: str
    text: str


def make_run(folder: Path, num_variants: int, values: dict[str, object]) -> Path:
    """A run's folder with random variants; nothing is trained."""
    config = parse({"layers": "all", "rank": 8, "alpha": 16.0, "device": "cpu", **values})
    labels = LABELS if config.task == "SEQ_CLS" else ()
    base, model = load_model(config, labels=labels)
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model.peft_model).items()}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    for number in range(num_variants):
        generator = torch.Generator().manual_seed(number)
        tensors = {name: 0.03 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        path = folder / "variants" / f"client-{number}"
        lora.save(model.peft_model, base, path, adapter=tensors, labels=labels)
        described = folders.Described(
            name=path.name,
            architecture=config.model,
            utility=None,
            epsilon_bound=0.0,
            utility_bound=0.0,
            deltas={},
            history=History(name=path.name, ancestors=frozenset()),
        )
        folders.describe(path, described)
    return folder


@contextmanager
def served(run: Path, base_dtype: Literal["float32", "bfloat16"] = "float32", **limits: int) -> Iterator[Scheduler]:
    """An engine of the variants of a run."""
    source = find(run)
    source = replace(source, config=replace(source.config, base_dtype=base_dtype))
    scheduler = Scheduler(source, load(source), EngineLimits(**{"waiting": 10**6, **limits}))
    try:
        yield scheduler
    finally:
        scheduler.close()


def plain_peft(run: Path, model: str) -> Any:
    """One peft model with all variants of a run as its adapters."""
    saved = sorted((run / "variants").iterdir())
    plain = adapters.load(model, saved[0])
    for folder in saved:
        plain.load_adapter(str(folder), adapter_name=folder.name)
    return plain.eval()


def answer_all(serving: Scheduler, requests: Sequence[Classify | Generate]) -> list[list[Event]]:
    """All requests at once; their events."""
    events: list[list[Event]] = [[] for _ in requests]
    done = threading.Semaphore(0)

    def told(number: int, event: Event) -> None:
        events[number].append(event)
        if not isinstance(event, Piece):
            done.release()

    for number, request in enumerate(requests):
        serving.submit(request, partial(told, number))
    for _ in requests:
        done.acquire()
    return events


def queries(num: int, num_variants: int, num_tokens: int, seed: int = 0) -> list[ServingQuery]:
    """Random requests whose texts have so many tokens, the tokenizer's own two included."""
    generator = random.Random(seed)
    return [
        ServingQuery(
            variant=f"client-{generator.randrange(num_variants)}",
            text=" ".join(generator.choices(WORDS, k=num_tokens - 2)),
        )
        for _ in range(num)
    ]


def batches(asked: Sequence[ServingQuery]) -> Iterator[Sequence[ServingQuery]]:
    """Those of a mixed batch."""
    for first in range(0, len(asked), BATCH):
        yield asked[first : first + BATCH]


def rivals(run: Path) -> dict[str, Callable[[Sequence[ServingQuery]], Any]]:
    """{arm: answers requests}, without a server."""
    plain, bare = plain_peft(run, MINILM), load_base(MINILM, task="SEQ_CLS", num_labels=len(LABELS), normalize=True)

    def tokens(asked: Sequence[ServingQuery]) -> Any:
        return bare.tokenizer([query.text for query in asked], padding=True, return_tensors="pt")

    @torch.inference_mode()
    def one_by_one(asked: Sequence[ServingQuery]) -> list[Any]:
        found = []
        for query in asked:
            plain.set_adapter(query.variant)
            found.append(plain(**tokens([query])).logits[0])
        return found

    @torch.inference_mode()
    def mixed(asked: Sequence[ServingQuery]) -> None:
        for batch in batches(asked):
            plain(**tokens(batch), adapter_names=[query.variant for query in batch])

    @torch.inference_mode()
    def without_variants(asked: Sequence[ServingQuery]) -> None:
        for batch in batches(asked):
            bare.model(**tokens(batch))

    return {"set_adapter": one_by_one, "adapter_names": mixed, "bare base": without_variants}


def to_classify(serving: Scheduler, query: ServingQuery) -> Classify:
    """The server's request for a query, tokenised."""
    return Classify(variant=query.variant, texts=(serving.encode(query.text),))


def shared(serving: Scheduler, asked: Sequence[ServingQuery]) -> list[Any]:
    """The server's answers to requests."""
    requests = [to_classify(serving, query) for query in asked]
    return [events[-1] for events in answer_all(serving, requests)]


def difference(shared: Sequence[Classified], plain: Sequence[torch.Tensor]) -> float:
    """The largest difference of the logits less their mean, which probabilities tell."""
    found = torch.tensor([answer.probabilities[0] for answer in shared]).log()
    expected = torch.stack(list(plain)).log_softmax(dim=1)
    return float((found - expected).abs().max())


def throughput(run: Path, num_variants: int, num_requests: int, num_tokens: int, repeats: int) -> None:
    """Print the claims for texts of one length."""
    asked = queries(num_requests, num_variants, num_tokens)
    with served(run) as serving, served(run, "bfloat16") as in_bfloat16:
        of_arms: dict[str, Callable[[Sequence[ServingQuery]], Any]] = {
            "shared": partial(shared, serving),
            **rivals(run),
            "shared, bfloat16": partial(shared, in_bfloat16),
        }
        largest = difference(of_arms["shared"](asked[:50]), of_arms["set_adapter"](asked[:50]))
        taken = alternate({name: partial(arm, asked) for name, arm in of_arms.items()}, repeats)
    least = {name: min(times) / len(asked) for name, times in taken.items()}
    shown = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in least.items())
    print(f"{num_tokens} tokens, ms a request: {shown}; largest difference of log-probabilities {largest:.1e}")
    for name in ("set_adapter", "adapter_names", "bare base", "shared, bfloat16"):
        ratio = least[name] / least["shared"]
        text = f"throughput of shared passes / {name}, {num_variants} variants, {num_tokens} tokens, float32"
        claim(text, at_least=TARGETS.get(name) if num_tokens == 32 else None, ratio=ratio)
    claim("largest difference of log-probabilities", holds=largest <= 1e-4, value=largest)


def latencies(ask: Ask, num_clients: int, num_requests: int) -> list[float]:
    """Seconds of each request of clients that ask again as soon as they are answered, ascending.

    Args:
        ask: called from `num_clients` threads, with numbers from 0.
        num_clients: at once.
        num_requests: of all clients.
    """
    found: list[float] = []
    numbers = iter(range(num_requests))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            taken = seconds_of(ask, number)
            with lock:
                found.append(taken)

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def latency(run: Path, num_variants: int, num_requests: int, num_clients: int = 20) -> None:
    """Print latencies at many clients at once, through the engine without HTTP."""
    asked = queries(num_requests, num_variants, 32, seed=1)
    with served(run) as serving:

        def ask(number: int) -> None:
            answer_all(serving, [to_classify(serving, asked[number])])

        found = latencies(ask, num_clients, len(asked))
        at_work = serving.statistics()
    shown = ", ".join(f"p{share} {1e3 * found[len(found) * share // 100]:.0f} ms" for share in (50, 90, 99))
    mean = at_work.num_rows / at_work.num_passes
    print(f"{num_clients} clients, 32 tokens: {shown}; {mean:.1f} rows a pass, {len(asked)} requests")


def main() -> None:
    """Print a line for each setting and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32, 12])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", arguments.variants, {"model": MINILM})
        latency(run, arguments.variants, 2 * arguments.requests)
        for num_tokens in arguments.tokens:
            throughput(run, arguments.variants, arguments.requests, num_tokens, arguments.repeats)


if __name__ == "__main__":
    main()
