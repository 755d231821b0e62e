"""The losses of a language model's records without the logits of a whole batch.

A vocabulary of 50,000 and a batch of 8 records of 256 tokens make 400 MB of logits, and as much for their gradient.
Here each record has products of its own: of the tokens that predict one of its targets, at most `_MOST_LOGITS` values
at once. Prompts and padding cost nothing, and a record's bits cannot depend on the others. The backward pass needs the
gradient of the hidden states alone, which is computed with the losses and kept in place of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedpriv.adapters import lora
from fedpriv.training.losses import IGNORED, Predictions

# Logits that stand in memory at once, 64 MiB in float32.
_MOST_LOGITS = 2**24


def output_layer(model: Any, inputs: dict[str, Tensor]) -> nn.Linear | None:
    """The frozen linear layer whose output is a causal model's logits; None if there is none, or they are not that.

    Args:
        model: a peft model.
        inputs: of one record, with which it is tried: some models scale or cap what the layer returns.
    """
    layer = model.get_output_embeddings() if lora.is_causal(model) else None
    if type(layer) is not nn.Linear:
        return None
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        with torch.no_grad():
            logits = model(**inputs).logits
    finally:
        hook.remove()
    return layer if len(outputs) == 1 and outputs[0] is logits else None


def places_of(targets: Tensor) -> list[Tensor]:
    """Where each row has a target, [rows] of int64 vectors."""
    return [(own != IGNORED).nonzero().squeeze(1) for own in targets]


def sliced_predictions(hidden: Tensor, layer: nn.Linear, targets: Tensor, places: Sequence[Tensor]) -> Predictions:
    """How well the layer's logits predict each record's targets: `losses.predictions` of them.

    Args:
        hidden: [rows, tokens, width], what the layer reads; gradients flow to it alone.
        layer: frozen, with vocabulary x width weights.
        targets: int64 [rows, tokens - 1], from `next_token_targets`.
        places: from `places_of`.
    """
    losses, hits = _Sliced.apply(hidden, layer.weight, layer.bias, targets, places)  # type: ignore[no-untyped-call]
    return Predictions(
        losses=losses, hits=hits, num_targets=torch.tensor([len(own) for own in places], device=hidden.device)
    )


class _Sliced(torch.autograd.Function):
    """Mean cross-entropy and share of hits of each row; zeros for one without targets."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, places: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        losses, hits = torch.zeros(2, len(hidden), device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        for row, (own, place) in enumerate(zip(targets, places, strict=True)):
            for chosen in place.split(max(1, _MOST_LOGITS // len(weight))) if len(place) else ():
                logits = F.linear(hidden[row, chosen], weight, bias).float()
                wanted = own[chosen].unsqueeze(1)
                log_sums = logits.logsumexp(dim=1, keepdim=True)
                losses[row] += (log_sums - logits.gather(1, wanted)).sum()
                hits[row] += (logits.argmax(dim=1, keepdim=True) == wanted).sum()
                if gradient is not None:
                    of_logits = logits.sub_(log_sums).exp_()  # in place: a second one would be as large
                    of_logits.scatter_add_(1, wanted, -torch.ones_like(log_sums))
                    gradient[row, chosen] = of_logits.div_(own.new_tensor(len(place))).to(weight.dtype) @ weight
            # Divided once, after the sums: shares of hits that are added up may round to more than 1.
            losses[row] /= max(1, len(place))
            hits[row] /= max(1, len(place))
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(gradient)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_outputs[0][:, None, None].to(gradient.dtype), None, None, None, None
