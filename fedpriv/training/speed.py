"""How fast this machine trains, for plans: a short timing on synthetic records."""

from __future__ import annotations

import time

import torch

from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training.footprint import RECORDS_OF_A_STEP
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.stacked import local_update
from fedpriv.training.workbench import load_model

_NUM_LABELS = 8


def records_per_second(at_least_seconds: float = 2.0) -> float:
    """Records that an update of the default model and its LoRA takes in a second, in one process of this machine.

    The records are random tokens, as long as the model reads them, and pass through all of its layers; real ones are
    shorter, and the states of frozen layers are kept.

    Args:
        at_least_seconds: for which updates are repeated, > 0; the first one, which warms up, is not counted.
    """
    config = RunConfig(prefix_cache=False, noise_multiplier=1.0, start_noise_multiplier=1.0, learning_rate=1.0)
    _, model = load_model(config, num_labels=_NUM_LABELS)
    source = SeededSource(0)
    spec = UpdateSpec.of(config)
    task = UpdateTask(
        adapter=model.initial,
        data=_random_records(config.max_length, model.peft_model.config.vocab_size),
        spec=spec,
        round=1,
        sampler=spec.sampler(RECORDS_OF_A_STEP, source),
        noise=source,
    )
    local_update(model, task)
    num_updates, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_seconds:
        local_update(model, task)
        num_updates += 1
    return num_updates * RECORDS_OF_A_STEP / (time.perf_counter() - started)


def _random_records(num_tokens: int, vocabulary: int) -> Records:
    """So many records as a step has, that nobody wrote."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (RECORDS_OF_A_STEP, num_tokens), generator=generator)
    labels = torch.randint(_NUM_LABELS, (RECORDS_OF_A_STEP,), generator=generator)
    return Records({"input_ids": tuple(tokens)}, labels, 0)
