"""Names that a package exports without loading them: each is imported when it is first used (PEP 562).

A package lists its exports once, where type checkers and editors look for them:

    if TYPE_CHECKING:
        from fedpriv.privacy.accounting.events import PureEpsilon as PureEpsilon
    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

Importing a package is therefore cheap, and accounting never loads torch. A `Registry` does the same for the kinds of
one thing, such as mechanisms: its names are known before any of them is loaded.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedpriv.errors import InputError

Entry = TypeVar("Entry")


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's `__getattr__`, `__dir__` and `__all__`, from the imports under `if TYPE_CHECKING:` in its file.

    Args:
        package: its `__name__`.
        file: its `__file__`. No export may share its name with another module of the package, which would hide it.
    """
    origins = listed_imports(Path(file).read_text(encoding="utf-8"))

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = origins[name]
        if module == package:
            return import_module(f"{package}.{attribute}")
        value = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(origins), sorted(origins)


def listed_imports(source: str) -> dict[str, tuple[str, str]]:
    """{exported name: (module, its name there)}."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


class Registry(MutableMapping[str, Entry], Generic[Entry]):
    """The kinds of one thing by name; another one is added at run time.

    Args:
        key: of the configuration, whose values are the names.
        entries: {name: the entry, or its place as `module:name`, from which it is imported on first use}.
    """

    def __init__(self, key: str, entries: Mapping[str, Entry | str]) -> None:
        self._key = key
        self._entries: dict[str, Any] = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = imported(entry)
        found: Entry = entry
        return found

    def __setitem__(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise ValueError(f"{self._key} = {name!r}: is registered already; delete it first")
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def named(self, name: str) -> Entry:
        """The entry with this name; an InputError lists the known ones if it is unknown."""
        if name not in self._entries:
            raise InputError(f"{self._key} = {name[:60]!r}: must be one of {', '.join(self)}")
        return self[name]


def imported(place: str) -> Any:
    """The object at a place `module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
