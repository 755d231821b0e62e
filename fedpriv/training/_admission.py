"""Whether and how a model trains here: its records must not touch each other, and its base computes in a format.

In fixed shapes most architectures keep records apart. Some do not: experts compute all tokens that are routed to them
in one product, whose shape depends on every record, and some approximations of attention normalise over the batch. Such
models run one record a pass. Others keep state between passes or draw random numbers; no shape helps against that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpriv.adapters import lora, restore_float32, to_bfloat16
from fedpriv.data.records import BatchShape, Item, Records
from fedpriv.errors import InputError
from fedpriv.training._isolation import raising_failures, refusing
from fedpriv.training._pass_sizes import RECORDS_OF_A_STEP
from fedpriv.training.independence import dependence
from fedpriv.training.model import TrainingModel
from fedpriv.training.per_sample import Stack, per_sample_gradients
from fedpriv.training.rehearsal import synthetic_records

log = logging.getLogger(__name__)

# Of these it is known that they neither mix the records of a pass nor remember any: tests/training/test_independence.py
# holds each to it, to the bit. How their kernels round is tried on the machine all the same; see `_pass_sizes.py`.
VERIFIED = frozenset(
    {
        "bert",
        "camembert",
        "convbert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "fnet",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "modernbert",
        "mpnet",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "roberta",
        "xlm-roberta",
    }
)

# A test on a few records can miss what depends on the data, so these are refused by name.
REFUSED = {
    "big_bird": "a short record switches its attention for all later ones",
    "bigbird_pegasus": "a short record switches its attention for all later ones",
    "longformer": "its passes fail depending on where records have global attention",
    "reformer": "it hashes with random numbers drawn in each pass",
    "xlnet": "its passes fail depending on the data",
}

# Experts are found by their configuration: whether a sum over routed tokens rounds differently depends on the data.
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Expected records of a step, which decide how many rows a pass has: the fewest, the default and the most.
_STEPS = (1, RECORDS_OF_A_STEP, math.inf)

# The longest synthetic records; a longer one takes the same way through a model.
_LONGEST = 64

# This share of a gradient's norm may be rounding: on a GPU, where passes have different numbers of rows, and between
# the whole model and the prefix cache.
_TOLERANCE = 0.05


def admit(model: TrainingModel) -> None:
    """Let a model train if its records cannot touch each other; one whose records can in a pass runs them apart.

    Raises:
        InputError: they can even then; names the architecture, and some that would do.
    """
    kind = model.peft_model.config.model_type
    if kind in VERIFIED:
        return
    with refusing(kind):
        reason = REFUSED.get(kind) or _reason_to_refuse(model)
    if reason:
        raise InputError(f"model: a {kind} model cannot train here ({reason}); bert, roberta, gpt2 or llama can")
    if not model.records_share_passes:
        log.warning("%s models mix the records of a pass, so each record has a pass of its own: training is slow", kind)
    if model.cache is not None and not _can_cache(model):
        log.warning("%s models do not run from their middle, so there is no prefix cache: training is slower", kind)
        model.cache = None


def _reason_to_refuse(model: TrainingModel) -> str:
    """Empty if records of the model, in passes of their own if they must, cannot touch each other."""
    config = model.peft_model.config
    model.records_share_passes = not any(getattr(config, name, None) for name in _NUMBERS_OF_EXPERTS)
    if not _records_are_independent(model):
        model.records_share_passes = False
        if not _records_are_independent(model):
            return "one record's result depends on the others'"
    return ""


def _can_cache(model: TrainingModel) -> bool:
    """Whether records stay apart with the prefix cache too, and have the gradients of the whole model."""
    records = _synthetic(model, RECORDS_OF_A_STEP, seed=0)
    try:
        with raising_failures():
            whole, cached = (_gradients(model, records.items(), cached=flag) for flag in (False, True))
            return _close(cached, whole) and _records_are_independent(model, cached=True)
    except Exception as error:  # as above
        log.warning("the prefix cache fails on synthetic records: %s", error)
        return False


def _records_are_independent(model: TrainingModel, *, cached: bool = False) -> bool:
    """Whether removing, replacing and permuting synthetic records changes no bit of the others' gradients.

    Args:
        model: to test, in passes of as many rows as the smallest and the largest steps have.
        cached: through its prefix cache.
    """
    steps = _STEPS if model.records_share_passes else (RECORDS_OF_A_STEP,)
    return all(_independent(model, num_expected, cached=cached) for num_expected in steps)


def _independent(model: TrainingModel, num_expected: float, *, cached: bool) -> bool:
    records, others = (_synthetic(model, num_expected, seed=seed) for seed in (0, 1))
    gradients = partial(_gradients, model, num_expected=num_expected, cached=cached)
    return dependence(gradients, records.items(), others.items(), partial(_equal, model)) is None


def _synthetic(model: TrainingModel, num_expected: float, *, seed: int) -> Records:
    classes = 0 if lora.is_causal(model.peft_model) else model.peft_model.config.num_labels
    longest = min(_LONGEST, model.longest or _LONGEST)
    return synthetic_records(model, max_length=longest, num_labels=classes, seed=seed, num_expected=num_expected)


def _equal(model: TrainingModel, one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) if model.device.type == "cpu" else _close(one, other)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).norm(dim=1) <= _TOLERANCE * other.norm(dim=1)).all())


def _gradients(
    model: TrainingModel, items: Sequence[Item], *, num_expected: float = RECORDS_OF_A_STEP, cached: bool
) -> Tensor:
    """[records, values] The records' gradients in the items' order, with parameters at which none of them vanishes."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: (p.detach().cpu() + 0.05 * torch.randn(p.shape, generator=generator)).unsqueeze(0).to(model.device)
        for name, p in model.peft_model.named_parameters()
        if p.requires_grad
    }
    rows: dict[int, Tensor] = {}
    for together in model.passes(items, num_expected):
        batch = [items[position] for position in together.positions]
        owners = torch.zeros(together.shape.rows, dtype=torch.int64, device=model.device)

        def losses(batch: list[Item] = batch, shape: BatchShape = together.shape) -> Tensor:
            return model.predictions(batch, cached=cached, shape=shape).losses

        gradients, _ = per_sample_gradients(
            model.layers, losses, Stack(parameters=parameters, owners=owners), recomputed=model.recomputed
        )
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
        rows.update(zip(together.positions, flat, strict=False))  # dummies' rows come last
    return torch.stack([rows[position] for position in range(len(items))])


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
        to_bfloat16(peft_model)
    if wanted in ("float32", "nf4") or (wanted == "auto" and _is_small(peft_model)):
        return build()
    before = None
    try:
        is_choice = wanted == "auto" and not _on_gpu(peft_model)
        in_float32 = _seconds_of_a_pass(peft_model, build) if is_choice else math.inf
        before = to_bfloat16(peft_model)
        share = _seconds_of_a_pass(peft_model, build) / in_float32
    except Exception as error:  # whatever it is, synthetic records alone have caused it
        if before is not None:
            restore_float32(peft_model, before)
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
    restore_float32(peft_model, before)
    return build()


