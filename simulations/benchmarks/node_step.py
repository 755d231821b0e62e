"""A step of a node, whose records have a pass each, against the same step with records that share passes.

    python -m simulations.benchmarks.node_step [--tokens 32 128] [--records 64 256] [--filled 4000] [--language-model]

The node computes in as many processes of one thread as there are cores; the other arm, as a simulation does, in one
process with all threads. MiniLM with LoRA in all layers, in the last two with their prefix cache, and the head alone,
on random records that fill all tokens; with `--language-model` SmolLM2 too, on 16 records of 256 tokens. The caches'
filling is that of a first step less a later one. Arms take turns, and ratios are those of the medians; a step includes
noise and optimizer. A simulation's test of the same records is compared with its step on them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import BUNDLED_LANGUAGE_MODEL
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import TrainingModel
from fedpriv.learning.training.evaluation import evaluate
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.stacked import local_update
from fedpriv.learning.training.workbench import load_model
from fedpriv.privacy.mechanisms.sources import SeededSource
from simulations.benchmarks._measuring import claim, seconds_of
from simulations.benchmarks.dp_step import FixedBatches

CLASSES = 8
# So many rounds that the caches pay off.
STEP: dict[str, Any] = {"local_steps": 1, "rounds": 1000, "learning_rate": 0.1, "noise_multiplier": 1.0}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The trained part of a model.

    Attributes:
        title: in words.
        layers: with LoRA.
        trains: as of `UpdateSpec`.
        prefix_cache: whether states below the first trained layer are kept.
    """

    title: str
    layers: str = "all"
    trains: str = "all"
    prefix_cache: bool = True


SETTINGS = (
    Setting(title="MiniLM, LoRA in all layers", prefix_cache=False),
    Setting(title="MiniLM, LoRA in the last two layers, prefix cache", layers="last-2"),
    Setting(title="MiniLM, the head alone", trains="head"),
)


def models(config: RunConfig, num_labels: int) -> list[TrainingModel]:
    """A node's and a simulation's."""
    cores = len(os.sched_getaffinity(0))
    return [
        load_model(config, labels=tuple(map(str, range(num_labels))), alone=a, num_workers=n)[1]
        for a, n in ((True, cores), (False, 1))
    ]


def random_records(model: TrainingModel, num: int, tokens: int, num_labels: int) -> Records:
    """Records that nobody wrote."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.peft_model.config.vocab_size, (num, tokens), generator=generator)
    labels = torch.randint(num_labels, (num,), generator=generator) if num_labels else torch.empty(0, dtype=torch.int64)
    return Records({"input_ids": tuple(ids)}, labels, 0)


def seconds(model: TrainingModel, config: RunConfig, records: Records, trains: str) -> float:
    """Seconds of a step on all records."""
    source = SeededSource(0)
    task = UpdateTask(
        adapter=model.initial,
        data=records,
        spec=replace(UpdateSpec.of(config), trains=trains, batch_size=len(records)),
        round=1,
        sampler=FixedBatches(num_registered=len(records), expected_batch_size=len(records), source=source),
        noise=source,
    )
    return seconds_of(local_update, model, task)


def measured(
    config: RunConfig, trains: str, num: int, num_labels: int, repeats: int
) -> tuple[list[float], list[float], float]:
    """The seconds of a step, and of filling the caches, of each arm, and those of a test in shared passes."""
    arms = models(config, num_labels)
    records = random_records(arms[0], num, config.max_length, num_labels)
    for model in arms:  # libraries choose their kernels
        seconds(model, config, records.part(range(2)), trains)
    firsts = [seconds(model, config, records, trains) for model in arms]
    pairs = [[seconds(model, config, records, trains) for model in arms] for _ in range(repeats)]
    steps = [statistics.median(times) for times in zip(*pairs, strict=True)]
    tested = partial(evaluate, arms[1], records, keep_features=trains == "head")
    test = statistics.fmean(seconds_of(tested) for _ in range(repeats))
    return steps, [first - step for first, step in zip(firsts, steps, strict=True)], test


def report(what: str, times: list[float]) -> None:
    """Print a claim about the ratio of two times."""
    claim(what, ratio=times[0] / times[1], seconds=times)


def main() -> None:
    """Print a JSON line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--records", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--filled", type=int, default=4000, help="records whose caches are filled; 0 for none")
    parser.add_argument("--language-model", action="store_true", help="SmolLM2 too, which `make llm` installs")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        for setting in SETTINGS:
            config = RunConfig(
                recipe="per-sample",
                layers=setting.layers,
                prefix_cache=setting.prefix_cache,
                max_length=tokens,
                base_dtype="float32",
                **STEP,
            )
            for num in arguments.records:
                steps, _, test = measured(config, setting.trains, num, CLASSES, arguments.repeats)
                what = f"{num} records of {tokens} tokens, {setting.title}"
                report(f"a step, {what}: records alone / in shared passes", steps)
                report(f"{what}, in shared passes: a test / a step", [test, steps[1]])
            if arguments.filled and setting.prefix_cache and tokens == arguments.tokens[0]:
                _, filling, _ = measured(config, setting.trains, arguments.filled, CLASSES, 1)
                what = f"{arguments.filled} records of {tokens} tokens, {setting.title}"
                report(f"filling the caches of {what}: records alone / in shared passes", filling)
    if arguments.language_model:
        config = RunConfig(
            recipe="per-sample",
            model=BUNDLED_LANGUAGE_MODEL,
            task="CAUSAL_LM",
            max_length=256,
            base_dtype="float32",
            **STEP,
        )
        steps, _, _ = measured(config, "all", 16, 0, arguments.repeats)
        report("a step, 16 records of 256 tokens, SmolLM2, LoRA in all layers: records alone / in shared passes", steps)


if __name__ == "__main__":
    main()
