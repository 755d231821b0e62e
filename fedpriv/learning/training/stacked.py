"""Local updates (DP-LoRA, Liu et al., Algorithm 1) of one client, or of many in one pass of the frozen base.

The adapters of K clients are the rows of one matrix [K, values]. In each step, the records that all of them sampled
pass through the base together, every record with its own client's adapter. Gradients are computed and clipped per
record and summed per client, noise comes from each client's own source, and the optimizer steps all rows at once.

A row holds the tensors that are trained; the others are used and returned as they were received.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedpriv.learning.adapters import Adapter, same_merged
from fedpriv.learning.data.records import Records, RecordSet, usable
from fedpriv.learning.training._caches import Body, FeatureCache
from fedpriv.learning.training._coordinates import Coordinates, VectorLayout, scaled, trained_weights
from fedpriv.learning.training._head import ROWS_OF_A_PRODUCT, ClippedSums, Heads
from fedpriv.learning.training._passes import to_device
from fedpriv.learning.training.independence import TRAINING, finite, isolated, shared, side_by_side
from fedpriv.learning.training.local_update import (
    COUNTS,
    OBJECTIVES,
    ClientUpdate,
    TrainedModel,
    UpdateSpec,
    UpdateTask,
    noise_request,
)
from fedpriv.learning.training.per_sample import Stack, per_sample_gradients
from fedpriv.learning.training.private_evaluation import counted
from fedpriv.learning.training.private_sums import (
    PoissonSampler,
    add_clipped,
    add_finite,
    add_in_turn,
    clipped_rows,
    clipped_sums,
)
from fedpriv.privacy.accounting.events import Event, group
from fedpriv.privacy.mechanisms.registry import MECHANISMS

log = logging.getLogger(__name__)

# Floats kept per client and adapter value: start, parameter, gradient, AdamW's two moments, and what a step needs.
FLOATS_PER_VALUE = 8

# For each value of a person's sum: float64, and as much again while rows are added to it.
_BYTES_OF_A_VALUE = 16
# For each input of a head, of each record of a product: what `HeadInputs` and its making take.
_BYTES_OF_AN_INPUT = 64
# Sums take one of so many equal parts of the memory limit.
_PARTS_OF_MEMORY = 4


def local_update(model: TrainedModel, task: UpdateTask) -> ClientUpdate:
    """`stacked_updates` for a single client, or the counts of its evaluation."""
    if task.spec.objective == COUNTS:
        return counted(model, task)
    return stacked_updates(model, [task])[0]


def stacked_updates(model: TrainedModel, tasks: Sequence[UpdateTask]) -> list[ClientUpdate]:
    """Each client's adapter after its steps, and the event that pays for them.

    With noise on the gradients, each step of a client is: Poisson sample, per-sample gradients of the trained tensors,
    clipping by the rule, sum, noise on each of their values, division by the expected batch size of the client's
    sampler, optimizer step. An empty sample counts as a zero gradient. With noise on the upload, the steps add no
    noise, and the whole update is clipped and noised. Other clients affect a result through rounding alone.

    Where the unit is the person, the sample is of persons, and what is clipped is the sum of the gradients of at most
    m records of each; one that fails counts as zero in it. So a person moves the sum by at most what a record would.

    With the objective `class-sums` the gradient of record i is -e_y x phi_i in the head: phi is what the head reads,
    with the scale of the bias as a further coordinate, and y the record's class. So a step of rate 1 of a head at zero
    is the noised sum of each class's phi over the expected batch size.

    Guarantee: every client's update is (epsilon, delta)-DP at the cost of its event, for the event's unit.

    Args:
        model: supplies the frozen base and the trainable layers; its own adapter is left unchanged.
        tasks: at least one, all with the same specification, adapter shapes and merged base.

    Raises:
        ValueError: the specifications, shapes or merged bases differ, or a task does not fit the model.
    """
    clients = _Clients.of(model, tasks)
    model.merge(tasks[0].merged)
    spec, on_upload = clients.spec, clients.spec.noise_on == "upload"
    planned = [task.event for task in tasks]
    weights = trained_weights(spec, clients.broadcast, model.initial, clients.layout)
    events: list[list[Event]] = [[] for _ in tasks]
    for step in range(spec.local_steps):
        clients = replace(clients, step=step)
        if on_upload:
            gradients = _plain_gradients(clients, weights.values())
        else:
            noised, gradients, step_events = _private_gradients(clients, weights.values())
            for collected, event in zip(events, step_events, strict=True):
                collected.append(event)
        weights.step(clients.coordinates.step_of(gradients))
        clients.tell(1.0)
    trained = weights.values()
    if on_upload:
        noised, trained, upload_events = _noised_uploads(clients, trained)
        events = [[event] for event in upload_events]
    learned = clients.learned
    if silent := learned.count(False):
        log.warning(
            "round %d: %d of %d updates are noise alone: no record had a gradient", tasks[0].round, silent, len(tasks)
        )
    return [
        ClientUpdate(
            adapter=clients.with_trained(client, row),
            event=_charged_event(collected, plan),
            num_records=task.sampler.num_registered,
            noised=released if task.grid else None,
            learned=learned[client],
        )
        for client, (row, released, collected, plan, task) in enumerate(
            zip(trained.cpu(), noised.cpu(), events, planned, tasks, strict=True)
        )
    ]


def execute_one_by_one(model: TrainedModel, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
    """Run the tasks in turn; one that fails yields its exception, and the others go on."""
    results: list[ClientUpdate | Exception] = []
    for task in tasks:
        try:
            results.append(local_update(model, task))
        except Exception as error:  # one client's failure must not end the round
            results.append(error)
    return results


def execute_stacked(model: TrainedModel, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
    """Run the tasks together, as many at once as the model's memory limit allows; one that fails yields its exception.

    If a client fails, its stack runs again one by one: nothing was released from it, and noise is drawn again.
    """
    results: dict[int, ClientUpdate | Exception] = {}
    stackable: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        stackable[task.spec, tuple(tensor.shape for tensor in task.adapter.values())].append(index)
    at_once = clients_at_once(model)
    for indices in stackable.values():
        for begin in range(0, len(indices), at_once):
            stack = [tasks[index] for index in indices[begin : begin + at_once]]
            try:
                found: Sequence[ClientUpdate | Exception] = stacked_updates(model, stack)
            except Exception:  # only separate runs tell which client failed
                found = execute_one_by_one(model, stack)
            results.update(zip(indices[begin : begin + at_once], found, strict=True))
    return [results[index] for index in range(len(tasks))]


def caching_pays_off(spec: UpdateSpec, sampler: PoissonSampler) -> bool:
    """Whether the run draws a record at least once on average; if not, the prefix cache cannot pay off."""
    return spec.num_rounds * spec.local_steps * sampler.sampling_probability >= 1


def clients_at_once(model: TrainedModel) -> int:
    """The number of clients whose adapters, gradients and optimizer state fit the memory limit; at least 1."""
    num_values = sum(parameter.numel() for parameter in model.parameters.values())
    return max(1, model.memory_limit // (4 * FLOATS_PER_VALUE * num_values))


def _persons_at_once(model: TrainedModel, num_values: int) -> int:
    """The number of persons whose summed gradients, of so many values, fit a part of the memory limit; at least 1."""
    return max(1, model.memory_limit // (_PARTS_OF_MEMORY * _BYTES_OF_A_VALUE * num_values))


@dataclass(frozen=True, kw_only=True)
class _Clients:
    """The clients of a stack.

    Attributes:
        model, tasks: as given.
        spec: the tasks' common specification.
        coordinates: of an adapter's trained values in a row.
        broadcast: [clients, values], the trained values that the clients start from.
        fixed: {tensor name: [clients, *shape]} of the tensors that are not trained.
        centres: [clients, inputs], what each client takes off the features that its head reads.
        step: the current one, from 0.
        heard: for each sum so far, which clients had drawn records, and bool [clients] whose sums were not zero.
    """

    model: TrainedModel
    tasks: Sequence[UpdateTask]
    spec: UpdateSpec
    coordinates: Coordinates
    broadcast: Tensor
    fixed: Mapping[str, Tensor]
    centres: Tensor | None
    step: int = 0
    heard: list[tuple[Sequence[bool], Tensor]] = field(default_factory=list)

    @staticmethod
    def of(model: TrainedModel, tasks: Sequence[UpdateTask]) -> _Clients:
        spec = tasks[0].spec
        if spec.objective not in OBJECTIVES:
            raise ValueError(f"objective = {spec.objective!r}: must be one of {', '.join(OBJECTIVES)} in a stack")
        if any(task.spec != spec for task in tasks):
            raise ValueError("tasks: all of one stack must have the same specification")
        if any(not same_merged(task.merged, tasks[0].merged) for task in tasks):
            raise ValueError("tasks: all of one stack must have the same merged base")
        shapes = {name: tensor.shape for name, tensor in tasks[0].adapter.items()}
        if any({name: tensor.shape for name, tensor in task.adapter.items()} != shapes for task in tasks):
            raise ValueError("tasks: the adapters of one stack must have tensors of the same names and shapes")
        model.check(shapes)
        if spec.centred and model.features is None:
            raise ValueError("centred = true: needs a classifier whose head is one linear layer")
        coordinates = Coordinates.of(spec, shapes, model.device)
        starts = [coordinates.start(task.adapter) for task in tasks]
        centres = [centre for _, centre in starts if centre is not None]
        return _Clients(
            model=model,
            tasks=tasks,
            spec=spec,
            coordinates=coordinates,
            broadcast=torch.stack([row for row, _ in starts]).to(model.device),
            fixed={
                name: torch.stack([task.adapter[name] for task in tasks]).to(model.device)
                for name in shapes.keys() - coordinates.layout.columns.keys()
            },
            centres=torch.stack(centres).to(model.device) if centres else None,
        )

    @property
    def layout(self) -> VectorLayout:
        """The layout of a row."""
        return self.coordinates.layout

    def with_trained(self, client: int, row: Tensor) -> Adapter:
        """A copy of the client's adapter with trained values [values] in the place of its own."""
        centre = None if self.centres is None else self.centres[client].cpu()
        return self.coordinates.moved(self.tasks[client].adapter, row, centre)

    @property
    def trained_parameters(self) -> set[str]:
        """The model's own names of the trained parameters."""
        return {name for name, stored in self.model.adapter_names.items() if stored in self.layout.columns}

    @property
    def learned(self) -> list[bool | None]:
        """For each client whether a record had a gradient; None if it drew no record in any step."""
        has_drawn = [any(steps) for steps in zip(*(drawn for drawn, _ in self.heard), strict=True)]
        moved = torch.stack([moved for _, moved in self.heard]).any(dim=0).tolist()
        return [found if drawn else None for found, drawn in zip(moved, has_drawn, strict=True)]

    def tell(self, share: float) -> None:
        """Tell those who follow the model that this share of the current step is done."""
        self.model.tell(TRAINING, len(self.tasks) * (self.step + share), len(self.tasks) * self.spec.local_steps)

    def expected_batch_sizes(self) -> Tensor:
        """[clients, 1], float64, of the samplers that draw the batches."""
        sizes = [task.sampler.expected_batch_size for task in self.tasks]
        return to_device(torch.tensor(sizes, dtype=torch.float64).unsqueeze(1), self.model.device)


