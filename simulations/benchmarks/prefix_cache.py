"""The time that the prefix cache saves: local updates with it, compared with the same updates through the whole model.

    python -m simulations.benchmarks.prefix_cache [--repeats 7]

MiniLM with LoRA in the last one or two of six layers, one client of 80 records of 32 tokens, batches of 8 expected
records, SGD, seeded noise. Both arms are the library's own code and take turns; the cost of filling the cache is given
in steps without it. Ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import statistics

from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import local_update
from simulations.benchmarks._measuring import claim, seconds_of
from simulations.benchmarks.stacked_clients import STEPS, make_model, make_records, make_tasks

RECORDS = make_records(0)


def seconds(model: TrainingModel) -> float:
    """Seconds of one local update."""
    (task,) = make_tasks(model, [RECORDS])
    return seconds_of(local_update, model, task)


def main() -> None:
    """Print a line for each setting, and its claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    for layers, target in (("last-1", 0.5), ("last-2", 0.67)):
        whole, cached = (make_model("all-MiniLM-L6-v2", layers, prefix_cache=flag) for flag in (False, True))
        seconds(whole)
        first = seconds(cached)
        pairs = [(seconds(whole), seconds(cached)) for _ in range(arguments.repeats)]
        slow, fast = (statistics.median(times) / STEPS for times in zip(*pairs, strict=True))
        print(
            f"LoRA in {layers}: whole model {1e3 * slow:.1f} ms a step, cached {1e3 * fast:.1f} ms, ratio "
            f"{fast / slow:.3f}; filling the cache costs {(first - STEPS * fast) / slow:.1f} steps without it"
        )
        text = f"a step with the prefix cache / through the whole model, MiniLM, LoRA in {layers}"
        claim(text, at_most=target, ratio=fast / slow)


if __name__ == "__main__":
    main()
