"""MiniLM, of which the last two layers and the head are trained: they alone run, on kept states of the layers before.

Texts come in passes of one length, so that no token is padding and attention needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedpriv.adapters import pooling
from fedpriv.adapters.base_models import BaseModel, load_base
from fedpriv.adapters.locations import BUNDLED_ENCODER

EMBEDDING = 384
FROZEN_LAYERS = 4  # of six
NUM_OUTPUTS = 15  # of the models on texts: enough for every task, so that all have one shape


class Tail(nn.Module):
    """MiniLM's last layers, the mean over tokens at a fixed length, and a linear head; in bfloat16 but for the head.

    The weights are float32. The modules' names are those of the whole model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        trained = {str(index): layers[index] for index in range(FROZEN_LAYERS, len(layers))}
        self.bert = nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.ModuleDict(trained)})})
        self._trained = tuple(trained.values())
        self.classifier = model.classifier

    def forward(self, states: Tensor) -> Tensor:
        """Logits, float32 [texts, 15], of the states after the frozen layers, [texts, tokens, 384]."""
        hidden = states
        # On texts this short the plain products are faster than fused attention.
        with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            for layer in self._trained:
                hidden = layer(hidden)
        logits: Tensor = self.classifier(pooling.unit_states(hidden.float().mean(dim=1)))
        return logits


def encoder(dtype: torch.dtype = torch.float32) -> BaseModel:
    """The whole model, with a head of zeros."""
    return load_base(BUNDLED_ENCODER, task="SEQ_CLS", num_labels=NUM_OUTPUTS, normalize=True, dtype=dtype)


def tail() -> Tail:
    """The trained part of the whole model, with a head of zeros."""
    model = Tail(encoder().model)
    return model.requires_grad_(True)


def whole(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """The state dict of the whole model, for `encoder().model`, with a variant's tensors in place of its own.

    Args:
        tensors: of a variant: the last two layers and the head.
    """
    given = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return {**encoder().model.state_dict(), **given}
