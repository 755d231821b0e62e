"""The types of configuration values: how each is read from TOML, from `-c`, and from Flower's run configuration."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt

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
            except (ValueError, RecursionError):
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
BaseFormat = Literal["auto", "float32", "bfloat16", "nf4"]
# What a JSON Schema says of values that take several forms: a list as one text, and the index of a single layer.
_List = Annotated[str, Field(pattern=r"^[\s\d.,eE+\[\]-]*$")]
_LAYERS = r"^(all|last-[1-9]\d*|\d+(,\d+)*)$"
_LayersInput = Annotated[str, Field(pattern=_LAYERS)] | NonNegativeInt
Layers = Annotated[str, BeforeValidator(text_of_number, json_schema_input_type=_LayersInput), Field(pattern=_LAYERS)]
Train = Literal["all", "head", "auto"]
Track = Literal["none", "mlflow", "tensorboard", "wandb"]
Names = Annotated[tuple[str, ...], BeforeValidator(split, json_schema_input_type=tuple[str, ...] | str)]
_Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[_Size, ...], BeforeValidator(split, json_schema_input_type=tuple[_Size, ...] | _List)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Budgets = Annotated[
    tuple[Positive, ...],
    BeforeValidator(split),
    BeforeValidator(one_for_all, json_schema_input_type=tuple[Positive, ...] | Positive | _List),
]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Clipping = Annotated[
    Literal["joint", "split", "per-tensor", "batch"],
    BeforeValidator(
        rule_by_any_name,
        json_schema_input_type=Literal["joint", "split", "per-tensor", "batch", "flat", "per-layer"],
    ),
]
Maybe = BeforeValidator(none_if_empty)
