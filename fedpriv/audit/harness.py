"""The engine under audit: `training.stacked` unchanged, on a model whose per-sample gradients can be chosen freely.

The model is linear: its logit is the inner product of the parameters with the record's direction, and the other class
has logit 0. The gradient of a record's loss then points along its direction, or against it for class 0, and long rows
make clipping active: the record's contribution is C times a unit vector, the most that the guarantee covers. Sampling,
per-sample gradients, clipping, noise, step, upload and event are those of the library; only its forward pass is not
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.accounting.events import Event
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.data.records import BatchShape, Item, Records
from fedpriv.mechanisms.sources import RandomSource, SecureSource, SeededSource
from fedpriv.training.local_update import UpdateSpec, UpdateTask, planned_event
from fedpriv.training.model import TrainingModel
from fedpriv.training.per_sample import TrainableLayer
from fedpriv.training.shapes import Pass
from fedpriv.training.stacked import stacked_updates

_RECORDS_AT_ONCE = 1024
A, B, HEAD = "canary.lora_A.weight", "canary.lora_B.weight", "canary.head.weight"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The mechanism under audit.

    Attributes:
        spec: of a round's update; one step of SGD per round.
        num_registered: N_k of every client.
        rounds: number of rounds.
        sizes: {tensor name: its number of values}; the name determines which part a tensor belongs to.
        seed: of a reproducible audit; None uses the cryptographic source.
    """

    spec: UpdateSpec
    num_registered: int
    rounds: int = 1
    sizes: Mapping[str, int] = field(default_factory=lambda: {A: 512, B: 512})
    seed: int | None = None

    @property
    def dimension(self) -> int:
        """Number of values in a gradient."""
        return sum(self.sizes.values())

    @property
    def event(self) -> Event:
        """The event charged to one client for all rounds."""
        shapes = {name: torch.empty(1, size) for name, size in self.sizes.items()}
        planned = planned_event(self.spec, self.spec.probability(self.num_registered), shapes)
        return planned.with_count(self.rounds * planned.count)

    @property
    def expected_batch_size(self) -> float:
        """B = q N_k, by which the noised sum of a step is divided."""
        return self.spec.probability(self.num_registered) * self.num_registered

    def source(self, *labels: int | str) -> RandomSource:
        """A source of randomness, independent for different labels."""
        return SecureSource() if self.seed is None else SeededSource("audit", self.seed, *labels)


def update_spec(
    *, noise_multiplier: float, batch_size: int = 1, clip_norm: float = 1.0, rounds: int = 1, **changes: Any
) -> UpdateSpec:
    """The specification of one step of SGD per round, with joint clipping and Gaussian noise unless changed."""
    config = RunConfig(
        rounds=rounds,
        local_steps=1,
        batch_size=batch_size,
        learning_rate=1.0,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )
    return replace(UpdateSpec.of(config), **changes)


class LinearModel(TrainingModel):
    """The model described above, with the interface that `stacked_updates` needs.

    Args:
        rows: [records, values], each a record's input; its gradient is -+ half of it when the parameters are 0.
        sizes: {tensor name: its number of values}, which sum to the values of a row.
    """

    output_layer = None
    recomputed = ()

    def __init__(self, rows: Tensor, sizes: Mapping[str, int]) -> None:  # there is no peft model to initialise
        self._blocks = dict(zip(sizes, torch.split(rows, list(sizes.values()), dim=1), strict=True))
        self._linear = {name: nn.Linear(size, 1, bias=False) for name, size in sizes.items()}
        for layer in self._linear.values():
            nn.init.zeros_(layer.weight)
        self.device, self.cache = torch.device("cpu"), None
        self.layers = {name: TrainableLayer(module=m, weight=name, bias=None) for name, m in self._linear.items()}
        self.parameters = {name: cast(nn.Parameter, layer.weight) for name, layer in self._linear.items()}
        self.initial = {name: layer.weight.detach().clone() for name, layer in self._linear.items()}
        self.adapter_names = {name: name for name in sizes}

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Accept every shape: each tensor is a row, whichever part its name puts it in."""

    def merge(self, merged: object) -> None:
        """Do nothing, since there is no frozen base."""

    def logits(
        self, items: Sequence[Item], *, cached: bool, shape: BatchShape | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Two logits for each record, and the records' classes."""
        rows = torch.cat([records.features["input_ids"][index] for records, index in items])
        inner = [layer(self._blocks[name][rows]) for name, layer in self._linear.items()]
        logit = torch.stack(inner).sum(dim=0)
        labels = torch.stack([records.labels[index] for records, index in items])
        return torch.cat([logit, torch.zeros_like(logit)], dim=1), {"labels": labels}

    def passes(
        self,
        items: Sequence[Item],
        num_expected: float = _RECORDS_AT_ONCE,
        num_values: int | None = None,
        rank: int | None = None,
    ) -> Iterator[Pass]:
        """The records in order, in chunks of bounded size, however many are expected."""
        for begin in range(0, len(items), _RECORDS_AT_ONCE):
            positions = list(range(begin, min(begin + _RECORDS_AT_ONCE, len(items))))
            yield Pass(positions=positions, shape=BatchShape(rows=len(positions), tokens=1, full=True))


