"""The values that an update trains, as one row: where each value lies, in which units it is trained, and its steps.

With scales s > 0, the values theta are trained as theta' = theta / s: gradients s * dl/dtheta are clipped, summed and
noised, and theta moves by s times a step of theta'. So the head's bias acts as the weight of a further feature.

A head's steps may be taken in centred coordinates, where gradients are shorter by the features' mean, so that noise
weighs less. The server knows the mean of all records' features from the released class sums, and hands it to the
clients as the mean of the head's rows (`fedpriv.learning.aggregation._head_start`): no prediction depends on that
mean, since it moves the scores of all classes alike. A client takes it off every feature, with a bias that makes up for
it, and puts it back at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.learning.adapters import Adapter
from fedpriv.learning.aggregation import head_of, ternary_codes
from fedpriv.learning.training.local_update import UpdateSpec, trained_names
from fedpriv.privacy.accounting.sensitivity import clipping_parts


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The trained values of one specification's updates.

    Attributes:
        scales: [values], see this module; None if each is one.
        rates: [values], each value's learning rate over the specification's; None if each is one.
        centred: whether a head's values are those for centred features.
    """

    layout: VectorLayout
    scales: Tensor | None
    rates: Tensor | None
    centred: bool

    @staticmethod
    def of(spec: UpdateSpec, shapes: Mapping[str, torch.Size], device: torch.device | str = "cpu") -> Coordinates:
        """The coordinates for updates of adapters of which `shapes` has {tensor name: its shape}, of all tensors."""
        names = trained_names(shapes, spec.trains)
        layout = VectorLayout.of({name: shapes[name] for name in names}, clipping_parts(spec.clipping, names))
        ordered = {name: shapes[name] for name in layout.columns}
        scales = _value_factors(ordered, bias=spec.bias_scale)
        rate = spec.lora_learning_rate / spec.learning_rate if spec.lora_learning_rate else 1.0
        rates = _value_factors(ordered, lora=rate)
        return Coordinates(
            layout=layout,
            scales=None if scales is None else scales.to(device),
            rates=None if rates is None else rates.to(device),
            centred=spec.centred,
        )

    def start(self, adapter: Adapter) -> tuple[Tensor, Tensor | None]:
        """The row [values] from which an update of this adapter starts, and the mean subtracted from features."""
        trained = {name: adapter[name] for name in self.layout.shapes}
        centre = _centre_of(trained) if self.centred else None
        return self.layout.flatten_one(trained if centre is None else shifted(trained, centre)), centre

    def moved(self, adapter: Adapter, row: Tensor, centre: Tensor | None) -> Adapter:
        """A copy of the adapter with the trained values [values] in the place of its own.

        Args:
            adapter: that was given to `start`.
            row: the values that training led to.
            centre: that `start` returned.
        """
        trained = self.layout.unflatten_one(row)
        if centre is not None:
            trained = shifted(trained, -centre)
        return {name: trained[name] if name in trained else tensor.clone() for name, tensor in adapter.items()}

    def step_of(self, gradients: Tensor) -> Tensor:
        """The steps of an optimizer for gradients [..., values] of the scaled values."""
        return scaled(scaled(gradients, self.scales), self.rates)


def scaled(values: Tensor, scales: Tensor | None) -> Tensor:
    """The values times their scales; None leaves them as they are."""
    return values if scales is None else values * scales


def _value_factors(shapes: Mapping[str, torch.Size], *, bias: float = 1.0, lora: float = 1.0) -> Tensor | None:
    """A factor > 0 for each value by the kind of its tensor, [values]; None if each is one.

    The bias of the head is its tensor of one dimension.
    """

    def factor(name: str, shape: torch.Size) -> float:
        if ".lora_" in name:
            return lora
        return bias if len(shape) == 1 else 1.0

    factors = {name: factor(name, shape) for name, shape in shapes.items()}
    if all(value == 1 for value in factors.values()):
        return None
    return torch.cat([torch.full((shape.numel(),), factors[name]) for name, shape in shapes.items()])


@dataclass(frozen=True, kw_only=True)
class VectorLayout:
    """The place of each tensor of an adapter in one flat vector, so that one operation replaces many small ones.

    Attributes:
        shapes: {tensor name: its shape}, in the adapter's order.
        columns: {tensor name: its slice of the vector}.
        parts: the slice of each clipping part; together they cover every column once.
    """

    shapes: dict[str, torch.Size]
    columns: dict[str, slice]
    parts: tuple[slice, ...]

    @staticmethod
    def of(shapes: Mapping[str, torch.Size], parts: Sequence[Sequence[str]]) -> VectorLayout:
        """The tensors' layout in which each part is one slice; ValueError unless the parts hold each tensor once."""
        names = [name for part in parts for name in part]
        if len(names) != len(shapes) or set(names) != shapes.keys():
            raise ValueError("parts: must contain the name of every tensor once")
        columns: dict[str, slice] = {}
        slices, end = [], 0
        for part in parts:
            start = end
            for name in part:
                columns[name] = slice(end, end := end + math.prod(shapes[name]))
            slices.append(slice(start, end))
        return VectorLayout(shapes=dict(shapes), columns=columns, parts=tuple(slices))

    @property
    def size(self) -> int:
        """The number of values in an adapter."""
        return max((part.stop for part in self.parts), default=0)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vectors [batch, size] of tensors {name: [batch, *shape]}."""
        return torch.cat([tensors[name].flatten(1) for name in self.columns], dim=1)

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors {name: view [batch, *shape]} of vectors [batch, size], in the adapter's order."""
        return {name: rows[:, self.columns[name]].view(len(rows), *shape) for name, shape in self.shapes.items()}

    def flatten_one(self, adapter: Adapter) -> Tensor:
        """The vector [size] of one adapter; ValueError if its tensors differ from the layout in name or shape."""
        if adapter.keys() != self.shapes.keys():
            unmatched = sorted(adapter.keys() ^ self.shapes.keys())
            raise ValueError(f"adapter: tensors {', '.join(unmatched)} are on one side only")
        for name, shape in self.shapes.items():
            if adapter[name].shape != shape:
                raise ValueError(
                    f"adapter: {name} has shape {tuple(adapter[name].shape)}, the model's is {tuple(shape)}"
                )
        return torch.cat([adapter[name].flatten() for name in self.columns])

    def unflatten_one(self, vector: Tensor) -> Adapter:
        """The adapter of a vector [size]: copies, not views, in the adapter's order."""
        return {name: vector[self.columns[name]].reshape(shape).clone() for name, shape in self.shapes.items()}


