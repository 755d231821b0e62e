"""The files of a clone that are made of the configuration's keys; `make keys` writes them.

Flower overrides only keys that pyproject.toml lists, editors and type checkers read no code that makes a list of
keyword arguments, and the documentation is a page.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import BeforeValidator

from fedpriv import config as configuration
from fedpriv.config._recipes import BY_RECIPE, LEFT_TO_RECIPES
from fedpriv.config._run_config import RunConfig
from fedpriv.config._schema import groups, schema_tables
from fedpriv.config._section import Fact, one_for_all
from fedpriv.errors import InputError

_EDITORS = '''\
"""The keys of a run's configuration as keyword arguments: what editors complete and type checkers check.

Written by `make keys` from the sections of `fedpriv.config`. docs/configuration.md explains the keys.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedpriv.config import ALIASES


class _CommonKeys(TypedDict, total=False):
    """The keys that mean the same in a run and in a sweep, less those that are arguments of their own."""

KEYS


class RunKeys(_CommonKeys, total=False):
    """The keys of one run."""

    batch_size: int
    model: str | Path | Callable[[], Any]
    data: str | Path | Sequence[Any] | Mapping[str, Any]
    test_data: str | Path | Any
    noise_schedule: Sequence[float | Sequence[float]] | Callable[[int], Any]


class SweepKeys(_CommonKeys, total=False):
    """The keys of every run of a sweep; the batch size `auto` follows each run's smallest client."""

    batch_size: int | Literal["auto"]
    model: str | Path
    data: str | Path
    test_data: str | Path
    noise_schedule: Sequence[float | Sequence[float]]
'''


def written(root: Path) -> dict[Path, str]:
    """{file that is made of the keys, wholly or in part: the text that it should have}.

    Raises:
        InputError: a file has no place for a table.
    """
    project, page = root / "pyproject.toml", root / "docs" / "configuration.md"
    return {
        project: _for_flower(project.read_text(encoding="utf-8")),
        page: _for_readers(page.read_text(encoding="utf-8")),
        root / "fedpriv" / "config" / "keys.py": _for_editors(),
    }


def _for_flower(project: str) -> str:
    """The project's file with every key; one whose value depends on others, where it is not given, names no value."""
    values = configuration.to_flower(RunConfig()) | dict.fromkeys(LEFT_TO_RECIPES, BY_RECIPE) | {"engine": "flower"}
    return _with_table(project, "[tool.flwr.app.config]\n", tomli_w.dumps(values))


def _for_readers(page: str) -> str:
    for title, table in schema_tables():
        page = _with_table(page, f"## {title}\n\n", f"{table}\n")
    return page


def _with_table(text: str, heading: str, table: str) -> str:
    """The text with another table under a heading, up to the next empty line."""
    found, count = re.subn(rf"(?m)(?<=^{re.escape(heading)})(?:.+\n)+", lambda _: table, text, count=1)
    if not count:
        raise InputError(f"{heading.strip()}: no such table to write; run this in a clone of the repository")
    return found


def _for_editors() -> str:
    exported = {name: getattr(configuration, name) for name in dir(configuration)}
    aliases = {value: name for name, value in exported.items() if get_origin(value) is Literal}
    hints = get_type_hints(RunConfig, include_extras=True)
    paths = {*RunConfig.keys_with(Fact.PATH), *RunConfig.keys_with(Fact.LOCATION)}
    left_out = {*RunConfig.keys_with(Fact.ARGUMENT), "batch_size", "model", "data", "test_data", "noise_schedule"}
    parts, used = [], set()
    for title, keys in groups().items():
        lines = [f"    # {title}"]
        for key in keys:
            if key not in left_out:
                names = [*_names(hints[key], aliases), *(["Path"] if key in paths else [])]
                used.update(names)
                lines.append(f"    {key}: {' | '.join(names)}")
        parts.append("\n".join(lines))
    imported = sorted(used & set(aliases.values()))
    return _EDITORS.replace("ALIASES", ", ".join(imported)).replace("KEYS", "\n\n".join(parts))


def _names(declared: Any, aliases: dict[Any, str]) -> Iterator[str]:
    """The members of a key's type as source, without what checks or reads its values; lists are as good as tuples."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        plain, *rest = arguments
        if any(isinstance(each, BeforeValidator) and each.func is one_for_all for each in rest):
            yield from _names(get_args(plain)[0], aliases)
        yield from _names(plain, aliases)
    elif origin in (Union, types.UnionType):
        for each in arguments:
            yield from _names(each, aliases)
    elif origin is tuple:
        yield f"Sequence[{' | '.join(_names(arguments[0], aliases))}]"
    elif origin is Literal:
        yield aliases.get(declared) or f"Literal[{', '.join(map(json.dumps, arguments))}]"
    else:
        yield "None" if declared is type(None) else declared.__name__


def main() -> None:
    """Write the files of the clone that is the working directory, or the first argument."""
    for path, text in written(Path(*sys.argv[1:2])).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
