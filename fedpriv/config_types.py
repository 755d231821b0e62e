"""The types of configuration values: how each is read from TOML, from `-c`, and from Flower's run configuration."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedpriv.accounting.sensitivity import clipping_rule

EMBEDDED = "embedded"
# Every node trains on the data that its own configuration names; the server knows only what the node registers.
ON_NODES = "on-nodes"


def split(value: object) -> object:
    """Flower's run configuration has no lists: `a,b` stands for one, or a JSON list if an item holds a comma."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return tuple(json.loads(value))
            except ValueError:
                raise ValueError(f"{value}: starts like a JSON list but is not one") from None
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def one_for_all(value: object) -> object:
    """A single number holds for all clients."""
    return (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def none_if_empty(value: object) -> object:
    """TOML has no null, so the empty string stands for it."""
    return None if value == "" else value


def text_of_number(value: object) -> object:
    """In TOML, the index of a single layer is a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def rule_by_any_name(value: object) -> object:
    """Other libraries have other names for the same clipping rules."""
    return clipping_rule(value) if isinstance(value, str) else value


Aggregation = Literal[
    "dp-lora", "fedavg", "t-fedavg", "cmfl", "ffa-lora", "rolora", "fedsvd", "fed-sb", "fedex-lora", "flora"
]  # of fedpriv/aggregation/rules.py
Layers = Annotated[str, BeforeValidator(text_of_number), Field(pattern=r"^(all|last-[1-9]\d*|\d+(,\d+)*)$")]
Train = Literal["all", "head", "auto"]
Track = Literal["none", "mlflow", "tensorboard", "wandb"]
Names = Annotated[tuple[str, ...], BeforeValidator(split)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(split)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Budgets = Annotated[tuple[Positive, ...], BeforeValidator(split), BeforeValidator(one_for_all)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Clipping = Annotated[Literal["joint", "split", "per-tensor", "batch"], BeforeValidator(rule_by_any_name)]
Maybe = BeforeValidator(none_if_empty)
