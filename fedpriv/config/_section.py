"""The parts of a section of the configuration: types of values, facts about keys, and the meaning of each key."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Flag
from functools import cache, partial
from typing import Annotated, ClassVar, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, TypeAdapter

from fedpriv.privacy.accounting.sensitivity import clipping_rule

# How a JSON Schema describes values that take several forms: a list as one text, and the index of a single layer.
_List = Annotated[str, Field(pattern=r"^[\s\d.,eE+\[\]-]*$")]
_LAYERS = r"^(all|last-[1-9]\d*|\d+(,\d+)*)$"
_LayersInput = Annotated[str, Field(pattern=_LAYERS)] | NonNegativeInt
_Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Fact(Flag):
    """A fact about a key, declared with its type: `Annotated[str, Fact.PATH]`; `keys_with` finds the keys."""

    # Each bit has a name, since Python 3.11.2 drops others when flags are joined.
    HIDDEN = 1 << 0
    """It names a machine, or a place on one, so trackers do not show it."""

    _BESIDE_RESULTS = 1 << 1
    OUTSIDE = HIDDEN | _BESIDE_RESULTS
    """No result depends on it, so a run's digest leaves it out, and trackers too."""

    _OF_FILES = 1 << 2
    LOCATION = OUTSIDE | _OF_FILES
    """It only says where a run's files are."""

    PATH = 1 << 3
    """It may hold a path, of which trackers show the last name."""

    RELOADS = 1 << 4
    """A process that has loaded data and model for another value of it loads them again."""

    RECORDS = 1 << 5
    """It decides which client holds which records."""

    RELEASE = 1 << 6
    """It decides what a release computes, and is not in the request for it."""

    PRIVACY = 1 << 7
    """It decides how private a run is; a finished run's epsilon stands for it."""

    BY_TRAIN = 1 << 8
    """`train = auto` decides it."""

    CALIBRATED = 1 << 9
    """Where it is not set, a run derives it when it begins."""

    BY_SWEEP = 1 << 10
    """A sweep sets it for each of its runs."""

    ARGUMENT = 1 << 11
    """Functions that run take it as an argument of their own."""

    TEXTS = 1 << 12
    """It is about texts, or a model that reads them; a run of a program's own model has no use for it."""


class ConfigSection:
    """Keys that belong together, each with its type, default and, right below, its meaning.

    A meaning is Markdown with links relative to docs/. Methods whose names begin with `_check_` refuse values that do
    not fit together; the section that composes the others calls them all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(use_attribute_docstrings=True)
    title: ClassVar[str] = ""
    facts: ClassVar[Fact] = Fact(0)

    def __init_subclass__(cls, *, title: str = "", facts: Fact | None = None) -> None:
        """Declare a section: the title of its table in the documentation, and facts that hold of all of its keys."""
        cls.title, cls.facts = title, facts or Fact(0)

    @classmethod
    def sections(cls) -> Iterator[type[ConfigSection]]:
        """The sections with keys that a configuration is composed of, in the order of its fields."""
        return (kind for kind in reversed(cls.__mro__) if issubclass(kind, ConfigSection) and kind.title)

    @classmethod
    def meanings(cls) -> Mapping[str, str]:
        """{key: its meaning} of the section's own keys; ValueError if one has none."""
        declared = TypeAdapter(cls).json_schema()["properties"]
        if missing := [key for key, about in declared.items() if "description" not in about]:
            raise ValueError(f"{cls.__name__}.{missing[0]}: no meaning stands below it")
        return {key: " ".join(about["description"].split()) for key, about in declared.items()}

    @classmethod
    @cache  # every message of a simulation asks
    def keys_with(cls, fact: Fact) -> tuple[str, ...]:
        """The keys of which a fact holds, in their order."""
        declared = _facts(cls)  # type: ignore[arg-type]  # a class is hashable
        return tuple(key for key, facts in declared.items() if any(fact in each for each in facts))

    def checks(self) -> Iterator[Callable[[], None]]:
        """Every check of what fits together, those of a section after those of the sections before it."""
        for kind in reversed(type(self).__mro__):
            yield from (partial(check, self) for name, check in vars(kind).items() if name.startswith("_check_"))


@cache
def _facts(kind: type[ConfigSection]) -> Mapping[str, Sequence[Fact]]:
    """{key: the facts that its section and its type declare}."""
    found: dict[str, Sequence[Fact]] = {}
    for section in kind.sections():
        hints = get_type_hints(section, include_extras=True)
        for key in inspect.get_annotations(section):
            declared = getattr(hints[key], "__metadata__", ())
            found[key] = [section.facts, *(each for each in declared if isinstance(each, Fact))]
    return found


def split(value: object) -> object:
    """The items of a list written as `a,b`, or as JSON if one holds a comma: Flower's configuration has no lists."""
    if isinstance(value, str):
        if value.startswith("["):
            try:
                return tuple(json.loads(value))
            except (ValueError, RecursionError):
                raise ValueError(f"{value}: starts like a JSON list but is not one") from None
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def one_for_all(value: object) -> object:
    """The number in a tuple: a single one holds for all clients."""
    return (value,) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _none_if_empty(value: object) -> object:
    """None for the empty string, which stands for it in TOML, where there is no null."""
    return None if value == "" else value


def _text_of_number(value: object) -> object:
    """The text of a number: in TOML, the index of a single layer is one."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rule_by_any_name(value: object) -> object:
    """The clipping rule, by its own name or by that of other libraries."""
    return clipping_rule(value) if isinstance(value, str) else value


Layers = Annotated[str, BeforeValidator(_text_of_number, json_schema_input_type=_LayersInput), Field(pattern=_LAYERS)]
Names = Annotated[tuple[str, ...], BeforeValidator(split, json_schema_input_type=tuple[str, ...] | str)]
Sizes = Annotated[tuple[_Size, ...], BeforeValidator(split, json_schema_input_type=tuple[_Size, ...] | _List)]
# z of a round, or z and q.
_Round = Positive | Annotated[tuple[Positive, ...], Field(min_length=2, max_length=2)]
Schedule = Annotated[tuple[_Round, ...], BeforeValidator(split, json_schema_input_type=tuple[_Round, ...] | str)]
Budgets = Annotated[
    tuple[Positive, ...],
    BeforeValidator(split),
    BeforeValidator(one_for_all, json_schema_input_type=tuple[Positive, ...] | Positive | _List),
]
_Rule = Literal["joint", "split", "per-tensor", "batch"]
_RuleInput = Literal["joint", "split", "per-tensor", "batch", "flat", "per-layer"]
Clipping = Annotated[_Rule, BeforeValidator(_rule_by_any_name, json_schema_input_type=_RuleInput)]
Maybe = BeforeValidator(_none_if_empty)
