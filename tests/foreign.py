"""Files that fedpriv did not write, in a folder that it cleans up: whatever it does there, they stay as they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

FILES = ("patients.csv", ".hidden", ".git/HEAD", ".git/refs/heads/main", "notes/patients.csv", "round-1/x", "store.npy")
LINKS = {"to-a-file": "patients.csv", "to-a-folder": "", "to-nothing": "missing"}


def planted(folder: Path, outside: Path, names: Iterable[str] = ()) -> Foreign:
    """Files, hidden ones, a repository, one that is read-only, and links to what lies outside, in a folder.

    Args:
        folder: made if it is missing.
        outside: a folder that is made, which the links lead to.
        names: of further files, such as look like fedpriv's own.
    """
    outside.mkdir(parents=True)
    paths = [*(folder / name for name in (*FILES, *names)), outside / "patients.csv", outside / "notes" / "x.json"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"a record of {path.name}")
    (folder / "patients.csv").chmod(0o444)
    links = [folder / name for name in LINKS]
    for link, target in zip(links, LINKS.values(), strict=True):
        link.symlink_to(outside / target)
    return Foreign([*paths, *links])


class Foreign:
    """What somebody keeps: files by content and mode, links by target."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._before = {path: _state(path) for path in paths}

    def check(self) -> None:
        """Fail unless all of it is there, as it was."""
        assert {path: _state(path) for path in self._before} == self._before


def linked(path: Path, target: Path) -> Foreign:
    """A link in the place of a path, to a file or folder outside, with what lies there."""
    path.symlink_to(target)
    within = target.rglob("*") if target.is_dir() else [target]
    return Foreign([path, *within])


def _state(path: Path) -> tuple[object, ...] | None:
    if not os.path.lexists(path):
        return None
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "link", path.readlink()
    return ("folder",) if stat.S_ISDIR(mode) else ("file", mode, path.read_bytes())
