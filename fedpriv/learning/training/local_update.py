"""A local update as every engine sees it: its specification, its task and its result; `stacked.py` computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedpriv.config import RunConfig
from fedpriv.learning.adapters import Adapter, Merged
from fedpriv.learning.adapters.pooling import BIAS_SCALE
from fedpriv.learning.data.records import RecordSet
from fedpriv.learning.training._caches import Cached
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.privacy.accounting.events import Event, Unit
from fedpriv.privacy.accounting.sensitivity import UPLOAD_FACTOR, clipping_parts, sensitivity_factor
from fedpriv.privacy.mechanisms.discrete_gaussian import ClientGrid
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource

if TYPE_CHECKING:
    from fedpriv.learning.training._caches import FeatureCache
    from fedpriv.learning.training._passes import Predictions
    from fedpriv.learning.training.per_sample import TrainableLayer

OPTIMIZERS = ("sgd", "adamw")
# Values that a tensor may take in training: any, or three around its initial one.
QUANTIZATIONS = ("none", "ternary")
_A, _B = ".lora_A.", ".lora_B."
# {which tensors an update trains: parts of the names of those that it returns as it received them}. The head is what is
# neither A nor B.
_LEFT_OUT: Mapping[str, tuple[str, ...]] = {"all": (), "head": (_A, _B), "lora-a": (_B,), "lora-b": (_A,)}
TRAINED_PARTS = tuple(_LEFT_OUT)
# What an update descends: each record's loss, or minus the logit of its class, whose gradient is minus its features.
OBJECTIVES = ("loss", "class-sums")
# The third one, which no instruction names: an evaluation counts the records on which the model is right and wrong.
COUNTS = "counts"
_NUM_COUNTS = 2


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """The update that the server asks of a client in one round; the guard checks it.

    Attributes:
        num_rounds: how many rounds the run has in all.
        local_steps: noisy steps in this round, >= 1.
        batch_size: B, the expected batch size, >= 1, if there is no `sampling_probability`.
        optimizer: `sgd` or `adamw`, both without state from earlier rounds.
        learning_rate: > 0.
        weight_decay: >= 0, for `adamw`.
        clipping: the clipping rule.
        clip_norm: C > 0, gradient units.
        noise_multiplier: z >= 0, noise relative to the clip norm; it scales the mechanism's noise.
        noise_on: `gradients` noises the sum of every step; `upload` trains without noise and noises the clipped
            update, where `clip_norm` is S, in units of the parameters.
        codec: how the upload is encoded.
        quantization: `none`, or `ternary`, where broadcast and upload are ternary differences from the run's start.
        relevance_threshold: v_0 in [0, 1]; with 0 every client uploads.
        mechanism: name of the noise mechanism in `MECHANISMS`.
        mechanism_parameters: as the mechanism reads them; empty for one that takes none.
        sampling_probability: q in (0, 1], the same at every client; 0 stands for B / N_k.
        trains: `all` tensors, the `head`, or `lora-a` or `lora-b`: A or B and the head.
        objective: `loss`, or `class-sums` for the start of a head, or `counts`; see `UpdateSpec.counts`.
        bias_scale: what the gradient of the head's bias is multiplied by before it is clipped, and its step after it
            was noised, > 0: features get this as a further, constant coordinate.
        lora_learning_rate: of A and B; 0 stands for `learning_rate`.
        centred: whether a head's steps are taken with features less the mean of its rows; see `_coordinates.py`.
        max_records_per_person: m; a sample draws persons, and at most so many records of each. 0 where the unit is the
            record; B and N_k then count records, and else persons.
    """

    num_rounds: int
    local_steps: int
    batch_size: int
    optimizer: str
    learning_rate: float
    weight_decay: float
    clipping: str
    clip_norm: float
    noise_multiplier: float
    noise_on: str
    codec: str = "float32"
    quantization: str = "none"
    relevance_threshold: float = 0.0
    mechanism: str = "gaussian"
    mechanism_parameters: str = ""
    sampling_probability: float = 0.0
    trains: str = "all"
    objective: str = "loss"
    bias_scale: float = 1.0
    lora_learning_rate: float = 0.0
    centred: bool = False
    max_records_per_person: int = 0

    @property
    def unit(self) -> Unit:
        """The unit that the event of the update protects."""
        if self.noise_on == "upload":
            return "client"
        return "person" if self.max_records_per_person else "record"

    def __str__(self) -> str:
        """A client's part in a round, in words, for logs."""
        num_steps = f"{self.local_steps} step{'s' if self.local_steps > 1 else ''}"
        drawn = f"q = {self.sampling_probability:g}" if self.sampling_probability else f"B = {self.batch_size}"
        drawn += f", {self.max_records_per_person} records of a person" if self.max_records_per_person else ""
        noised = "the upload" if self.noise_on == "upload" else "gradients"
        rate = f"{self.learning_rate:.4g}"
        rate += f" ({self.lora_learning_rate:.4g} for A and B)" if self.lora_learning_rate else ""
        goal = "class sums" if self.objective == "class-sums" else f"training {self.trains}"
        return (
            f"{goal}, {num_steps} of {self.optimizer} at learning rate {rate}, {drawn}; {noised} clipped to "
            f"{self.clip_norm:g} ({self.clipping}), {self.mechanism} noise with z = {self.noise_multiplier:g}"
        )

    @staticmethod
    def of(config: RunConfig) -> UpdateSpec:
        """The part of a configuration that a client carries out where all is trained; ValueError unless calibrated."""
        if config.learning_rate == "auto":
            raise ValueError("learning_rate = auto: has not been derived yet")
        rule = config.rule
        derived: dict[str, Any] = {
            "num_rounds": config.rounds,
            "codec": "ternary" if rule.ternary else config.upload_codec,
            "quantization": "ternary" if rule.ternary else "none",
            "relevance_threshold": config.relevance_threshold if rule.selective else 0.0,
            "sampling_probability": config.sampling_probability or 0.0,
            "trains": "all",
            "objective": "loss",
            "bias_scale": BIAS_SCALE if config.normalize_features else 1.0,
            "lora_learning_rate": 0.0,
            "centred": False,
            "max_records_per_person": config.most_of_a_person,
        }
        names = UpdateSpec.__dataclass_fields__.keys() - derived.keys()
        return UpdateSpec(**derived, **{name: getattr(config, name) for name in names})

    @staticmethod
    def counts(noise_multiplier: float, max_records_per_person: int = 0) -> UpdateSpec:
        """An evaluation as an update: one step over all records set aside, which moves nothing.

        Every record adds (h, 1 - h) to (hits, misses), with h in [0, 1]. Since h^2 + (1 - h)^2 <= 1, adding or removing
        one moves the pair by at most C = 1 in L2, and by exactly 1 if h is 0 or 1. Which records are set aside is no
        sampling that amplifies privacy, so q = 1: the coins of `fedpriv.learning.data.federated` are the same in every
        evaluation. A person adds the mean of the same over at most m records, which is no longer.
        """
        return UpdateSpec(
            num_rounds=1,
            local_steps=1,
            batch_size=1,
            optimizer="sgd",
            learning_rate=0.0,
            weight_decay=0.0,
            clipping="joint",
            clip_norm=1.0,
            noise_multiplier=noise_multiplier,
            noise_on="gradients",
            sampling_probability=1.0,
            objective=COUNTS,
            max_records_per_person=max_records_per_person,
        )

    def probability(self, num_registered: int) -> float:
        """q, with which a client with so many registered records, or persons, samples each of them."""
        return self.sampling_probability or self.batch_size / num_registered

    def sampler(self, num_registered: int, source: RandomSource, choices: RandomSource | None = None) -> PoissonSampler:
        """Draws the batches of a client with so many registered records, or persons.

        Args:
            num_registered: N_k.
            source: of the coins for inclusion.
            choices: source of what decides which records of a person count; None takes that of the coins.

        Raises:
            InputError: B > N_k.
        """
        if self.sampling_probability:
            return PoissonSampler.with_probability(
                self.sampling_probability, num_registered=num_registered, source=source, choices=choices
            )
        return PoissonSampler(
            num_registered=num_registered, expected_batch_size=self.batch_size, source=source, choices=choices
        )

    @property
    def broadcast_codec(self) -> str:
        """The codec of the adapter that a client starts from."""
        return "ternary" if self.quantization == "ternary" else "float32"


