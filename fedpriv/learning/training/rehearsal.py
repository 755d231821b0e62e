"""A local step on synthetic records, before anything is charged: what no record causes must fail here.

Once records are touched, every failure counts as a zero gradient, so a model, request or memory limit that cannot work
at all would otherwise show as an upload of noise alone. How long such steps take bounds how long any records may take.
It takes a record of every padded length, so that no record is the first for which a library chooses a kernel.

The memory of a pass is counted on tensors without values, before anything is loaded.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import time
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.data.chat import RESPONSE_MASK
from fedpriv.learning.data.records import Records
from fedpriv.learning.training._caches import input_of
from fedpriv.learning.training._passes import lengths_up_to, sliced_predictions
from fedpriv.learning.training.independence import raising_failures, refusing
from fedpriv.learning.training.local_update import UpdateSpec, UpdateTask
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.stacked import caching_pays_off, local_update
from fedpriv.privacy.mechanisms.sources import SeededSource

# Kinds of attributes that are compared by what they hold.
_PLAIN = (str, int, float, list, tuple, dict, set)

# Two steps: ternary quantisation treats the first one differently from the others.
_MOST_STEPS = 2

# So many requests a model remembers, the latest, whatever a coordinator sends.
_MOST_REMEMBERED = 256

# Records of each worker, and how often the head alone takes each, when the pace is measured.
_RECORDS_OF_A_WORKER = 2
_TIMES_FOR_A_HEAD = 64

# Oldest first: the pace of what was rehearsed.
_rehearsed: WeakKeyDictionary[TrainingModel, dict[Hashable, Pace]] = WeakKeyDictionary()
# How often a pace was measured.
_num_measured: WeakKeyDictionary[TrainingModel, int] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds that the parts of an update take on this machine, measured on the longest synthetic records.

    Attributes:
        step: without records: noise, the optimizer's step and what precedes the first one.
        record: of a worker, while all are at work.
        new_record: the same where its states are not in the caches yet.
        num_workers: that share the records.
    """

    step: float
    record: float
    new_record: float
    num_workers: int

    @property
    def fork(self) -> float:
        """More than it takes to fork a process: so long takes an update for which workers are forked."""
        return _RECORDS_OF_A_WORKER * self.new_record

    def seconds(self, *, num_steps: int, num_drawn: int, num_new: int, records_each: int = 1) -> float:
        """Seconds that an update takes at most, whatever the lengths of its records.

        Args:
            num_drawn: records, or persons, of all steps together.
            num_new: records whose states the caches have to take first.
            records_each: the most of a person, which one worker takes; 1 where the unit is the record.
        """
        drawn = (num_drawn / self.num_workers + num_steps) * records_each * self.record
        return num_steps * self.step + drawn + math.ceil(num_new / self.num_workers) * self.new_record


