"""Random requests for many minutes over variants that do not all fit into a server's memory.

    python -m simulations.benchmarks.serving_soak [--minutes 10] [--variants 50]

The resident set and the hit rate, beside that of an independent least-recently-used memory, are printed, and every
answer is compared with plain peft's. Model and variants are those of `simulations.benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from pathlib import Path

import torch

from fedpriv.models.serving.requests import Classified
from simulations.benchmarks._measuring import claim, resident
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


def soak(run: Path, num_variants: int, minutes: float, num_clients: int = 4) -> None:
    """Print the claims for random requests over variants that do not fit into memory."""
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
    lru = functools.lru_cache(room)(abs)
    megabytes: list[float] = []
    with served(run, memory_bytes=room * of_one + of_one // 2) as serving:
        while time.monotonic() < ends:
            # A few are asked for much more often than others.
            chosen = [min(int(generator.expovariate(4 / num_variants)), num_variants - 1) for _ in range(num_clients)]
            places = [generator.randrange(len(texts)) for _ in chosen]
            for number in chosen:
                lru(number)
            asked = [ServingQuery(variant=f"client-{n}", text=texts[p]) for n, p in zip(chosen, places, strict=True)]
            requests = [to_classify(serving, query) for query in asked]
            for number, place, events in zip(chosen, places, answer_all(serving, requests), strict=True):
                found = events[-1]
                assert isinstance(found, Classified), found
                wrong += not torch.allclose(torch.tensor(found.probabilities[0]), expected[number, place], atol=1e-5)
                num += 1
            if time.monotonic() >= next_print:
                next_print = time.monotonic() + max(6 * minutes, 0.5)
                megabytes.append(resident() / 1e6)
                done = serving.statistics()
                rate, predicted = done.hits / max(1, done.hits + done.misses), lru.cache_info().hits / num
                print(
                    f"{num} requests: resident set {megabytes[-1]:.1f} MB, variants "
                    f"{done.bytes_in_memory / 1e6:.1f} MB, hit rate {rate:.4f}, predicted {predicted:.4f}",
                    flush=True,
                )
        done = serving.statistics()
    rate, predicted = done.hits / (done.hits + done.misses), lru.cache_info().hits / num
    # The first tenth warms up: allocators keep what passes of the first shapes took.
    growth = megabytes[-1] - megabytes[min(1, len(megabytes) - 1)]
    claim("hit rate less predicted", holds=abs(rate - predicted) <= 0.02, value=rate - predicted)
    claim("growth of the resident set, MB", holds=growth <= 10, value=growth)
    claim("answers that are not plain peft's", holds=wrong == 0, value=wrong, of=num)


def main() -> None:
    """Print a line for each tenth of the time and a JSON line for each claim last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", arguments.variants, {"model": MINILM})
        soak(run, arguments.variants, arguments.minutes)


if __name__ == "__main__":
    main()
