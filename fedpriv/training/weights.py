"""What the optimizer updates in a local update: the trained values, or the latent values behind ternary ones."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from fedpriv.adapters.arithmetic import Adapter
from fedpriv.aggregation.t_fedavg import ternary_codes
from fedpriv.training.layout import Layout
from fedpriv.training.local_update import UpdateSpec


class TrainedWeights(Protocol):
    """The trained values of a stack of clients."""

    def values(self) -> Tensor:
        """The values that the forward pass uses and that are uploaded, [clients, values]."""

    def step(self, gradients: Tensor) -> None:
        """One optimizer step, from the (noised) gradients with respect to these values, [clients, values]."""


def trained_weights(spec: UpdateSpec, broadcast: Tensor, initial: Adapter, layout: Layout) -> TrainedWeights:
    """The weights of a local update.

    Args:
        spec: of the update.
        broadcast: [clients, values], where the clients start.
        initial: the tensors at the start of the run; `ternary` quantises the difference to them.
        layout: of the tensors.

    Raises:
        ValueError: the optimizer or the quantization is unknown.
    """
    if spec.quantization == "none":
        return _PlainWeights(spec, broadcast)
    if spec.quantization == "ternary":
        return _TernaryWeights(spec, broadcast, layout.flatten_one(initial).to(broadcast.device), layout)
    raise ValueError(f"quantization = {spec.quantization!r}: must be none or ternary")


class _PlainWeights:
    def __init__(self, spec: UpdateSpec, broadcast: Tensor) -> None:
        self._parameters = nn.Parameter(broadcast.clone())
        self._optimizer = _optimizer([self._parameters], spec)

    def values(self) -> Tensor:
        return self._parameters.detach()

    def step(self, gradients: Tensor) -> None:
        self._parameters.grad = gradients
        self._optimizer.step()


class _TernaryWeights:
    """Trained ternary quantisation of the difference to the run's start (Xu et al. 2020, Section III).

    The broadcast is already ternary, so the first step is a plain one; after it each tensor has a trained scale. The
    straight-through gradient of the latent difference is multiplied by the scale where the code is not zero. All of
    this is computed from the noised gradient, so it is post-processing. Unlike in the paper, the scale follows the mean
    of its weights' gradients, not the sum: the sum of so many noise values would derail it at every step.
    """

    def __init__(self, spec: UpdateSpec, broadcast: Tensor, initial: Tensor, layout: Layout) -> None:
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
