"""How often a model is right on a holder's records, as two noised counts: the only evaluation on private data."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedpriv.config import RunConfig
from fedpriv.errors import is_memory_failure
from fedpriv.learning.adapters import Adapter, Merged, lora
from fedpriv.learning.data.records import Item, Records, RecordSet, num_tokens, usable
from fedpriv.learning.training import local_update
from fedpriv.learning.training.independence import finite, raising_failures, refusing, shared, side_by_side
from fedpriv.learning.training.local_update import ClientUpdate, TrainedModel, UpdateSpec, UpdateTask, noise_request
from fedpriv.learning.training.model import TrainingModel
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from fedpriv.privacy.mechanisms.sources import RandomSource

# Shares of correct tokens are rounded to multiples of 2^-20. Sums of up to 2^32 records are then exact in float64, so
# that no sum's rounding adds to what one record changes.
_STEPS = 2**20

NO_COUNTS = torch.zeros(2, dtype=torch.float64)
"""The counts of no records."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """The evaluation that the server asks of a client.

    Attributes:
        noise_multiplier: z >= 0, the standard deviation of the noise on each count.
        max_records_per_person: m, at most how many records of a person count; 0 where the unit is the record.
    """

    noise_multiplier: float
    max_records_per_person: int = 0

    @property
    def update(self) -> UpdateSpec:
        """The evaluation as an update."""
        return UpdateSpec.counts(self.noise_multiplier, self.max_records_per_person)

    @staticmethod
    def of(config: RunConfig) -> EvaluationSpec | None:
        """The evaluation that a run's configuration asks for; None if it asks for none."""
        z = config.evaluation_noise_multiplier
        if z is None:
            return None
        return EvaluationSpec(noise_multiplier=z, max_records_per_person=config.most_of_a_person)


@dataclass(frozen=True, kw_only=True)
class NoisedCounts:
    """A client's answer: the numbers of records on which the model was right and wrong, both with noise."""

    hits: float
    misses: float

    @staticmethod
    def of(sums: Tensor) -> NoisedCounts:
        """The counts in a result of `noised`, [2]."""
        hits, misses = sums.tolist()
        return NoisedCounts(hits=hits, misses=misses)


def planned_event(spec: EvaluationSpec) -> Event:
    """The event of an evaluation, which a holder pays for, see `UpdateSpec.counts`; ValueError if z is out of range."""
    return local_update.planned_event(spec.update, 1.0, {})


def check_fits(model: TrainedModel, adapter: Adapter, merged: Merged) -> None:
    """Refuse an adapter without the model's tensors, or additions to frozen weights that do not fit; ValueError."""
    for name in adapter.keys() | model.parameters.keys():
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (adapter, model.parameters)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"adapter: {name} has shape {shapes[0]}, the model's is {shapes[1]}")
    model.check_merged(merged)


def counted(model: TrainedModel, task: UpdateTask) -> ClientUpdate:
    """The noised counts of a task whose objective is `counts`, as its `noised` values; its adapter is the broadcast.

    Without records it is noise alone, and the model is not touched. ValueError if the task does not fit, as
    `UpdateTask.event` and `check_fits` say, which belong before the charge.
    """
    most, records = task.spec.max_records_per_person, cast("Records", task.data)  # persons are known of these alone
    units = task.sampler.some_of_each(records, range(records.num_units), most) if most else None
    exact = count(model, task.adapter, task.merged, records, units) if len(records) else NO_COUNTS
    sums, event = noised(exact, task.spec, task.noise)
    if event != task.event:
        raise RuntimeError(f"the evaluation cost {event}, but {task.event} was planned and charged")
    return ClientUpdate(adapter=task.adapter, event=event, num_records=task.sampler.num_registered, noised=sums)


