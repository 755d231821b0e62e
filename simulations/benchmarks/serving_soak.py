"""Random requests for many minutes over variants that do not all fit into a server's memory.

    python -m simulations.benchmarks.serving_soak [--minutes 10] [--variants 50]

The resident set and the hit rate, beside that of an independent least-recently-used memory, are printed, and every
answer is compared with plain peft's. Model and variants are those of `simulations.benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedpriv.models.serving.requests import Classified
from simulations.benchmarks.serving import (
    MINILM,
    ServingQuery,
    answer_all,
    make_run,
    queries,
    rivals,
    served,
    to_classify,
)


def soak(run: Path, num_variants: int, minutes: float, num_clients: int = 4) -> list[dict[str, Any]]:
    """The claims for random requests over variants that do not fit into memory."""
    texts = [query.text for query in queries(4, num_variants, 16, seed=2)]
    plain = rivals(run)["set_adapter"]
    expected = {
        (number, place): found.softmax(dim=0)
        for number in range(num_variants)
        for place, found in enumerate(plain([ServingQuery(variant=f"client-{number}", text=text) for text in texts]))
    }
    del plain
    generator = random.Random(3)
    with served(run) as serving:
        answer_all(serving, [to_classify(serving, ServingQuery(variant="client-0", text=texts[0]))])
        of_one = serving.statistics().bytes_in_memory
    room = num_variants // 3
    ends, next_print, wrong, num = time.monotonic() + 60 * minutes, 0.0, 0, 0
    lru = _Lru(room)
    resident: list[float] = []
    with served(run, memory_bytes=room * of_one + of_one // 2) as serving:
        while time.monotonic() < ends:
            # A few are asked for much more often than others.
            chosen = [min(int(generator.expovariate(4 / num_variants)), num_variants - 1) for _ in range(num_clients)]
            places = [generator.randrange(len(texts)) for _ in chosen]
            lru.ask(chosen)
            asked = [ServingQuery(variant=f"client-{n}", text=texts[p]) for n, p in zip(chosen, places, strict=True)]
            requests = [to_classify(serving, query) for query in asked]
            for number, place, events in zip(chosen, places, answer_all(serving, requests), strict=True):
                found = events[-1]
                assert isinstance(found, Classified), found
                wrong += not torch.allclose(torch.tensor(found.probabilities[0]), expected[number, place], atol=1e-5)
                num += 1
            if time.monotonic() >= next_print:
                next_print = time.monotonic() + max(6 * minutes, 0.5)
                resident.append(_resident_mb())
                done = serving.statistics()
                rate = done.hits / max(1, done.hits + done.misses)
                print(
                    f"{num} requests: resident set {resident[-1]:.1f} MB, variants "
                    f"{done.bytes_in_memory / 1e6:.1f} MB, hit rate {rate:.4f}, predicted {lru.hits / lru.asked:.4f}",
                    flush=True,
                )
        done = serving.statistics()
    rate, predicted = done.hits / (done.hits + done.misses), lru.hits / lru.asked
    # The first tenth warms up: allocators keep what passes of the first shapes took.
    growth = resident[-1] - resident[min(1, len(resident) - 1)]
    return [
        {"claim": "hit rate less predicted", "value": rate - predicted, "met": abs(rate - predicted) <= 0.02},
        {"claim": "growth of the resident set, MB", "value": growth, "met": growth <= 10},
        {"claim": "answers that are not plain peft's", "value": wrong, "of": num, "met": wrong == 0},
    ]


class _Lru:
    """The hit rate of a memory of so many variants."""

    def __init__(self, room: int) -> None:
        self._room, self._held = room, OrderedDict[int, None]()
        self.hits, self.asked = 0, 0

    def ask(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.asked += 1
            self.hits += number in self._held
            self._held[number] = None
            self._held.move_to_end(number)
            if len(self._held) > self._room:
                self._held.popitem(last=False)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main() -> None:
    """Print a line for each tenth of the time and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", arguments.variants, {"model": MINILM})
        for line in soak(run, arguments.variants, arguments.minutes):
            print(json.dumps(line))


if __name__ == "__main__":
    main()
