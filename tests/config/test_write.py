"""Each key is declared once: what other programs read of it is made from that, by `make keys`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.config._schema import written
from fedpriv.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_of_the_clone_are_as_the_command_writes_them():
    stale = [path.name for path, text in written(ROOT).items() if path.read_text() != text]
    assert not stale, "run `make keys`"


def test_a_file_without_a_place_for_the_keys_is_refused(tmp_path):
    for name in ("pyproject.toml", "docs/configuration.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nothing\n")
    with pytest.raises(InputError, match=r"^\[tool\.flwr\.app\.config\]: no such table"):
        written(tmp_path)


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
from fedpriv.config._schema import main
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
    environment = os.environ | {"PYTHONPATH": str(clone)}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=clone, env=environment, capture_output=True, text=True, check=True
    )
    *paths, line = done.stdout.splitlines()
    assert sorted(paths) == ["docs/configuration.md", "fedpriv/config/keys.py", "pyproject.toml"]
    found = json.loads(line)
    assert found["flower"] == "4,5"
    assert found["toml"]
    assert found["hidden"]
    assert found["sweep"]
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
