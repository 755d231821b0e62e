"""The time that stacking saves: a round of 16 clients at once, compared with the same clients one at a time.

    python -m simulations.benchmarks.stacked_clients [--clients 16] [--repeats 6]

Batches of 8 expected records of 32 tokens, 2 local steps, SGD, seeded noise, LoRA of rank 8 on query and value. Both
arms are the library's own code, the rival with a stack of one. They take turns, and ratios are those of the medians.
The tiny BERT, whose steps take milliseconds, has five times as many repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import LoraSettings, attach, load_base, read
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import PoissonSampler
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.stacked import execute_one_by_one, execute_stacked
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.benchmarks._measuring import claim, seconds_of
from simulations.tiny_bert import make_tiny_bert

BATCH, TOKENS, RECORDS, STEPS = 8, 32, 80, 2
SPEC = UpdateSpec.of(RunConfig(local_steps=STEPS, batch_size=BATCH, learning_rate=0.1, noise_multiplier=1.0))


def make_model(name: str, layers: str, *, prefix_cache: bool) -> TrainingModel:
    """The model with an adapter."""
    base = load_base(name, task="SEQ_CLS", num_labels=8)
    model = attach(base, LoraSettings(rank=8, layers=layers))
    return TrainingModel(model, memory_limit=2**31, prefix_cache=prefix_cache, max_length=TOKENS)


def make_records(seed: int) -> Records:
    """Random tokens, all records of one length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(5, 900, (TOKENS,), generator=generator) for _ in range(RECORDS))
    return Records({"input_ids": tokens}, torch.randint(8, (RECORDS,), generator=generator), pad_token_id=0)


def make_tasks(model: TrainingModel, records: list[Records]) -> list[UpdateTask]:
    """A round's tasks; every repeat draws the same batches."""
    adapter = read(model.peft_model)
    return [
        UpdateTask(
            adapter=adapter,
            data=data,
            spec=SPEC,
            round=1,
            sampler=PoissonSampler(
                num_registered=RECORDS, expected_batch_size=BATCH, source=SeededSource(client, "inclusion")
            ),
            noise=SeededSource(client, "noise"),
        )
        for client, data in enumerate(records)
    ]


def measure(model: TrainingModel, num_clients: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a client's step one at a time, and stacked."""
    records = [make_records(client) for client in range(num_clients)]
    arms = {"one by one": execute_one_by_one, "stacked": execute_stacked}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, execute in arms.items():
            tasks = make_tasks(model, records)
            taken = seconds_of(execute, model, tasks)
            if repeat:  # the first fills the prefix cache
                times[name].append(taken / num_clients / STEPS)
    alone, stacked = map(statistics.median, times.values())
    return alone, stacked


def main() -> None:
    """Print a line for each setting, and its claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(make_tiny_bert(Path(folder) / "tiny-bert", [f"word{number}" for number in range(895)]))
        for title, name, layers, prefix_cache, target, times in (
            ("tiny BERT, LoRA in all layers", tiny, "all", False, 0.45, 5),
            ("MiniLM, LoRA in all layers", "all-MiniLM-L6-v2", "all", False, 0.78, 1),
            ("MiniLM, LoRA in the last two layers", "all-MiniLM-L6-v2", "last-2", False, 0.78, 1),
            ("MiniLM, LoRA in the last two layers, prefix cache", "all-MiniLM-L6-v2", "last-2", True, 0.78, 1),
        ):
            model = make_model(name, layers, prefix_cache=prefix_cache)
            alone, stacked = measure(model, arguments.clients, times * arguments.repeats)
            ratio = stacked / alone
            print(f"{title}: one by one {1e3 * alone:.2f} ms a step, stacked {1e3 * stacked:.2f} ms, ratio {ratio:.3f}")
            claim(f"time per client, {arguments.clients} stacked / one at a time, {title}", at_most=target, ratio=ratio)


if __name__ == "__main__":
    main()
