"""docs/who_decides.md says who decides each key that a coordinator may send; docs/privacy.md lists the limits."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedpriv.config import RunConfig
from fedpriv.training.local_update import UpdateSpec
from fedpriv.vault.settings import NodeLimits

DOCS = Path(__file__).resolve().parents[3] / "docs"
DECIDERS = {"operator", "coordinator, within bounds", "coordinator, freely", "ignored"}


def table() -> dict[str, str]:
    """{key: who decides it}."""
    lines = (DOCS / "who_decides.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    found: dict[str, str] = {}
    for keys, decider, _ in rows[2:]:
        for key in re.findall(r"`([a-z_]+)`", keys):
            assert key not in found, f"{key} stands in two rows"
            found[key] = decider
    return found


def test_every_key_has_one_who_decides_it():
    expected = {f.name for kind in (RunConfig, UpdateSpec) for f in fields(kind)}
    assert table().keys() == expected
    assert set(table().values()) == DECIDERS


@pytest.mark.parametrize("page", ["who_decides.md", "privacy.md"])
def test_every_limit_is_named(page):
    text = (DOCS / page).read_text()
    assert [f.name for f in fields(NodeLimits) if f"`{f.name}`" not in text] == []


def test_the_defaults_of_the_limits_are_those_on_the_page():
    rows = re.findall(r"^\| (`m[^|]*) \| ([^|]*) \|", (DOCS / "privacy.md").read_text(), flags=re.MULTILINE)
    stated = {
        name: float(value)
        for names, values in rows
        for name, value in zip(
            re.findall(r"`([a-z_]+)`", names),
            re.split(r", (?=\d)", values.replace(",000", "000")),
            strict=True,
        )
    }
    assert stated == {f.name: f.default for f in fields(NodeLimits)}