def _charged_event(events: Sequence[Event], planned: Event) -> Event:
    """The update's events as one, which must equal the event that was planned and charged."""
    (event,) = group(events)
    if event != planned:
        raise RuntimeError(f"the update cost {event}, but {planned} was planned and charged")
    return event


def _plain_gradients(clients: _Clients, parameters: Tensor) -> Tensor:
    """[clients, values] The gradients of one step without clipping or noise; the noise on the upload protects them."""
    totals = _sums(clients, parameters, _drawn(clients), is_clipped=False)
    return totals.div_(clients.expected_batch_sizes()).float()


def _noised_uploads(clients: _Clients, trained: Tensor) -> tuple[Tensor, Tensor, Sequence[Event]]:
    """The updates, clipped jointly to S and noised; the broadcast adapters plus these; and the events that pay.

    Source: Liu et al., Eq. 8.
    """
    spec = clients.spec
    updates = trained.double() - clients.broadcast
    if clients.coordinates.scales is not None:
        updates = updates / clients.coordinates.scales
    noised, events = _noised(clients, clipped_rows(updates, spec.clip_norm, (slice(0, clients.layout.size),)))
    return noised, (clients.broadcast + scaled(noised, clients.coordinates.scales)).float(), events


def _private_gradients(clients: _Clients, parameters: Tensor) -> tuple[Tensor, Tensor, Sequence[Event]]:
    """[clients, values] The noised sums of one step, the gradients that they make, and the events that pay for them."""
    batch_rule, drawn = clients.spec.clipping == "batch", _drawn(clients)
    totals = _sums(clients, parameters, drawn, is_clipped=not batch_rule)
    if batch_rule:
        # Algorithm 1 to the letter: the mean over the realised batch is clipped, and its noise is not divided by B.
        sizes = torch.tensor([max(len(units), 1) for units in drawn], device=totals.device)
        totals = clipped_rows(totals / sizes.unsqueeze(1), clients.spec.clip_norm, clients.layout.parts)
    noised, events = _noised(clients, totals)
    return noised, (noised if batch_rule else noised / clients.expected_batch_sizes()).float(), events