class _Everyone(PoissonSampler):
    """Draws every record, so many times."""

    times = 1

    def draw(self, num_records: int) -> list[int]:
        """All indices."""
        return list(range(num_records)) * self.times


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
) -> Pace:
    """Run a local update of this specification on synthetic records of every length, through the cache and without.

    It uses public inputs alone, releases nothing and draws nothing from a secure source. The model is as before, but
    that its caches have room for `num_cached` records, if the update uses them; whatever they hold stays. A model
    remembers what it has rehearsed: another adapter of the same shapes costs nothing, and other learning rates, clip
    norms and the like cost an update on one record. The pace, which is returned, is measured once, with the update's
    use of the caches.

    Args:
        num_registered: N_k, the registered number of records, or persons.
        max_length: tokens of the longest record.
        num_labels: number of classes; 0 for causal models.
        features: names of what the tokenizer returns for each record.
        num_cached: for how many records the caches take room, >= 1; None stands for N_k, or m N_k where N_k counts
            persons.

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
    # Without room for the caches all takes longer.
    machine = cached, num_cached if cached else 0, model.num_workers
    # All that decides how an update is computed, but its values: one record shows whether it fails at those.
    of_any_values = replace(
        short, learning_rate=0.0, weight_decay=0.0, clip_norm=0.0, noise_multiplier=0.0, relevance_threshold=0.0
    )
    computed = (shapes, products, of_any_values, size, max_length, num_labels, tuple(features), machine)
    exact = (computed, short)
    known = _rehearsed.setdefault(model, {})
    if exact in known:
        return known[exact]
    records = synthetic_records(model, max_length=max_length, num_labels=num_labels, features=features)
    if spec.max_records_per_person:  # the more persons, the more work: none has a second record
        records = replace(records, persons=tuple(map(str, range(len(records)))))
    tasks = _tasks(adapter, merged, short, records, size)
    pace = known.get(computed)
    if pace is not None:  # through the whole model: the prefix cache keeps its states
        tasks = [replace(tasks[-1], data=records.part([0]))]
    before = model.merged
    try:
        with (
            refusing(model.peft_model.config.model_type),
            raising_failures(also_of_numbers=True),
            _caches_set_aside(model),
        ):
            model.merge(merged)
            with _in_this_process(model):
                for task in tasks:
                    # By the shortest record too, whose trace a longer one could hide.
                    for data in (task.data.part([0]), task.data)[len(task.data) == 1 :]:
                        with left_as_it_is(model.peft_model):
                            local_update(model, replace(task, data=data))
            if pace is None:
                pace = _pace(model, tasks[0 if cached else 1], keeps_features=cached)
                _num_measured[model] = num_measured(model) + 1
    finally:
        model.merge(before)
    for key in (computed, exact):
        known.pop(key, None)
        known[key] = pace
    for oldest in list(known)[:-_MOST_REMEMBERED]:
        del known[oldest]
    return pace


def num_measured(model: TrainingModel) -> int:
    """How many kinds of updates were rehearsed on this model so far, in full."""
    return _num_measured.get(model, 0)


def _pace(model: TrainingModel, task: UpdateTask, *, keeps_features: bool) -> Pace:
    """The pace of updates like this one, whose records are `synthetic_records`."""
    task = replace(task, spec=replace(task.spec, local_steps=1))
    has_features = keeps_features and model.features is not None and model.features.has_room
    times = _TIMES_FOR_A_HEAD if has_features and task.spec.trains == "head" else 1
    often = cast(_Everyone, copy.copy(task.sampler))
    often.times = times
    news, agains = [], []
    step = max(_timed(model, replace(task, data=task.data.part([]))) for _ in range(2))
    # The longest has no padding, so that some models leave out its mask and compute in another way.
    for longest in range(len(task.data))[-2:]:
        number = _RECORDS_OF_A_WORKER * model.num_workers
        data = cast(Records, task.data).part([longest] * number)
        if data.persons is not None:  # one each, so that workers share them
            data = replace(data, persons=tuple(map(str, range(number))))
        whole = replace(task, data=data)
        news.append(_timed(model, whole) / _RECORDS_OF_A_WORKER)
        # Less a step without workers: what these cost counts for each record, so that the pace is never too quick.
        agains.append(max(_timed(model, replace(whole, sampler=often)) for _ in range(2)) - step)
    return Pace(
        step=step,
        record=max(1e-6, *agains) / (_RECORDS_OF_A_WORKER * times),
        new_record=max(news),
        num_workers=model.num_workers,
    )


def _timed(model: TrainingModel, task: UpdateTask) -> float:
    begin = time.perf_counter()
    local_update(model, task)
    return time.perf_counter() - begin


@contextmanager
def _caches_set_aside(model: TrainingModel) -> Iterator[None]:
    with ExitStack() as aside:
        for cache in (model.cache, model.features):
            if cache is not None:
                aside.enter_context(cache.set_aside())
        yield


@contextmanager
def _in_this_process(model: TrainingModel) -> Iterator[None]:
    """Within this context passes run here, where what a library keeps of them serves later workers too."""
    before, model.num_workers = model.num_workers, 1
    try:
        yield
    finally:
        model.num_workers = before


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Within this context no pass may change the model or draw random numbers: a later record would show it."""
    before = _state(model)
    yield
    after = _state(model)
    changed = sorted(name for name in {*before, *after} if not _same(after.get(name), before.get(name)))
    if changed:
        raise ValueError(f"a pass changes {changed[0]}, which later records would show")


