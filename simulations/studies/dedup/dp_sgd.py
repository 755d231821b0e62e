"""DP-SGD on all weights of a network, the events that pay for it, and training on public records.

The sum of clipped gradients is formed without any record's gradient. One backward pass gives the gradient g of each
layer's output, next to its input x. A linear layer's gradient of one record is the sum of g x^T over its tokens, whose
squared norm is the sum over pairs of tokens of (x.x')(g.g'). With the norms known, the sum of all records' clipped
gradients is one product of the same x and g, each g scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.learning.training import PoissonSampler
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.mechanisms.registry import MECHANISMS, NoiseRequest
from fedpriv.privacy.mechanisms.sources import RandomSource
from simulations.studies.dedup.networks import AddedPlaces
from simulations.studies.dedup.records import Pass, StudyRecords

# Keeps a clipped gradient below the clip norm although norms are float32 sums over pairs of tokens.
_ROUNDING_MARGIN = 1.0 - 1e-3

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass(frozen=True, kw_only=True)
class DpSgdSchedule:
    """How a network is trained under differential privacy.

    Attributes:
        steps: noisy steps, >= 1.
        expected_batch_size: B of Poisson sampling.
        learning_rate: of the optimizer, applied to the noised sum over B.
        optimizer: `sgd` or `adam`; it is post-processing.
        clip_norm: C, gradient units.
        averaged: share of the iterates, the last ones, whose mean is the model, in (0, 1].
    """

    steps: int
    expected_batch_size: int
    learning_rate: float
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip_norm: float = 1.0
    averaged: float = 0.5


def train_privately(
    model: nn.Module, records: StudyRecords, schedule: DpSgdSchedule, *, noise_multiplier: float, source: RandomSource
) -> list[Event]:
    """Train all weights in place, and return one event for each step.

    Guarantee: each step is one Gaussian mechanism on a Poisson sample, with the rate and the noise that its event
    states; everything else is post-processing. With a seeded source it protects nobody.

    Args:
        model: has no layer that mixes records; see `add_clipped_gradients`.
        records: registered number and data, at least one.
        schedule: see there.
        noise_multiplier: z >= 0.
        source: of sampling and noise.

    Source: Abadi et al. 2016, Algorithm 1.
    """
    parameters = dict(model.named_parameters())
    flat = torch.cat([value.detach().flatten().float() for value in parameters.values()])
    sampler = PoissonSampler(
        num_registered=len(records), expected_batch_size=schedule.expected_batch_size, source=source
    )
    optimizer = OPTIMIZERS[schedule.optimizer]([flat], lr=schedule.learning_rate)
    request = NoiseRequest(
        noise_multiplier=noise_multiplier,
        clip_norm=schedule.clip_norm,
        dimension=len(flat),
        sampling_probabilities=(sampler.sampling_probability,),
    )
    num_averaged = max(1, round(schedule.averaged * schedule.steps))
    average, events = torch.zeros_like(flat), []
    for step in range(schedule.steps):
        total = clipped_sum(model, records, sampler.draw(len(records)), schedule.clip_norm)
        noised, (event,) = MECHANISMS["gaussian"].add_noise(total.double().unsqueeze(0), request, [source])
        events.append(event)
        flat.grad = noised[0].float() / schedule.expected_batch_size
        optimizer.step()
        _put(model, flat)
        if step >= schedule.steps - num_averaged:
            average += flat / num_averaged
    _put(model, average)
    return events


def clipped_sum(model: nn.Module, records: StudyRecords, chosen: list[int], clip_norm: float) -> Tensor:
    """The sum of the chosen records' clipped gradients by all weights, float32 [values], in the parameters' order."""
    parameters = dict(model.named_parameters())
    total = torch.zeros(sum(value.numel() for value in parameters.values()))
    views = _pieces(total, parameters)
    for one in records.passes(chosen):
        add_clipped_gradients(views, model, lambda one=one: losses(model, one), clip_norm)  # type: ignore[misc]
    return total


def losses(model: nn.Module, one: Pass) -> Tensor:
    """The cross-entropy of each record of a pass, float32 [rows]."""
    inputs, labels = one
    return F.cross_entropy(model(inputs), labels, reduction="none")


def _pieces(flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values under the parameters' names and in their shapes."""
    pieces = flat.split([value.numel() for value in parameters.values()])
    return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}


