"""Names that a package exports without loading them: each is imported when it is first used (PEP 562).

A package lists its exports once, where type checkers and editors look for them:

    if TYPE_CHECKING:
        from fedpriv.accounting.events import PureEpsilon as PureEpsilon
    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

Importing a package is therefore cheap, and accounting never loads torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


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
