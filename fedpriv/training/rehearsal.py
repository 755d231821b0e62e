"""A local step on synthetic records, before anything is charged: what no record causes must fail here.

Once records are touched, every failure counts as a zero gradient, so a model, request or memory limit that cannot work
at all would otherwise show as an upload of noise alone. How long such steps take bounds how long any records may take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from fedpriv.adapters import Adapter, Merged
from fedpriv.data.chat import RESPONSE_MASK
from fedpriv.data.records import Records, RecordSet, num_tokens
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training._isolation import raising_failures, refusing
from fedpriv.training._pass_sizes import RECORDS_OF_A_STEP
from fedpriv.training._sampling import PoissonSampler
from fedpriv.training._shapes import most_dummies, most_small_passes
from fedpriv.training.local_update import UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel, rank_of
from fedpriv.training.stacked import caching_pays_off, local_update

# Two steps: ternary quantisation treats the first one differently from the others.
_MOST_STEPS = 2

# So many requests a model remembers, the latest, whatever a coordinator sends.
_MOST_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds that the parts of an update take on this machine, measured on synthetic records.

    Attributes:
        step: without records: noise, the optimizer's step and what precedes the first one.
        record: as a part of the largest pass of its length, at the length where that is most.
        new_record: the same where its states are not in the caches yet.
        small_pass: the fewest and shortest records that share one.
        num_small_passes: that a step may have, besides the largest of each length.
        dummies: that a step may compute, as if all were of the length of `record`.
    """

    step: float
    record: float
    new_record: float
    small_pass: float
    num_small_passes: int
    dummies: float

    def seconds(self, *, num_steps: int, num_drawn: int, num_new: int, num_parts: int = 1) -> float:
        """Seconds that an update takes at most, whatever the lengths of its records.

        Trials decide how many records of a length share a pass, so a shorter one may take more time than a longer one:
        each counts like the slowest. All but the last passes of each length are the largest; the last ones hold the
        dummies.

        Args:
            num_steps: of the update.
            num_drawn: records of all steps together.
            num_new: records whose states the caches have to take first.
            num_parts: of a step, each with passes of its own.
        """
        steps = num_steps * self.step + self._of(num_drawn, self.record, num_steps * num_parts)
        return steps + self._of(num_new, self.new_record, min(num_new, 1))

    def _of(self, number: int, record: float, times: int) -> float:
        """Seconds for so many records, which are taken in turns."""
        passes = min(number, times * self.num_small_passes)
        return (number + times * self.dummies) * record + passes * self.small_pass


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The results of a rehearsal.

    Attributes:
        pace: of such updates; None if it was not measured.
        caches_are_empty: whether its records took the place of others in the model's caches.
    """

    pace: Pace | None
    caches_are_empty: bool


# Oldest first: the pace of what was rehearsed.
_rehearsed: WeakKeyDictionary[TrainingModel, dict[Hashable, Pace | None]] = WeakKeyDictionary()


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
    num_cached: int | None = None,
    measures_pace: bool = True,
) -> Rehearsed:
    """Run a local update of this specification on synthetic records of every length, through the cache and without.

    It uses public inputs alone, releases nothing and draws nothing from a secure source. The model is as before, but
    that its caches have room for `num_cached` records, if the update uses them. A model remembers what it has
    rehearsed: another adapter of the same shapes costs nothing, and other learning rates, clip norms and the like cost
    an update on one record. The pace is measured once, with the update's use of the caches.

    Args:
        model: as for the update.
        adapter, merged, spec: of the update.
        num_registered: N_k, the registered number of records, or persons.
        max_length: tokens of the longest record.
        num_labels: number of classes; 0 for causal models.
        features: names of what the tokenizer returns for each record.
        num_cached: for how many records the caches take room, >= 1; None stands for N_k, or m N_k where N_k counts
            persons.
        measures_pace: whether the pace is asked for, which takes several further updates.

    Raises:
        InputError: the update fails; names the type of the model.
    """
    sampler = spec.sampler(num_registered, SeededSource("rehearsal"))
    cached = caching_pays_off(spec, sampler)
    if cached:
        num_cached = num_registered * max(1, spec.max_records_per_person) if num_cached is None else num_cached
        model.reserve_cache(num_cached)
        if model.features is not None and spec.trains == "head":
            model.features.reserve(num_cached)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in adapter.items())
    products = tuple((name, product.shape) for name, product in merged.items())
    short = replace(spec, local_steps=min(spec.local_steps, _MOST_STEPS), num_rounds=1)
    size = sampler.expected_batch_size
    # Threads decide which passes are tried, and without room for the caches all takes longer.
    machine = cached, num_cached if cached else 0, torch.get_num_threads(), measures_pace
    computed = (shapes, products, _without_values(short), size, max_length, num_labels, tuple(features), machine)
    exact = (computed, short)
    known = _rehearsed.setdefault(model, {})
    if exact in known:
        return Rehearsed(pace=known[exact], caches_are_empty=False)
    records = synthetic_records(
        model,
        max_length=max_length,
        num_labels=num_labels,
        features=features,
        # As many as fill the passes of this step, and those in which the caches are filled.
        num_expected=max(spec.expected_records(sampler), RECORDS_OF_A_STEP),
        num_values=sum(tensor.numel() for tensor in adapter.values()),
        rank=_rank(adapter),
    )
    if spec.max_records_per_person:  # the more persons, the more work: none has a second record
        records = replace(records, persons=tuple(map(str, range(len(records)))))
    tasks = _tasks(adapter, merged, short, records, size)
    is_known, pace = computed in known, known.get(computed)
    if is_known:  # through the whole model: the prefix cache keeps its states
        tasks = [replace(tasks[-1], data=records.part([0]))]
    before = model.merged
    try:
        with refusing(model.peft_model.config.model_type), raising_failures():
            for task in tasks:
                local_update(model, task)
            if measures_pace and not is_known:
                pace = _pace(model, tasks[0 if cached else 1])
    finally:
        model.merge(before)
    for key in (computed, exact):
        known.pop(key, None)
        known[key] = pace
    for oldest in list(known)[:-_MOST_REMEMBERED]:
        del known[oldest]
    return Rehearsed(pace=pace, caches_are_empty=not is_known)


def _pace(model: TrainingModel, task: UpdateTask) -> Pace:
    """The pace of updates like this one, whose records are `synthetic_records`."""
    records, size = task.data, task.spec.expected_records(task.sampler)
    task = replace(task, spec=replace(task.spec, local_steps=1))
    num_values = sum(tensor.numel() for tensor in task.adapter.values())
    tokens = [num_tokens(item) for item in records.items()]
    of_length = [[i for i, number in enumerate(tokens) if number == length] for length in sorted(set(tokens))]
    lengths = [model.lengths(size).padded(number)[0] for number in sorted(set(tokens))]
    sizes = [model.sizes(length, size, num_values, _rank(task.adapter)) for length in lengths]

    def seconds(data: RecordSet) -> float:
        begin = time.perf_counter()
        local_update(model, replace(task, data=data))
        return time.perf_counter() - begin

    least, none = records.part([0]), records.part([])
    seconds(least)  # into the caches
    steps = seconds(none), seconds(none)
    step, news, agains = max(steps), [], []
    for indices in of_length:
        whole = records.part(indices)
        # The shorter ones differ by little but the step, which is counted by itself.
        besides = 0.0 if indices is of_length[-1] else min(steps)
        new, again = seconds(whole), max(seconds(whole), seconds(whole))
        news.append((new - besides) / len(indices))
        agains.append(max(again - besides, 1e-6) / len(indices))
    dummies = [most_dummies(s) * again / max(agains) for s, again in zip(sizes, agains, strict=True)]
    seconds(least)
    return Pace(
        step=step,
        record=max(agains),
        new_record=max(news),
        small_pass=max(0.0, max(seconds(least), seconds(least)) - step),
        num_small_passes=sum(map(most_small_passes, sizes)),
        dummies=sum(dummies) if model.device.type == "cpu" else 0.0,
    )


def synthetic_records(
    model: TrainingModel,
    *,
    max_length: int,
    num_labels: int,
    features: Sequence[str] = ("input_ids",),
    seed: int = 0,
    num_expected: float = RECORDS_OF_A_STEP,
    num_values: int | None = None,
    rank: int | None = None,
) -> Records:
    """Records of random tokens and labels that fill the largest pass of every length, shortest first.

    Args:
        model, max_length, num_labels, features: as for `rehearse`.
        seed: of tokens and labels.
        num_expected, num_values, rank: as for `TrainingModel.passes`.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = model.lengths(num_expected)
    lengths = [
        length
        for length in shapes.up_to(max_length)
        for _ in range(model.sizes(shapes.padded(length)[0], num_expected, num_values, rank)[-1])
    ]
    vocabulary = model.peft_model.config.vocab_size
    columns = {name: tuple(torch.zeros(length, dtype=torch.int64) for length in lengths) for name in features}
    if RESPONSE_MASK in columns:
        columns[RESPONSE_MASK] = tuple(map(torch.ones_like, columns[RESPONSE_MASK]))
    columns["input_ids"] = tuple(torch.randint(vocabulary, (length,), generator=generator) for length in lengths)
    labels = torch.randint(num_labels, (len(lengths),), generator=generator) if num_labels else torch.empty(0)
    return Records(columns, labels.to(torch.int64), pad_token_id=model.peft_model.config.pad_token_id or 0)


def _rank(adapter: Adapter) -> int | None:
    """The rank of the adapter's LoRA layers."""
    return rank_of({name: tensor.shape for name, tensor in adapter.items()})


def _without_values(spec: UpdateSpec) -> UpdateSpec:
    """All that decides how an update is computed, but its values: one record shows whether it fails at those."""
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