@torch.no_grad()
def _put(model: nn.Module, flat: Tensor) -> None:
    """Give the model these weights, in the types that its own have."""
    parameters = dict(model.named_parameters())
    for name, piece in _pieces(flat, parameters).items():
        parameters[name].copy_(piece)


def train_publicly(
    model: nn.Module, records: StudyRecords, *, epochs: int = 1, batch_size: int = 64, learning_rate: float = 1e-3
) -> None:
    """Train the weights that need a gradient in place by Adam on public records, at a rate that falls to zero."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    batches = [batch for seed in range(epochs) for batch in _order(len(records), seed).split(batch_size)]
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / len(batches))
        optimizer.zero_grad()
        for one in records.passes(batch.tolist()):
            (losses(model, one).sum() / len(batch)).backward()
        optimizer.step()


def _order(num_records: int, seed: int) -> Tensor:
    return torch.randperm(num_records, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class _Seen:
    """A layer in one pass.

    Attributes:
        layer: the module.
        x, g: its input, and the gradient of its output, float32 [rows, ...].
    """

    layer: nn.Module
    x: Tensor
    g: Tensor


def add_clipped_gradients(
    totals: Mapping[str, Tensor], model: nn.Module, losses: Callable[[], Tensor], clip_norm: float
) -> Tensor:
    """Add the sum of a pass's gradients by all weights, each record's clipped to C, and return their norms.

    Guarantee: one record moves the totals by at most C in L2, by all weights together, up to the rounding of a
    float32 sum. A record whose norm is not finite counts as zero.

    Args:
        totals: {parameter name: float32 [*its shape]}, changed in place.
        model: of linear layers, norms and `Places`, each called at most once, that never mix records.
        losses: runs the model, and returns one loss for each record, float [rows], rows >= 1.
        clip_norm: C, finite, > 0, gradient units.

    Returns:
        Norms before clipping, float32 [rows].

    Raises:
        TypeError: a layer has weights whose gradients are not known here.

    Source: Abadi et al. 2016, Algorithm 1; Li et al. 2022, section 4; Bu et al. 2023, section 3.
    """
    seen = _seen(_layers(model), losses)
    rows = len(next(iter(seen.values())).x)
    squares = torch.zeros(rows)
    for each in seen.values():
        squares += _RULES[type(each.layer)].squares(each)
    norms = squares.clamp_min(0.0).sqrt()
    finite = torch.isfinite(norms)
    scales = torch.where(finite, (clip_norm * _ROUNDING_MARGIN / norms).clamp_max(1.0), torch.zeros(()))
    for name, each in seen.items():
        x, g = (_zero_where_not(finite, value) for value in (each.x, each.g))
        scaled = _Seen(each.layer, x, g * _shaped(scales, g))
        _RULES[type(each.layer)].add({key.removeprefix(f"{name}."): totals[key] for key in _keys(name, each)}, scaled)
    return norms


def _zero_where_not(finite: Tensor, values: Tensor) -> Tensor:
    """The values, with zeros for the records that are not finite."""
    if bool(finite.all()):
        return values
    return torch.where(_shaped(finite, values), values, torch.zeros(()))


def _shaped(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _keys(name: str, seen: _Seen) -> list[str]:
    return [f"{name}.{key}" for key, _ in seen.layer.named_parameters(recurse=False)]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of those that have weights of their own."""
    found = {name: module for name, module in model.named_modules() if module._parameters}
    for name, module in found.items():
        if type(module) not in _RULES:
            raise TypeError(f"{name}: gradients of a {type(module).__name__} are not known here")
    return found


