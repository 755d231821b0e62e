"""What a local update is, and the seam behind which engines differ; `stacked.py` carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from fedpriv.accounting.events import Event, LmoAccounting, SubsampledGaussian, SubsampledLmo, Unit
from fedpriv.accounting.lmo import parameters as lmo_parameters
from fedpriv.accounting.lmo.parameters import LmoParameters
from fedpriv.accounting.sensitivity import UPLOAD_FACTOR, clipping_parts, sensitivity_factor
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.adapters.merged import Merged
from fedpriv.aggregation.rules import RULES
from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.sampling import PoissonSampler

OPTIMIZERS = ("sgd", "adamw")
# Values that a trained tensor takes while it is trained: any, or three around its start.
QUANTIZATIONS = ("none", "ternary")


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """What the server asks of a client in one round; the guard checks it.

    Attributes:
        num_rounds: how many rounds the run has in all.
        local_steps: noisy steps in this round, >= 1.
        batch_size: B, the expected batch size, >= 1.
        optimizer: `sgd` or `adamw`, both without state from earlier rounds.
        learning_rate: > 0.
        weight_decay: >= 0, for `adamw`.
        clipping: the clipping rule.
        clip_norm: C > 0, gradient units.
        noise_multiplier: z >= 0, noise over clip norm; what LMO noise is multiplied by.
        noise_on: `gradients`, each step's noised sum; or `upload`, plain steps and noise on the clipped update, where
            `clip_norm` is S, in units of the parameters.
        codec: how the upload is written.
        quantization: `none`, or `ternary`, where broadcast and upload are ternary differences to the run's start.
        relevance_threshold: v_0 in [0, 1]; with 0 every client uploads.
        lmo_parameters: of LMO noise, as JSON; empty for Gaussian noise.
        lmo_accounting: how LMO noise is accounted, `sound` or `published`.
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
    lmo_parameters: str = ""
    lmo_accounting: str = "sound"

    @staticmethod
    def of(config: RunConfig) -> UpdateSpec:
        """The part of a run's configuration that a client carries out."""
        rule = RULES[config.aggregation]
        derived: dict[str, Any] = {
            "num_rounds": config.rounds,
            "codec": "ternary" if rule.ternary else config.upload_codec,
            "quantization": "ternary" if rule.ternary else "none",
            "relevance_threshold": config.relevance_threshold if rule.selective else 0.0,
        }
        names = UpdateSpec.__dataclass_fields__.keys() - derived.keys()
        return UpdateSpec(**derived, **{name: getattr(config, name) for name in names})

    @property
    def lmo(self) -> LmoParameters:
        """The LMO noise, multiplied by `noise_multiplier`, in units of the clip norm.

        Raises:
            InputError: there is none, or it is multiplied by 0.
        """
        if self.noise_multiplier == 0:
            raise InputError("noise_multiplier = 0: with it there is no LMO noise")
        return lmo_parameters.from_json(self.lmo_parameters).scaled(1 / self.noise_multiplier)

    @property
    def broadcast_codec(self) -> str:
        """How the server writes what a client starts from."""
        return "ternary" if self.quantization == "ternary" else "float32"


@dataclass(frozen=True, kw_only=True)
class UpdateTask:
    """A local update to compute.

    Attributes:
        adapter: the broadcast adapter, float32.
        data: the client's records.
        spec: what to do.
        round: which round of the run this is, from 1.
        sampler: draws the batches, and knows its probability.
        noise: where the release noise comes from.
        merged: what aggregation has added to the frozen weights.
    """

    adapter: Adapter
    data: Records
    spec: UpdateSpec
    round: int
    sampler: PoissonSampler
    noise: RandomSource
    merged: Merged = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """What a client uploads.

    Attributes:
        adapter: the noised adapter, float32.
        event: the privacy event that pays for it.
        num_records: N_k, the registered number of records.
    """

    adapter: Adapter
    event: Event
    num_records: int


Execute = Callable[[Sequence[UpdateTask]], list[ClientUpdate | Exception]]


def planned_event(spec: UpdateSpec, sampling_probability: float, adapter: Mapping[str, Tensor]) -> Event:
    """The event that a local update by this specification returns, for charging it before anything is computed.

    Args:
        spec: of the update.
        sampling_probability: q in [0, 1].
        adapter: all trainable tensors; LMO noise costs more for more values.

    Raises:
        ValueError: the clipping rule, or the noise, is unknown.
    """
    if spec.noise_on == "upload":
        return _event(spec, UPLOAD_FACTOR, 1.0, adapter, unit="client")
    factor = sensitivity_factor(spec.clipping, len(clipping_parts(spec.clipping, adapter)))
    return _event(spec, factor, sampling_probability, adapter, count=spec.local_steps)


def _event(
    spec: UpdateSpec,
    factor: float,
    sampling_probability: float,
    adapter: Mapping[str, Tensor],
    count: int = 1,
    unit: Unit = "record",
) -> Event:
    if not spec.lmo_parameters:
        z = spec.noise_multiplier / factor
        return SubsampledGaussian(noise_multiplier=z, sampling_probability=sampling_probability, count=count, unit=unit)
    return SubsampledLmo(
        parameters=spec.lmo,
        sensitivity=factor,
        dimension=sum(tensor.numel() for tensor in adapter.values()),
        sampling_probability=sampling_probability,
        accounting=cast(LmoAccounting, spec.lmo_accounting),  # the event refuses any other
        count=count,
        unit=unit,
    )
