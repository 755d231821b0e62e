"""Classification heads of one linear layer, in place of the several layers that some encoders' heads have.

The transformers class stays as it is: modules of its own are replaced, such that its forward pass applies one linear
layer to the pooled vector. The pooling convention `unit-mean` implies it, so `fedpriv.adapters.load` restores it; plain
peft refuses such an adapter on the model's own head, unless `pooling.apply` comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Their forward passes call one module, `classifier`, with all tokens' states.
_CALLED_WITH_STATES = {"roberta", "xlm-roberta", "camembert", "electra"}
# Its forward pass applies pre_classifier, ReLU, dropout and classifier to the first token's state.
_WITH_RELU = "distilbert"

REPLACED = frozenset({*_CALLED_WITH_STATES, _WITH_RELU})
"""Model types whose head of several layers becomes one layer where features are normalised."""


def linear_head(model: Any) -> tuple[str, nn.Linear] | None:
    """The name of a classification model's head and the head, if one linear layer is all that follows the encoder."""
    after = {name: module for name, module in model.named_children() if name != model.base_model_prefix}
    with_weights = [(name, module) for name, module in after.items() if next(module.parameters(), None) is not None]
    if len(with_weights) != 1 or type(with_weights[0][1]) is not nn.Linear:
        return None
    return with_weights[0]


def can_be_linear(model: Any) -> bool:
    """Whether the classification model's head is one linear layer, or `make_linear` makes it one."""
    return linear_head(model) is not None or model.config.model_type in REPLACED


def is_called_with_states(model: Any) -> bool:
    """Whether the encoder must return the pooled vector alone, [batch, hidden], for a linear head to read it."""
    return model.config.model_type in _CALLED_WITH_STATES


def make_linear(model: Any) -> None:
    """Replace a head of several layers by one linear layer of zeros, `classifier`, in families that are known here.

    Args:
        model: a transformers classification model; others than RoBERTa, XLM-R, CamemBERT, ELECTRA and DistilBERT, and
            one whose head is one linear layer, are left as they are.
    """
    if linear_head(model) is not None or not can_be_linear(model):
        return
    # Without initialisation, which would draw from the global generator.
    head = nn.utils.skip_init(nn.Linear, model.config.hidden_size, model.num_labels, device=model.device)
    zero(head)
    model.classifier = head
    if model.config.model_type == _WITH_RELU:
        model.pre_classifier, model.dropout = _BothSigns(), _Difference()


def zero(head: nn.Linear) -> None:
    """Set the head's weight and bias to zero."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


class _BothSigns(nn.Module):
    """x as [x, -x]: a ReLU that follows loses nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], dim=-1)


class _Difference(nn.Module):
    """x, to the bit, from the ReLU of [x, -x]: one of the two is zero."""

    def forward(self, rectified: Tensor) -> Tensor:
        positive, negative = rectified.chunk(2, dim=-1)
        return positive - negative
