"""The reference of the library: a page for each package that lists what it exports."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import fedpriv

# simulations is no library, but people call its functions from notebooks.
ROOTS = ("fedpriv", "simulations")


def packages() -> list[str]:
    """Dotted names of all packages that export something, by name."""
    inner = [f"fedpriv.{found.name}" for found in pkgutil.iter_modules(fedpriv.__path__) if found.ispkg]
    return [name for name in (*ROOTS, *sorted(inner)) if getattr(import_module(name), "__all__", ())]


def pages() -> dict[str, str]:
    """{file name: page in Markdown}; mkdocstrings fills in what each name is."""
    return {f"{name}.md": _page(name) for name in packages()}


def _page(package: str) -> str:
    module = import_module(package)
    own = [name for name in module.__all__ if f"{package}.{name}" not in packages()]
    rooms = [name for name in module.__all__ if f"{package}.{name}" in packages()]
    parts = [f"# `{package}`", inspect.cleandoc(_prose(module.__doc__ or ""))]
    parts += [f"- [`{package}.{name}`]({package}.{name}.md)" for name in rooms]
    return "\n\n".join([*parts, *(f"::: {package}.{name}" for name in own)]) + "\n"


def _prose(docstring: str) -> str:
    """A docstring whose examples are blocks of code."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(f"```pycon\n{block}\n```" if block.startswith(">>>") else block for block in blocks)
