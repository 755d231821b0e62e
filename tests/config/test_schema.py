"""Files that other programs read of the keys, and the JSON Schema, are made of the keys, each declared once.

The JSON Schema accepts what a run accepts, refuses what it refuses, and describes every key.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from config_keys import written

from fedpriv.config import KEYS, RunConfig, parse, schema, schema_tables, to_toml
from fedpriv.config._schema import groups
from fedpriv.errors import InputError
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from tests.config.test_run_config import BAD, CHANGED

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "simulations" / "configs"

# What types alone do not tell: the loader reads these as numbers that are none.
NOT_JSON = ("learning_rate", "noise_multiplier")

SECTION = '''\
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedpriv.config._section import Fact, ConfigSection, Sizes


@dataclass(frozen=True, kw_only=True)
class ExtraSection(ConfigSection, title="Execution"):
    """A section of a test."""

    extra_sizes: Annotated[Sizes, Fact.HIDDEN] = (3,)
    """the [sizes](data.md) of
    something"""

    def _check_extra_sizes(self) -> None:
        if len(self.extra_sizes) > 2:
            raise ValueError("extra_sizes: too many")
'''

USE = """
import json, tomllib
from fedpriv.config import Fact, RunConfig, checked, parse, parse_overrides, schema, to_flower, to_toml
from config_keys import main
main()
config = parse(parse_overrides(["extra_sizes=[4, 5]"]))
print(json.dumps({
    "toml": parse(tomllib.loads(to_toml(config))) == config,
    "flower": to_flower(config)["extra_sizes"],
    "problems": [checked({"extra_sizes": value})[1] for value in ("x", "1,2,3")],
    "hidden": "extra_sizes" in RunConfig.keys_with(Fact.HIDDEN),
    "schema": schema()["properties"]["extra_sizes"],
    "sweep": "extra_sizes" in schema(sweep=True)["properties"]["grid"]["properties"],
}))
"""


@cache
def validator(*, sweep: bool = False):
    """Made when a test needs it: its library takes seconds to load, and each worker collects this file."""
    import jsonschema

    return jsonschema.Draft202012Validator(schema(sweep=sweep))


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.toml")), ids=lambda file: file.stem)
def test_every_shipped_configuration_is_valid(file):
    values = tomllib.loads(file.read_text())
    validator(sweep=file.parent.name == "sweeps").validate(values)


@pytest.mark.parametrize("values", [{}, CHANGED, {"budget_epsilon": 4}, {"layers": 3}, {"recipe": "per-sample"}])
def test_a_resolved_configuration_is_valid(values):
    validator().validate(tomllib.loads(to_toml(parse(values))))
    validator().validate(values)


@pytest.mark.parametrize("key", sorted(set(BAD) - set(NOT_JSON)))
def test_what_a_run_refuses_of_a_single_key_the_schema_refuses(key):
    assert not validator().is_valid({key: BAD[key]})
    assert not validator(sweep=True).is_valid({"grid": {key: [BAD[key]]}})
    assert not validator(sweep=True).is_valid({"runs": [{key: BAD[key]}]})


def test_both_schemas_are_valid_and_refuse_unknown_keys_and_a_table_as_a_value():
    for each in (validator(), validator(sweep=True)):
        each.check_schema(each.schema)
    assert not [key for key in KEYS if validator().is_valid({key: {"a": 1}})]
    assert not validator().is_valid({"ronds": 3})
    assert not validator().is_valid({"grid": {"rank": [4]}}), "a run is no sweep"
    assert not validator(sweep=True).is_valid({"grid": {"rang": [4]}})
    assert validator(sweep=True).is_valid({"batch_size": "auto", "grid": {"rank": [4]}})
    assert not validator().is_valid({"batch_size": "auto"})


def test_every_key_has_its_name_meaning_group_and_a_default_that_is_valid():
    assert tuple(key for keys in groups().values() for key in keys) == tuple(validator().schema["properties"])
    assert set(validator().schema["properties"]) == set(KEYS)
    assert validator().schema["properties"]["mechanism"]["enum"] == list(MECHANISMS)
    for key, about in validator().schema["properties"].items():
        assert about["title"] == key
        assert len(about["description"]) > 5, key
        assert "`" not in about["description"]
        assert "](" not in about["description"], "an editor cannot follow a link to a page"
        assert about["x-group"] in groups()
        validator().validate({key: about["default"]})
        default = getattr(RunConfig(), key)
        assert about["default"] == ("" if default is None else list(default) if isinstance(default, tuple) else default)


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


def test_the_files_of_the_clone_and_the_tables_of_the_page_are_as_the_command_writes_them():
    stale = [path.name for path, text in written(ROOT).items() if path.read_text() != text]
    assert not stale, "run `make keys`"


def test_a_file_without_a_place_for_the_keys_is_refused(tmp_path):
    for name in ("pyproject.toml", "docs/configuration.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nothing\n")
    with pytest.raises(InputError, match=r"^\[tool\.flwr\.app\.config\]: no such table"):
        written(tmp_path)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone whose configuration is composed of one section more, and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "fedpriv").mkdir()
    for room in (ROOT / "fedpriv").iterdir():
        if room.name != "config":
            (folder / "fedpriv" / room.name).symlink_to(room)
    for name in ("fedpriv/config", "docs", "simulations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "fedpriv/config/_extra.py").write_text(SECTION)
    composed = folder / "fedpriv/config/_run_config.py"
    source = composed.read_text().replace("class RunConfig(\n", "class RunConfig(\n    ExtraSection,\n")
    extra = "from fedpriv.config._extra import ExtraSection\n"
    composed.write_text(source.replace("\nfrom fedpriv.config._fed", f"\n{extra}from fedpriv.config._fed", 1))
    return folder


def test_a_key_of_a_new_section_appears_wherever_keys_are_without_another_edit(clone):
    there = {"cwd": clone, "env": os.environ | {"PYTHONPATH": f"{clone}:{clone}/docs/_hooks"}}
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=True, **there)
    *paths, line = done.stdout.splitlines()
    assert sorted(paths) == ["docs/configuration.md", "fedpriv/config/keys.py", "pyproject.toml"]
    found = json.loads(line)
    assert found["flower"] == "4,5"
    assert found["toml"] is found["hidden"] is found["sweep"] is True
    (mistyped, *_), misfit = found["problems"]
    assert mistyped.startswith("extra_sizes = 'x': ")
    assert misfit == ["extra_sizes: too many"]
    assert found["schema"] | {"anyOf": None} == {
        **{"title": "extra_sizes", "x-group": "Execution", "default": [3], "anyOf": None},
        **{"description": "the sizes of something", "markdownDescription": "the [sizes](data.md) of something"},
    }
    row = "| `extra_sizes = [3]` | list of integers >= 1 | the [sizes](data.md) of something |"
    assert row in (clone / "docs/configuration.md").read_text()
    assert '\nextra_sizes = "3"\n' in (clone / "pyproject.toml").read_text()
    assert "\n    extra_sizes: Sequence[int]\n" in (clone / "fedpriv/config/keys.py").read_text()