def _seen(layers: Mapping[str, nn.Module], losses: Callable[[], Tensor]) -> dict[str, _Seen]:
    """Each layer's input, and the gradient of its output."""
    with _recorded(layers) as recorded:
        total = losses().sum()
    gradients = torch.autograd.grad(total, [output for _, output in recorded.values()])
    return {
        name: _Seen(layers[name], x.detach().float(), g.float())
        for (name, (x, _)), g in zip(recorded.items(), gradients, strict=True)
    }


@contextmanager
def _recorded(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """{name: (input, output)} of the layers that run within this context; no gradient by a weight is computed."""
    recorded: dict[str, tuple[Tensor, Tensor]] = {}

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if name in recorded:
                raise ValueError(f"{name}: called twice in one pass, so its gradients would mix")
            output = output if output.requires_grad else output.requires_grad_()
            recorded[name] = inputs[0], output
            return output

        return hook

    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Rule:
    """How a kind of layer gets its gradients.

    Attributes:
        squares: the squared norm of each record's gradient by the layer's weights, float32 [rows].
        add: adds the sum of the records' gradients to the layer's totals.
    """

    squares: Callable[[_Seen], Tensor]
    add: Callable[[Mapping[str, Tensor], _Seen], None]


def _tokens(values: Tensor) -> Tensor:
    """[rows, tokens, features], of one token where there are none."""
    return values.reshape(len(values), -1, values.shape[-1])


def _linear_squares(seen: _Seen) -> Tensor:
    x, g = _tokens(seen.x), _tokens(seen.g)
    num_tokens, num_weights = x.shape[1], x.shape[2] * g.shape[2]
    if num_tokens * (x.shape[2] + g.shape[2]) <= num_weights:
        squares = ((x @ x.transpose(1, 2)) * (g @ g.transpose(1, 2))).sum(dim=(1, 2))
    else:  # then the gradients themselves are smaller
        squares = (g.transpose(1, 2) @ x).square().sum(dim=(1, 2))
    return squares if seen.layer.bias is None else squares + g.sum(dim=1).square().sum(dim=1)


def _add_linear(totals: Mapping[str, Tensor], seen: _Seen) -> None:
    x, g = seen.x.reshape(-1, seen.x.shape[-1]), seen.g.reshape(-1, seen.g.shape[-1])
    totals["weight"].addmm_(g.T, x)
    if "bias" in totals:
        totals["bias"].add_(g.sum(dim=0))


def _layer_norm_rows(seen: _Seen) -> dict[str, Tensor]:
    """Each record's gradients, [rows, features]."""
    layer, g = seen.layer, _tokens(seen.g)
    assert isinstance(layer, nn.LayerNorm)
    normed = F.layer_norm(seen.x, layer.normalized_shape, eps=layer.eps)
    return {"weight": (g * _tokens(normed)).sum(dim=1), "bias": g.sum(dim=1)}


def _group_norm_rows(seen: _Seen) -> dict[str, Tensor]:
    """Each record's gradients, [rows, channels]."""
    layer, g = seen.layer, seen.g.flatten(2)
    assert isinstance(layer, nn.GroupNorm)
    normed = F.group_norm(seen.x, layer.num_groups, eps=layer.eps)
    return {"weight": (g * normed.flatten(2)).sum(dim=2), "bias": g.sum(dim=2)}


def _places_rows(seen: _Seen) -> dict[str, Tensor]:
    return {"values": seen.g}


def _by_rows(rows: Callable[[_Seen], dict[str, Tensor]]) -> _Rule:
    """The rule of a layer whose records' gradients are small enough to be formed."""

    def squares(seen: _Seen) -> Tensor:
        return torch.stack([each.flatten(1).square().sum(dim=1) for each in rows(seen).values()]).sum(dim=0)

    def add(totals: Mapping[str, Tensor], seen: _Seen) -> None:
        for name, each in rows(seen).items():
            totals[name].add_(each.sum(dim=0))

    return _Rule(squares, add)


_RULES: Mapping[type[nn.Module], _Rule] = {
    nn.Linear: _Rule(_linear_squares, _add_linear),
    nn.LayerNorm: _by_rows(_layer_norm_rows),
    nn.GroupNorm: _by_rows(_group_norm_rows),
    AddedPlaces: _by_rows(_places_rows),
}
