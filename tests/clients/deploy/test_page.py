"""docs/who_decides.md says who decides each key that a coordinator may send, and lists a node's limits."""

import re
from dataclasses import fields
from pathlib import Path

from fedpriv.config import RunConfig
from fedpriv.holder.vault.settings import NodeLimits
from fedpriv.learning.training.local_update import UpdateSpec

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "who_decides.md").read_text()
DECIDERS = {
    "The operator decides",
    "The coordinator decides, within bounds",
    "The coordinator decides freely",
    "The node ignores",
}


def table() -> dict[str, str]:
    """{key: the heading above it}."""
    found: dict[str, str] = {}
    heading = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| "):
            for key in re.findall(r"`([a-z_]+)`", line.split("|")[1]):
                assert key not in found, f"{key} stands in two rows"
                found[key] = heading
    return found


def test_every_key_has_one_who_decides_it():
    expected = {f.name for kind in (RunConfig, UpdateSpec) for f in fields(kind)}
    assert table().keys() == expected
    assert set(table().values()) == DECIDERS


def test_every_limit_has_its_default_on_the_page():
    stated = re.findall(r"`(m[a-z_]+)` \(([\d.,e-]+)\)", PAGE)
    assert sorted((name, float(value.replace(",", ""))) for name, value in stated) == sorted(
        (f.name, float(f.default)) for f in fields(NodeLimits)
    )