def _noised(clients: _Clients, sums: Tensor) -> tuple[Tensor, Sequence[Event]]:
    """The sums with the specified noise, and the events that pay for it."""
    spec, layout = clients.spec, clients.layout
    probabilities = [task.sampler.sampling_probability for task in clients.tasks]
    grids = [task.grid for task in clients.tasks]
    request = noise_request(spec, probabilities, layout.size, len(layout.parts), grids)
    return MECHANISMS.named(spec.mechanism).add_noise(sums, request, [task.noise for task in clients.tasks])


Unit = list[int]
"""The records of what is clipped as one, by their indices: a record, or those of a person that count."""

Add = Callable[[Tensor, Tensor, Tensor], None]
"""Adds rows to the totals of their owners, as `add_clipped` does."""


def _drawn(clients: _Clients) -> list[list[Unit]]:
    """[clients] What each client draws."""
    most, tasks = clients.spec.max_records_per_person, clients.tasks
    if most:  # persons are known of tokenised records alone
        return [task.sampler.draw_persons(cast("Records", task.data), most) for task in tasks]
    return [[[index] for index in task.sampler.draw(len(task.data))] for task in tasks]


def _sums(clients: _Clients, parameters: Tensor, drawn: Sequence[Sequence[Unit]], *, is_clipped: bool) -> Tensor:
    """[clients, values] The sum of each client's gradients, float64; clipped by the rule, each unit as a whole.

    A person's gradient is the sum of its records': no mean, since clipping bounds either by C, and a mean of records
    that differ is short, so it would waste what C pays for.

    Guarantee: where each record has a pass of its own, what a unit adds depends on this unit's records alone, to the
    bit. A person's are added up in the order of their indices.
    """
    spec, model = clients.spec, clients.model
    totals = torch.zeros_like(parameters, dtype=torch.int64 if is_clipped else torch.float64)
    add: Add = partial(add_clipped, clip_norm=spec.clip_norm, parts=clients.layout.parts) if is_clipped else add_finite
    of_head = None
    if model.features is not None and clients.layout.columns.keys() == model.head_tensors:
        of_head = _add_of_head(totals, clients, model.features, parameters, drawn, add, is_clipped=is_clipped)
    elif model.alone:
        totals += _alone(clients, parameters, drawn, add, totals.dtype).to(totals.device)
    elif spec.max_records_per_person:
        for sums, owners in _sums_of_persons(clients, parameters, drawn):
            add(totals, sums, owners)
    else:
        every = _Drawn.of_records([[index for (index,) in units] for units in drawn])
        for rows, owners in _gradient_rows(clients, parameters, every):
            add(totals, rows, owners)
    sums = clipped_sums(totals, spec.clip_norm) if is_clipped else totals
    sums = sums if of_head is None else sums + of_head
    clients.heard.append((list(map(bool, drawn)), sums.any(dim=1)))
    return sums


