"""How an encoder's token states are pooled into the vector that its classification head reads.

Many encoders have a pooler or a first-token state that their training never used; on them, the mean over tokens
separates records far better. Hooks put the mean in place, so the transformers class and all parameter names stay as
they are: plain peft can load the adapter, and `fedpriv.learning.adapters.load` restores the hooks.

The conventions `unit-mean` and `unit-model` also bring what a linear head reads to the length `STATE_SCALE`: the pooled
vector or, for a decoder, every token's last state. A record's gradient with respect to the head is then bounded. By
`unit-mean` an encoder whose head has several layers gets one of one linear layer instead. The transformers class stays
as it is: modules of its own are replaced, such that its forward pass applies one linear layer to the pooled vector.
`fedpriv.learning.adapters.load` restores that too; plain peft refuses such an adapter on the model's own head,
unless `apply` comes first.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_UNIT = "unit-"
CONVENTIONS = ("mean", "model", "unit-mean", "unit-model")

# A record's features are its pooled state at unit length with one constant coordinate, at unit length again. The head's
# bias stands for the constant: in units of `BIAS_SCALE` it is that coordinate's weight.
# docs/appendices/recipe_trials.md says why 0.3.
_CONSTANT = 0.3
STATE_SCALE = 1 / math.hypot(1, _CONSTANT)
BIAS_SCALE = _CONSTANT * STATE_SCALE

# Encoders whose head reads the pooler's output or the first token's state.
_ENCODERS = {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra"}

# Their forward passes call one module, `classifier`, with all tokens' states.
_CALLED_WITH_STATES = {"roberta", "xlm-roberta", "camembert", "electra"}
# Its forward pass applies pre_classifier, ReLU, dropout and classifier to the first token's state.
_WITH_RELU = "distilbert"

REPLACED = frozenset({*_CALLED_WITH_STATES, _WITH_RELU})
"""Model types whose head of several layers becomes one layer where features are normalised."""


def pooling_of(model: Any, *, normalize: bool = False) -> str:
    """`mean` for the encoders that this module knows; `model`, the model's own pooling, for all others.

    Args:
        normalize: whether the pooled vector has a fixed length, which `unit-` before the name says.
    """
    return _UNIT * normalize + ("mean" if pools(model) else "model")


def normalizes(convention: str) -> bool:
    """Whether the pooled vector has a fixed length by this convention."""
    return convention.startswith(_UNIT)


def unit_states(states: Tensor) -> Tensor:
    """The vectors at length `STATE_SCALE`, float32; a vector of zeros stays one.

    Args:
        states: [..., hidden].
    """
    return F.normalize(states.float(), dim=-1) * STATE_SCALE


def masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the real tokens, float32 [batch, hidden].

    Args:
        states: [batch, tokens, hidden].
        mask: [batch, tokens], 1 for a real token; None means that all are real.
    """
    states = states.float()
    if mask is None:
        return states.mean(dim=1)
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1.0)


def pooled(output: Any) -> Tensor:
    """The vectors that the head of a model which `pools` reads, [batch, hidden], in what its encoder gives."""
    if getattr(output, "pooler_output", None) is not None:
        vectors: Tensor = output.pooler_output
        return vectors
    states: Tensor = output.last_hidden_state
    return states if states.dim() == 2 else states[:, 0]


def pools(model: Any) -> bool:
    """Whether the model is an encoder whose output holds one vector for each text, as `apply` leaves it."""
    return model.config.model_type in _ENCODERS


def apply(model: Any, convention: str) -> None:
    """Make the classification model's encoder pool by the given convention from now on, and its head fit that.

    Raises:
        ValueError: the convention is unknown, or a vector of fixed length would not be what a linear head reads.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"pooling = {convention!r}: must be one of {', '.join(CONVENTIONS)}")
    if convention == "unit-mean":
        _make_linear(model)
    if normalizes(convention) and linear_head(model) is None:
        raise ValueError(f"pooling = {convention}: the head of a {type(model).__name__} is not one linear layer")
    if convention.removeprefix(_UNIT) == "mean":
        # A linear head that such a model calls with all states must get the pooled vector alone, [batch, hidden].
        is_called_with_states = model.config.model_type in _CALLED_WITH_STATES
        _pool_by_the_mean(model.base_model, alone=normalizes(convention) and is_called_with_states)
    if normalizes(convention):
        model.base_model.register_forward_hook(_normalize)  # after the pooling: the encoder's output holds its result


def _normalize(_encoder: Any, _args: Any, output: Any) -> Any:
    name = "last_hidden_state" if getattr(output, "pooler_output", None) is None else "pooler_output"
    setattr(output, name, unit_states(output[name]))
    return output


def _pool_by_the_mean(encoder: Any, *, alone: bool) -> None:
    """Put the mean in the place of the pooler's output, of the first token's state or, alone, of all states."""
    signature = inspect.signature(type(encoder).forward)
    mask: list[Tensor | None] = [None]

    def remember_mask(module: Any, args: Any, kwargs: Any) -> None:
        mask[0] = signature.bind(module, *args, **kwargs).arguments.get("attention_mask")

    def pool(_module: Any, args: Any, _output: Any) -> Tensor:
        return masked_mean(args[0], mask[0])

    def replace_states(_module: Any, _args: Any, output: Any) -> Any:
        states = output[0]
        pooled = masked_mean(states, mask[0])
        output.last_hidden_state = pooled if alone else torch.cat([pooled.unsqueeze(1), states[:, 1:]], dim=1)
        return output

    encoder.register_forward_pre_hook(remember_mask, with_kwargs=True)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler.register_forward_hook(pool)
    else:
        encoder.register_forward_hook(replace_states)


def linear_head(model: Any) -> tuple[str, nn.Linear] | None:
    """The name of a classification model's head and the head, if one linear layer is all that follows the encoder."""
    after = {name: module for name, module in model.named_children() if name != model.base_model_prefix}
    with_weights = [(name, module) for name, module in after.items() if next(module.parameters(), None) is not None]
    if len(with_weights) != 1 or type(with_weights[0][1]) is not nn.Linear:
        return None
    return with_weights[0]


def can_be_linear(model: Any) -> bool:
    """Whether the classification model's head is one linear layer, or `_make_linear` makes it one."""
    return linear_head(model) is not None or model.config.model_type in REPLACED


def _make_linear(model: Any) -> None:
    """Replace a head of several layers by one linear layer of zeros, `classifier`, in the families of `REPLACED`."""
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