def records_of(rows: Sequence[int], classes: Sequence[int] | None = None) -> Records:
    """Records of a `LinearModel`, by row index; class 0 moves the upload along the row, class 1 against it."""
    labels = torch.tensor(classes if classes is not None else [0] * len(rows), dtype=torch.int64)
    return Records({"input_ids": tuple(torch.tensor([row]) for row in rows)}, labels, pad_token_id=0)


def observed(setup: Setup, model: LinearModel, data: Sequence[Records], round_: int) -> Tensor:
    """[clients, values] Noised sums of clipped gradients, recovered from the uploads by an observer, in units of C.

    Every client starts at zero. The observer knows the step: upload - broadcast = lr / B * (sum + noise), without B
    under `batch` and for noise on the upload, where the sum is the clipped update itself.
    """
    spec = setup.spec
    broadcast: Adapter = {name: torch.zeros(1, size) for name, size in setup.sizes.items()}
    tasks = [
        UpdateTask(
            adapter=broadcast,
            data=records,
            spec=spec,
            round=round_,
            sampler=spec.sampler(setup.num_registered, setup.source("inclusion", client, round_)),
            noise=setup.source("noise", client, round_),
        )
        for client, records in enumerate(data)
    ]
    updates = stacked_updates(cast(TrainingModel, model), tasks)
    uploads = torch.stack([torch.cat([t.flatten() for t in update.adapter.values()]) for update in updates])
    if spec.noise_on == "upload":
        return uploads / spec.clip_norm
    divisor = 1 if spec.clipping == "batch" else setup.expected_batch_size
    return uploads * divisor / (spec.learning_rate * spec.clip_norm)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What an attacker observes in one run, for each canary.

    Attributes:
        local: [rounds, canaries] inner product of each canary's direction with its client's upload, in units of C.
        aggregate: [rounds, canaries] inner product with the sum of all uploads of the round.
        included: bool [canaries].
    """

    local: Tensor
    aggregate: Tensor
    included: np.ndarray[tuple[int], np.dtype[np.bool_]]


def observe(setup: Setup, directions: Tensor, included: np.ndarray, *, num_clients: int = 1) -> Observations:
    """A run in which the canaries are dealt out to the clients in turn.

    Args:
        setup: of the run.
        directions: unit vectors [canaries, values]; a canary's raw gradient is 100 C times its own.
        included: bool [canaries].
        num_clients: number of clients, >= 1.
    """
    model = LinearModel(200.0 * setup.spec.clip_norm * directions, setup.sizes)
    own = torch.arange(len(directions)) % num_clients
    data = [records_of(np.flatnonzero(included & (own.numpy() == client)).tolist()) for client in range(num_clients)]
    local, total = [], []
    for round_ in range(setup.rounds):
        sums = observed(setup, model, data, round_)
        inner = torch.empty(len(directions))
        for client in range(num_clients):
            inner[own == client] = directions[own == client] @ sums[client]
        local.append(inner)
        total.append(directions @ sums.sum(dim=0))
    return Observations(local=torch.stack(local), aggregate=torch.stack(total), included=included)


def observe_clients(setup: Setup, bits: np.ndarray) -> Tensor:
    """[clients] Inner products of client-level canaries, one for each client, for noise on the upload.

    Each client's data set is a single record, replaced by the opposite one if the client's bit is unset. This is the
    strongest pair that the client-level guarantee covers: the clipped updates are 2 S apart.

    Args:
        setup: with noise on the upload.
        bits: bool [clients].
    """
    direction = torch.full((1, setup.dimension), setup.dimension**-0.5)
    # A step of lr / B times half the row must exceed S, so that the update is clipped.
    gradient_norm = 100.0 * setup.spec.clip_norm * setup.expected_batch_size / setup.spec.learning_rate
    model = LinearModel(2 * gradient_norm * direction, setup.sizes)
    sums = observed(setup, model, [records_of([0], [0 if bit else 1]) for bit in bits], 0)
    return sums @ direction[0]
