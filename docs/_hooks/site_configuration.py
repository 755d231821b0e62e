"""The reference of the configuration, from the types of `fedpriv.config.RunConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from fedpriv.config import RunConfig

INTRODUCTION = """# Configuration, key by key

Made from the configuration's own types, so this is what a run accepts. [Configuration, explained](../configuration.md)
says what the keys are for, and which defaults another recipe replaces. An empty default means "not set".
"""


def page() -> str:
    """The page in Markdown: a table of all keys with their types, ranges and defaults."""
    keys: Mapping[str, Mapping[str, Any]] = TypeAdapter(RunConfig).json_schema()["properties"]
    described = any("description" in schema for schema in keys.values())
    heading = ["key", "takes", "default", "meaning"]
    rows = [_row(key, schema) for key, schema in keys.items()]
    if not described:
        heading, *rows = [row[:-1] for row in (heading, *rows)]
    lines = [heading, ["---"] * len(heading), *rows]
    return INTRODUCTION + "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _row(key: str, schema: Mapping[str, Any]) -> list[str]:
    meaning = _escaped(schema.get("description", ""))
    return [f'<a id="{key}"></a>`{key}`', kind(schema), _code(schema.get("default")), meaning]


def kind(schema: Mapping[str, Any]) -> str:
    """What a JSON Schema accepts, in words: `a number > 0`.

    Raises:
        KeyError: the schema has a type that this page has no word for.
    """
    if "anyOf" in schema:
        return " or ".join(kind(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return ", ".join(_code(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"a list; each {kind(schema['items'])}"
    words = {"string": "a text", "integer": "an integer", "number": "a number", "boolean": "true or false"}
    bounds = {"minimum": "\u2265", "exclusiveMinimum": ">", "maximum": "\u2264", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[bound]:g}" for bound, sign in bounds.items() if bound in schema]
    pattern = [f"like `{_escaped(schema['pattern'])}`"] if "pattern" in schema else []
    return " ".join([words[schema["type"]], ", ".join([*limits, *pattern])]).strip()


def _code(value: Any) -> str:
    """A value as it stands in a TOML file; nothing for one that is not set."""
    if value is None or value == "" or value == []:
        return ""
    return f"`{_escaped(json.dumps(value))}`"


def _escaped(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
