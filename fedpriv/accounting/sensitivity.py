"""Clipping rules: which parts of a gradient are clipped to C, and the L2 sensitivity that follows.

Training clips by these parts and accounting divides the noise multiplier by this factor: one definition for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

CLIPPING_RULES = ("joint", "split", "per-tensor", "batch")

# Names that other libraries have for the same rules (Opacus: flat, per_layer).
_ALIASES = {"flat": "joint", "per-layer": "per-tensor"}

# Where the noise goes: on every step's gradient, or once on the whole update before it is uploaded.
NOISE_PLACES = ("gradients", "upload")

# Whatever a client's data are, its clipped update lies within S of zero, so replacing them, or one record of them,
# moves it by up to 2 S. The server knows who sends: nothing smaller holds against it.
UPLOAD_FACTOR = 2.0


def clipping_parts(rule: str, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of tensors that are clipped to C each, together holding every tensor once.

    Args:
        rule: `joint` clips each record's whole gradient, `split` its A part, its B part and its head apart,
            `per-tensor` each of its tensors, `batch` the parts of `split` of the batch's *mean* gradient.
        names: of all trainable tensors, as peft stores them.

    Raises:
        ValueError: the rule is unknown, or there is no tensor.
    """
    names = tuple(names)
    check_rule(rule)
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
    """L2 sensitivity of what is noised, in units of C, under add/remove of one record.

    Clipping `num_parts` parts to C each bounds one record's contribution by sqrt(num_parts) C. Under `batch` one
    record moves each part's clipped mean by up to 2C, whatever the rest of the batch is.

    Args:
        rule: the clipping rule.
        num_parts: how many parts it clips, >= 1.

    Raises:
        ValueError: the rule is unknown, or num_parts < 1.
    """
    check_rule(rule)
    if num_parts < 1:
        raise ValueError(f"num_parts = {num_parts}: must be >= 1")
    return math.sqrt(num_parts) * (2.0 if rule == "batch" else 1.0)


def num_parts(rule: str, *, num_tensors: int, head: bool) -> int:
    """How many parts a rule clips, for who knows the model by its numbers only.

    Args:
        rule: the clipping rule.
        num_tensors: trainable tensors, a head's weight and bias too, >= 1.
        head: whether a classification head is trained beside A and B.

    Raises:
        ValueError: the rule is unknown, or num_tensors < 1.
    """
    check_rule(rule)
    if num_tensors < 1:
        raise ValueError(f"num_tensors = {num_tensors}: must be >= 1")
    return {"joint": 1, "split": 2 + head, "per-tensor": num_tensors, "batch": 2 + head}[rule]


def clipping_rule(name: str) -> str:
    """The rule of this name: one of `CLIPPING_RULES`, or `flat` for `joint` and `per-layer` for `per-tensor`.

    Raises:
        ValueError: the rule is unknown.
    """
    rule = _ALIASES.get(name, name)
    check_rule(rule)
    return rule


def check_rule(rule: str) -> None:
    """Refuse an unknown clipping rule."""
    if rule not in CLIPPING_RULES:
        raise ValueError(f"clipping = {rule!r}: must be one of {', '.join(CLIPPING_RULES)}")
