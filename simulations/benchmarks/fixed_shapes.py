"""The cost of fixed shapes: a DP step in them against one in free shapes, on texts of natural lengths.

    python -m simulations.benchmarks.fixed_shapes [--repeats 7] [--batches 8 64 256] [--multiples 8 16 32]

The arms draw the same records of the synthetic corpus, and are the library's own local update; in the free arm, records
are sorted by length, as many pass at once as a CPU's caches hold, and they are padded to the longest of them. That arm
protects nobody: a record's gradient depends on the others by rounding, and in some architectures by more. With
`--multiples` there is an arm for each multiple of record lengths. The arms take turns, and ratios are those of the
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fedpriv.adapters import LoraSettings, attach, load_base, read
from fedpriv.config import RunConfig
from fedpriv.data import federated
from fedpriv.data.records import BatchShape, Item, Records, num_tokens, tokenize
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import Pass, PoissonSampler
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel
from fedpriv.training.stacked import local_update
from simulations.tiny_bert import make_tiny_bert

MAX_LENGTH, STEPS = 64, 4
TARGET = 1.10
# Floats of the widest activation of a pass in the free arm: 8 MiB.
MOST_FLOATS = 2**21


def free_passes(items: Sequence[Item], widest: int) -> Iterator[Pass]:
    """Passes of records of similar length, padded to the longest of them."""
    order = sorted(range(len(items)), key=lambda position: num_tokens(items[position]))
    chosen: list[int] = []
    for position in order:
        if chosen and (len(chosen) + 1) * num_tokens(items[position]) * widest > MOST_FLOATS:
            yield free_pass(items, chosen)
            chosen = []
        chosen.append(position)
    if chosen:
        yield free_pass(items, chosen)


def free_pass(items: Sequence[Item], positions: list[int]) -> Pass:
    """A pass of the given records without dummies."""
    tokens = max(num_tokens(items[position]) for position in positions)
    return Pass(positions=positions, shape=BatchShape(rows=len(positions), tokens=tokens, full=False))


def seconds(model: TrainingModel, records: Records, batch_size: int, repeat: int) -> float:
    """Seconds of a step of one local update."""
    config = RunConfig(local_steps=STEPS, batch_size=batch_size, learning_rate=0.1, noise_multiplier=1.0)
    task = UpdateTask(
        adapter=read(model.peft_model),
        data=records,
        spec=UpdateSpec.of(config),
        round=1,
        sampler=PoissonSampler(
            num_registered=len(records), expected_batch_size=batch_size, source=SeededSource(repeat, "inclusion")
        ),
        noise=SeededSource(repeat, "noise"),
    )
    started = time.perf_counter()
    local_update(model, task)
    return (time.perf_counter() - started) / STEPS


def measure(
    model: TrainingModel, records: Records, batch_size: int, repeats: int, multiples: Sequence[int]
) -> dict[str, float]:
    """Median seconds of a step in fixed shapes, in free ones, and with record lengths of each multiple."""
    widest = getattr(model.peft_model.config, "intermediate_size", 0)
    arms: dict[str, AbstractContextManager[object]] = {
        "fixed": nullcontext(),
        "free": patch.object(model, "passes", lambda items, *_: free_passes(items, widest)),
    }
    for multiple in multiples:
        lengths = replace(model.lengths(), multiple=multiple)
        arms[str(multiple)] = patch.object(model, "lengths", lambda *_, lengths=lengths: lengths)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            with arm:
                taken = seconds(model, records, batch_size, repeat)
            if repeat:  # the first fills the prefix cache
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Print a JSON line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 256], help="expected batch sizes")
    parser.add_argument("--multiples", type=int, nargs="+", default=[], help="of record lengths, powers of two >= 8")
    arguments = parser.parse_args()
    data = federated.load(RunConfig())
    with tempfile.TemporaryDirectory() as folder:
        words = sorted({word for text in data.clients[0].texts for word in text.lower().split()})
        tiny = str(make_tiny_bert(Path(folder) / "tiny-bert", words))
        for title, name, layers in (
            ("tiny BERT, LoRA in all layers", tiny, "all"),
            ("MiniLM, LoRA in all layers", "all-MiniLM-L6-v2", "all"),
            ("MiniLM, LoRA in the last two layers, prefix cache", "all-MiniLM-L6-v2", "last-2"),
        ):
            base = load_base(name, task="SEQ_CLS", num_labels=len(data.label_names))
            records = tokenize(data.clients[0], base.tokenizer, label_names=data.label_names, max_length=MAX_LENGTH)
            model = TrainingModel(
                attach(base, LoraSettings(rank=8, layers=layers)), memory_limit=2**31, max_length=MAX_LENGTH
            )
            for batch_size in arguments.batches:
                taken = measure(model, records, batch_size, arguments.repeats, arguments.multiples)
                ratio = taken["fixed"] / taken["free"]
                claim = f"a step in fixed shapes / in free shapes, batch {batch_size}, {title}"
                met = ratio <= TARGET if batch_size >= 64 else None
                line = {"claim": claim, "ratio": ratio, "target": TARGET, "met": met, "seconds": taken}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
