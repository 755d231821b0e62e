"""Clipping rules: which parts of a gradient are clipped to C, and the resulting L2 sensitivity.

Training clips these parts and accounting divides the noise multiplier by this factor: one definition serves both.
"""

import math
from collections.abc import Iterable

CLIPPING_RULES = ("joint", "split", "per-tensor", "batch")

# Names that other libraries use for the same rules (Opacus: flat, per_layer).
_ALIASES = {"flat": "joint", "per-layer": "per-tensor"}

# Noise is added to the gradient of every step, or once to the whole update before it is uploaded.
NOISE_TARGETS = ("gradients", "upload")

# Whatever a client's data are, the L2 norm of its clipped update is at most S, so replacing the data, or one record of
# them, moves the update by up to 2 S. The server knows who sends, so no smaller bound holds against it.
UPLOAD_FACTOR = 2.0

# What LocalDpMod's norms in the arrays' own type may be off by: clipped float32 updates of 10^7 values stay below it.
_CLIPPING_MARGIN = 1e-3


def clipping_parts(rule: str, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of tensors that are each clipped to C; together they contain every tensor exactly once.

    Args:
        rule: `joint` clips each per-sample gradient as a whole, `split` its A part, its B part and its head
            separately, `per-tensor` each of its tensors; `batch` clips the parts of `split` in the *mean* gradient of
            the batch.
        names: names of all trainable tensors, as peft stores them.

    Raises:
        ValueError: the rule is unknown, or there is no tensor.
    """
    names = tuple(names)
    _check_rule(rule)
    if not names:
        raise ValueError("names: clipping needs at least one trainable tensor")
    if rule == "joint":
        return (names,)
    if rule == "per-tensor":
        return tuple((name,) for name in names)
    parts = (
        tuple(name for name in names if ".lora_A." in name),
        tuple(name for name in names if ".lora_B." in name),
        tuple(name for name in names if ".lora_A." not in name and ".lora_B." not in name),
    )
    return tuple(part for part in parts if part)


def sensitivity_factor(rule: str, num_parts: int) -> float:
    """L2 sensitivity of the noised quantity, in units of C, under add-or-remove adjacency of records.

    Clipping each of `num_parts` parts to C bounds one record's contribution by sqrt(num_parts) C. Under `batch`, one
    record moves the clipped mean of each part by up to 2C, whatever the rest of the batch is; divergences are jointly
    convex over samples, so the subsampled accountant applies to it too.

    Args:
        num_parts: number of parts that it clips, >= 1.

    Raises:
        ValueError: the rule is unknown, or num_parts < 1.
    """
    _check_rule(rule)
    if num_parts < 1:
        raise ValueError(f"num_parts = {num_parts}: must be >= 1")
    return math.sqrt(num_parts) * (2.0 if rule == "batch" else 1.0)


def num_parts(rule: str, *, num_tensors: int, head: bool) -> int:
    """The number of parts that a rule clips, from the number of tensors alone.

    Args:
        num_tensors: number of trainable tensors, including a head's weight and bias, >= 1.
        head: whether a classification head is trained in addition to A and B.

    Raises:
        ValueError: the rule is unknown, or num_tensors < 1.
    """
    _check_rule(rule)
    if num_tensors < 1:
        raise ValueError(f"num_tensors = {num_tensors}: must be >= 1")
    return {"joint": 1, "split": 2 + head, "per-tensor": num_tensors, "batch": 2 + head}[rule]


def clipping_rule(name: str) -> str:
    """The rule named so in `CLIPPING_RULES`, `joint` for `flat`, `per-tensor` for `per-layer`, or a ValueError."""
    rule = _ALIASES.get(name, name)
    _check_rule(rule)
    return rule


def _check_rule(rule: str) -> None:
    """Refuse an unknown clipping rule."""
    if rule not in CLIPPING_RULES:
        raise ValueError(f"clipping = {rule!r}: must be one of {', '.join(CLIPPING_RULES)}")


def local_dp_multiplier(clip_norm: float, sensitivity: float, epsilon: float, delta: float) -> float:
    """The effective noise multiplier of one update through Flower's LocalDpMod, >= 0.

    The mod adds N(0, s^2) with s = sensitivity sqrt(2 ln(1.25 / delta)) / epsilon, the classical bound, which is proven
    for epsilon < 1 alone. Two updates clipped to C are up to 2 C apart, whatever sensitivity the mod was given, so this
    is s / (2 C), less 0.1 % since the mod clips in the arrays' own type.

    Args:
        clip_norm: C > 0.
        sensitivity: >= 0, in the same unit.
        epsilon: > 0.
        delta: in (0, 1).

    Source: Dwork and Roth 2014, Theorem 3.22, for s.
    """
    stddev = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return stddev / (UPLOAD_FACTOR * clip_norm * (1 + _CLIPPING_MARGIN))
