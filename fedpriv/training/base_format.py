"""In which format the frozen base computes: as the configuration says, or in whichever is faster on this machine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from fedpriv.adapters import base_dtype, lora
from fedpriv.errors import InputError
from fedpriv.training.model import TrainingModel
from fedpriv.training.per_sample import per_sample_gradients
from fedpriv.training.rehearsal import synthetic_records

log = logging.getLogger(__name__)

# bfloat16 costs precision, so it must save at least this share of the time.
_LEAST_SAVING = 0.2

# In narrower models a pass is mostly overhead, and which format is faster is chance.
_LEAST_WIDTH = 128

# Tokens of the synthetic records, and the seconds for which each format is timed.
_TOKENS = 32
_SECONDS = 0.15


def in_format(peft_model: Any, wanted: str, build: Callable[..., TrainingModel]) -> TrainingModel:
    """The training model with its frozen base in a format.

    Args:
        peft_model: with a float32 base on the device that trains; converted in place.
        wanted: `float32`, `bfloat16` or `auto`: on a GPU bfloat16, and on a CPU whichever takes less time for a pass
            of synthetic records there and back; float32 if the model computes in neither, which is for others to say.
            With `nf4` the linear layers are quantised already, and the rest becomes bfloat16 on a GPU.
        build: makes the training model; takes `pretrained` and `prefix_cache`.

    Raises:
        InputError: bfloat16 is wanted, and the model does not compute in it.
    """
    if wanted == "nf4" and _on_gpu(peft_model):
        base_dtype.to_bfloat16(peft_model)
    if wanted in ("float32", "nf4") or (wanted == "auto" and _is_small(peft_model)):
        return build()
    before = None
    try:
        is_choice = wanted == "auto" and not _on_gpu(peft_model)
        in_float32 = _seconds_of_a_pass(peft_model, build) if is_choice else math.inf
        before = base_dtype.to_bfloat16(peft_model)
        share = _seconds_of_a_pass(peft_model, build) / in_float32
    except Exception as error:  # whatever it is, synthetic records alone have caused it
        if before is not None:
            base_dtype.restore(peft_model, before)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if wanted == "bfloat16":
            kind = peft_model.config.model_type
            raise InputError(
                f"base_dtype = bfloat16: a {kind} model does not compute in it here ({reason}); use float32"
            ) from None
        log.info("base_dtype = auto: float32, since this model does not compute in bfloat16 (%s)", reason)
        return build()
    is_taken = share <= 1 - _LEAST_SAVING
    if is_choice:
        chosen = "bfloat16" if is_taken else "float32"
        log.info("base_dtype = auto: %s; a pass in bfloat16 takes %.2f of the time in float32", chosen, share)
    if is_taken:
        return build(pretrained=before.weights)
    base_dtype.restore(peft_model, before)
    return build()


def _on_gpu(peft_model: Any) -> bool:
    kind: str = next(peft_model.parameters()).device.type
    return kind != "cpu"


def _is_small(peft_model: Any) -> bool:
    width: int = peft_model.config.hidden_size
    return not _on_gpu(peft_model) and width < _LEAST_WIDTH


def _seconds_of_a_pass(peft_model: Any, build: Callable[..., TrainingModel]) -> float:
    """The least time of one pass for per-sample gradients; the first pass, which warms up, is not counted."""
    model = build(prefix_cache=False)
    classes = 0 if lora.is_causal(peft_model) else peft_model.config.num_labels
    tokens = min(_TOKENS, model.lengths.longest or _TOKENS)
    records = synthetic_records(model, max_length=tokens, num_labels=classes)
    *_, longest = model.passes(records.items())
    items = [records.items()[position] for position in longest.positions]

    def one_pass() -> None:
        per_sample_gradients(
            model.layers,
            lambda: model.predictions(items, cached=False, shape=longest.shape).losses,
            recomputed=model.recomputed,
        )

    one_pass()
    least, ends = float("inf"), time.perf_counter() + _SECONDS
    while True:
        started = time.perf_counter()
        one_pass()
        finished = time.perf_counter()
        least = min(least, finished - started)
        if finished >= ends:
            return least
