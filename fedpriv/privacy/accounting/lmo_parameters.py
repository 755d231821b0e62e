"""Parameters of LMO noise: the distribution of u = 1/b, the inverse scale of a Laplace variable."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from fedpriv.errors import InputError
from fedpriv.privacy.accounting.law import short

# `mixture`: u is one of the parts, chosen with probability equal to its weight. `linear`: u is the weighted sum of the
# independent parts.
Combination = Literal["mixture", "linear"]

# How the cost of LMO noise is computed. `published` is the paper's curve, which holds for one number and not for a
# vector: it is no privacy guarantee, and no budget is ever enforced by it.
LmoAccounting = Literal["published", "sound"]

# Floating point is unreliable beyond these. Parameters are relative to the clip norm, and weights are shares.
_SMALLEST, _LARGEST = 1e-9, 1e9

# A Gamma variable of smaller shape is so often nearly zero that the noise leaves the range of a float.
_SMALLEST_SHAPE = 0.1


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of u, and its weight."""

    weight: float

    def __post_init__(self) -> None:
        kind = next(name for name, part in _PARTS.items() if part is type(self))
        if not _is_number(self.weight) or not (self.weight == 0 or _SMALLEST <= self.weight <= _LARGEST):
            raise InputError(f"{kind}.weight = {short(self.weight)}: must be 0 or lie in [{_SMALLEST:g}, {_LARGEST:g}]")
        for name, value in vars(self).items():
            least = _SMALLEST_SHAPE if name == "shape" else _SMALLEST
            if name == "weight" or (name == "low" and value == 0 and not isinstance(value, bool)):
                continue
            if not _is_number(value) or not least <= value <= _LARGEST:
                raise InputError(f"{kind}.{name} = {short(value)}: must lie in [{least:g}, {_LARGEST:g}]")

    def scaled(self, factor: float) -> Self:
        """The part of u times the factor."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("weight", "shape")}
        return replace(self, **{name: v / factor if name == "rate" else v * factor for name, v in sizes.items()})


@dataclass(frozen=True, kw_only=True)
class GammaPart(_Part):
    """Gamma part of u: shape k >= 0.1 and scale theta > 0, mean k theta."""

    shape: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class ExponentialPart(_Part):
    """Exponential part of u, given by its rate lambda > 0; mean 1 / lambda."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class UniformPart(_Part):
    """Uniform part of u on [low, high], 0 <= low <= high, high > 0; a point mass (Laplace noise) if low = high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise InputError(f"uniform.low = {self.low}: must be at most uniform.high = {self.high}")


Part = GammaPart | ExponentialPart | UniformPart
_PARTS: dict[str, type[Part]] = {"gamma": GammaPart, "exponential": ExponentialPart, "uniform": UniformPart}


@dataclass(frozen=True, kw_only=True)
class LmoParameters:
    """The distribution of u, drawn afresh for every coordinate and step; noise is Laplace(1 / u) times the clip norm.

    Attributes:
        combination: `mixture` (weights sum to one) or `linear` (weights are factors).
        gamma, exponential, uniform: the parts; None, like weight 0, means that the part is absent.

    Raises:
        InputError: the combination is unknown, no part has weight, or a mixture's weights do not sum to one.

    Source: Yang et al., Definition 4.1, whose moment generating function is neither of the two combinations.
    """

    combination: Combination
    gamma: GammaPart | None = None
    exponential: ExponentialPart | None = None
    uniform: UniformPart | None = None

    def __post_init__(self) -> None:
        check_one_of("combination", self.combination, Combination)
        total = math.fsum(part.weight for part in self.parts.values())
        if total <= 0:
            raise InputError("parameters: no part has weight; give gamma, exponential or uniform a weight > 0")
        if self.combination == "mixture" and not math.isclose(total, 1.0, rel_tol=1e-9):
            raise InputError(f"weights sum to {total!r}: those of a mixture must sum to 1")

    @property
    def parts(self) -> dict[str, Part]:
        """{name: part} of the parts with positive weight."""
        every = {name: getattr(self, name) for name in _PARTS}
        return {name: part for name, part in every.items() if part is not None and part.weight > 0}

    def scaled(self, factor: float) -> LmoParameters:
        """The parameters of u times the factor, which divides the noise by it."""
        parts: dict[str, Any] = {name: part.scaled(factor) for name in _PARTS if (part := getattr(self, name))}
        return replace(self, **parts)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain values that JSON can represent, without the absent parts."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The parameters that `to_dict` wrote; InputError, in one line, if it did not."""
        if not isinstance(values, Mapping):
            raise InputError('parameters: must be a JSON object, such as {"combination": "mixture", "uniform": {...}}')
        known = ("combination", *_PARTS)
        if unknown := sorted(str(name) for name in set(values) - set(known)):
            raise InputError(f"parameters: {unknown[0][:60]!r} is unknown; known are {', '.join(known)}")
        if "combination" not in values:
            raise InputError(f"parameters: combination is missing; must be one of {', '.join(get_args(Combination))}")
        parts: dict[str, Any] = {name: _part(name, values[name]) for name in _PARTS if name in values}
        return cls(combination=values["combination"], **parts)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The parameters in a JSON text; InputError if it is not JSON, or does not hold parameters."""
        return cls.from_dict(read_json(text))


def check_one_of(name: str, value: object, choices: Any) -> None:
    """Refuse, by an InputError, a value that is none of a Literal's."""
    if value not in get_args(choices):
        raise InputError(f"{name} = {short(value)}: must be one of {', '.join(get_args(choices))}")


def read_json(text: str) -> Any:
    """The value in a JSON text; InputError if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"parameters {text[:60]!r}: must be JSON") from None


def _part(name: str, values: object) -> Part:
    wanted = [field.name for field in fields(_PARTS[name])]
    if not isinstance(values, Mapping) or set(values) != set(wanted):
        raise InputError(f"{name}: must be a JSON object with {', '.join(wanted)} and nothing else")
    return _PARTS[name](**values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