def _on_gpu(peft_model: Any) -> bool:
    kind: str = next(peft_model.parameters()).device.type
    return kind != "cpu"


def _is_small(peft_model: Any) -> bool:
    width: int = peft_model.config.hidden_size
    return not _on_gpu(peft_model) and width < _LEAST_WIDTH


def _seconds_of_a_pass(peft_model: Any, build: Callable[..., TrainingModel]) -> float:
    """The least time of one pass for per-sample gradients; the first pass, which warms up, is not counted.

    On a CPU it is the processor's, whatever else keeps the machine busy.
    """
    model = build(prefix_cache=False)
    classes = 0 if lora.is_causal(peft_model) else peft_model.config.num_labels
    tokens = min(_TOKENS, model.longest or _TOKENS)
    records = synthetic_records(model, max_length=tokens, num_labels=classes)
    *_, longest = model.passes(records.items())
    items = [records.items()[position] for position in longest.positions]

    def one_pass() -> None:
        per_sample_gradients(
            model.layers,
            lambda: model.predictions(items, cached=False, shape=longest.shape).losses,
            recomputed=model.recomputed,
        )

    clock = time.perf_counter if _on_gpu(peft_model) else time.process_time
    one_pass()
    least, ends = float("inf"), clock() + _SECONDS
    while True:
        started = clock()
        one_pass()
        finished = clock()
        least = min(least, finished - started)
        if finished >= ends:
            return least
