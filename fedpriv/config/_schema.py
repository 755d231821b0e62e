"""The configuration's keys as other programs read them: a JSON Schema, tables, and files that are made of the keys.

`python -m fedpriv.config._schema`, or `make keys`, writes those files in a clone of the repository. Flower overrides
only keys that pyproject.toml lists, editors and type checkers read no code that makes a list of keyword arguments, and
the documentation is a page. All is made from the types of the sections and the meanings below their keys.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import BeforeValidator, TypeAdapter

from fedpriv import config as configuration
from fedpriv.config._federation_and_privacy import RULE_FACTS
from fedpriv.config._recipes import BY_RECIPE, LEFT_TO_RECIPES
from fedpriv.config._run_config import RunConfig
from fedpriv.config._section import Fact, one_for_all
from fedpriv.errors import InputError
from fedpriv.privacy.mechanisms.registry import MECHANISMS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_EDITORS = '''\
"""The keys of a run's configuration as keyword arguments: what editors complete and type checkers check.

Written by `make keys` from the sections of `fedpriv.config`. docs/configuration.md explains the keys.
"""

from __future__ import annotations

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


class SweepKeys(_CommonKeys, total=False):
    """The keys of every run of a sweep; the batch size `auto` follows each run's smallest client."""

    batch_size: int | Literal["auto"]
    model: str | Path
    data: str | Path
    test_data: str | Path
'''


@cache
def groups() -> Mapping[str, Mapping[str, str]]:
    """{title of a table: {key: its meaning, in Markdown with links relative to docs/}}, in the order of `RunConfig`."""
    found: dict[str, dict[str, str]] = {}
    for section in RunConfig.sections():
        found.setdefault(section.title, {}).update(section.meanings())
    return found


def schema(*, sweep: bool = False) -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of a run's configuration file.

    Each of its `properties` has `title` (the key), `description` (plain text), `markdownDescription` (the same with
    links relative to docs/), `default` (that of the recipe `fedpriv`; the empty string where a key is not set) and
    `x-group`; allowed values are in `enum`, `const`, `pattern` and bounds, inside `anyOf` where a value takes several
    forms. Which keys fit together is for `fedpriv.config.checked`.

    Args:
        sweep: of a sweep's file, which also has `title`, `[grid]` and `[[runs]]`.
    """
    properties = _properties()
    if sweep:
        properties |= _of_sweep(properties)
    return {
        "$schema": _DIALECT,
        "title": f"Configuration of a {'sweep' if sweep else 'run'} of fedpriv",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def schema_tables() -> Iterator[tuple[str, str]]:
    """(group, its table of keys with their defaults, what they take and mean), for documentation."""
    properties = _properties()
    for group, keys in groups().items():
        rows = [
            f"| `{key}{_shown(properties[key]['default'])}` | {_kind(properties[key])} | {text} |"
            for key, text in keys.items()
        ]
        yield group, "\n".join(["| key and default | takes | meaning |", "| --- | --- | --- |", *rows])


def _properties() -> dict[str, Any]:
    """{key: its schema}, in the order of the groups."""
    known = copy.deepcopy(_typed())
    known["mechanism"]["enum"] = list(MECHANISMS)  # of both, a program may register its own at any time
    known["aggregation"]["enum"] = list(RULE_FACTS)
    found = {}
    for group, keys in groups().items():
        for key, text in keys.items():
            about = {"title": key, "description": _plain(text), "markdownDescription": text, "x-group": group}
            found[key] = about | {name: value for name, value in known[key].items() if name not in about}
    return found


@cache
def _typed() -> dict[str, Any]:
    """{key: its schema by its type alone}."""
    found: dict[str, Any] = _without_null(TypeAdapter(RunConfig).json_schema())["properties"]
    return found


def _without_null(value: Any) -> Any:
    """The schema with the empty string for null, which TOML does not have."""
    if value == {"type": "null"}:
        return {"const": ""}
    if isinstance(value, dict):
        return {key: "" if key == "default" and inner is None else _without_null(inner) for key, inner in value.items()}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _of_sweep(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties that differ in a sweep's file."""
    about = ("title", "description", "markdownDescription", "x-group", "default")
    batch_size = properties["batch_size"]
    number = {key: value for key, value in batch_size.items() if key not in about}
    each = {key: {"$ref": f"#/properties/{key}"} for key in properties}
    lists = {key: {"type": "array", "items": one, "minItems": 1} for key, one in each.items()}
    run = {"type": "object", "properties": each, "additionalProperties": False}
    return {
        "batch_size": {key: batch_size[key] for key in about} | {"anyOf": [number, {"const": "auto"}]},
        "title": {"type": "string", "description": "of the plots"},
        "grid": {
            "type": "object",
            "description": "every combination of these values is a run",
            "properties": lists,
            "additionalProperties": False,
        },
        "runs": {
            "type": "array",
            "description": "each of these is combined with the grid",
            "items": run,
            "minItems": 1,
        },
    }


def _plain(text: str) -> str:
    """Markdown without what an editor's tooltip cannot follow or show: links and backticks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def _kind(about: Mapping[str, Any], plural: str = "") -> str:
    """The values that a key's schema accepts, in words: `number > 0`.

    Left out are the empty string for a key that is not set, `a,b` for a list, and patterns, which the key's meaning
    tells better.
    """
    if "anyOf" in about:
        choices = [choice for choice in about["anyOf"] if choice != {"const": ""}]
        has_list = any(choice.get("type") == "array" for choice in choices)
        return " or ".join(_kind(choice) for choice in choices if not (has_list and choice.get("type") == "string"))
    if "const" in about or "enum" in about:
        return ", ".join(f"`{value}`" for value in about.get("enum", [about.get("const")]) if value != "")
    if about["type"] == "array":
        return f"list of {_kind(about['items'], plural='s')}"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "true, false"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {about[bound]:g}" for bound, sign in signs.items() if bound in about]
    return f"{words[about['type']]}{plural} {', '.join(bounds)}".strip()


def _shown(default: Any) -> str:
    """A default as the tables show it after its key, names without quotes; nothing where the key is not set."""
    if default in ("", []):
        return ""
    return f" = {str(default).lower() if isinstance(default, bool) else default}"


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
    left_out = {*RunConfig.keys_with(Fact.ARGUMENT), "batch_size", "model", "data", "test_data"}
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
