"""One client's local update (DP-LoRA, Liu et al., Algorithm 1), and the seam behind which engines differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpriv.accounting.clipping import UPLOAD_FACTOR, clipping_parts, sensitivity_factor
from fedpriv.accounting.events import Event, SubsampledGaussian, group
from fedpriv.adapters import lora
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.mechanisms.gaussian import noised_sum
from fedpriv.mechanisms.sources import RandomSource
from fedpriv.training.clipping import clipped_parts, clipped_sum, finite_sum
from fedpriv.training.losses import losses_and_hits
from fedpriv.training.model import TrainingModel
from fedpriv.training.per_sample import per_sample_gradients
from fedpriv.training.sampling import PoissonSampler

OPTIMIZERS = ("sgd", "adamw")


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
        noise_multiplier: z >= 0, noise over clip norm.
        noise_on: `gradients`, each step's noised sum; or `upload`, plain steps and noise on the clipped update, where
            `clip_norm` is S, in units of the parameters.
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

    @staticmethod
    def of(config: RunConfig) -> UpdateSpec:
        """The part of a run's configuration that a client carries out."""
        names = UpdateSpec.__dataclass_fields__.keys() - {"num_rounds"}
        return UpdateSpec(num_rounds=config.rounds, **{name: getattr(config, name) for name in names})


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
    """

    adapter: Adapter
    data: Records
    spec: UpdateSpec
    round: int
    sampler: PoissonSampler
    noise: RandomSource


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


def planned_event(spec: UpdateSpec, sampling_probability: float, tensor_names: Iterable[str]) -> Event:
    """The event that a local update by this specification returns, for charging it before anything is computed.

    Args:
        spec: of the update.
        sampling_probability: q in [0, 1].
        tensor_names: of all trainable tensors, as the adapter holds them.

    Raises:
        ValueError: the clipping rule is unknown.
    """
    if spec.noise_on == "upload":
        return SubsampledGaussian(
            noise_multiplier=spec.noise_multiplier / UPLOAD_FACTOR, sampling_probability=1.0, unit="client"
        )
    parts = clipping_parts(spec.clipping, tensor_names)
    return SubsampledGaussian(
        noise_multiplier=spec.noise_multiplier / sensitivity_factor(spec.clipping, len(parts)),
        sampling_probability=sampling_probability,
        count=spec.local_steps,
    )


def local_update(model: TrainingModel, task: UpdateTask) -> ClientUpdate:
    """The client's adapter after its steps, and the event that pays for them.

    With noise on the gradients, each step is: Poisson sample, per-sample gradients of all trainable tensors,
    clipping by the rule, sum, Gaussian noise, division by the expected batch size, optimizer step. An empty sample
    counts as a zero gradient. With noise on the upload, the steps are plain and the whole update is clipped and noised.

    Guarantee: (epsilon, delta)-DP by the returned event, for its unit.
    """
    spec, on_upload = task.spec, task.spec.noise_on == "upload"
    planned = planned_event(spec, task.sampler.sampling_probability, model.parameters)
    lora.write_parameters(model.parameters, task.adapter)
    optimizer = _optimizer(model, spec)
    events: list[Event] = []
    for _ in range(spec.local_steps):
        if on_upload:
            gradient = _plain_gradient(model, task)
        else:
            gradient, event = _private_gradient(model, task)
            events.append(event)
        for name, parameter in model.parameters.items():
            parameter.grad = gradient[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    adapter = lora.read_parameters(model.parameters)
    if on_upload:
        adapter, event = _noised_upload(task, adapter)
        events.append(event)
    (event,) = group(events)
    if event != planned:
        raise RuntimeError(f"the update cost {event}, but {planned} was planned and charged")
    return ClientUpdate(adapter=adapter, event=event, num_records=task.sampler.num_registered)


def _plain_gradient(model: TrainingModel, task: UpdateTask) -> dict[str, Tensor]:
    """The gradient of one step without clipping or noise; what it reveals, the noise on the upload hides."""
    total = {name: torch.zeros_like(parameter) for name, parameter in model.parameters.items()}
    for gradients in _per_sample_gradients(model, task, task.sampler.draw(len(task.data))):
        for name, tensor in finite_sum(gradients, (tuple(gradients),)).items():
            total[name] += tensor
    return {name: tensor / task.spec.batch_size for name, tensor in total.items()}


def _noised_upload(task: UpdateTask, trained: Adapter) -> tuple[Adapter, Event]:
    """The broadcast adapter plus the update, clipped jointly to S and noised, and the event that pays for it.

    Source: Liu et al., Eq. 8.
    """
    update = {name: trained[name] - tensor for name, tensor in task.adapter.items()}
    noised, event = noised_sum(
        clipped_parts(update, task.spec.clip_norm, (tuple(update),)),
        noise_multiplier=task.spec.noise_multiplier,
        clip_norm=task.spec.clip_norm,
        sensitivity_factor=UPLOAD_FACTOR,
        sampling_probability=1.0,
        source=task.noise,
    )
    adapter = {name: tensor + noised[name] for name, tensor in task.adapter.items()}
    return adapter, replace(event, unit="client")


def _private_gradient(model: TrainingModel, task: UpdateTask) -> tuple[dict[str, Tensor], Event]:
    """The noised gradient of one step and the event that pays for it."""
    spec, batch_rule = task.spec, task.spec.clipping == "batch"
    parts = clipping_parts(spec.clipping, model.parameters)
    indices = task.sampler.draw(len(task.data))
    total = {name: torch.zeros_like(parameter) for name, parameter in model.parameters.items()}
    for gradients in _per_sample_gradients(model, task, indices):
        piece = finite_sum(gradients, parts) if batch_rule else clipped_sum(gradients, spec.clip_norm, parts)
        for name, tensor in piece.items():
            total[name] += tensor
    if batch_rule:
        # Algorithm 1 to the letter: the realised batch's mean is clipped, and its noise is not divided by B.
        mean = {name: tensor / max(len(indices), 1) for name, tensor in total.items()}
        total = clipped_parts(mean, spec.clip_norm, parts)
    noised, event = noised_sum(
        total,
        noise_multiplier=spec.noise_multiplier,
        clip_norm=spec.clip_norm,
        sensitivity_factor=sensitivity_factor(spec.clipping, len(parts)),
        sampling_probability=task.sampler.sampling_probability,
        source=task.noise,
    )
    divisor = 1 if batch_rule else spec.batch_size
    return {name: tensor / divisor for name, tensor in noised.items()}, event


def _per_sample_gradients(model: TrainingModel, task: UpdateTask, indices: list[int]) -> Iterator[dict[str, Tensor]]:
    """Per-sample gradients of the sampled records by the adapter's names, a physical batch at a time."""
    # A record is visited B/N_k times a step on average: below one visit in the whole run the cache cannot pay.
    visits = task.spec.num_rounds * task.spec.local_steps * task.sampler.sampling_probability
    for piece in model.physical_batches(task.data, indices):

        def losses(piece: list[int] = piece) -> Tensor:
            logits, batch = model.logits(task.data, piece, cached=visits >= 1)
            return losses_and_hits(logits, batch)[0]

        gradients, _ = per_sample_gradients(model.layers, losses)
        yield {model.adapter_names[name]: gradient for name, gradient in gradients.items()}


def _optimizer(model: TrainingModel, spec: UpdateSpec) -> torch.optim.Optimizer:
    parameters = list(model.parameters.values())
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate)
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    raise ValueError(f"optimizer = {spec.optimizer!r}: must be sgd or adamw")


def execute_one_by_one(model: TrainingModel, tasks: Sequence[UpdateTask]) -> list[ClientUpdate | Exception]:
    """Run the tasks in turn; a failing one is its exception, and the others go on."""
    results: list[ClientUpdate | Exception] = []
    for task in tasks:
        try:
            results.append(local_update(model, task))
        except Exception as error:  # one client's failure must not end the round
            results.append(error)
    return results