def _alone(
    clients: _Clients, parameters: Tensor, drawn: Sequence[Sequence[Unit]], add: Add, dtype: torch.dtype
) -> Tensor:
    """`_sums` with a pass for each record, in as many workers as the model has; on the CPU."""
    model = clients.model
    units = [(client, unit) for client, own in enumerate(drawn) for unit in own]
    totals = shared(max(1, model.num_workers), *parameters.shape, dtype=dtype)
    _fill_cache(clients)

    def work(number: int, worker: int) -> None:
        client, unit = units[number]
        row = parameters.new_zeros((1, parameters.shape[1]), dtype=torch.float64)
        of_unit = _Drawn(
            indices=[unit if k == client else [] for k in range(len(drawn))],
            targets=[[0] * len(unit) if k == client else [] for k in range(len(drawn))],
        )
        for rows, targets in _gradient_rows(clients, parameters, of_unit):
            add_in_turn(row, rows, targets)
        add(totals[worker], row.cpu(), torch.tensor([client]))

    side_by_side(work, len(units), model.num_workers)
    return totals.sum(dim=0)


@dataclass(frozen=True)
class _Drawn:
    """Records whose gradients a step computes.

    Attributes:
        indices: [clients] the indices of each client's records.
        targets: [clients] for each record, the place of the total that its gradient is added to.
        num_before: records of the same step that were computed before these.
        num_after: those that are left after these.
    """

    indices: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    num_before: int = 0
    num_after: int = 0

    @staticmethod
    def of_records(indices: Sequence[Sequence[int]]) -> _Drawn:
        """Records, each of which is added to its client's total."""
        return _Drawn(indices, [[client] * len(own) for client, own in enumerate(indices)])

    def __len__(self) -> int:
        return sum(map(len, self.indices))


