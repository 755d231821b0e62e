"""Puts the programs of the top-level folders into the wheel, under names that no folder of a user's has.

`fedpriv/_apps` gets `simulations`, `clients` and `server` with their imports of each other renamed, `flower-app`, the
files from which a Flower bundle is built, as they are, and `docs`, the pages as text. fedpriv/apps.py finds them. The
address of the repository that a wheel is built from is known to who builds it: $REPOSITORY, or else git's origin.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_PROGRAMS = ("simulations", "clients", "server")
_LEFT_OUT = ("simulations/benchmarks", "simulations/studies", "simulations/sites.py", "simulations/tiny_bert.py")
_IMPORT = re.compile(rf"^(\s*)(from|import) (?=(?:{'|'.join(_PROGRAMS)})\b)", re.MULTILINE)
_APPS = "fedpriv/_apps"


class Programs(BuildHookInterface[Any]):
    """Adds the programs to the wheel, not to an editable install, which finds them in the clone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._made = tempfile.TemporaryDirectory(prefix="fedpriv-wheel-")  # gone with the hook, after the build
        root, made = Path(self.root), Path(self._made.name)
        for file in sorted(_programs(root)):
            text = _IMPORT.sub(r"\1\2 fedpriv._apps.", file.read_text(encoding="utf-8"))
            place = made / file.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            build_data["force_include"][str(place)] = f"{_APPS}/{file.relative_to(root).as_posix()}"
        for file in _flower_app(root):
            build_data["force_include"][str(file)] = f"{_APPS}/flower-app/{file.relative_to(root).as_posix()}"
        for file in sorted((root / "docs").rglob("*.md")):
            build_data["force_include"][str(file)] = f"{_APPS}/{file.relative_to(root).as_posix()}"


class Address(MetadataHookInterface):
    """Names the repository as the project's address, where one is known; without user and password, if it has them."""

    def update(self, metadata: dict[str, Any]) -> None:
        ask = ("git", "-C", self.root, "config", "--get", "remote.origin.url")
        given = os.environ.get("REPOSITORY") or _said(ask)
        host = re.fullmatch(r"(?:https?://|ssh://)?(?:[^@/]*@)?([\w.-]+(?::\d+)?)[/:]([\w./~-]+?)(?:\.git)?/?", given)
        if host and "." in host[1]:
            metadata["urls"] = {"Repository": f"https://{host[1]}/{host[2]}"}


def _said(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def get_build_hook() -> type[Programs]:
    """The hook that hatchling runs as it builds: of two classes it must be told which."""
    return Programs


def get_metadata_hook() -> type[Address]:
    """The hook that hatchling runs as it reads the metadata."""
    return Address


def _programs(root: Path) -> Iterator[Path]:
    """The source of the programs and what they read beside it, less what only the repository needs."""
    for folder in _PROGRAMS:
        for file in (root / folder).rglob("*"):
            name = file.relative_to(root).as_posix()
            if file.suffix in {".py", ".toml", ".bash"} and not any(name.startswith(left) for left in _LEFT_OUT):
                yield file


def _flower_app(root: Path) -> Iterator[Path]:
    """The files from which `flwr build` makes the bundle."""
    yield from (root / name for name in ("pyproject.toml", "LICENSE"))
    for folder in ("clients", "server"):
        yield from (root / folder).glob("*.py")
