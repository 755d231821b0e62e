"""A local step on synthetic records, before anything is charged: what no record causes must fail here.

Once records are touched, every failure counts as a zero gradient, so a model, request or memory limit that cannot work
at all would otherwise show as an upload of noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.data.records import RESPONSE_MASK, Records
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training.footprint import RECORDS_OF_A_STEP
from fedpriv.training.isolation import raising_failures
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel
from fedpriv.training.sampling import PoissonSampler
from fedpriv.training.stacked import caching_pays_off, local_update

# Two steps: ternary quantisation treats the first one differently from the others.
_MOST_STEPS = 2

# So many requests a model remembers, the latest, whatever a coordinator sends.
_MOST_REMEMBERED = 256

# Oldest first; the values mean nothing.
_rehearsed: WeakKeyDictionary[TrainingModel, dict[Hashable, None]] = WeakKeyDictionary()


class _Everyone(PoissonSampler):
    """Draws every record."""

    def draw(self, num_records: int) -> list[int]:
        """All indices."""
        return list(range(num_records))


def rehearse(
    model: TrainingModel,
    *,
    adapter: Adapter,
    merged: Merged,
    spec: UpdateSpec,
    num_registered: int,
    max_length: int,
    num_labels: int,
    features: Sequence[str] = ("input_ids",),
) -> None:
    """Run a local update of this specification on synthetic records of every length, through the cache and without.

    It uses public inputs alone, releases nothing and draws nothing from a secure source. The model is as before, but
    that its caches have room for the registered records, if the update uses them. A model remembers what it has
    rehearsed: another adapter of the same shapes costs nothing, and other learning rates, clip norms and the like cost
    an update on one record.

    Args:
        model: as for the update.
        adapter, merged, spec: of the update.
        num_registered: N_k, the registered number of records.
        max_length: tokens of the longest record.
        num_labels: number of classes; 0 for causal models.
        features: names of what the tokenizer returns for each record.

    Raises:
        Exception: whatever the update raises; no record has caused it.
    """
    sampler = spec.sampler(num_registered, SeededSource("rehearsal"))
    if caching_pays_off(spec, sampler):
        model.reserve_cache(num_registered)
        if model.features is not None and spec.trains == "head":
            model.features.reserve(num_registered)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in adapter.items())
    products = tuple((name, product.shape) for name, product in merged.items())
    short = replace(spec, local_steps=min(spec.local_steps, _MOST_STEPS), num_rounds=1)
    size = sampler.expected_batch_size
    computed = (shapes, products, _without_values(short), size, max_length, num_labels, tuple(features))
    exact = (computed, short)
    known = _rehearsed.setdefault(model, {})
    if exact in known:
        return
    records = synthetic_records(
        model,
        max_length=max_length,
        num_labels=num_labels,
        features=features,
        # As many as fill the passes of this step, and those in which the caches are filled.
        num_expected=max(size, RECORDS_OF_A_STEP),
        num_values=sum(tensor.numel() for tensor in adapter.values()),
    )
    tasks = _tasks(adapter, merged, short, records, size)
    if computed in known:  # through the whole model: the prefix cache keeps its states
        tasks = [replace(tasks[-1], data=records.part([0]))]
    before = model.merged
    try:
        with raising_failures():
            for task in tasks:
                local_update(model, task)
    finally:
        model.merge(before)
    for key in (computed, exact):
        known.pop(key, None)
        known[key] = None
    for oldest in list(known)[:-_MOST_REMEMBERED]:
        del known[oldest]


def synthetic_records(
    model: TrainingModel,
    *,
    max_length: int,
    num_labels: int,
    features: Sequence[str] = ("input_ids",),
    seed: int = 0,
    num_expected: float = RECORDS_OF_A_STEP,
    num_values: int | None = None,
) -> Records:
    """Records of random tokens and labels that fill the largest pass of every length, shortest first.

    Args:
        model, max_length, num_labels, features: as for `rehearse`.
        seed: of tokens and labels.
        num_expected, num_values: as for `TrainingModel.passes`.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        length
        for length in model.lengths.up_to(max_length)
        for _ in range(model.sizes(model.lengths.padded(length)[0], num_expected, num_values)[-1])
    ]
    vocabulary = model.peft_model.config.vocab_size
    columns = {name: tuple(torch.zeros(length, dtype=torch.int64) for length in lengths) for name in features}
    if RESPONSE_MASK in columns:
        columns[RESPONSE_MASK] = tuple(map(torch.ones_like, columns[RESPONSE_MASK]))
    columns["input_ids"] = tuple(torch.randint(vocabulary, (length,), generator=generator) for length in lengths)
    labels = torch.randint(num_labels, (len(lengths),), generator=generator) if num_labels else torch.empty(0)
    return Records(columns, labels.to(torch.int64), pad_token_id=model.peft_model.config.pad_token_id or 0)


def _without_values(spec: UpdateSpec) -> UpdateSpec:
    """What decides how an update is computed, whatever the values: one record shows whether it fails at those."""
    return replace(
        spec, learning_rate=0.0, weight_decay=0.0, clip_norm=0.0, noise_multiplier=0.0, relevance_threshold=0.0
    )


def _tasks(
    adapter: Adapter, merged: Merged, spec: UpdateSpec, records: Records, expected_batch_size: float
) -> list[UpdateTask]:
    """The update with the caches and without them: with few registered records they pay off."""
    few = math.ceil(expected_batch_size)
    return [
        UpdateTask(
            adapter=adapter,
            data=records,
            spec=spec,
            round=1,
            sampler=_Everyone(
                num_registered=num_registered,
                expected_batch_size=expected_batch_size,
                source=SeededSource("rehearsal"),
            ),
            noise=SeededSource("rehearsal"),
            merged=merged,
        )
        for num_registered in (few, 2 * few * spec.num_rounds * spec.local_steps)
    ]