def _state(model: nn.Module) -> dict[str, Any]:
    """{name: value} of what a pass could leave behind: tensors by their versions, other attributes as they are."""
    state: dict[str, Any] = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state |= {f"{name}'s values": parameter._version for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                state[f"{path}.{name}"] = (id(value), value._version)
            elif value is None or (isinstance(value, _PLAIN) and not name.startswith("_")):
                state[f"{path}.{name}"] = repr(value)
    device = next(model.parameters()).device
    state["random numbers"] = torch.get_rng_state()
    state["other random numbers"] = pickle.dumps((random.getstate(), np.random.get_state()))
    if device.type == "cuda":
        state["random numbers of the GPU"] = torch.cuda.get_rng_state(device)
    return state


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def synthetic_records(
    model: TrainingModel, *, max_length: int, num_labels: int, features: Sequence[str] = ("input_ids",)
) -> Records:
    """Records of random tokens and labels, one of every padded length, shortest first; arguments as for `rehearse`."""
    lengths = lengths_up_to(max_length, model.longest)
    return random_records(model, lengths, num_labels=num_labels, features=features)


def random_records(
    model: TrainingModel,
    lengths: Sequence[int],
    *,
    num_labels: int,
    features: Sequence[str] = ("input_ids",),
    seed: int = 0,
) -> Records:
    """Records of these numbers of random tokens, >= 1, with random labels; other arguments as for `rehearse`."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.peft_model.config.vocab_size
    columns = {name: tuple(torch.zeros(length, dtype=torch.int64) for length in lengths) for name in features}
    if RESPONSE_MASK in columns:
        columns[RESPONSE_MASK] = tuple(map(torch.ones_like, columns[RESPONSE_MASK]))
    columns["input_ids"] = tuple(torch.randint(vocabulary, (length,), generator=generator) for length in lengths)
    labels = torch.randint(num_labels, (len(lengths),), generator=generator) if num_labels else torch.empty(0)
    return Records(columns, labels.to(torch.int64), pad_token_id=model.peft_model.config.pad_token_id or 0)


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


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within this context, for as long as they stand; `peak` is the most.

    Tensors that stood before are not counted, and what an operation takes for itself while it runs is not seen.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._now = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operation's result, counted."""
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


def peak_of_pass(model: Any, *, rows: int, tokens: int, activation_checkpointing: bool = False) -> int:
    """Bytes of all tensors at once in a pass for per-sample gradients, without the model's own: the gradients are in.

    Args:
        model: a causal peft model in eval mode, on torch's meta device; its parameters' formats count.
        rows: records of the pass, >= 1.
        tokens: of each record, >= 2.
    """
    live: _LiveBytes
    with _tensors_without_values(model):
        training = TrainingModel(
            model, memory_limit=2**62, prefix_cache=False, activation_checkpointing=activation_checkpointing
        )
        ids = (torch.ones(tokens, dtype=torch.int64),) * rows
        records = Records({"input_ids": ids}, torch.zeros(0, dtype=torch.int64), 0)
        # As in a run: each record has its own client's parameters.
        own = {name: p.detach().unsqueeze(0) for name, p in model.named_parameters() if p.requires_grad}
        stack = Stack(parameters=own, owners=torch.zeros(rows, dtype=torch.int64))
        with _LiveBytes([*model.parameters(), *model.buffers()]) as live:
            per_sample_gradients(
                training.layers, lambda: _losses_of_a_pass(training, records), stack, recomputed=training.recomputed
            )
    return live.peak


def _losses_of_a_pass(training: TrainingModel, records: Records) -> Tensor:
    """Losses of `TrainingModel.predictions` with a target at every place: values alone would tell where they are."""
    if training.output_layer is None:
        return training.predictions(records.items(), cached=False).losses
    with input_of(training.output_layer) as captured:
        training.logits(records.items(), cached=False)
    rows, tokens = captured[0].shape[:2]
    targets = torch.zeros(rows, tokens - 1, dtype=torch.int64)
    places = [torch.arange(tokens - 1)] * rows
    return sliced_predictions(captured[0], training.output_layer, targets, places).losses


@contextmanager
def _tensors_without_values(model: Any) -> Iterator[None]:
    """Within this context all tensors, the model's own too, stand for tensors on a CPU and have no memory."""
    meta = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    stand_ins: dict[int, nn.Parameter] = {}  # tied parameters stay one
    with FakeTensorMode():
        for module, parameters, buffers in meta:
            for name, p in parameters.items():
                if p is not None:
                    empty = torch.empty(p.shape, dtype=p.dtype)
                    stand_ins.setdefault(id(p), nn.Parameter(empty, requires_grad=p.requires_grad))
                    module._parameters[name] = stand_ins[id(p)]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        try:
            yield
        finally:
            for module, parameters, buffers in meta:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