@dataclass(frozen=True, kw_only=True)
class UpdateTask:
    """A local update to compute.

    Attributes:
        adapter: the broadcast adapter, float32.
        data: the client's records.
        spec: how to compute it.
        round: the run's round, from 1.
        sampler: draws the batches, and knows its sampling probability.
        noise: source of the release noise.
        merged: what aggregation has added to the frozen weights.
        grid: of the client's sum, where the server learns the clients' total alone; None elsewhere.
    """

    adapter: Adapter
    data: RecordSet
    spec: UpdateSpec
    round: int
    sampler: PoissonSampler
    noise: RandomSource
    merged: Merged = field(default_factory=dict)
    grid: ClientGrid | None = None

    @cached_property
    def event(self) -> Event:
        """The event that the update returns, and that is charged before it is computed; raises as `planned_event`."""
        return planned_event(self.spec, self.sampler.sampling_probability, self.adapter, self.grid)


class TrainedModel(Cached, Protocol):
    """A frozen base with trained tensors, as local updates and evaluations use it; an item is a record of a set."""

    device: torch.device
    """The device on which it computes."""
    layers: dict[str, TrainableLayer]
    """The trainable layers by module name."""
    parameters: dict[str, nn.Parameter]
    """{name of a trained tensor in adapters: its parameter}."""
    adapter_names: dict[str, str]
    """{name of a parameter in gradients: its name in adapters}."""
    initial: Adapter
    """The trained tensors that a run starts from."""
    recomputed: Sequence[nn.Module]
    """Layers that run again in the backward pass, as `per_sample_gradients` takes them."""
    head: str | None
    """Name of the layer that makes one vector of each record into the logits; None if no such layer is trained."""
    features: FeatureCache | None
    """The vectors that the head reads, kept; None without a head."""
    alone: bool
    """Whether each record has a pass of its own."""

    @property
    def head_tensors(self) -> set[str]:
        """Names of the head's tensors in adapters; empty without a `head`."""

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse an adapter that does not fit, with a ValueError."""

    def check_merged(self, merged: Merged) -> None:
        """Refuse additions to frozen weights that do not fit, with a ValueError."""

    def merge(self, merged: Merged) -> None:
        """Set the frozen weights to the pretrained ones plus these."""

    def passes(self, items: Sequence[Any], num_values: int | None = None) -> Iterable[list[int]]:
        """The positions of the records that share a pass."""

    def predictions(self, items: Sequence[Any], *, cached: bool) -> Predictions:
        """The predictions of the records with the tensors of the model."""

    def objectives(self, items: Sequence[Any], objective: str, *, cached: bool) -> Tensor:
        """[records] The values whose gradients an update descends."""


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """The upload of a client, and the event that pays for it.

    Attributes:
        adapter: the noised adapter, float32.
        event: the privacy event that pays for it.
        num_records: N_k, the registered number of records, or persons.
        noised: float64 [values], what was noised last, before anything was made of it: the sum of a step, or the
            update; of a task with a grid, else None.
        learned: whether a record that was drawn had a gradient; None if none was drawn. It is no part of the upload,
            and its holder's alone.
    """

    adapter: Adapter
    event: Event
    num_records: int
    noised: Tensor | None = None
    learned: bool | None = None


Execute = Callable[[Sequence[UpdateTask]], list[ClientUpdate | Exception]]
"""Trains the clients of a round: all that engines differ in."""


def noise_request(
    spec: UpdateSpec,
    sampling_probabilities: Sequence[float],
    dimension: int,
    num_parts: int,
    grids: Sequence[ClientGrid | None] = (),
) -> NoiseRequest:
    """One release under a specification: of a step's sums or, with noise on the upload, of the update.

    Args:
        spec: of the update.
        sampling_probabilities: [clients], q in [0, 1], of a step.
        dimension: number of values that a client trains.
        num_parts: how many parts the clipping rule clips.
        grids: [clients], of their sums; without any the mechanism chooses.

    Raises:
        ValueError: the clipping rule is unknown, or a value is out of range.
    """
    given = [grid for grid in grids if grid is not None]
    on_upload = spec.noise_on == "upload"
    return NoiseRequest(
        parameters=spec.mechanism_parameters,
        noise_multiplier=spec.noise_multiplier,
        clip_norm=spec.clip_norm,
        sensitivity_factor=UPLOAD_FACTOR if on_upload else sensitivity_factor(spec.clipping, num_parts),
        dimension=dimension,
        sampling_probabilities=(1.0,) * len(sampling_probabilities) if on_upload else tuple(sampling_probabilities),
        unit=spec.unit,
        grids=tuple(grid.points for grid in given),
        bounds=tuple(grid.bound for grid in given),
    )


def planned_event(
    spec: UpdateSpec, sampling_probability: float, adapter: Mapping[str, Tensor], grid: ClientGrid | None = None
) -> Event:
    """The event that a local update under this specification returns, so that it can be charged in advance.

    Args:
        spec: of the update.
        sampling_probability: q in [0, 1].
        adapter: all trainable tensors; those that the update trains decide how many parts are clipped, and the cost of
            some mechanisms depends on their number of values. Not read where counts are noised.
        grid: of the client's sum, if it is given.

    Raises:
        ValueError: the clipping rule, the mechanism, the objective or what is trained is unknown, a mechanism's
            parameters are invalid, a scale is out of range, or these values do not go together.
    """
    check(spec)
    if spec.objective == COUNTS:
        dimension, num_parts = _NUM_COUNTS, 1
    else:
        dimension = num_trained_values(adapter, spec.trains)
        num_parts = len(clipping_parts(spec.clipping, trained_names(adapter, spec.trains)))
    request = noise_request(spec, [sampling_probability], dimension, num_parts, [grid])
    count = 1 if spec.noise_on == "upload" else spec.local_steps
    (event,) = MECHANISMS.named(spec.mechanism).planned_events(replace(request, count=count))
    return event


def check(spec: UpdateSpec) -> None:
    """Refuse an objective, scale or combination that no update is defined for; the ValueError says what is possible."""
    if spec.objective == COUNTS:
        if spec != UpdateSpec.counts(spec.noise_multiplier, spec.max_records_per_person):
            raise ValueError(f"objective = {COUNTS}: goes with the fields of `UpdateSpec.counts` alone")
    elif spec.objective not in OBJECTIVES:
        raise ValueError(f"objective = {spec.objective!r}: must be one of {', '.join(OBJECTIVES)}")
    if spec.max_records_per_person < 0:
        raise ValueError(f"max_records_per_person = {spec.max_records_per_person}: must be >= 0")
    if spec.max_records_per_person and (spec.noise_on, spec.clipping == "batch") != ("gradients", False):
        raise ValueError(
            f"max_records_per_person = {spec.max_records_per_person}: a person needs noise_on = gradients and a "
            f"clipping other than batch, not {spec.noise_on} and {spec.clipping}"
        )
    if not 0 < spec.bias_scale < math.inf:
        raise ValueError(f"bias_scale = {spec.bias_scale}: must be finite and > 0")
    if spec.trains != "all" and (spec.optimizer, spec.quantization) != ("sgd", "none"):
        raise ValueError(
            f"trains = {spec.trains}: needs optimizer = sgd and quantization = none, not {spec.optimizer} and "
            f"{spec.quantization}"
        )
    if spec.centred and (spec.trains, spec.objective) != ("head", "loss"):
        raise ValueError(
            f"centred = true: needs trains = head and objective = loss, not {spec.trains} and {spec.objective}"
        )


def trained_names(names: Iterable[str], trains: str) -> tuple[str, ...]:
    """The tensors that an update trains, in the order of the names.

    Args:
        names: of all tensors of the adapter, as peft stores them.
        trains: `all`, `head`, or `lora-a` or `lora-b`: A or B and the head.

    Raises:
        ValueError: trains is unknown, or there is no such tensor.
    """
    if trains not in _LEFT_OUT:
        raise ValueError(f"trains = {trains!r}: must be one of {', '.join(_LEFT_OUT)}")
    chosen = tuple(name for name in names if not any(part in name for part in _LEFT_OUT[trains]))
    if not chosen:
        raise ValueError(f"trains = {trains}: the adapter has no such tensor")
    return chosen


def num_trained_values(adapter: Mapping[str, Tensor], trains: str) -> int:
    """How many values an update trains; arguments and errors as for `trained_names`."""
    return sum(adapter[name].numel() for name in trained_names(adapter, trains))
