"""The JSON Schema of a configuration: accepts what a run accepts, refuses what it refuses, describes every key."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest

from fedpriv.config import KEYS, RunConfig, parse, schema, schema_tables, to_toml
from fedpriv.config._schema import groups
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from tests.config.test_run_config import BAD, CHANGED

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "simulations" / "configs"


# What types alone do not tell: the loader reads these as numbers that are none.
NOT_JSON = ("learning_rate", "noise_multiplier")


@cache
def validator(*, sweep: bool = False):
    """Made when a test needs it: its library takes seconds to load, and each worker collects this file."""
    import jsonschema

    return jsonschema.Draft202012Validator(schema(sweep=sweep))


def test_both_schemas_are_valid_schemas():
    for each in (validator(), validator(sweep=True)):
        each.check_schema(each.schema)


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.toml")), ids=lambda file: file.stem)
def test_every_shipped_configuration_is_valid(file):
    values = tomllib.loads(file.read_text())
    validator(sweep=file.parent.name == "sweeps").validate(values)


@pytest.mark.parametrize("values", [{}, CHANGED, {"budget_epsilon": 4}, {"layers": 3}, {"recipe": "dp-lora-paper"}])
def test_a_resolved_configuration_is_valid(values):
    validator().validate(tomllib.loads(to_toml(parse(values))))
    validator().validate(values)


@pytest.mark.parametrize("key", sorted(set(BAD) - set(NOT_JSON)))
def test_what_a_run_refuses_of_a_single_key_the_schema_refuses(key):
    assert not validator().is_valid({key: BAD[key]})
    assert not validator(sweep=True).is_valid({"grid": {key: [BAD[key]]}})
    assert not validator(sweep=True).is_valid({"runs": [{key: BAD[key]}]})


@pytest.mark.parametrize("key", KEYS)
def test_a_table_is_no_value_of_any_key(key):
    assert not validator().is_valid({key: {"a": 1}})


def test_unknown_keys_are_refused_everywhere():
    assert not validator().is_valid({"ronds": 3})
    assert not validator().is_valid({"grid": {"rank": [4]}}), "a run is no sweep"
    assert not validator(sweep=True).is_valid({"grid": {"rang": [4]}})
    assert validator(sweep=True).is_valid({"batch_size": "auto", "grid": {"rank": [4]}})
    assert not validator().is_valid({"batch_size": "auto"})


def test_every_key_has_its_name_meaning_group_and_a_default_that_is_valid():
    assert tuple(key for keys in groups().values() for key in keys) == tuple(validator().schema["properties"])
    assert set(validator().schema["properties"]) == set(KEYS)
    for key, about in validator().schema["properties"].items():
        assert about["title"] == key
        assert len(about["description"]) > 5, key
        assert "`" not in about["description"]
        assert "](" not in about["description"], "an editor cannot follow a link to a page"
        assert about["x-group"] in groups()
        validator().validate({key: about["default"]})
        default = getattr(RunConfig(), key)
        assert about["default"] == ("" if default is None else list(default) if isinstance(default, tuple) else default)


def test_names_of_mechanisms_are_those_of_the_registry():
    assert validator().schema["properties"]["mechanism"]["enum"] == list(MECHANISMS)


def test_the_page_has_the_tables_that_the_descriptions_make():
    page = (ROOT / "docs" / "configuration.md").read_text()
    missing = [group for group, table in schema_tables() if f"## {group}\n\n{table}\n" not in page]
    assert not missing, f"paste what `fedpriv config schema --markdown` prints of {missing}"


def test_the_tables_say_what_each_key_takes():
    rows = dict(schema_tables())
    for group, row in {
        "Model and adapter": "| `rank = 4` | integer >= 1 | ",
        "Local update and privacy": "| `delta` | number > 0, < 1 | ",
        "Federation": "| `client_ranks` | list of integers >= 1 | ",
        "Variants and deduplication": "| `audit` | `tokens`, `mislabelled` | ",
    }.items():
        assert row in rows[group]
    assert "| `budget_epsilon` | list of numbers > 0 or number > 0 | " in rows["Local update and privacy"]
