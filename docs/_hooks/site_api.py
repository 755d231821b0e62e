"""The reference of the library: a page for each package, and each module that users import, with what it exports."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType

import fedpriv

# simulations is no library, but people call its functions from notebooks.
ROOTS = ("fedpriv", "simulations")


def documented() -> list[str]:
    """Dotted names of all packages that export something, and of the modules that `fedpriv` exports, by name."""
    every = pkgutil.walk_packages(fedpriv.__path__, "fedpriv.")
    found = [each.name for each in every if each.ispkg or each.name.removeprefix("fedpriv.") in fedpriv.__all__]
    return [name for name in (*ROOTS, *sorted(found)) if exported(import_module(name))]


def exported(module: ModuleType) -> list[str]:
    """What a package exports; of a module, its public classes and functions in their order."""
    if hasattr(module, "__path__"):
        return list(getattr(module, "__all__", ()))
    own = {name: each for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
    return [name for name, each in own.items() if name[0] != "_" and callable(each)]


def pages() -> dict[str, str]:
    """{file name: page in Markdown}; mkdocstrings fills in what each name is."""
    return {f"{name}.md": _page(name) for name in documented()}


def _page(dotted: str) -> str:
    module = import_module(dotted)
    own = [name for name in exported(module) if f"{dotted}.{name}" not in documented()]
    rooms = [name for name in exported(module) if f"{dotted}.{name}" in documented()]
    parts = [f"# `{dotted}`", inspect.cleandoc(_prose(module.__doc__ or ""))]
    parts += [f"- [`{dotted}.{name}`]({dotted}.{name}.md)" for name in rooms]
    return "\n\n".join([*parts, *(f"::: {dotted}.{name}" for name in own)]) + "\n"


def _prose(docstring: str) -> str:
    """A docstring whose examples are blocks of code."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(f"```pycon\n{block}\n```" if block.startswith(">>>") else block for block in blocks)