def count(
    model: TrainedModel,
    adapter: Adapter,
    merged: Merged,
    records: RecordSet,
    units: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """The exact (hits, misses), float64 [2].

    A record with choices is a hit or a miss, like one of a class, so that its pair is (1, 0), (0, 1) or zero.

    Guarantee: each unit adds the mean of its records' pairs, which depends on them and the model alone. A record is
    computed in a pass of its own, and if that fails, its pair is zero.

    Args:
        merged: what aggregation has added to the frozen weights.
        records: of the holder, set aside for evaluation.
        units: the records of each unit, by their indices; None takes each record by itself.

    Raises:
        ValueError: as `check_fits`, which belongs before the charge.
    """
    model.merge(merged)
    lora.write_parameters(model.parameters, adapter)
    units = [[index] for index in range(len(records))] if units is None else units
    counts = shared(max(1, model.num_workers), len(NO_COUNTS), dtype=torch.float64)

    def add(number: int, worker: int) -> None:
        unit = units[number]
        pairs = torch.stack([_contribution(model, item) for item in records.items(unit)])
        # Down to the grid, so that the sums stay exact, and the pair no longer than its records' pairs.
        counts[worker] += (pairs.sum(dim=0) * _STEPS / len(unit)).floor() / _STEPS

    side_by_side(add, len(units), model.num_workers)
    return counts.sum(dim=0)


@torch.no_grad()
def rehearse(model: TrainingModel, adapter: Adapter, merged: Merged, records: Records) -> float:
    """Evaluate synthetic records, so that what no record causes fails before anything is charged.

    Returns the seconds that the longest of them takes. InputError, which names the type of the model, if an evaluation
    fails, or a loss is not finite.
    """
    model.merge(merged)
    lora.write_parameters(model.parameters, adapter)
    by_length = {num_tokens(item): item for item in records.items()}
    with refusing(model.peft_model.config.model_type), raising_failures(also_of_numbers=True):
        for item in by_length.values():
            finite(_losses(model, item))
    begin = time.perf_counter()
    _losses(model, by_length[max(by_length)])  # again, when nothing is new
    return time.perf_counter() - begin


def noised(counts: Tensor, spec: UpdateSpec, source: RandomSource) -> tuple[Tensor, Event]:
    """The counts, float64 [2], with Gaussian noise by `UpdateSpec.counts`, and the event that pays for them."""
    request = noise_request(spec, [spec.sampling_probability], len(counts), num_parts=1)
    sums, (event,) = MECHANISMS.named(spec.mechanism).add_noise(counts.unsqueeze(0), request, [source])
    return sums[0], event


@torch.no_grad()
def _contribution(model: TrainedModel, item: tuple[RecordSet, int]) -> Tensor:
    """(h, 1 - h) of one record, float64 [2]; zeros if it cannot be evaluated."""
    try:
        share = _share(model, [item]) if usable(item) else math.nan
    except Exception as error:  # whatever it is, one record must not decide whether the others count
        if is_memory_failure(error):  # which says nothing of this record
            raise
        share = math.nan
    if not 0 <= share <= 1:
        return NO_COUNTS
    share = round(share * _STEPS) / _STEPS
    return torch.tensor([share, 1 - share], dtype=torch.float64)


def _share(model: TrainedModel, items: Sequence[tuple[RecordSet, int]]) -> float:
    """The first record's share of correct predictions; of choices, 1 if its own is likelier than each other."""
    records, index = item = cast("Item", items[0])
    if (choices := getattr(records, "choices", None)) is None:
        return float(model.predictions(items, cached=False).hits[0])
    losses = _losses(model, item)
    there = torch.tensor([usable((each, index)) for each in choices.records])
    own, there[choices.truth[index]] = losses[choices.truth[index]], False
    return float(own < losses[there].min()) if losses.isfinite().all() else math.nan


def _losses(model: TrainedModel, item: Item) -> Tensor:
    """The loss of a record; of one with choices that of each, and of what stands for those that it has not.

    Every record of a node takes as many passes, of one shape: how many choices it has, and how long, changes none.
    """
    records, index = item
    places = records.choices.records if records.choices else (records,)
    found = [model.predictions([(each, index)], cached=False) for each in places]
    return torch.stack([each.losses[0] for each in found]).cpu()