def _centre_of(adapter: Adapter) -> Tensor:
    """[inputs] The mean of the head's rows; zeros for a head without a bias, which could not make up for it."""
    weight, bias = head_of(adapter)
    mean = adapter[weight].double().mean(dim=0).float()
    return mean if bias is not None else torch.zeros_like(mean)


def shifted(adapter: Adapter, by: Tensor) -> Adapter:
    """The adapter whose linear head scores features less `by`, [inputs], as the given one scores the features."""
    weight, bias = head_of(adapter)
    if bias is None:
        return adapter
    scores = adapter[weight].double() @ by.double()
    return {**adapter, bias: (adapter[bias].double() + scores).float()}


def trained_weights(
    spec: UpdateSpec, broadcast: Tensor, initial: Adapter, layout: VectorLayout
) -> _PlainWeights | _TernaryWeights:
    """The weights of a local update.

    Args:
        broadcast: [clients, values], where the clients start.
        initial: the tensors at the start of the run; `ternary` quantises the difference to them.

    Raises:
        ValueError: the optimizer or the quantization is unknown.
    """
    if spec.quantization == "none":
        return _PlainWeights(spec, broadcast)
    if spec.quantization == "ternary":
        return _TernaryWeights(spec, broadcast, layout.flatten_one(initial).to(broadcast.device), layout)
    raise ValueError(f"quantization = {spec.quantization!r}: must be none or ternary")


class _PlainWeights:
    """The trained values of a stack of clients."""

    def __init__(self, spec: UpdateSpec, broadcast: Tensor) -> None:
        self._parameters = nn.Parameter(broadcast.clone())
        self._optimizer = _optimizer([self._parameters], spec)

    def values(self) -> Tensor:
        """The values that the forward pass uses and that are uploaded, [clients, values]."""
        return self._parameters.detach()

    def step(self, gradients: Tensor) -> None:
        """One optimizer step, from the (noised) gradients with respect to these values, [clients, values]."""
        self._parameters.grad = gradients
        self._optimizer.step()


class _TernaryWeights:
    """Trained ternary quantisation of the difference to the run's start (Xu et al. 2020, Section III).

    The broadcast is already ternary, so the first step is a plain one; after it each tensor has a trained scale. The
    straight-through gradient of the latent difference is multiplied by the scale where the code is not zero. All of
    this is computed from the noised gradient, so it is post-processing. Unlike in the paper, the scale follows the mean
    of its weights' gradients, not the sum: the sum of so many noise values would derail it at every step.
    """

    def __init__(self, spec: UpdateSpec, broadcast: Tensor, initial: Tensor, layout: VectorLayout) -> None:
        self._initial = initial
        self._columns = tuple(layout.columns.values())
        self._latent = nn.Parameter(broadcast - initial)
        self._scales = nn.Parameter(broadcast.new_zeros(len(broadcast), len(self._columns)))
        self._optimizer = _optimizer([self._latent, self._scales], spec)
        self._stepped = False

    def values(self) -> Tensor:
        if not self._stepped:
            return self._initial + self._latent.detach()
        return self._initial + self._scale_per_value(self._scales.detach()) * self._codes()

    def step(self, gradients: Tensor) -> None:
        if self._stepped:
            codes, value_scales = self._codes(), self._scale_per_value(self._scales.detach())
            self._scales.grad = torch.cat([self._mean(gradients, codes, c) for c in self._columns], dim=1)
            self._latent.grad = torch.where(codes == 0, gradients, value_scales * gradients)
        else:
            self._latent.grad = gradients
        self._optimizer.step()
        if not self._stepped:
            with torch.no_grad():
                scales = [ternary_codes(self._latent[:, columns])[1] for columns in self._columns]
                self._scales.copy_(torch.cat(scales, dim=1))
            self._stepped = True

    def _codes(self) -> Tensor:
        codes = torch.empty_like(self._latent)
        for columns in self._columns:
            codes[:, columns] = ternary_codes(self._latent.detach()[:, columns])[0]
        return codes

    def _scale_per_value(self, scales: Tensor) -> Tensor:
        """The scale of each value's tensor, [clients, values]."""
        result = torch.empty_like(self._latent)
        for index, columns in enumerate(self._columns):
            result[:, columns] = scales[:, index : index + 1]
        return result

    @staticmethod
    def _mean(gradients: Tensor, codes: Tensor, columns: slice) -> Tensor:
        codes = codes[:, columns]
        return (gradients[:, columns] * codes).sum(dim=1, keepdim=True) / codes.abs().sum(dim=1, keepdim=True).clamp(1)


def _optimizer(parameters: list[nn.Parameter], spec: UpdateSpec) -> torch.optim.Optimizer:
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate)
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    raise ValueError(f"optimizer = {spec.optimizer!r}: must be sgd or adamw")
