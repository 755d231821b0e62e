"""The keyword arguments of runs and sweeps are the keys of a configuration, name by name and type by type."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from fedpriv import run
from fedpriv.config import KEYS, RunConfig, RunKeys, SweepKeys

# Arguments of their own.
ARGUMENTS = inspect.signature(run).parameters.keys() & set(KEYS)

# What a run takes beyond its key's type, since a file could hold nothing else.
PATHS = {"model", "data", "test_data", "mechanism_parameters", "node_keys", "ledger"}
ALSO: dict[str, Any] = {**dict.fromkeys(PATHS, Path), "budget_epsilon": float}
# What a program may give to a run in place of a name.
GIVEN: dict[str, Any] = {
    "model": Callable[[], Any],
    "data": Sequence[Any] | Mapping[str, Any],
    "test_data": Any,
    "noise_schedule": Callable[[int], Any],
}


def plain(declared: Any) -> frozenset[Any]:
    """The members of a type, without what checks or reads its values; lists are as good as tuples."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return plain(arguments[0])
    if origin in (Union, types.UnionType):
        return frozenset().union(*map(plain, arguments))
    if origin is tuple:
        return frozenset({(Sequence, plain(arguments[0]))})
    if origin is Sequence:
        return frozenset({(Sequence, plain(arguments[0]))})
    return frozenset((Literal, value) for value in arguments) if origin is Literal else frozenset({declared})


@pytest.mark.parametrize("kind", [RunKeys, SweepKeys])
def test_every_key_of_a_configuration_is_a_keyword_of_its_type(kind):
    configured = get_type_hints(RunConfig, include_extras=True)
    keywords = get_type_hints(kind)
    assert tuple(key for key in KEYS if key not in ARGUMENTS) == tuple(key for key in KEYS if key in keywords)
    assert keywords.keys() <= set(KEYS)
    for key, type_ in keywords.items():
        expected = plain(configured[key]) | ({ALSO[key]} if key in ALSO else set())
        if kind is RunKeys and key in GIVEN:
            expected |= plain(GIVEN[key])
        if kind is SweepKeys and key == "batch_size":
            expected |= {(Literal, "auto")}
        assert plain(type_) == expected, key


def test_no_keyword_is_required():
    assert not RunKeys.__required_keys__
    assert not SweepKeys.__required_keys__
