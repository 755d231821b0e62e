"""The configuration's keys as other programs read them: a JSON Schema, and tables in Markdown.

Both are made from the types of the sections and the meanings below their keys.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from fedpriv.config._federation_and_privacy import RULE_FACTS
from fedpriv.config._run_config import RunConfig
from fedpriv.privacy.mechanisms.registry import MECHANISMS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


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
        "grid": run | {"description": "every combination of these values is a run", "properties": lists},
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
