"""What an update trains, as a row of values: where each value is, in which units it is trained, and its learning rate.

With scales s > 0, the values theta are trained as theta' = theta / s: gradients s * dl/dtheta are clipped, summed and
noised, and theta moves by s times a step of theta'. So the head's bias acts as the weight of a further feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.accounting.sensitivity import clipping_parts
from fedpriv.adapters.arithmetic import Adapter
from fedpriv.training.centred import centre_of, shifted
from fedpriv.training.layout import Layout
from fedpriv.training.local_update import UpdateSpec
from fedpriv.training.trained import trained_names, value_factors


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The trained values of one specification's updates.

    Attributes:
        layout: of an adapter's trained values in a row.
        scales: [values], see this module; None if each is one.
        rates: [values], each value's learning rate over the specification's; None if each is one.
        centred: whether a head's values are those for centred features.
    """

    layout: Layout
    scales: Tensor | None
    rates: Tensor | None
    centred: bool

    @staticmethod
    def of(spec: UpdateSpec, shapes: Mapping[str, torch.Size], device: torch.device | str = "cpu") -> Coordinates:
        """The coordinates for updates of adapters with these shapes.

        Args:
            spec: of the updates.
            shapes: {tensor name: its shape} of all tensors of the adapter.
            device: for `scales` and `rates`.
        """
        names = trained_names(shapes, spec.trains)
        layout = Layout.of({name: shapes[name] for name in names}, clipping_parts(spec.clipping, names))
        ordered = {name: shapes[name] for name in layout.columns}
        scales = value_factors(ordered, bias=spec.bias_scale)
        rate = spec.lora_learning_rate / spec.learning_rate if spec.lora_learning_rate else 1.0
        rates = value_factors(ordered, lora=rate)
        return Coordinates(
            layout=layout,
            scales=None if scales is None else scales.to(device),
            rates=None if rates is None else rates.to(device),
            centred=spec.centred,
        )

    def start(self, adapter: Adapter) -> tuple[Tensor, Tensor | None]:
        """The row [values] from which an update of this adapter starts, and what it takes off a head's features."""
        trained = {name: adapter[name] for name in self.layout.shapes}
        centre = centre_of(trained) if self.centred else None
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
        """What an optimizer steps by for gradients [..., values] of the scaled values."""
        return scaled(scaled(gradients, self.scales), self.rates)


def scaled(values: Tensor, scales: Tensor | None) -> Tensor:
    """The values times their scales; None leaves them as they are."""
    return values if scales is None else values * scales
