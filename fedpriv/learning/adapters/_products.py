"""Products of float32 matrices on a CPU, by the faster of two libraries.

torch multiplies float32 matrices with MKL. On processors that MKL does not know well, oneDNN, which torch brings along
for bfloat16 and for compiled models, takes as little as a third of the time: the faster one on this machine is used.
It reads weights in a layout of its own, in which those of smaller models are copied once.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Tokens of the product that is timed, how often it is, and the share of the time that must be saved.
_TOKENS = 256
_REPEATS = 5
_LEAST_SAVING = 0.05

# Products of fewer weights are hardly worth a choice.
_FEWEST = 2**16

# Bytes of weights that may stand in memory twice.
_MOST_COPIED = 2**29


def use_the_faster(base: Any) -> bool:
    """Give the linear layers of a model another forward pass if that is faster here; whether it did.

    The results are the same up to rounding.

    Args:
        base: frozen, for inference only. Layers in another format or on another device stay as they are.
    """
    found = [
        module
        for module in base.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"
    ]
    largest = max(found, key=lambda module: module.weight.numel(), default=None)
    if largest is None or largest.weight.numel() < _FEWEST or not _has_onednn():
        return False
    arranged = _arranged if sum(module.weight.nbytes for module in found) <= _MOST_COPIED else Tensor.detach
    with torch.no_grad():
        # Not the vocabulary's: as many outputs as inputs stand for all layers.
        weight = largest.weight[: largest.in_features]
        x = torch.ones(_TOKENS, largest.in_features)
        usual, other = partial(F.linear, x, weight), partial(_onednn_linear, x, arranged(weight), None)
        times = [(_seconds(usual), _seconds(other)) for _ in range(1 + _REPEATS)][1:]
        if min(other for _, other in times) > (1 - _LEAST_SAVING) * min(usual for usual, _ in times):
            return False
        for module in found:
            vars(module)["forward"] = partial(_onednn_linear, weight=arranged(module.weight), bias=module.bias)
    return True


def _arranged(weight: Tensor) -> Tensor:
    """A copy of a weight in oneDNN's own layout."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)
    return found


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in], transposed, plus bias [out]."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _seconds(product: Callable[[], Tensor]) -> float:
    """The processor's time, whatever else keeps the machine busy."""
    started = time.process_time()
    product()
    return time.process_time() - started