def _sums_of_persons(
    clients: _Clients, parameters: Tensor, drawn: Sequence[Sequence[Unit]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The sum of each drawn person's gradients, float64 [persons, values], and the person's client, int64 [persons]."""
    at_once = _persons_at_once(clients.model, clients.layout.size)
    persons = [(client, records) for client, each in enumerate(drawn) for records in each]
    num_before, num_after = 0, sum(len(records) for _, records in persons)
    for begin in range(0, len(persons), at_once):
        chunk = persons[begin : begin + at_once]
        indices: list[list[int]] = [[] for _ in clients.tasks]
        targets: list[list[int]] = [[] for _ in clients.tasks]
        for place, (client, records) in enumerate(chunk):
            indices[client] += records
            targets[client] += [place] * len(records)
        sums = parameters.new_zeros((len(chunk), parameters.shape[1]), dtype=torch.float64)
        num_after -= (number := sum(map(len, indices)))
        for rows, places in _gradient_rows(clients, parameters, _Drawn(indices, targets, num_before, num_after)):
            add_in_turn(sums, rows, places)
        num_before += number
        yield sums, torch.tensor([client for client, _ in chunk], device=sums.device)


def _fill_cache(clients: _Clients) -> None:
    """Keep the states of the clients' records, where that pays off: in the first step, whatever is drawn in it."""
    cache = clients.model.cache
    held = [task.data for task in clients.tasks if len(task.data) and caching_pays_off(task.spec, task.sampler)]
    if cache is not None:
        cache.fill([item for records in held for item in records.items([0])])


def _gradient_rows(clients: _Clients, parameters: Tensor, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-sample gradients of the drawn records by pass, [records, values], and each one's target, int64 [records].

    A record that is unusable or fails is left out: its gradient is zero.
    """
    model, by_name = clients.model, {**clients.fixed, **clients.layout.unflatten(parameters)}
    stacked = {module: by_name[name] for module, name in model.adapter_names.items()}
    num_done, num_drawn = drawn.num_before, drawn.num_before + len(drawn) + drawn.num_after
    _fill_cache(clients)
    for cached in (True, False):
        selected = [k for k, task in enumerate(clients.tasks) if caching_pays_off(task.spec, task.sampler) == cached]
        sampled = [
            ((clients.tasks[k].data, index), k, target)
            for k in selected
            for index, target in zip(drawn.indices[k], drawn.targets[k], strict=True)
        ]
        sampled = [each for each in sampled if usable(each[0])]
        items, owners = [item for item, _, _ in sampled], [k for _, k, _ in sampled]
        for together in model.passes(items, clients.layout.size):
            run = partial(_pass_gradients, clients, stacked, items, owners, cached)
            for positions, rows in isolated(run, together):
                if rows is not None:
                    targets = torch.tensor([sampled[position][2] for position in positions], dtype=torch.int64)
                    yield rows, to_device(targets, rows.device)
            num_done += len(together)
            clients.tell(num_done / (1 + num_drawn))  # noise and step are still to come


def _pass_gradients(
    clients: _Clients,
    stacked: Mapping[str, Tensor],
    items: Sequence[tuple[RecordSet, int]],
    owners: Sequence[int],
    cached: bool,
    positions: list[int],
) -> Tensor:
    """[records, values] Per-sample gradients of the records at the given positions."""
    model = clients.model
    batch = [items[position] for position in positions]
    own = to_device(torch.tensor([owners[position] for position in positions]), model.device)
    gradients, _ = per_sample_gradients(
        model.layers,
        partial(model.objectives, batch, clients.spec.objective, cached=cached),
        Stack(parameters=stacked, owners=own),
        trained=clients.trained_parameters,
        recomputed=model.recomputed,
    )
    rows = clients.layout.flatten({model.adapter_names[name]: g for name, g in gradients.items()})
    return finite(scaled(rows, clients.coordinates.scales))


def _add_of_head(
    totals: Tensor,
    clients: _Clients,
    features: FeatureCache,
    parameters: Tensor,
    drawn: Sequence[Sequence[Unit]],
    add: Add,
    *,
    is_clipped: bool,
) -> Tensor | None:
    """`_sums` where the head alone is trained, from the features of the records; None if all is added to the totals."""
    heads, spec = _heads(clients, parameters), clients.spec
    sums = ClippedSums(len(drawn), heads.shape, spec.clip_norm, heads.parts) if is_clipped else None
    for body, keep, members in _by_body(clients):
        # Features are kept of tokenised records alone.
        held = [(cast("Records", clients.tasks[k].data), k) for k in members]
        records = [
            (data, torch.tensor([index for unit in drawn[k] for index in unit], dtype=torch.int64)) for data, k in held
        ]
        inputs = finite(features.features(records, body, keep=keep))
        labels = torch.cat([data.labels[indices] for data, indices in records])
        owners = torch.tensor(members).repeat_interleave(torch.tensor([len(indices) for _, indices in records]))
        if spec.max_records_per_person:
            sizes = [(k, len(unit)) for k in members for unit in drawn[k]]
            _add_persons_of_head(totals, heads, inputs, labels, owners, sizes, add)
            continue
        at_once = max(1, min(ROWS_OF_A_PRODUCT, clients.model.memory_limit // (_BYTES_OF_AN_INPUT * heads.shape[1])))
        for begin in range(0, len(inputs), at_once):
            at = slice(begin, begin + at_once)
            found, differences, runs = heads.of_records(inputs[at], labels[at], owners[at])
            if sums is not None:
                sums.add(found, differences, runs)
                continue
            for client, rows in runs:
                totals[client] += heads.flat(found.plain_sum(rows, differences)).to(totals.device)
    if sums is None:
        return None
    return torch.stack([heads.flat(matrix) for matrix in sums.totals()]).to(totals.device)


def _add_persons_of_head(
    totals: Tensor,
    heads: Heads,
    inputs: Tensor,
    labels: Tensor,
    owners: Tensor,
    sizes: Sequence[tuple[int, int]],
    add: Add,
) -> None:
    """Add what each person's records, which follow one another in the inputs, give: one row at a time.

    Args:
        totals, heads, add: as for `_add_of_head`.
        inputs, labels, owners: of the records.
        sizes: the client, and the number of records, of each person.
    """
    ends = torch.tensor([number for _, number in sizes]).cumsum(dim=0).tolist()
    for (client, number), end in zip(sizes, ends, strict=True):
        at = slice(end - number, end)
        found, differences, _ = heads.of_records(inputs[at], labels[at], owners[at])
        row = heads.flat(sum(found.gradients(differences), torch.zeros(heads.shape, dtype=torch.float64)))
        add(totals, row.unsqueeze(0).to(totals.device), torch.tensor([client], device=totals.device))


def _heads(clients: _Clients, parameters: Tensor) -> Heads:
    """The heads that the clients have in this step."""
    model = clients.model
    assert model.head is not None
    layer, tensors = model.layers[model.head], clients.layout.unflatten(parameters.cpu())
    names = tuple(model.adapter_names[name] for name in (layer.weight, layer.bias) if name)
    scale = clients.spec.bias_scale if len(names) > 1 else None
    columns = [tensors[names[0]].double()]
    if scale is not None:
        columns.append(tensors[names[1]].double().unsqueeze(2) / scale)
    return Heads(
        weights=torch.cat(columns, dim=2),
        bias_scale=scale,
        centres=None if clients.centres is None else clients.centres.cpu(),
        layout=clients.layout,
        names=names,
        objective=clients.spec.objective,
    )


def _by_body(clients: _Clients) -> list[tuple[Body, bool, list[int]]]:
    """The clients whose features are computed with the same tensors, and whether these pay off being kept."""
    groups: list[tuple[Body, bool, list[int]]] = []
    for k, task in enumerate(clients.tasks):
        own = Body({name: task.adapter[name] for name in sorted(clients.fixed)}, task.merged)
        keep = caching_pays_off(task.spec, task.sampler)
        for body, kept, members in groups:
            if kept == keep and body.same(own):
                members.append(k)
                break
        else:
            groups.append((own, keep, [k]))
    return groups
