"""What privacy costs in time: a DP step against a plain LoRA step on the same model, batches and optimizer.

    python -m simulations.benchmarks.dp_step [--steps 60] [--seeded]

Both arms run the whole encoder (no prefix cache) on equal batches of 8 records of 32 tokens with SGD. The plain arm
is what a user would write without privacy: a forward pass in eval mode, `loss.mean().backward()`, an optimizer
step. The DP arm is the library's own local update with its sampler replaced by the same fixed batches. Steps of the
two arms alternate, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from fedpriv.adapters import LoraSettings, attach, load_base, read
from fedpriv.data.records import Records
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.losses import losses_and_hits
from fedpriv.training.model import TrainingModel
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.stacked import local_update

BATCH, TOKENS, CLASSES = 8, 32, 8
TARGETS = {"secure": 1.10, "seeded": 1.05}


class FixedBatches(PoissonSampler):
    """Every draw is the whole batch, so that both arms do the same work."""

    def draw(self, num_records: int) -> list[int]:
        """All records."""
        return list(range(num_records))


def make_records() -> Records:
    """A batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 20000, (BATCH, TOKENS), generator=generator)
    return Records({"input_ids": tuple(tokens)}, torch.randint(CLASSES, (BATCH,), generator=generator), 0)


def make_model(layers: str) -> TrainingModel:
    """The bundled encoder with LoRA r = 8 on query and value."""
    base = load_base("all-MiniLM-L6-v2", task="SEQ_CLS", num_labels=CLASSES)
    model = attach(base, LoraSettings(rank=8, layers=layers))
    return TrainingModel(model, memory_limit=2**32, prefix_cache=False)


def plain_step(model: TrainingModel, records: Records) -> Callable[[], None]:
    """A LoRA step without privacy."""
    optimizer = torch.optim.SGD(list(model.parameters.values()), lr=0.1)

    def step() -> None:
        logits, batch = model.logits(records.items(), cached=False)
        losses_and_hits(logits, batch)[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def dp_step(model: TrainingModel, records: Records, source: RandomSource) -> Callable[[], None]:
    """A local update of one step."""
    spec = UpdateSpec(
        num_rounds=1,
        local_steps=1,
        batch_size=BATCH,
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=0.0,
        clipping="joint",
        clip_norm=1.0,
        noise_multiplier=1.0,
        noise_on="gradients",
    )
    sampler = FixedBatches(num_registered=100 * BATCH, expected_batch_size=BATCH, source=source)
    task = UpdateTask(adapter=read(model.peft_model), data=records, spec=spec, round=1, sampler=sampler, noise=source)
    return lambda: local_update(model, task) and None


def alternate(arms: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Median seconds of a step of each arm, the arms taking turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(steps + 5):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if step >= 5:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a line for each setting and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeded", action="store_true", help="seeded noise instead of secure")
    arguments = parser.parse_args()
    name = "seeded" if arguments.seeded else "secure"
    source = SeededSource(0) if arguments.seeded else SecureSource()
    records, ratios = make_records(), {}
    for layers in ("all", "last-2"):
        model = make_model(layers)
        medians = alternate(
            {"plain": plain_step(model, records), "dp": dp_step(model, records, source)}, arguments.steps
        )
        ratios[layers] = medians["dp"] / medians["plain"]
        print(
            f"LoRA in {layers} layers, {name} noise: plain {1e3 * medians['plain']:.1f} ms, "
            f"DP {1e3 * medians['dp']:.1f} ms, ratio {ratios[layers]:.3f}"
        )
    worst = max(ratios.values())
    claim = f"DP step / non-private LoRA step, MiniLM, batch {BATCH}, {TOKENS} tokens, {name} noise"
    print(
        json.dumps(
            {
                "claim": claim,
                "ratio": worst,
                "by_layers": ratios,
                "target": TARGETS[name],
                "met": worst <= TARGETS[name],
            }
        )
    )


if __name__ == "__main__":
    main()
