"""Templates of the live pages, which share style, filters and tables with the report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from fedpriv.runs.show.page import templates


def rendered(template: str, names: Sequence[str], **values: Any) -> dict[str, str]:
    """{name: HTML} of a template's macros of these names, which see the values and escape them."""
    module = _environment().get_template(template).make_module(values)
    return {name: str(getattr(module, name)()) for name in names}


def whole_page(**values: Any) -> str:
    """A whole page, with its first pieces in place."""
    return _environment().get_template("page.html.j2").render(script=script(), **values)


@cache
def script() -> str:
    """The page's script; it is the same on every page, so a browser is told to run nothing else."""
    return (resources.files("fedpriv.live") / "templates" / "live.js").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    shared = templates()
    return shared.overlay(loader=ChoiceLoader([PackageLoader("fedpriv.live"), PackageLoader("fedpriv.runs.show")]))
