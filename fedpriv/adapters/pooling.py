"""How an encoder's token states are pooled into the vector that its classification head reads.

Many encoders have a pooler or a first-token state that their training never used; on them, the mean over tokens
separates records far better. Hooks put the mean in place, so the transformers class and all parameter names stay as
they are: plain peft can load the adapter, and `fedpriv.adapters.load` restores the hooks.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

CONVENTIONS = ("mean", "model")

# A record's features are its pooled state at unit length with one constant coordinate, at unit length again. The head's
# bias stands for the constant: in units of `BIAS_SCALE` it is that coordinate's weight. docs/recipes.md says why 0.3.
_CONSTANT = 0.3
STATE_SCALE = 1 / math.hypot(1, _CONSTANT)
BIAS_SCALE = _CONSTANT * STATE_SCALE

# Encoders whose head reads the pooler's output or the first token's state.
_ENCODERS = {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra"}


def convention(model: Any) -> str:
    """`mean` for the encoders that this module knows; `model`, the model's own pooling, for all others."""
    return "mean" if model.config.model_type in _ENCODERS else "model"


def masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the real tokens, [batch, hidden].

    Args:
        states: [batch, tokens, hidden].
        mask: [batch, tokens], 1 for a real token; None means that all are real.
    """
    if mask is None:
        return states.mean(dim=1)
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1.0)


def apply(model: Any, convention: str) -> None:
    """Make the classification model's encoder pool by the given convention from now on.

    Raises:
        ValueError: the convention is unknown.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"pooling = {convention!r}: must be one of {', '.join(CONVENTIONS)}")
    if convention == "model":
        return
    encoder = model.base_model
    signature = inspect.signature(type(encoder).forward)
    mask: list[Tensor | None] = [None]

    def remember_mask(module: Any, args: Any, kwargs: Any) -> None:
        mask[0] = signature.bind(module, *args, **kwargs).arguments.get("attention_mask")

    def pool(_module: Any, args: Any, _output: Any) -> Tensor:
        return masked_mean(args[0], mask[0])

    def replace_first_token(_module: Any, _args: Any, output: Any) -> Any:
        states = output[0]
        pooled = masked_mean(states, mask[0]).unsqueeze(1)
        output.last_hidden_state = torch.cat([pooled, states[:, 1:]], dim=1)
        return output

    encoder.register_forward_pre_hook(remember_mask, with_kwargs=True)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler.register_forward_hook(pool)
    else:
        encoder.register_forward_hook(replace_first_token)
